// The largest magnitudes of each chunk of consecutive values, in all segments of a vector, a block of threads for each
// chunk. A chunk of up to a tile is read once, into registers; a longer one once for each digit and once more. Few of a
// tile are selected from candidates: a threshold is narrowed until it is reached by little more threads than entries are
// wanted, and what reaches it is compared with each other.
#include "common.cuh"

// Blocks of 256 threads get chunks of a tile at most: loops over tiles would keep what all need in registers.
template <int threads>
constexpr bool IS_ONE_TILE = threads == THREADS;
constexpr u32 FEW = 128, CANDIDATES = THREADS;  // entries of a tile, at most, that are selected from so many candidates

template <int threads>
struct ChunkShared {
    Scan<1> scan;
    Finder finder;
    u32 bins[BINS];
    u64 warps[2][threads / 32];
    u64 candidates[CANDIDATES];
    i32 places[CANDIDATES];
    i64 start, written;  // the first value of a chunk in the vector, and the place of its first entry
};

// Set `prefix` to the k-th largest magnitude of a chunk, 0 where there are fewer, and k to its rank among what equals it.
// items: the chunk, where it is no longer than a tile.
template <int threads, typename Key>
__device__ inline void find_kth(
    ChunkShared<threads>& shared, const Key* bits, i64 size, Items<Key>& items, u64 mask, u64 width, u64& prefix, u64& k) {
    const i64 TILE = threads * Items<Key>::COUNT;
    prefix = 0;
    for (u64 shift = width; shift;) {
        u64 digit = lesser((u64)DIGIT, shift);
        shift -= digit;
        for (int b = threadIdx.x; b < BINS; b += threads) shared.bins[b] = 0;
        __syncthreads();
        for (i64 first = warp() * Items<Key>::WARP; first < size; first += TILE) {
            if (!IS_ONE_TILE<threads> && size > TILE) read(bits, size, first, items);
            count_digits(items.key, real_items<Key>(first, size), mask, prefix, shift, digit, shared.bins);
            if (IS_ONE_TILE<threads>) break;
        }
        __syncthreads();
        find_bin<threads>(shared.finder, [&](int bin) { return (u64)shared.bins[bin]; }, k);
        prefix = prefix << digit | shared.finder.bin;
        k = shared.finder.k;
    }
}

// A bit for each item of this thread that is above the threshold, or equal to it, among the first `size`.
template <typename Key>
__device__ inline void compare(
    const Items<Key>& items, i64 first, i64 size, u64 mask, u64 threshold, u32& above, u32& equal) {
    above = equal = 0;
#pragma unroll
    for (int i = 0; i < Items<Key>::COUNT; ++i) {
        Key key = (Key)(items.key[i] & mask);
        above |= (u32)(key > (Key)threshold) << i;
        equal |= (u32)(key == (Key)threshold) << i;
    }
    above &= real_items<Key>(first, size);
    equal &= real_items<Key>(first, size);
}

// Keep what is above the threshold, and the first `ties` of what equals it, from place `written` on, where `equal_before`
// that equal it lie before: keep(at, place in the chunk, bits).
template <int threads, typename Key, typename Keep>
__device__ inline void append_chunk(
    ChunkShared<threads>& shared, const Key* bits, i64 size, Items<Key>& items, u64 mask, u64 threshold, u64 ties,
    u64 written, u64 equal_before, const Keep& keep) {
    const i64 TILE = threads * Items<Key>::COUNT;
    const u64 taken = lesser(equal_before, ties);
    written += taken, ties -= taken;
    u64 counts = 0;  // of the tiles before: above, and equal in the upper half
    for (i64 tile = 0; tile < size; tile += TILE) {
        const i64 first = tile + warp() * Items<Key>::WARP;
        if (!IS_ONE_TILE<threads> && size > TILE) read(bits, size, first, items);
        u32 above, equal;
        compare(items, first, size, mask, threshold, above, equal);
        const u64 own = (u64)warp_sum((u32)__popc(equal)) << 32 | warp_sum((u32)__popc(above));
        if (lane() == 0) shared.warps[0][warp()] = own;
        __syncthreads();
        const u64 other = lane() < threads / 32 ? shared.warps[0][lane()] : 0;
        const u64 before = counts + warp_sum(lane() < warp() ? other : 0);
        counts += warp_sum(other);
        append_with_ties<Key>(
            above, equal, first, written + (u32)before, before >> 32, ties,
            [&](u64 at, int i, i64 place) { keep(at, place, items.key[i]); });
        if (IS_ONE_TILE<threads>) break;
        __syncthreads();
    }
}

// Return a magnitude, at least 1, that no fewer items of a tile reach than are wanted, unless it is 1: so many threads
// have one. own: the largest magnitude of this thread.
template <int threads, typename Key>
__device__ inline Key narrowed(ChunkShared<threads>& shared, Key own, u32 wanted) {
    const Key of_warp = (Key)warp_max(own);
    if (lane() == 0) shared.warps[0][warp()] = of_warp;
    __syncthreads();
    const Key top = (Key)warp_max(lane() < threads / 32 ? (Key)shared.warps[0][lane()] : (Key)0);
    Key low = 1, high = top, middle = (Key)(top - (top >> 4));
    while (low < high) {  // the answer is not above `high`
        const u32 reaching = (u32)__syncthreads_count(own >= middle);
        if (reaching < wanted) {
            high = (Key)(middle - 1);
        } else {
            low = middle;
            if (reaching <= wanted + 16) break;
        }
        middle = (Key)(high - (high - low) / 2);
    }
    return low;
}

// Keep the `wanted` largest items of a tile, in order: keep(at, place in the tile, bits). Return
// how many they are, fewer where the others are zero; -1, without a call, if there are too many candidates.
template <int threads, typename Key, typename Keep>
__device__ inline int keep_few(
    ChunkShared<threads>& shared, const Items<Key>& items, i64 size, Key mask, u32 wanted, const Keep& keep) {
    const i64 first = warp() * Items<Key>::WARP;
    Key own = 0;  // behind the last item are zeros
#pragma unroll
    for (int i = 0; i < Items<Key>::COUNT; ++i) own = greater(own, (Key)(items.key[i] & mask));
    const Key least = narrowed(shared, own, wanted);
    u32 reached = 0;
#pragma unroll
    for (int i = 0; i < Items<Key>::COUNT; ++i) reached |= (u32)((Key)(items.key[i] & mask) >= least) << i;
    const u32 of_warp = warp_sum((u32)__popc(reached));
    if (lane() == 0) shared.warps[1][warp()] = of_warp;
    __syncthreads();
    const u32 of_other = lane() < threads / 32 ? (u32)shared.warps[1][lane()] : 0;
    const u32 count = warp_sum(of_other), before = warp_sum(lane() < warp() ? of_other : 0);
    if (count > CANDIDATES) return -1;
    append<Key>(reached, first, before, [&](u64 at, int i, i64 place) {
        shared.candidates[at] = items.key[i], shared.places[at] = (i32)place;
    });
    __syncthreads();
    bool is_kept = false;
    Key bits = 0;
    if (threadIdx.x < count) {
        bits = (Key)shared.candidates[threadIdx.x];
        const Key key = (Key)(bits & mask);
        u32 larger = 0;
        for (u32 c = 0; c < count; ++c) {
            const Key other = (Key)((Key)shared.candidates[c] & mask);
            larger += other > key || (other == key && c < threadIdx.x);
        }
        is_kept = larger < wanted;
    }
    const u32 kept = __ballot_sync(ALL, is_kept);
    if (lane() == 0) shared.warps[0][warp()] = __popc(kept);
    __syncthreads();
    const u32 of_earlier = warp_sum(lane() < warp() ? (u32)shared.warps[0][lane()] : 0);
    const u64 at = of_earlier + __popc(kept & ((1u << lane()) - 1));
    if (is_kept) keep(at, (i64)shared.places[threadIdx.x], bits);
    return (int)lesser(count, wanted);
}

// A segment in chunks; in the row behind the last `before` is the number of all.
struct Chunks {
    i64 first, end, before;  // in the vector; the number of chunks before
    i64 chunk;
    u64 k, last;         // entries to select from a chunk, and from a shorter one at the end
    u64 room;            // for entries, of the segments before
    u64 addend;          // address of the segment's part of a second vector, or 0
};

// Write positions and bits of the largest magnitudes of a chunk, in order, to its part of the room; zeros where it has
// fewer that are not zero. With `out` the values are first made the sum of `factor` times themselves and the addends.
// room: for entries of all chunks. said: the first and the last position if no place has a zero; zeros when the kernel
// begins, as `missing`, which counts those places.
template <int threads, typename Index, typename Key>
__device__ inline void largest_in_chunks(
    const Key* values, u64 factor, Key* out, const Chunks* rows, i64 count, u64 mask, u64 width, u64 infinity,
    u64 room, Index* positions, Key* kept, Said* said, u64* missing) {
    SHARED(ChunkShared<threads>, shared);
    const i64 number = blockIdx.x;
    const Chunks own = rows[find_row(rows, count, &Chunks::before, number)];
    const i64 start = own.first + (number - own.before) * own.chunk;
    const int length = (int)lesser(own.chunk, own.end - start);
    const u32 wanted = (u32)(length == own.chunk ? own.k : own.last);
    // in registers they would be spilled; a barrier comes before they are read
    if (threadIdx.x == 0) shared.start = start, shared.written = own.room + (number - own.before) * (i64)own.k;
    const Key* bits = (out ? out : values) + start;
    Items<Key> items;
    if (out) {
        const Key* addend = ADDRESS(const Key, own.addend) + (start - own.first);
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) items.key[i] = 0;
        for (i64 first = warp() * Items<Key>::WARP; first < length; first += threads * Items<Key>::COUNT) {
            read_sum(values + start, factor, addend, length, first, items);
            write(out + start, length, first, items);
        }
    } else {
        read(bits, length, warp() * Items<Key>::WARP, items);
    }
    const auto keep = [&](u64 of_chunk, i64 of_values, Key key) {
        const u64 at = shared.written + of_chunk, place = shared.start + of_values;
        positions[at] = (Index)place, kept[at] = key;
        if (at == 0) said->first = place;
        if (at == room - 1) said->last = place;
        if ((key & (Key)mask) >= (Key)infinity) atomicMax(&said->bad, 1ull);
    };
    int chosen = -1;
    if (length <= threads * Items<Key>::COUNT && wanted <= FEW)
        chosen = keep_few(shared, items, length, (Key)mask, wanted, keep);
    if (chosen < 0) {
        u64 threshold, ties = wanted;
        find_kth(shared, bits, length, items, mask, width, threshold, ties);
        chosen = (int)(wanted - ties);
        if (threshold == 0) ties = 0;  // zeros are not selected
        append_chunk(shared, bits, length, items, mask, threshold, ties, 0, 0, keep);
        chosen += (int)ties;
    }
    for (u32 at = (u32)chosen + threadIdx.x; at < wanted; at += threads) kept[shared.written + at] = 0;
    if (threadIdx.x == 0 && (u32)chosen < wanted) atomicAdd(missing, (u64)(wanted - (u32)chosen));
}

// Kernels

#define LARGEST_IN_CHUNKS(name, threads, blocks, Index, Key)                                                        \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(                                             \
        const Key* values, u64 factor, Key* out, const Chunks* rows, i64 count, u64 mask, u64 width, u64 infinity,  \
        u64 room, Index* positions, Key* kept, Said* said, u64* missing) {                                          \
        largest_in_chunks<threads>(                                                                                 \
            values, factor, out, rows, count, mask, width, infinity, room, positions, kept, said, missing);         \
    }
#define LARGEST_IN_CHUNKS_OF(index, Index, key, Key)                                                                \
    LARGEST_IN_CHUNKS(largest_in_chunks_##index##_##key, THREADS, sizeof(Key) == 8 ? 3 : 4, Index, Key)                                    \
    LARGEST_IN_CHUNKS(largest_in_long_chunks_##index##_##key, SELECTORS, 1, Index, Key)
FOR_INDEX_AND_KEY_OF_ROWS(LARGEST_IN_CHUNKS_OF)
