// Orthonormal transforms of chunks of consecutive values, and signs: the additions of the host, in the same order.
#include "common.cuh"

constexpr int HELD = 4096;           // values of a tile of whole chunks, of which none is longer
constexpr int OWN = HELD / THREADS;  // of a thread: its registers hold them for four stages

// After every 32 values a place is left out, so that threads which take values 16 apart use different banks.
__device__ inline u32 padded(u32 i) { return i + i / 32; }

template <typename Wide>
struct HadamardTile {
    Wide values[HELD + HELD / 32];
};

// 1 / sqrt(2^power), exact for even powers.
__device__ inline double scale_of(int power) {
    return (power % 2 ? 0.70710678118654757 : 1.0) * __longlong_as_double((i64)(1023 - power / 2) << 52);
}

// The butterflies of four strides from `unit` on. Those of a value have strides below half its `bound`, the length of its
// chunk. In the last tile the chunks are of descending powers of two; the highest bit in which a value's number differs
// from the number of values is then the length of its chunk.
template <typename Wide>
__device__ inline void four_stages(HadamardTile<Wide>& tile, u32 unit, u32 chunk, u32 rest) {
    const u32 first = threadIdx.x / unit * unit * OWN + threadIdx.x % unit;
    Wide own[OWN];
#pragma unroll
    for (int j = 0; j < OWN; ++j) own[j] = tile.values[padded(first + j * unit)];
#pragma unroll
    for (int by = 1; by < OWN; by *= 2) {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            const u32 bound = rest ? (first + j * unit) ^ rest : chunk;
            if (j & by || bound < 2 * by * unit) continue;
            const Wide a = own[j], b = own[j + by];
            own[j] = a + b, own[j + by] = a - b;
        }
    }
#pragma unroll
    for (int j = 0; j < OWN; ++j) tile.values[padded(first + j * unit)] = own[j];
}

// Transform whole chunks, a tile of them in each of the first `tiles` blocks, and in one more what is left at the end.
template <typename Key, typename Wide>
__device__ inline void hadamard(const Key* values, Key* out, i64 size, i64 chunk, i64 tiles, HadamardTile<Wide>& tile) {
    const i64 whole = size / chunk * chunk, start = lesser((i64)blockIdx.x * HELD, whole);
    const u32 rest = blockIdx.x < tiles ? 0 : (u32)(size - whole);
    const u32 length = rest ? rest : (u32)lesser((i64)HELD, whole - start);
    for (u32 part = warp() * Items<Key>::WARP; part < HELD; part += Items<Key>::TILE) {
        Items<Key> items;
        read(values + start, length, part, items);
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i)
            tile.values[padded(part + place_of<Key>(i))] = widened(number_of(items.key[i]));
    }
    __syncthreads();
    for (u32 unit = 1; unit < chunk; unit *= OWN) {
        four_stages(tile, unit, (u32)chunk, rest);
        __syncthreads();
    }
    Wide scale;
    narrow(scale_of(31 - __clz((int)chunk)), scale);
    for (u32 part = warp() * Items<Key>::WARP; part < length; part += Items<Key>::TILE) {
        Items<Key> items;
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) {
            const u32 place = part + place_of<Key>(i);
            if (rest && place < length) narrow(scale_of(31 - __clz((int)(place ^ rest))), scale);
            auto result = number_of((Key)0);
            narrow(tile.values[padded(place)] * scale, result);
            items.key[i] = bits_of(result);
        }
        write(out + start, length, part, items);
    }
}

// Kernels

#define TRANSFORMS(key, Key, Wide)                                                                                  \
    KERNEL hadamard_##key(const Key* values, Key* out, i64 size, i64 chunk, i64 tiles) {                            \
        SHARED(HadamardTile<Wide>, tile);                                                                           \
        hadamard(values, out, size, chunk, tiles, tile);                                                            \
    }                                                                                                               \
    KERNEL signs_##key(Key* bits, i64 size, u64 mask, u64 one) {                                                    \
        const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;                                                      \
        if (i < size) bits[i] = bits[i] & (Key)mask ? (Key)((bits[i] & (Key)~mask) | one) : (Key)0;                 \
    }

IF_2(TRANSFORMS(u2, u16, Single))
IF_4(TRANSFORMS(u4, u32, Single))
IF_8(TRANSFORMS(u8, u64, double))
