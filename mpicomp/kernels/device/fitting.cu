// Thresholds of fitted distributions: see mpicomp/kernels/host/fitting.py, whose order of operations this is.
#include "common.cuh"

constexpr i64 RUN = 16, SAMPLE_TILE = 1024;  // consecutive values of a sample, and those that a block takes
constexpr int EIGHT = 8;
constexpr double FIRST = 0.25, NO_SPREAD = 1e-5, LEAST_SHARE = 1e-12;
constexpr double LN2 = 0.69314718055994530942, LOG_SQRT_2_PI = 0.91893853320467274178;

// A segment, which is not empty. In the row behind the last the numbers before it are those of all.
struct Segment {
    i64 first, end;
    i64 sampled, sampling;  // values of samples, and blocks that take them, before
    i64 block, tile;        // blocks that add up, and tiles that are selected from, before
    u64 addend;             // address of the segment's part of a second vector, or 0
    i64 stages;             // of a plan, as bits, as what follows
    u64 wanted;
};

// What is known of a segment: fields of its plan, in order.
struct Fit {
    i64 stages;
    double start, share, nonzeros;
    i64 room;
    double total, threshold;
};

// How many magnitudes are above a threshold, and the sums of their excess and of its square.
struct Excess {
    double entries, total, squares;
};
enum { TOTAL = BELOW, SQUARES = BEYOND, ENTRIES = ABOVE };  // of `Sides`

__device__ inline double not_a_number() { return __longlong_as_double(0x7ff8ll << 48); }

// Return the significand of a positive number, from 1/2 to 1, and add to its exponent.
__device__ inline double significand_of(double x, i64& exponent) {
    if (x < 0x1p-1022) x *= 0x1p54, exponent -= 54;
    const i64 bits = __double_as_longlong(x);
    exponent += (bits >> 52) - 1022;
    return __longlong_as_double((bits & ((1ll << 52) - 1)) | 1022ll << 52);
}

__device__ inline double logarithm(double x) {
    i64 exponent = 0;
    const double significand = significand_of(x, exponent), ratio = (significand - 1) / (significand + 1);
    double series = 0;
    for (int term = 37; term > 0; term -= 2) series = series * (ratio * ratio) + 1.0 / term;
    return (double)exponent * LN2 + 2 * ratio * series;
}

__device__ inline double exponential_less_1(double x) {
    int doublings = 0;
    for (; x > 0.5 || x < -0.5; ++doublings) x = x / 2;
    double series = 0;
    for (int term = 18; term > 0; --term) series = (series + 1) * x / term;
    for (; doublings > 0; --doublings) series *= series + 2;
    return series;
}

__device__ inline double excess_of(const Excess& sums, double share, i64 steps, bool pareto) {
    if (share >= 1) return 0;
    const double mean = sums.total / sums.entries, exponent = -logarithm(share) / (double)steps;
    const double variance = sums.squares / sums.entries - mean * mean, none = NO_SPREAD * mean * mean;
    if (!(pareto && none < variance && variance < infinity())) return mean * exponent;
    const double ratio = mean * mean / variance, shape = (1 - ratio) / 2, scale = mean * (ratio + 1) / 2;
    return shape == 0 ? scale * exponent : scale / shape * exponential_less_1(shape * exponent);
}

__device__ inline double log_factorial(double x) {
    double product = 1;
    for (x += 1; x < 16; x += 1) product *= x;
    const double square = x * x;
    double series = 1.0 / 1260 - 1.0 / 1680 / square;
    series = 1.0 / 360 - series / square;
    series = (1.0 / 12 - series / square) / x;
    return (x - 0.5) * logarithm(x) - x + LOG_SQRT_2_PI + series - logarithm(product);
}

__device__ inline double gamma_quantile(double shape, double share) {
    if (share >= 1) return 0;
    const double wanted = logarithm(1 - greater(share, LEAST_SHARE)), factorial = log_factorial(shape);
    double log_x = (wanted + factorial) / shape, x = 0, step = 1;
    for (int round = 0; round < 100; ++round) {
        x = log_x > 0 ? 1 + exponential_less_1(log_x) : 1 / (1 + exponential_less_1(-log_x));
        if (!(step > 1e-12)) break;
        double number = shape, term = 1, series = 1;
        while (term > 1e-17 * series) number += 1, term *= x / number, series += term;
        const double found = shape * log_x - x - factorial + logarithm(series);
        step = (wanted - found) * series / shape;
        log_x += step;
    }
    return x;
}

__device__ inline double gamma_threshold(const Excess& sums, double logarithms, double share) {
    const double mean = sums.total / sums.entries, spread = logarithm(mean) - logarithms / sums.entries;
    if (!(spread > NO_SPREAD)) return not_a_number();
    const double shape = (3 - spread + __dsqrt_rn((spread - 3) * (spread - 3) + 24 * spread)) / (12 * spread);
    return mean / shape * gamma_quantile(shape, share);
}

// Add up the excess of the magnitudes of a tile.
template <typename Key>
__device__ inline void add_excess(Sides& shared, const Key* values, i64 size, double threshold) {
    double total = 0, squares = 0, eight = 0, eight_squares = 0;
    u32 entries = 0;
    for_lane(values, size, [&](int r, Key magnitude) {
        double over = (double)widened(number_of(magnitude)) - threshold;
        over = over <= 0 ? 0 : over;
        entries += over > 0;
        eight += over;
        eight_squares += over * over;
        if (r % EIGHT != EIGHT - 1) return;
        total += eight, squares += eight_squares;
        eight = eight_squares = 0;
    });
    fold_lanes(shared, total, squares, 0, entries);
}

// Add up the logarithms of the magnitudes of a tile: of products of eight, whose factors are from 1/2 to 1.
template <typename Key>
__device__ inline void add_logarithms(Sides& shared, const Key* values, i64 size) {
    double total = 0, product = 1;
    i64 exponents = 0;
    for_lane(values, size, [&](int r, Key magnitude) {
        if (magnitude) product *= significand_of((double)widened(number_of(magnitude)), exponents);
        if (r % EIGHT != EIGHT - 1) return;
        if (product < 1) total += (double)exponents * LN2 + logarithm(product);
        product = 1, exponents = 0;
    });
    fold_lanes(shared, total, 0, 0, 0);
}

// The sums over a sample, by one block; all threads get them.
template <typename Key>
__device__ inline Excess excess_of_sample(Sides& shared, const Key* some, i64 size, double threshold) {
    Excess sums = {0, 0, 0};
    for (i64 first = 0; first < size; first += SUM_TILE) {
        add_excess(shared, some + first, size - first, threshold);
        sums.entries += shared.sums[ENTRIES], sums.total += shared.sums[TOTAL], sums.squares += shared.sums[SQUARES];
    }
    return sums;
}

template <typename Key>
__device__ inline double logarithms_of_sample(Sides& shared, const Key* some, i64 size) {
    double total = 0;
    for (i64 first = 0; first < size; first += SUM_TILE) {
        add_logarithms(shared, some + first, size - first);
        total += shared.sums[TOTAL];
    }
    return total;
}

struct FitShared {
    Sides sides;
    double start;
};

// Fit all stages but the last to the sample of a segment, by one block. The first thread computes the thresholds: others
// would take time of the units of double precision, which consumer GPUs have few of.
template <typename Key>
__device__ inline void fit_sample(
    FitShared& shared, const Key* some, i64 size, const Segment& row, bool pareto, bool gamma, bool by_count, Fit& fit) {
    Sides& sides = shared.sides;
    Excess sums = excess_of_sample(sides, some, size, 0);
    i64 stages = row.stages;
    if (!(sums.entries > 0 && sums.total < infinity())) {
        if (threadIdx.x == 0) fit.stages = stages, fit.start = fit.share = not_a_number();
        return;
    }
    const double weight = (double)(row.end - row.first) / (double)size;
    const double wanted = __longlong_as_double((i64)row.wanted) / weight, nonzeros = weight * sums.entries;
    double share = wanted / sums.entries;
    if (share >= FIRST) stages = 1;
    const double first = stages == 1 ? share : FIRST, logarithms = gamma ? logarithms_of_sample(sides, some, size) : 0;
    if (threadIdx.x == 0) {
        shared.start = gamma ? gamma_threshold(sums, logarithms, first) : not_a_number();
        if (!(shared.start >= 0)) shared.start = excess_of(sums, first, 1, pareto);
    }
    share = stages > 1 ? share / FIRST : 1;
    i64 steps = stages - 1;
    for (i64 left = steps; left > 1; --left) {
        __syncthreads();
        sums = excess_of_sample(sides, some, size, shared.start);
        if (sums.entries == 0) break;
        if (by_count) share = wanted / sums.entries, steps = left;
        if (threadIdx.x == 0) shared.start += excess_of(sums, share, steps, pareto);
    }
    __syncthreads();
    const double above = excess_of_sample(sides, some, size, shared.start).entries;
    if (threadIdx.x) return;
    const double room = lesser((double)(row.end - row.first), weight * (2 * above + RUN * RUN));
    if (by_count && stages > 1) share = not_a_number();
    fit = {stages, shared.start, share, nonzeros, (i64)room, 0, 0};
}

// The bits of the largest magnitude up to a threshold, which is not rounded; of the largest number for NaN.
template <typename Key>
__device__ inline Key limit_of(double threshold) {
    auto nearest = number_of((Key)0);
    narrow(threshold, nearest);
    return bits_of(nearest) - !((double)widened(nearest) <= threshold);
}

// Take a sample of each segment, of the sum of `factor` times the values and the addends if there are any. A segment's
// last block fits all stages but the last to it, and writes the least magnitude above their threshold to `floors`: of what
// is not finite without one. done: of each segment, 0 when the kernel begins, as is `fits`.
template <typename Key, typename Value, typename Wide>
__device__ inline void fit_samples(
    const Value* values, u64 factor_bits, const Segment* rows, i64 count, bool pareto, bool gamma, bool by_count,
    u64 infinite, Wide* taken, u64* done, Fit* fits, u64* floors) {
    SHARED(FitShared, shared);
    const auto factor = (typename Format<Value>::Wide)number_of(factor_bits);
    const i64 number = find_row(rows, count, &Segment::sampling, blockIdx.x);
    const Segment& row = rows[number];
    const i64 size = row.end - row.first, some = rows[number + 1].sampled - row.sampled, runs = some / RUN;
    const i64 blocks = rows[number + 1].sampling - row.sampling, tile = (blockIdx.x - row.sampling) * SAMPLE_TILE;
    for (i64 i = tile + threadIdx.x; i < lesser(some, tile + SAMPLE_TILE); i += THREADS) {
        i64 place = i;
        if (some < size) {
            const i64 run = i / RUN, start = run * size / runs, end = (run + 1) * size / runs - RUN;
            u64 scattered = ((u64)run + 1) * 0x9E3779B97F4A7C15ull;
            scattered = (scattered ^ scattered >> 32) * 0xD6E8FEB86659FD93ull;
            place = start + (i64)((scattered >> 40) * (u64)(end - start) >> 24) + i % RUN;
        }
        Value value = values[row.first + place];
        if (row.addend) {
            narrow(widened(value) * factor, value);
            narrow(widened(value) + widened(ADDRESS(const Value, row.addend)[place]), value);
        }
        taken[row.sampled + i] = bits_of(widened(value));
    }
    __syncthreads();
    if (!is_last_of(shared.sides, done + number, blocks)) return;
    fit_sample(shared, taken + row.sampled, some, row, pareto, gamma, by_count, fits[number]);
    if (threadIdx.x) return;
    const double start = fits[number].start;
    floors[number] = start >= 0 ? lesser((u64)limit_of<Key>(start) + 1, infinite) : infinite;
}

// Add up the excess of the candidates of each segment over a threshold. A segment's last block writes the total and the
// last threshold, and the largest magnitude up to that to `limits`. starts: the number of candidates before each segment.
// sums: of each tile. done: of each segment, 0 when the kernel begins.
template <typename Key>
__device__ inline void fit_excess(
    const Key* candidates, u64 room, const Segment* rows, i64 count, const u64* starts, bool pareto, double* sums,
    u64* done, Fit* fits, u64* limits) {
    SHARED(Sides, shared);
    const i64 row = find_row(rows, count, &Segment::block, blockIdx.x), place = (blockIdx.x - rows[row].block) * SUM_TILE;
    const i64 blocks = rows[row + 1].block - rows[row].block, first = lesser(starts[row], room);
    const i64 size = lesser((i64)lesser(starts[row + 1], room) - first, blocks * SUM_TILE);
    Fit& fit = fits[row];
    add_excess(shared, candidates + first + place, greater(size - place, 0ll), fit.start);
    if (!is_last_of(shared, sums + blockIdx.x * SUMS, done + row, blocks)) return;
    add_up(shared, sums + rows[row].block * SUMS, (size + SUM_TILE - 1) / SUM_TILE);
    if (threadIdx.x) return;
    const Excess all = {shared.sums[ENTRIES], shared.sums[TOTAL], shared.sums[SQUARES]};
    fit.total = all.total, fit.threshold = fit.start;
    if (all.entries > 0) {
        const double wanted = __longlong_as_double((i64)rows[row].wanted) / all.entries;
        const bool is_counted = fit.share != fit.share;
        fit.threshold += excess_of(all, is_counted ? wanted : fit.share, is_counted ? 1 : fit.stages - 1, pareto);
    }
    limits[row] = limit_of<Key>(fit.threshold);
}

// Write indices and bits of the candidates above the limit of their segment, in order; starts_of_kept: the number before
// each segment, and at last that of all.
template <typename Index, typename Key>
__device__ inline void exceeding(
    const Index* indices, const Key* candidates, u64 room, const Segment* rows, i64 count, const u64* starts, u64 mask,
    const u64* limits, u64* ticket, u64* states, u64* starts_of_kept, Index* positions, Key* kept, Said* said) {
    SHARED(Scan<1>, scan);
    const i64 tile = take_tile(scan, ticket), row = find_row(rows, count, &Segment::tile, tile);
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

#define FITTING(name, Value, Key, Wide)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) fit_samples_##name(                                    \
        const Value* values, u64 factor, const Segment* rows, i64 count, u64 pareto, u64 gamma, u64 by_count,       \
        u64 infinite, Wide* taken, u64* done, Fit* fits, u64* floors) {                                             \
        fit_samples<Key>(values, factor, rows, count, pareto, gamma, by_count, infinite, taken, done, fits, floors); \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) fit_excess_##name(                                     \
        const Key* candidates, u64 room, const Segment* rows, i64 count, const u64* starts, u64 pareto,             \
        double* sums, u64* done, Fit* fits, u64* limits) {                                                          \
        fit_excess(candidates, room, rows, count, starts, pareto, sums, done, fits, limits);                        \
    }
IF_2(FITTING(f2, Half, u16, u32))
IF_4(FITTING(f4, Single, u32, u32))
IF_8(FITTING(f8, double, u64, u64))

#define EXCEEDING(index, Index, key, Key)                                                                           \
    KERNEL exceeding_##index##_##key(                                                                               \
        const Index* indices, const Key* candidates, u64 room, const Segment* rows, i64 count, const u64* starts,   \
        u64 mask, const u64* limits, u64* ticket, u64* states, u64* starts_of_kept, Index* positions, Key* kept,    \
        Said* said) {                                                                                               \
        exceeding(indices, candidates, room, rows, count, starts, mask, limits, ticket, states, starts_of_kept,     \
                  positions, kept, said);                                                                           \
    }
FOR_INDEX_AND_KEY_OF_ROWS(EXCEEDING)
