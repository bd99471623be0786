// The entries of bins of consecutive values that reach the bin's maximum after an addend of each is added, a warp for each
// bin: it reads the bin three times, twice from the cache.
#include "common.cuh"

// Segments of a vector, each with bins of its own length: arrays of one more than there are segments, but for `size`.
struct Bins {
    const i64 *edges, *places, *size;  // first positions, first bins
    i64 segments, bins;
};

// The segment of a bin, and its values from `first` to `end`.
__device__ inline i64 find_bin_of(const Bins& table, i64 bin, i64& first, i64& end) {
    i64 row = lower_bound(table.places, 0, table.segments + 1, bin + 1) - 1;
    first = table.edges[row] + (bin - table.places[row]) * table.size[row];
    end = lesser(first + table.size[row], table.edges[row + 1]);
    return row;
}

template <typename Key>
__device__ inline bool is_reached(Key value, Key addend, Key largest, u64 mask) {
    double sum = (double)widened(number_of(value)) + (double)widened(number_of(addend));
    return (value & mask) && (sum < 0 ? -sum : sum) >= (double)widened(number_of(largest));
}

// Write the largest magnitude of each bin, and how many values are selected there. *bad becomes 1 if a number is not
// finite.
template <typename Key>
__device__ inline void bin_maxima(
    const Key* values, const Key* addends, Bins table, u64 mask, u64 infinity, Key* largest, i64* counts, u64* bad) {
    for (i64 bin = (i64)blockIdx.x * WARPS + warp(); bin < table.bins; bin += (i64)gridDim.x * WARPS) {
        i64 first, end;
        find_bin_of(table, bin, first, end);
        u64 top = 0, worst = 0;
        for (i64 i = first + lane(); i < end; i += 32) {
            top = greater(top, (u64)(values[i] & mask));
            worst = greater(worst, (u64)(addends[i] & mask));
        }
        for (int by = 16; by; by /= 2) {
            top = greater(top, __shfl_xor_sync(ALL, top, by));
            worst = greater(worst, __shfl_xor_sync(ALL, worst, by));
        }
        i64 own = 0;
        for (i64 i = first + lane(); i < end; i += 32) own += is_reached(values[i], addends[i], (Key)top, mask);
        own = warp_sum(own);
        if (lane() == 0) {
            largest[bin] = (Key)top, counts[bin] = own;
            if (greater(top, worst) >= infinity) atomicMax(bad, 1ull);
        }
    }
}

// Write the positions of the selected values, and the magnitude of their segment with their signs. ends: sums of counts.
template <typename Key>
__device__ inline void bin_entries(
    const Key* values, const Key* addends, Bins table, u64 mask, const Key* largest, const i64* counts,
    const i64* ends, const Key* magnitudes, i64* positions, Key* found) {
    for (i64 bin = (i64)blockIdx.x * WARPS + warp(); bin < table.bins; bin += (i64)gridDim.x * WARPS) {
        i64 first, end, row = find_bin_of(table, bin, first, end), place = ends[bin] - counts[bin];
        for (i64 start = first; start < end; start += 32) {
            const i64 i = start + lane();
            const bool chosen = i < end && is_reached(values[i], addends[i], largest[bin], mask);
            const u32 all = __ballot_sync(ALL, chosen);
            if (chosen) {
                const i64 at = place + __popc(all & ((1u << lane()) - 1));
                positions[at] = i;
                found[at] = (Key)(magnitudes[row] | (values[i] & ~mask));
            }
            place += __popc(all);
        }
    }
}

#define IN_BINS(key, Key)                                                                                           \
    KERNEL bin_maxima_##key(                                                                                        \
        const Key* values, const Key* addends, const i64* edges, const i64* places, const i64* size, i64 segments,  \
        i64 bins, u64 mask, u64 infinity, Key* largest, i64* counts, u64* bad) {                                    \
        bin_maxima(values, addends, Bins{edges, places, size, segments, bins}, mask, infinity, largest, counts, bad); \
    }                                                                                                               \
    KERNEL bin_entries_##key(                                                                                       \
        const Key* values, const Key* addends, const i64* edges, const i64* places, const i64* size, i64 segments,  \
        i64 bins, u64 mask, const Key* largest, const i64* counts, const i64* ends, const Key* magnitudes,          \
        i64* positions, Key* found) {                                                                               \
        bin_entries(values, addends, Bins{edges, places, size, segments, bins}, mask, largest, counts, ends,        \
                    magnitudes, positions, found);                                                                  \
    }
IN_BINS(u2, u16)
IN_BINS(u4, u32)
IN_BINS(u8, u64)
