// The largest magnitudes of each chunk of consecutive values, a block of threads for each chunk. A chunk of up to a tile
// is read once, into registers; a longer one once for each digit and once more.
#include "common.cuh"

template <int threads>
struct ChunkShared {
    Scan<1> scan;  // of the chunks
    Finder finder;
    u32 bins[BINS];
    u64 warps[2][threads / 32], before;
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
            if (size > TILE) read(bits, size, first, items);
            count_digits(items.key, real_items<Key>(first, size), mask, prefix, shift, digit, shared.bins);
        }
        __syncthreads();
        find_bin<threads>(shared.finder, [&](int bin) { return (u64)shared.bins[bin]; }, k);
        prefix = prefix << digit | shared.finder.bin;
        k = shared.finder.k;
    }
}

// Append what is above the threshold, and the first `ties` of what equals it, from place `written` on. start: the
// position of the chunk's first value.
template <int threads, typename Key>
__device__ inline void append_chunk(
    ChunkShared<threads>& shared, const Key* bits, i64 size, Items<Key>& items, u64 mask, u64 threshold, u64 ties,
    i64 start, const i64* sources, u64 written, u64 room, i64* positions, Key* kept) {
    const i64 TILE = threads * Items<Key>::COUNT;
    u64 equal_before = 0;
    for (i64 tile = 0; tile < size; tile += TILE) {
        const i64 first = tile + warp() * Items<Key>::WARP;
        if (size > TILE) read(bits, size, first, items);
        u32 above = 0, equal = 0;
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) {
            Key key = (Key)(items.key[i] & mask);
            above |= (u32)(key > (Key)threshold) << i;
            equal |= (u32)(key == (Key)threshold) << i;
        }
        above &= real_items<Key>(first, size);
        equal &= real_items<Key>(first, size);
        const u64 own[2] = {warp_sum((u64)__popc(above)), warp_sum((u64)__popc(equal))};
        if (lane() == 0) shared.warps[0][warp()] = own[0], shared.warps[1][warp()] = own[1];
        __syncthreads();
        u64 before[2] = {written, equal_before};
        for (u32 w = 0; w < threads / 32; ++w) {
            const u64 counts[2] = {shared.warps[0][w], shared.warps[1][w]};
            written += counts[0], equal_before += counts[1];
            if (w < warp()) before[0] += counts[0], before[1] += counts[1];
        }
        append_with_ties(
            items, above, equal, start + first, sources, before[0], before[1], ties, room, positions, kept);
        __syncthreads();
    }
}

// Write positions and bits of the k largest magnitudes of each chunk, `last` of a shorter one at the end, in order, and
// in *total how many there are.
template <typename Key>
__device__ inline void largest_in_chunks(
    const Key* bits, i64 size, u64 mask, u64 width, u64 k, i64 chunk, u64 last, i64* positions, Key* kept, u64 room,
    u64* total, u64* ticket, u64* states, i64 chunks) {
    SHARED(ChunkShared<THREADS>, shared);
    const i64 number = take_tile(shared.scan, ticket), start = number * chunk, length = lesser(chunk, size - start);
    const u64 wanted = length == chunk ? k : last;
    Items<Key> items;
    read(bits + start, length, warp() * Items<Key>::WARP, items);
    u64 threshold, ties = wanted;
    find_kth(shared, bits + start, length, items, mask, width, threshold, ties);
    u64 above = wanted - ties;
    if (threshold == 0) ties = 0;  // zeros are not selected
    if (warp() == 0) {
        u64 before = look_back(states, number, above + ties);
        if (lane() == 0) shared.before = before;
        if (lane() == 0 && number == chunks - 1) *total = before + above + ties;
    }
    __syncthreads();
    append_chunk(shared, bits + start, length, items, mask, threshold, ties, start, (const i64*)0, shared.before, room,
                 positions, kept);
}

// The same for few values, which are one chunk: one block of 1024 threads. There are `size` keys, or *counted if that is
// less. sources: the positions to write; null for the places in `bits`.
template <typename Key>
__device__ inline void largest_of_few(
    const Key* bits, i64 size, const u64* counted, u64 mask, u64 width, u64 k, const i64* sources, i64* positions,
    Key* kept, u64* total) {
    SHARED(ChunkShared<SAMPLERS>, shared);
    if (counted) size = lesser(size, (i64)*counted);
    Items<Key> items;
    read(bits, size, warp() * Items<Key>::WARP, items);
    u64 threshold, ties = k;
    find_kth(shared, bits, size, items, mask, width, threshold, ties);
    u64 above = k - ties;
    if (threshold == 0) ties = 0;
    if (threadIdx.x == 0) *total = above + ties;
    append_chunk(shared, bits, size, items, mask, threshold, ties, 0, sources, 0, k, positions, kept);
}

#define LARGEST_IN_CHUNKS(name, Key)                                                                                \
    KERNEL name(                                                                                                    \
        const Key* bits, i64 size, u64 mask, u64 width, u64 k, i64 chunk, u64 last, i64* positions, Key* kept,      \
        u64 room, u64* total, u64* ticket, u64* states, i64 chunks) {                                               \
        largest_in_chunks(                                                                                          \
            bits, size, mask, width, k, chunk, last, positions, kept, room, total, ticket, states, chunks);         \
    }
LARGEST_IN_CHUNKS(largest_in_chunks_u2, u16)
LARGEST_IN_CHUNKS(largest_in_chunks_u4, u32)
LARGEST_IN_CHUNKS(largest_in_chunks_u8, u64)

#define LARGEST_OF_FEW(name, Key)                                                                                   \
    extern "C" __global__ void __launch_bounds__(SAMPLERS) name(                                                    \
        const Key* bits, i64 size, const u64* counted, u64 mask, u64 width, u64 k, const i64* sources,              \
        i64* positions, Key* kept, u64* total) {                                                                    \
        largest_of_few(bits, size, counted, mask, width, k, sources, positions, kept, total);                       \
    }
LARGEST_OF_FEW(largest_of_few_u2, u16)
LARGEST_OF_FEW(largest_of_few_u4, u32)
LARGEST_OF_FEW(largest_of_few_u8, u64)
