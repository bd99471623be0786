// The entries of bins of consecutive values that reach the bin's maximum after an addend of each is added. A warp takes a
// bin: a short one it reads once, and keeps in registers. It marks the entries with a bit each, from which they are
// written once the magnitude of their segment is known.
#include "common.cuh"

// A segment with bins of its own length; in the row behind the last the numbers before it are those of all.
struct Bins {
    i64 first, end;     // in the vector
    i64 before, words;  // numbers of bins, and of words of marks, before
    i64 bin, marks;     // values of a bin, and words for it
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
    SideLanes lanes;
    u64 selected, bin, place;
};

// Write the magnitude of each segment's entries, the mean of the largest ones of its bins, above zero if one is; and how
// many are selected: a block of threads for each segment. If none is, and it is not zero, mark its largest.
template <typename Value, typename Key>
__device__ inline void mean_of_bins(
    const Key* values, const Bins* rows, u64 mask, const Key* largest, u32* counts, u32* marks, Key* scales,
    u64* selected, Said* said) {
    SHARED(Means, shared);
    const Bins own = rows[blockIdx.x];
    const i64 bins = rows[blockIdx.x + 1].before - own.before;
    const Key* maxima = largest + own.before;
    if (threadIdx.x == 0) shared.selected = 0, shared.bin = shared.place = ~0ull;
    double total, ignored, most;
    i64 above;
    const double infinity = __longlong_as_double(0x7ffll << 52);
    add_all_sides(shared.lanes, (const Value*)maxima, bins, infinity, total, ignored, most, above);
    double mean = total / (double)bins;
    if (!(total < infinity)) {  // the sum is out of range
        double part;
        add_all_sides(shared.lanes, (const Value*)maxima, bins, infinity, mean, ignored, part, above, (double)bins);
    }
    Value scale;
    narrow(mean > most ? most : mean, scale);
    const Key magnitude = greater(bits_of(scale), (Key)(most > 0));
    u64 sum = 0;
    for (i64 bin = threadIdx.x; bin < bins; bin += THREADS) sum += counts[own.before + bin];
    sum = warp_sum(sum);
    if (lane() == 0) atomicAdd(&shared.selected, sum);
    __syncthreads();
    const bool is_none = shared.selected == 0 && magnitude;
    if (threadIdx.x == 0) scales[blockIdx.x] = magnitude, selected[blockIdx.x] = is_none ? 1 : shared.selected;
    if (!is_none) return;
    Value top;
    narrow(most, top);
    for (i64 bin = threadIdx.x; bin < bins; bin += THREADS)
        if (maxima[bin] == bits_of(top)) atomicMin(&shared.bin, (u64)bin);
    __syncthreads();
    const i64 bin = (i64)shared.bin, start = own.first + bin * own.bin, end = lesser(start + own.bin, own.end);
    for (i64 i = start + threadIdx.x; i < end; i += THREADS)
        if ((Key)(values[i] & mask) == bits_of(top)) atomicMin(&shared.place, (u64)i);
    __syncthreads();
    if (threadIdx.x) return;
    counts[own.before + bin] = 1;
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

#define IN_BINS(key, Key, Value)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) mark_in_bins_##key(                                    \
        const Key* values, u64 factor, Key* out, const Bins* rows, i64 count, u64 mask, u64 infinity, Key* largest, \
        u32* counts, u32* marks, Said* said) {                                                                      \
        mark_in_bins(values, factor, out, rows, count, mask, infinity, largest, counts, marks, said);               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) mean_of_bins_##key(                                    \
        const Key* values, const Bins* rows, u64 mask, const Key* largest, u32* counts, u32* marks, Key* scales,    \
        u64* selected, Said* said) {                                                                                \
        mean_of_bins<Value>(values, rows, mask, largest, counts, marks, scales, selected, said);                    \
    }
IN_BINS(u2, u16, Half)
IN_BINS(u4, u32, Single)
IN_BINS(u8, u64, double)

#define ENTRIES_OF_BINS(index, Index, key, Key)                                                                     \
    KERNEL entries_of_bins_##index##_##key(                                                                         \
        const Key* values, const Bins* rows, i64 count, u64 mask, const u32* counts, const u32* marks,              \
        const Key* scales, u64* total, u64* ticket, u64* states, i64 blocks, Index* positions, Key* found) {        \
        entries_of_bins(values, rows, count, mask, counts, marks, scales, total, ticket, states, blocks, positions, \
                        found);                                                                                     \
    }
FOR_INDEX_AND_KEY_OF_ROWS(ENTRIES_OF_BINS)
