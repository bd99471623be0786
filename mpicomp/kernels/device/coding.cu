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

template <typename Index>
__device__ inline void to_elias_fano(const Index* indices, i64 size, i64 first, u64 low_bits, u64* lows, u64* highs) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    u64 number = (u64)(indices[i] - first), place = (number >> low_bits) + (u64)i;
    atomicOr(highs + place / 64, 1ull << place % 64);
    u64 at = (u64)i * low_bits, shift = at % 64, low = number & ((1ull << low_bits) - 1);
    atomicOr(lows + at / 64, low << shift);
    u64 rest = (low >> 1) >> (63 - shift);  // two shifts: one by 64 is not defined
    if (rest) atomicOr(lows + at / 64 + 1, rest);
}

// Planes of `room` bytes, one for each 8 bits of a field; behind them planes of `row` words, one for each bit left.
struct Planes {
    u32 octets, bits;
    u64 room, row;
    __device__ inline Planes(u64 width, u64 size)
        : octets((u32)(width + 1) / 8), bits((u32)(width + 1) % 8), room((size + 7) / 8 * 8), row((size + 63) / 64) {}
    __device__ inline u64 word(u32 bit, u64 i) const { return octets * (room / 8) + bit * row + i / 64; }
};

template <typename Key>
__device__ inline void to_offsets(const Key* values, i64 size, u64 mask, u64 sign, u64 least, u64 width, u8* bytes) {
    const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (u64)size) return;
    const Planes planes(width, size);
    u64 field = ((u64)values[i] & mask) - least | (u64)values[i] >> sign << width;
    for (u32 j = 0; j < planes.octets; ++j, field >>= 8) bytes[j * planes.room + i] = (u8)field;
    for (u32 bit = 0; bit < planes.bits; ++bit, field >>= 1)
        if (field & 1) atomicOr((u64*)bytes + planes.word(bit, i), 1ull << i % 64);
}

template <typename Key>
__device__ inline void from_offsets(const u8* bytes, u64 mask, u64 sign, u64 least, u64 width, Key* values, i64 size) {
    const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (u64)size) return;
    const Planes planes(width, size);
    u64 field = 0;
    for (u32 j = 0; j < planes.octets; ++j) field |= (u64)bytes[j * planes.room + i] << 8 * j;
    for (u32 bit = 0; bit < planes.bits; ++bit)
        field |= (((const u64*)bytes)[planes.word(bit, i)] >> i % 64 & 1) << (8 * planes.octets + bit);
    u64 magnitude = (field & ((1ull << width) - 1)) + least & mask;
    values[i] = (Key)(magnitude | (field >> width & 1) << sign);
}

// Kernels

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
            u64 at = number * low_bits, shift = at % 64;                                                            \
            u64 low = lows[at / 64] >> shift | (lows[at / 64 + 1] << 1) << (63 - shift);                            \
            u64 high = (place - number) << low_bits;                                                                \
            indices[number] = (Index)((i64)(high | (low & ((1ull << low_bits) - 1))) + first);                      \
        });                                                                                                         \
    }

IF_I4(CODING(i4, i32))
IF_I8(CODING(i8, i64))

#define OFFSETS(key, Key)                                                                                           \
    KERNEL to_offsets_##key(                                                                                        \
        const Key* values, i64 size, u64 mask, u64 sign, u64 least, u64 width, u8* bytes) {                         \
        to_offsets(values, size, mask, sign, least, width, bytes);                                                  \
    }                                                                                                               \
    KERNEL from_offsets_##key(                                                                                      \
        const u8* bytes, u64 mask, u64 sign, u64 least, u64 width, Key* values, i64 size) {                         \
        from_offsets(bytes, mask, sign, least, width, values, size);                                                \
    }

IF_2(OFFSETS(u2, u16))
IF_4(OFFSETS(u4, u32))
IF_8(OFFSETS(u8, u64))
