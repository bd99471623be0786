// Thresholds of fitted distributions: see mpicomp/kernels/host/fitting.py, whose order of operations this is.
#include "common.cuh"

constexpr i64 RUN = 16;  // consecutive values of a sample
constexpr int EIGHT = 8;
constexpr double NO_SPREAD = 1e-5, LN2 = 0.69314718055994530942;

// A segment, which is not empty, of which `before` of the row behind less its own are sampled.
struct Sampled {
    i64 first, end, before;
    u64 addend;  // address of the segment's part of a second vector, or 0
};

// Write samples of all segments, of the sum of `factor` times the values and the addends if there are any.
template <typename Value>
__device__ inline void take_samples(
    const Value* values, u64 factor_bits, const Sampled* rows, i64 rows_count, typename Format<Value>::Wide* taken) {
    const auto factor = (typename Format<Value>::Wide)number_of(factor_bits);
    const i64 all = rows[rows_count].before, stride = (i64)gridDim.x * THREADS;
    for (i64 sample = (i64)blockIdx.x * THREADS + threadIdx.x; sample < all; sample += stride) {
        const Sampled* row = rows + find_row(rows, rows_count, &Sampled::before, sample);
        const i64 size = row->end - row->first, count = row[1].before - row->before, i = sample - row->before;
        i64 place = i;
        if (count < size) {
            const i64 number = i / RUN, runs = count / RUN;
            const i64 start = number * size / runs, end = (number + 1) * size / runs - RUN;
            u64 scattered = ((u64)number + 1) * 0x9E3779B97F4A7C15ull;
            scattered = (scattered ^ scattered >> 32) * 0xD6E8FEB86659FD93ull;
            place = start + (i64)((scattered >> 40) * (u64)(end - start) >> 24) + i % RUN;
        }
        Value value = values[row->first + place];
        if (row->addend) {
            narrow(widened(value) * factor, value);
            narrow(widened(value) + widened(ADDRESS(const Value, row->addend)[place]), value);
        }
        taken[sample] = widened(value);
    }
}

__device__ inline double logarithm(double x) {
    const i64 bits = __double_as_longlong(x);
    const double exponent = (double)((bits >> 52) - 1022);
    const double significand = __longlong_as_double((bits & ((1ll << 52) - 1)) | 1022ll << 52);
    const double ratio = (significand - 1) / (significand + 1);
    double series = 0;
    for (int term = 37; term > 0; term -= 2) series = series * (ratio * ratio) + 1.0 / term;
    return exponent * LN2 + 2 * ratio * series;
}

__device__ inline double exponential_less_1(double x) {
    int doublings = 0;
    for (; x > 0.5 || x < -0.5; ++doublings) x = x / 2;
    double series = 0;
    for (int term = 18; term > 0; --term) series = (series + 1) * x / term;
    for (; doublings > 0; --doublings) series *= series + 2;
    return series;
}

__device__ inline double excess_of(double entries, double total, double squares, double share, bool pareto) {
    if (share >= 1) return 0;
    const double mean = total / entries, exponent = -logarithm(share), variance = squares / entries - mean * mean;
    const double none = NO_SPREAD * mean * mean, infinity = __longlong_as_double(0x7ffll << 52);
    if (!(pareto && none < variance && variance < infinity)) return mean * exponent;
    const double ratio = mean * mean / variance, shape = (1 - ratio) / 2, scale = mean * (ratio + 1) / 2;
    return shape == 0 ? scale * exponent : scale / shape * exponential_less_1(shape * exponent);
}

enum { TOTAL = BELOW, SQUARES = BEYOND, ENTRIES = ABOVE };  // of `Sides`

// The last stage of a segment; in the row behind the last the numbers before it are those of all.
struct Fit {
    i64 block, tile;            // numbers of blocks that add up, and of tiles that are selected from, before
    u64 start, wanted, share;   // of a plan, as bits
};

// Add up the excess of the candidates of each segment over a threshold. A segment's last block writes the total and the
// last threshold of the fit to `found`, and the largest magnitude up to that to `limits`. starts: the number of
// candidates before each segment. sums: of each tile. done: of each segment, 0 when the kernel begins.
template <typename Key>
__device__ inline void fit_excess(
    const Key* candidates, u64 room, const Fit* rows, i64 count, const u64* starts, u64 pareto, double* sums, u64* done,
    double* found, u64* limits) {
    SHARED(Sides, shared);
    const i64 row = find_row(rows, count, &Fit::block, blockIdx.x), place = (blockIdx.x - rows[row].block) * SUM_TILE;
    const i64 blocks = rows[row + 1].block - rows[row].block, first = lesser(starts[row], room);
    const i64 size = lesser((i64)lesser(starts[row + 1], room) - first, blocks * SUM_TILE);
    const double start = __longlong_as_double((i64)rows[row].start);
    double total = 0, squares = 0, eight = 0, eight_squares = 0;
    u32 entries = 0;
    for_lane(candidates + first + place, greater(size - place, 0ll), [&](int r, Key magnitude) {
        double over = (double)widened(number_of(magnitude)) - start;
        over = over <= 0 ? 0 : over;
        entries += over > 0;
        eight += over;
        eight_squares += over * over;
        if (r % EIGHT != EIGHT - 1) return;
        total += eight, squares += eight_squares;
        eight = eight_squares = 0;
    });
    fold_lanes(shared, total, squares, 0, entries);
    if (!is_last_of(shared, sums + blockIdx.x * SUMS, done + row, blocks)) return;
    add_up(shared, sums + rows[row].block * SUMS, (size + SUM_TILE - 1) / SUM_TILE);
    if (threadIdx.x) return;
    double threshold = start, share = __longlong_as_double((i64)rows[row].share);
    const double* all = shared.sums;
    if (all[ENTRIES] > 0) {
        if (!(share > 0)) share = __longlong_as_double((i64)rows[row].wanted) / all[ENTRIES];
        threshold += excess_of(all[ENTRIES], all[TOTAL], all[SQUARES], share, pareto);
    }
    found[2 * row] = all[TOTAL], found[2 * row + 1] = threshold;
    auto nearest = number_of((Key)0);
    narrow(threshold, nearest);
    limits[row] = bits_of(nearest) - !((double)widened(nearest) <= threshold);
}

// Write indices and bits of the candidates above the limit of their segment, in order; starts_of_kept: the number before
// each segment, and at last that of all.
template <typename Index, typename Key>
__device__ inline void exceeding(
    const Index* indices, const Key* candidates, u64 room, const Fit* rows, i64 count, const u64* starts, u64 mask,
    const u64* limits, u64* ticket, u64* states, u64* starts_of_kept, Index* positions, Key* kept, Said* said) {
    SHARED(Scan<1>, scan);
    const i64 tile = take_tile(scan, ticket), row = find_row(rows, count, &Fit::tile, tile);
    const u64 begin = lesser(starts[row], room);
    const i64 size = lesser(starts[row + 1], room) - begin;
    const i64 first = (tile - rows[row].tile) * Items<Key>::TILE + warp() * Items<Key>::WARP;
    const Key limit = (Key)limits[row];
    Items<Key> items;
    read(candidates + begin, size, first, items);
    u32 chosen = 0;
#pragma unroll
    for (int i = 0; i < Items<Key>::COUNT; ++i) chosen |= (u32)((Key)(items.key[i] & mask) > limit) << i;
    chosen &= real_items<Key>(first, size);
    u64 counts[1] = {warp_sum((u32)__popc(chosen))};
    scan_grid(scan, counts, states, rows[count].tile, starts_of_kept + count);
    if (tile == rows[row].tile && threadIdx.x == 0) starts_of_kept[row] = counts[0];
    u64 last = 0;
    append<Key>(chosen, first, counts[0], [&](u64 at, int i, i64 place) {
        const Index position = indices[begin + place];
        positions[at] = position, kept[at] = items.key[i];
        if (at == 0) said->first = (u64)position;
        last = (u64)position;
    });
    for (int by = 16; by; by /= 2) last = greater(last, __shfl_xor_sync(ALL, last, by));
    if (last && lane() == 0) atomicMax(&said->last, last);
}

// Kernels

#define FITTING(name, Value, Key)                                                                                   \
    KERNEL take_samples_##name(                                                                                     \
        const Value* values, u64 factor, const Sampled* rows, i64 count, Format<Value>::Wide* taken) {              \
        take_samples(values, factor, rows, count, taken);                                                           \
    }                                                                                                               \
    KERNEL fit_excess_##name(                                                                                       \
        const Key* candidates, u64 room, const Fit* rows, i64 count, const u64* starts, u64 pareto, double* sums,   \
        u64* done, double* found, u64* limits) {                                                                    \
        fit_excess(candidates, room, rows, count, starts, pareto, sums, done, found, limits);                       \
    }
IF_2(FITTING(f2, Half, u16))
IF_4(FITTING(f4, Single, u32))
IF_8(FITTING(f8, double, u64))

#define EXCEEDING(index, Index, key, Key)                                                                           \
    KERNEL exceeding_##index##_##key(                                                                               \
        const Index* indices, const Key* candidates, u64 room, const Fit* rows, i64 count, const u64* starts,       \
        u64 mask, const u64* limits, u64* ticket, u64* states, u64* starts_of_kept, Index* positions, Key* kept,    \
        Said* said) {                                                                                               \
        exceeding(indices, candidates, room, rows, count, starts, mask, limits, ticket, states, starts_of_kept,     \
                  positions, kept, said);                                                                           \
    }
FOR_INDEX_AND_KEY_OF_ROWS(EXCEEDING)
