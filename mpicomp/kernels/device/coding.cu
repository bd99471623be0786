// Sets of indices as bitmaps, indices and values at the fewest bits: see mpicomp/kernels/host/bits.py and coding.py.
#include "common.cuh"

constexpr int WORDS = 4;  // that a thread takes
constexpr int WORD_TILE = THREADS * WORDS;

// Call emit(number, place) for each bit that is set, the lowest first; *total is how many are.
template <typename Emit>
__device__ inline void walk_bits(
    const u64* words, i64 size, u64* total, u64* ticket, u64* states, i64 tiles, const Emit& emit) {
    SHARED(Scan<1>, scan);
    i64 first = take_tile(scan, ticket) * WORD_TILE + warp() * 32 * WORDS + lane();
    u64 word[WORDS], own = 0;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        word[w] = first + 32 * w < size ? words[first + 32 * w] : 0;
        own += __popcll(word[w]);
    }
    u64 counts[1] = {warp_sum(own)};
    scan_grid(scan, counts, states, tiles, total);
    u64 before = counts[0];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        u64 set = __popcll(word[w]), through = warp_scan(set), number = before + through - set;
        for (u64 left = word[w]; left; left &= left - 1) emit(number++, (u64)(first + 32 * w) * 64 + __ffsll(left) - 1);
        before += __shfl_sync(ALL, through, 31);
    }
}

template <typename Index>
__device__ inline void to_bitmap(const Index* indices, i64 size, i64 first, u64* words) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    u64 place = (u64)(indices[i] - first);
    atomicOr(words + place / 64, 1ull << place % 64);
}

// Write bits at a place in words that are zeros there. Two shifts, here and below: one by 64 is not defined.
__device__ inline void put(u64 bits, u64 place, u64* words) {
    u64 shift = place % 64, rest = (bits >> 1) >> (63 - shift);
    atomicOr(words + place / 64, bits << shift);
    if (rest) atomicOr(words + place / 64 + 1, rest);
}

// Return the 64 bits at a place in words; there is one word more behind the last field.
__device__ inline u64 taken(const u64* words, u64 place) {
    u64 shift = place % 64;
    return words[place / 64] >> shift | (words[place / 64 + 1] << 1) << (63 - shift);
}

template <typename Index>
__device__ inline void to_elias_fano(const Index* indices, i64 size, i64 first, u64 low_bits, u64* lows, u64* highs) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    u64 number = (u64)(indices[i] - first), place = (number >> low_bits) + (u64)i;
    atomicOr(highs + place / 64, 1ull << place % 64);
    put(number & ((1ull << low_bits) - 1), (u64)i * low_bits, lows);
}

template <typename Key>
__device__ inline void to_offsets(const Key* bits, i64 size, u64 mask, u64 sign, u64 least, u64 width, u64* words) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    u64 offset = (u64)(bits[i] & mask) - least, negative = (u64)bits[i] >> sign;
    put(offset | negative << width, (u64)i * (width + 1), words);
}

template <typename Key>
__device__ inline void from_offsets(const u64* words, u64 mask, u64 sign, u64 least, u64 width, Key* bits, i64 size) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    u64 field = taken(words, (u64)i * (width + 1)), negative = field >> width & 1;
    u64 magnitude = (field & ((1ull << width) - 1)) + least & mask;
    bits[i] = (Key)(magnitude | negative << sign);
}

#define CODING(index, Index)                                                                                     \
    KERNEL to_bitmap_##index(const Index* indices, i64 size, i64 first, u64* words) {                               \
        to_bitmap(indices, size, first, words);                                                                     \
    }                                                                                                               \
    KERNEL from_bitmap_##index(                                                                                     \
        const u64* words, i64 size, i64 first, Index* indices, i64 room, u64* total, u64* ticket, u64* states,      \
        i64 tiles) {                                                                                                \
        walk_bits(words, size, total, ticket, states, tiles, [=](u64 number, u64 place) {                           \
            if (number < (u64)room) indices[number] = (Index)(first + (i64)place);                                  \
        });                                                                                                         \
    }                                                                                                               \
    KERNEL to_elias_fano_##index(                                                                                   \
        const Index* indices, i64 size, i64 first, u64 low_bits, u64* lows, u64* highs) {                           \
        to_elias_fano(indices, size, first, low_bits, lows, highs);                                                 \
    }                                                                                                               \
    KERNEL from_elias_fano_##index(                                                                                 \
        const u64* lows, const u64* highs, i64 size, i64 first, u64 low_bits, Index* indices, i64 room, u64* total, \
        u64* ticket, u64* states, i64 tiles) {                                                                      \
        walk_bits(highs, size, total, ticket, states, tiles, [=](u64 number, u64 place) {                           \
            if (number >= (u64)room) return;                                                                        \
            u64 low = taken(lows, number * low_bits);                                                               \
            u64 high = (place - number) << low_bits;                                                                \
            indices[number] = (Index)((i64)(high | (low & ((1ull << low_bits) - 1))) + first);                      \
        });                                                                                                         \
    }

CODING(i4, i32)
CODING(i8, i64)

#define OFFSETS(key, Key)                                                                                           \
    KERNEL to_offsets_##key(                                                                                        \
        const Key* bits, i64 size, u64 mask, u64 sign, u64 least, u64 width, u64* words) {                          \
        to_offsets(bits, size, mask, sign, least, width, words);                                                    \
    }                                                                                                               \
    KERNEL from_offsets_##key(                                                                                      \
        const u64* words, u64 mask, u64 sign, u64 least, u64 width, Key* bits, i64 size) {                          \
        from_offsets(words, mask, sign, least, width, bits, size);                                                  \
    }

OFFSETS(u2, u16)
OFFSETS(u4, u32)
OFFSETS(u8, u64)
