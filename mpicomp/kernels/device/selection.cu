// The largest magnitudes of a vector, and what is above a threshold. Magnitudes are compared as integers: the bits of a
// number without its sign order as its magnitude does, infinities and NaN last.
#include "common.cuh"

constexpr int DIGIT = 11, BINS = 1 << DIGIT;
constexpr int SAMPLERS = 1024, SAMPLES = 16;  // threads, and places that each of them looks at
constexpr int SELECTORS = 512;                // threads, of blocks that select from many values

// Call `keep(at, i, place)` for the items of this warp that the bits of `chosen` name, in order: `at` counts from `at` on,
// `i` is the item of this thread, and `place` its place among those that begin at `first`.
template <typename Key, typename Keep>
__device__ inline void append(u32 chosen, i64 first, u64 place, const Keep& keep) {
    const int VECTOR = Items<Key>::VECTOR;
#pragma unroll
    for (int l = 0; l < Items<Key>::LOADS; ++l) {
        u32 part = chosen >> (l * VECTOR) & ((1u << VECTOR) - 1);
        if (!__any_sync(ALL, part != 0)) continue;
        u32 own = __popc(part), through = warp_scan(own);
        u64 at = place + through - own;
#pragma unroll
        for (int i = l * VECTOR; i < (l + 1) * VECTOR; ++i)
            if (chosen >> i & 1) keep(at++, i, first + place_of<Key>(i));
        place += __shfl_sync(ALL, through, 31);
    }
}

// Append the items of `above`, and of those of `equal` the first ones: `ties` in all, of which `equal_before` lie before
// this warp, as `above_before` items of `above` do.
template <typename Key, typename Keep>
__device__ inline void append_with_ties(
    u32 above, u32 equal, i64 first, u64 above_before, u64 equal_before, u64 ties, const Keep& keep) {
    const u64 place = above_before + lesser(equal_before, ties);
#pragma unroll
    for (int l = 0; l < Items<Key>::LOADS; ++l) {
        u32 part = equal >> (l * Items<Key>::VECTOR) & ((1u << Items<Key>::VECTOR) - 1);
        if (!__any_sync(ALL, part != 0)) continue;
        u32 own = __popc(part), through = warp_scan(own);
        u64 at = equal_before + through - own;
#pragma unroll
        for (int i = l * Items<Key>::VECTOR; i < (l + 1) * Items<Key>::VECTOR; ++i)
            if (equal >> i & 1) above |= (u32)(at++ < ties) << i;
        equal_before += __shfl_sync(ALL, through, 31);
    }
    append<Key>(above, first, place, keep);
}

// Find the bin of the k-th largest of keys counted in BINS bins, and what its rank is in that bin; bin 0 where there are
// fewer than k. Each of `threads` threads, all of the block, looks at as many bins, thread 0 at the highest ones.
struct Finder {
    u64 warps[32];
    u64 bin, k;
};

template <int threads, typename Counts>
__device__ inline void find_bin(Finder& finder, const Counts& count_of, u64 k) {
    const int OWN = BINS / threads;
    int highest = BINS - 1 - (int)threadIdx.x * OWN;
    u64 counts[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) sum += counts[i] = count_of(highest - i);
    u64 through = warp_scan(sum);
    if (lane() == 31) finder.warps[warp()] = through;
    __syncthreads();
    if (warp() == 0) {
        u64 all = lane() < threads / 32 ? finder.warps[lane()] : 0;
        all = warp_scan(all);
        finder.warps[lane()] = all;
    }
    __syncthreads();
    u64 before = through - sum + (warp() ? finder.warps[warp() - 1] : 0);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (before < k && (before + counts[i] >= k || highest - i == 0)) {
            finder.bin = (u64)(highest - i);
            finder.k = k - before;
        }
        before += counts[i];
    }
    __syncthreads();
}

// Count in `bins`, of a block, the digits at `shift` of the magnitudes whose leading bits are `prefix`. real: a bit for each
// key that counts.
template <int COUNT, typename Key>
__device__ inline void count_digits(
    const Key (&keys)[COUNT], u32 real, u64 mask, u64 prefix, u64 shift, u64 digit, u32* bins) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        u64 head = (keys[i] & mask) >> shift;
        if (head >> digit == prefix && (real >> i & 1)) atomicAdd(&bins[head & ((1ull << digit) - 1)], 1u);
    }
}

// The place of sample `number`, in one of 16384 equal strides, each below 2^32, scattered by a hash of the number.
__device__ inline i64 sample_place(u32 number, u64 size) {
    const u64 before = number * size, start = before / (SAMPLERS * SAMPLES);
    const u64 stride = (before + size) / (SAMPLERS * SAMPLES) - start;
    u32 scattered = (number + 1) * 0x9E3779B9u;
    scattered = (scattered ^ scattered >> 16) * 0x85EBCA6Bu;
    return (i64)(start + (scattered * stride >> 32));
}

// Raise *found_at, which is 0 before, to the complement of the first place of a magnitude at or above `floor`.
template <typename Key>
__device__ inline void first_reaching(const Key* bits, i64 size, u64 mask, u64 floor, u64* found_at) {
    for (i64 tile = blockIdx.x; tile * Items<Key>::TILE < size; tile += gridDim.x) {
        i64 first = tile * Items<Key>::TILE + warp() * Items<Key>::WARP;
        Items<Key> items;
        read(bits, size, first, items);
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) found |= (u32)((items.key[i] & mask) >= floor) << i;
        found &= real_items<Key>(first, size);
        if (found) atomicMax(found_at, ~(u64)(first + place_of<Key>(__ffs(found) - 1)));
    }
}

// Tables of segments: the row that the number of a tile, chunk or block belongs to, of which `before` come before a row.
template <typename Row>
__device__ inline i64 find_row(const Row* rows, i64 count, i64 Row::*before, i64 number) {
    i64 low = 0;
    while (low + 1 < count) {
        i64 middle = (low + count) / 2;
        if (rows[middle].*before <= number) low = middle;
        else count = middle;
    }
    return low;
}

// The bits of `factor` a + b, as two roundings to the format. factor: the bits of a double that the format has.
template <typename Key>
__device__ inline Key scale_and_add(Key a, u64 factor, Key b) {
    auto number = number_of(a);
    narrow(widened(number) * (decltype(widened(number)))number_of(factor), number);
    return add_bits(bits_of(number), b);
}

// Read the sum of `factor` times the items of a warp and those of another vector.
template <typename Key>
__device__ inline void read_sum(
    const Key* values, u64 factor, const Key* addend, i64 size, i64 first, Items<Key>& items, u32 head = 0) {
    Items<Key> others;
    read(values, size, first, items, head);
    read(addend, size, first, others, head);
#pragma unroll
    for (int i = 0; i < Items<Key>::COUNT; ++i) items.key[i] = scale_and_add(items.key[i], factor, others.key[i]);
}

#define FOR_INDEX_AND_KEY_OF_ROWS(DEFINE)                                                                           \
    IF_I4(IF_2(DEFINE(i4, i32, u2, u16)))                                                                           \
    IF_I4(IF_4(DEFINE(i4, i32, u4, u32)))                                                                           \
    IF_I4(IF_8(DEFINE(i4, i32, u8, u64)))                                                                           \
    IF_I8(IF_2(DEFINE(i8, i64, u2, u16)))                                                                           \
    IF_I8(IF_4(DEFINE(i8, i64, u4, u32)))                                                                           \
    IF_I8(IF_8(DEFINE(i8, i64, u8, u64)))

// Kernels

#define FIRST_REACHING(name, Key)                                                                                   \
    KERNEL name(                                                                                                    \
        const Key* bits, i64 size, u64 mask, u64 floor, u64* found_at) {                                            \
        first_reaching(bits, size, mask, floor, found_at);                                                          \
    }
IF_2(FIRST_REACHING(first_reaching_u2, u16))
IF_4(FIRST_REACHING(first_reaching_u4, u32))
IF_8(FIRST_REACHING(first_reaching_u8, u64))
