// The largest magnitudes of each chunk of consecutive values, a block of threads for each chunk. A chunk of up to a tile
// is read once, into registers; a longer one once for each digit and once more.
#include "common.cuh"

struct ChunkShared {
    Scan<2> scan;
    Finder finder;
    u32 bins[BINS];
    u64 before;
};

// Set `prefix` to the k-th largest magnitude of a chunk, 0 where there are fewer, and k to its rank among what equals it.
template <typename Key>
__device__ inline void find_kth(
    ChunkShared& shared, const Key* bits, i64 size, Items<Key>& items, u64 mask, u64 width, u64& prefix, u64& k) {
    prefix = 0;
    for (u64 shift = width; shift;) {
        u64 digit = lesser((u64)DIGIT, shift);
        shift -= digit;
        for (int b = threadIdx.x; b < BINS; b += THREADS) shared.bins[b] = 0;
        __syncthreads();
        for (i64 first = warp() * Items<Key>::WARP; first < size; first += Items<Key>::TILE) {
            if (size > Items<Key>::TILE) read(bits, size, first, items);
            u32 real = real_items<Key>(first, size);
#pragma unroll
            for (int i = 0; i < Items<Key>::COUNT; ++i) {
                u64 head = (items.key[i] & mask) >> shift;
                if (head >> digit == prefix && (real >> i & 1))
                    atomicAdd(&shared.bins[head & ((1ull << digit) - 1)], 1u);
            }
        }
        __syncthreads();
        find_bin<THREADS>(shared.finder, [&](int bin) { return (u64)shared.bins[bin]; }, k);
        prefix = prefix << digit | shared.finder.bin;
        k = shared.finder.k;
    }
}

// Write positions and bits of the k largest magnitudes of each chunk, `last` of a shorter one at the end, in order, and
// in *total how many there are.
template <typename Key>
__device__ inline void largest_in_chunks(
    const Key* bits, i64 size, u64 mask, u64 width, u64 k, i64 chunk, u64 last, i64* positions, Key* kept, u64 room,
    u64* total, u64* ticket, u64* states, i64 chunks) {
    SHARED(ChunkShared, shared);
    const i64 number = take_tile(shared.scan, ticket), start = number * chunk, length = lesser(chunk, size - start);
    const u64 wanted = length == chunk ? k : last;
    Items<Key> items;
    read(bits + start, length, warp() * Items<Key>::WARP, items);
    u64 threshold, ties = wanted;
    find_kth(shared, bits + start, length, items, mask, width, threshold, ties);
    u64 place = wanted - ties;  // as many are above the threshold
    if (threshold == 0) ties = 0;  // zeros are not selected
    if (warp() == 0) {
        u64 before = look_back(states, number, place + ties);
        if (lane() == 0) shared.before = before;
        if (lane() == 0 && number == chunks - 1) *total = before + place + ties;
    }
    __syncthreads();
    u64 above_before = shared.before, equal_before = 0;
    for (i64 tile = 0; tile < length; tile += Items<Key>::TILE) {
        const i64 first = tile + warp() * Items<Key>::WARP;
        if (length > Items<Key>::TILE) read(bits + start, length, first, items);
        u32 above = 0, equal = 0;
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) {
            Key key = (Key)(items.key[i] & mask);
            above |= (u32)(key > (Key)threshold) << i;
            equal |= (u32)(key == (Key)threshold) << i;
        }
        above &= real_items<Key>(first, length);
        equal &= real_items<Key>(first, length);
        const u64 own[2] = {warp_sum((u64)__popc(above)), warp_sum((u64)__popc(equal))};
        if (lane() == 0) shared.scan.warps[0][warp()] = own[0], shared.scan.warps[1][warp()] = own[1];
        __syncthreads();
        u64 before[2] = {above_before, equal_before};
        for (u32 w = 0; w < WARPS; ++w) {
            const u64 counts[2] = {shared.scan.warps[0][w], shared.scan.warps[1][w]};
            above_before += counts[0], equal_before += counts[1];
            if (w < warp()) before[0] += counts[0], before[1] += counts[1];
        }
        append_with_ties(items, above, equal, start + first, (const i64*)0, before[0], before[1], ties, room, positions, kept);
        __syncthreads();
    }
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
