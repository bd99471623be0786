// The largest magnitudes of each chunk of consecutive values, in all segments of a vector, a block of threads for each
// chunk. A chunk of up to a tile is read once, into registers; a longer one once for each digit and once more. Few of a
// tile are selected from candidates: a threshold is narrowed until it is reached by little more threads than entries are
// wanted, and what reaches it is compared with each other.
#include "common.cuh"

constexpr u32 FEW = 128, CANDIDATES = THREADS;  // entries of a tile, at most, that are selected from so many candidates

template <int threads>
struct ChunkShared {
    Scan<1> scan;  // its tile is the number of the chunk
    Finder finder;
    u32 bins[BINS];
    u64 warps[2][threads / 32], before;
    u64 candidates[CANDIDATES];
    i32 places[CANDIDATES];
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
    for (i64 tile = 0; tile < size; tile += TILE) {
        const i64 first = tile + warp() * Items<Key>::WARP;
        if (size > TILE) read(bits, size, first, items);
        u32 above, equal;
        compare(items, first, size, mask, threshold, above, equal);
        const u64 own[2] = {warp_sum((u32)__popc(above)), warp_sum((u32)__popc(equal))};
        if (lane() == 0) shared.warps[0][warp()] = own[0], shared.warps[1][warp()] = own[1];
        __syncthreads();
        u64 before[2] = {written, equal_before};
        for (u32 w = 0; w < threads / 32; ++w) {
            const u64 counts[2] = {shared.warps[0][w], shared.warps[1][w]};
            written += counts[0], equal_before += counts[1];
            if (w < warp()) before[0] += counts[0], before[1] += counts[1];
        }
        append_with_ties<Key>(above, equal, first, before[0], before[1], ties, [&](u64 at, int i, i64 place) {
            keep(at, place, items.key[i]);
        });
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

// Keep the `wanted` largest items of a tile, in order: keep(number, place in the tile, bits). Call publish(count), a
// function of the whole block, before. Return false, without a call, if there are too many candidates.
template <int threads, typename Key, typename Publish, typename Keep>
__device__ inline bool keep_few(
    ChunkShared<threads>& shared, const Items<Key>& items, i64 size, Key mask, u32 wanted, const Publish& publish,
    const Keep& keep) {
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
    if (count > CANDIDATES) return false;
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
    publish(lesser(count, wanted));  // and a barrier
    const u32 of_earlier = warp_sum(lane() < warp() ? (u32)shared.warps[0][lane()] : 0);
    const u64 at = shared.before + of_earlier + __popc(kept & ((1u << lane()) - 1));
    if (is_kept) keep(at, (i64)shared.places[threadIdx.x], bits);
    return true;
}

// A segment in chunks; in the row behind the last `before` is the number of all.
struct Chunks {
    i64 first, end, before;  // in the vector; the number of chunks before
    i64 chunk;
    u64 k, last;         // entries to select from a chunk, and from a shorter one at the end
    u64 addend;          // address of the segment's part of a second vector, or 0
};

// Write positions and bits of the largest magnitudes of each chunk, in order; starts: how many there are before each
// segment, and at last that of all. With `out` the values are first made the sum of `factor` times themselves and the
// addends.
template <int threads, typename Index, typename Key>
__device__ inline void largest_in_chunks(
    const Key* values, u64 factor, Key* out, const Chunks* rows, i64 count, u64 mask, u64 width, u64 infinity,
    u64* ticket, u64* states, u64* starts, Index* positions, Key* kept, Said* said) {
    SHARED(ChunkShared<threads>, shared);
    const i64 number = take_tile(shared.scan, ticket), row = find_row(rows, count, &Chunks::before, number);
    const Chunks own = rows[row];
    const i64 start = own.first + (number - own.before) * own.chunk, length = lesser(own.chunk, own.end - start);
    const u64 wanted = length == own.chunk ? own.k : own.last;
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
    u64 final = 0;
    const auto publish = [&](u64 selected) {
        if (warp() == 0) {
            const u64 before = look_back(states, number, selected);
            if (lane() == 0) {
                shared.before = before;
                if (number == own.before) starts[row] = before;
                if (number == rows[count].before - 1) starts[count] = before + selected;
            }
        }
        __syncthreads();
        final = shared.before + selected - 1;
    };
    const auto keep = [&](u64 at, i64 place, Key key) {
        const i64 position = start + place;
        positions[at] = (Index)position, kept[at] = key;
        if (at == 0) said->first = (u64)position;
        if (at == final) atomicMax(&said->last, (u64)position);
        if ((key & mask) >= infinity) atomicMax(&said->bad, 1ull);
    };
    const bool is_tile = length <= threads * Items<Key>::COUNT;
    if (is_tile && wanted <= FEW && keep_few(shared, items, length, (Key)mask, (u32)wanted, publish, keep)) return;
    u64 threshold, ties = wanted;
    find_kth(shared, bits, length, items, mask, width, threshold, ties);
    const u64 above = wanted - ties;
    if (threshold == 0) ties = 0;  // zeros are not selected
    publish(above + ties);
    append_chunk(shared, bits, length, items, mask, threshold, ties, shared.before, 0, keep);
}

#define LARGEST_IN_CHUNKS(name, threads, Index, Key)                                                                \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(                                                     \
        const Key* values, u64 factor, Key* out, const Chunks* rows, i64 count, u64 mask, u64 width, u64 infinity,  \
        u64* ticket, u64* states, u64* starts, Index* positions, Key* kept, Said* said) {                           \
        largest_in_chunks<threads>(                                                                                 \
            values, factor, out, rows, count, mask, width, infinity, ticket, states, starts, positions, kept, said); \
    }
#define LARGEST_IN_CHUNKS_OF(index, Index, key, Key)                                                                \
    LARGEST_IN_CHUNKS(largest_in_chunks_##index##_##key, THREADS, Index, Key)                                       \
    LARGEST_IN_CHUNKS(largest_in_long_chunks_##index##_##key, SELECTORS, Index, Key)
FOR_INDEX_AND_KEY_OF_ROWS(LARGEST_IN_CHUNKS_OF)
