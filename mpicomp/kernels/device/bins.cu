// The entries of bins of consecutive values that reach the bin's maximum after an addend of each is added. A warp takes a
// bin: a short one it reads once, and keeps in registers. It marks the entries with a bit each, from which they are
// written once the magnitude of their segment is known.
#include "common.cuh"

// A segment with bins of its own length; in the row behind the last the numbers before it are those of all.
struct Bins {
    i64 first, end;     // in the vector
    i64 before, words;  // numbers of bins, and of words of marks, before
    i64 bin, marks;     // values of a bin, and words for it
    i64 tile;           // number of tiles of bins, whose sums `mean_of_bins` adds up, before
    u64 addend;         // address of the segment's addends
};

constexpr int OF_A_BIN = 4;  // values of a bin in registers, of a lane

template <typename Key>
__device__ inline bool is_reached(Key value, Key addend, double largest, u64 mask) {
    const double sum = (double)widened(number_of(value)) + (double)widened(number_of(addend));
    return (value & mask) && (sum < 0 ? -sum : sum) >= largest;
}

// The values of a bin that this lane keeps: from `start` on, of `size`; with `out` their sum with the addends, which is
// written.
template <typename Key>
struct Held {
    Key value[OF_A_BIN], addend[OF_A_BIN];
    __device__ void read(const Key* values, u64 factor, Key* out, const Key* addends, int start, int size) {
#pragma unroll
        for (int h = 0; h < OF_A_BIN; ++h) {
            const int i = start + h * 32 + lane();
            if (start + h * 32 >= size) break;
            value[h] = addend[h] = 0;
            if (i >= size) continue;
            addend[h] = addends[i];
            value[h] = out ? scale_and_add(values[i], factor, addend[h]) : values[i];
            if (out) out[i] = value[h];
        }
    }
};

// Mark the selected values of each bin, and write its largest magnitude and how many are selected. With `out` the values
// are first made the sum of `factor` times themselves and the addends. said: as of a selection, with
// all bits of the first position inverted; zeros when the kernel begins.
template <typename Key>
__device__ inline void mark_in_bins(
    const Key* values, u64 factor, Key* out, const Bins* rows, i64 count, u64 mask, u64 infinity, Key* largest,
    u32* counts, u32* marks, Said* said) {
    const i64 bins = rows[count].before, warps = (i64)gridDim.x * WARPS, share = (bins + warps - 1) / warps;
    const i64 begin = ((i64)blockIdx.x * WARPS + warp()) * share, end = lesser(begin + share, bins);
    u64 lowest = ~0ull, highest = 0;
    bool bad = false;
    i64 row = find_row(rows, count, &Bins::before, begin);
    for (i64 bin = begin; bin < end; ++bin) {
        while (rows[row + 1].before <= bin) ++row;
        const Bins own = rows[row];
        const i64 start = own.first + (bin - own.before) * own.bin;
        const int size = (int)lesser(own.bin, own.end - start), reach = OF_A_BIN * 32;
        const Key* addends = ADDRESS(const Key, own.addend) + (start - own.first);
        Held<Key> held;
        Key top = 0;
        for (int first = 0; first < size; first += reach) {
            held.read(values + start, factor, out ? out + start : (Key*)0, addends, first, size);
#pragma unroll
            for (int h = 0; h < OF_A_BIN; ++h) {
                if (first + h * 32 >= size) break;
                top = greater(top, (Key)(held.value[h] & mask));
                bad |= (held.addend[h] & mask) >= infinity;
            }
        }
        top = (Key)warp_max(top);
        bad |= top >= infinity;
        const double most = (double)widened(number_of(top));
        u32* own_marks = marks + own.words + (bin - own.before) * own.marks;
        u32 selected = 0;
        for (int first = 0; first < size; first += reach) {
            if (size > reach) held.read((out ? out : values) + start, 0, (Key*)0, addends, first, size);
#pragma unroll
            for (int h = 0; h < OF_A_BIN; ++h) {
                const int at = first + h * 32;
                if (at >= size) break;
                const u32 chosen = __ballot_sync(ALL, is_reached(held.value[h], held.addend[h], most, mask));
                if (lane() == 0) own_marks[at / 32] = chosen;
                selected += __popc(chosen);
                if (chosen) {
                    lowest = lesser(lowest, (u64)(start + at + __ffs(chosen) - 1));
                    highest = (u64)(start + at + 31 - __clz(chosen));
                }
            }
        }
        if (lane() == 0) largest[bin] = top, counts[bin] = selected;
    }
    if (__any_sync(ALL, bad) && lane() == 0) atomicMax(&said->bad, 1ull);
    if (lane() == 0 && lowest != ~0ull) atomicMax(&said->first, ~lowest), atomicMax(&said->last, highest);
}

struct Means {
    Sides sides;
    u64 bin, place;
};

// Write the magnitude of each segment's entries, the mean of the largest ones of its bins, above zero if one is; and how
// many are selected: a block for each tile of bins, and a segment's last one adds up. If none is, and the magnitude is not
// zero, mark its largest. sums: of each tile. arrived, selected: of each segment, 0 when the kernel begins.
template <typename Key>
__device__ inline void mean_of_bins(
    const Key* values, const Bins* rows, i64 count, u64 mask, const Key* largest, u32* counts, u32* marks,
    double* sums, u64* arrived, Key* scales, u64* selected, Said* said) {
    SHARED(Means, shared);
    if (threadIdx.x == 0) shared.bin = shared.place = ~0ull;
    const i64 row = find_row(rows, count, &Bins::tile, blockIdx.x);
    const Bins own = rows[row];
    const i64 bins = rows[row + 1].before - own.before, tiles = rows[row + 1].tile - own.tile;
    const i64 first = (blockIdx.x - own.tile) * SUM_TILE;
    const Key* maxima = largest + own.before;
    u32* const own_counts = counts + own.before;
    u32 chosen = 0;
#pragma unroll 32
    for (int i = 0; i < ROWS; ++i) {
        const i64 bin = first + i * LANES + threadIdx.x;
        chosen += bin < bins ? own_counts[bin] : 0;
    }
    chosen = warp_sum(chosen);
    if (lane() == 0 && chosen) atomicAdd(selected + row, (u64)chosen);
    add_tile(shared.sides, maxima + first, bins - first, infinity());
    if (!is_last_of(shared.sides, sums + blockIdx.x * SUMS, arrived + row, tiles)) return;
    add_up(shared.sides, sums + own.tile * SUMS, tiles);
    const double total = shared.sides.sums[BELOW], most = shared.sides.sums[LARGEST];
    double mean = total / (double)bins;
    if (sizeof(Key) == 8 && !(total < infinity())) {  // the sum is out of range
        mean = 0;
        for (i64 start = 0; start < bins; start += SUM_TILE) {
            add_tile(shared.sides, maxima + start, bins - start, infinity(), (double)bins);
            mean += shared.sides.sums[BELOW];
        }
    }
    auto scale = number_of((Key)0), top = scale;
    narrow(mean > most ? most : mean, scale);
    narrow(most, top);
    const Key magnitude = greater(bits_of(scale), (Key)(most > 0));
    const bool is_none = __ldcg(selected + row) == 0 && magnitude;
    if (threadIdx.x == 0) scales[row] = magnitude;
    if (!is_none) return;
    for (i64 bin = threadIdx.x; bin < bins; bin += THREADS)
        if (maxima[bin] == bits_of(top)) atomicMin(&shared.bin, (u64)bin);
    __syncthreads();
    const i64 bin = (i64)shared.bin, start = own.first + bin * own.bin, end = lesser(start + own.bin, own.end);
    for (i64 i = start + threadIdx.x; i < end; i += THREADS)
        if ((Key)(values[i] & mask) == bits_of(top)) atomicMin(&shared.place, (u64)i);
    __syncthreads();
    if (threadIdx.x) return;
    selected[row] = own_counts[bin] = 1;
    const u64 at = shared.place - (u64)start;
    marks[own.words + bin * own.marks + at / 32] = 1u << at % 32;
    atomicMax(&said->first, ~shared.place), atomicMax(&said->last, shared.place);
}

// Write the positions of the marked values, and the magnitude of their segment with their signs: a thread for each bin.
template <typename Index, typename Key>
__device__ inline void entries_of_bins(
    const Key* values, const Bins* rows, i64 count, u64 mask, const u32* counts, const u32* marks, const Key* scales,
    u64* total, u64* ticket, u64* states, i64 blocks, Index* positions, Key* found) {
    SHARED(Scan<1>, scan);
    const i64 bin = take_tile(scan, ticket) * THREADS + threadIdx.x, bins = rows[count].before;
    const u64 own = bin < bins ? counts[bin] : 0, through = warp_scan(own);
    u64 sums[1] = {__shfl_sync(ALL, through, 31)};
    scan_grid(scan, sums, states, blocks, total);
    if (own == 0) return;
    u64 at = sums[0] + through - own;
    const i64 row = find_row(rows, count, &Bins::before, bin), number = bin - rows[row].before;
    const i64 start = rows[row].first + number * rows[row].bin;
    const u32* own_marks = marks + rows[row].words + number * rows[row].marks;
    const Key scale = scales[row];
    for (i64 first = start, end = at + own; (i64)at < end; first += 32, ++own_marks) {
        for (u32 left = *own_marks; left; left &= left - 1, ++at) {
            const i64 position = first + __ffs(left) - 1;
            positions[at] = (Index)position;
            found[at] = (Key)(scale | (values[position] & ~mask));
        }
    }
}

#define IN_BINS(key, Key)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) mark_in_bins_##key(                                    \
        const Key* values, u64 factor, Key* out, const Bins* rows, i64 count, u64 mask, u64 infinity, Key* largest, \
        u32* counts, u32* marks, Said* said) {                                                                      \
        mark_in_bins(values, factor, out, rows, count, mask, infinity, largest, counts, marks, said);               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) mean_of_bins_##key(                                    \
        const Key* values, const Bins* rows, i64 count, u64 mask, const Key* largest, u32* counts, u32* marks,      \
        double* sums, u64* arrived, Key* scales, u64* selected, Said* said) {                                       \
        mean_of_bins(values, rows, count, mask, largest, counts, marks, sums, arrived, scales, selected, said);     \
    }
IN_BINS(u2, u16)
IN_BINS(u4, u32)
IN_BINS(u8, u64)

#define ENTRIES_OF_BINS(index, Index, key, Key)                                                                     \
    KERNEL entries_of_bins_##index##_##key(                                                                         \
        const Key* values, const Bins* rows, i64 count, u64 mask, const u32* counts, const u32* marks,              \
        const Key* scales, u64* total, u64* ticket, u64* states, i64 blocks, Index* positions, Key* found) {        \
        entries_of_bins(values, rows, count, mask, counts, marks, scales, total, ticket, states, blocks, positions, \
                        found);                                                                                     \
    }
FOR_INDEX_AND_KEY_OF_ROWS(ENTRIES_OF_BINS)
