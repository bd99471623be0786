// Sums over a gradient, in float64 and in the order of mpicomp/kernels/host/statistics.py: a block of threads takes a
// block of values, thread j lane j.
#include "common.cuh"

constexpr int LANES = THREADS, ROWS = 64;
constexpr i64 SUM_TILE = LANES * ROWS;  // values

// The sums of a tile, or of several: of the magnitudes up to a threshold and above it, the largest, and how many are above.
enum { BELOW, BEYOND, LARGEST, ABOVE, SUMS };

struct Sides {
    Scan<1> scan;
    double lanes[SUMS][LANES], sums[SUMS];
    bool is_last;
};

__device__ inline double infinity() { return __longlong_as_double(0x7ffll << 52); }

__device__ inline double fold(u32 sum, double a, double b) { return sum == LARGEST ? greater(a, b) : a + b; }

// Call `take(row, magnitude)` for the values of this thread's lane in a tile, of `size` values at most, in order, and with
// zeros up to a multiple of eight rows.
template <typename Key, typename Take>
__device__ inline void for_lane(const Key* values, i64 size, const Take& take) {
    constexpr int AT_ONCE = sizeof(Key) == 4 ? 32 : 16;
    const Key mask = (Key)((Key)-1 / 2), *own = values + threadIdx.x;
    int left = (int)lesser(size, SUM_TILE) - (int)threadIdx.x;
    for (; left > 0; left -= AT_ONCE * LANES, own += AT_ONCE * LANES) {
        Key keys[AT_ONCE];
        if ((AT_ONCE - 1) * LANES < left) {  // all loads are in flight: without predicates there are enough registers
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) keys[i] = own[i * LANES];
        } else {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) keys[i] = i * LANES < left ? own[i * LANES] : (Key)0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) take(i, (Key)(keys[i] & mask));
    }
}

// Fold the sums of a block's lanes by halves; all threads get those of the tile.
__device__ inline void fold_lanes(Sides& shared, double below, double beyond, double largest, u32 above) {
    const int j = threadIdx.x;
    shared.lanes[BELOW][j] = below, shared.lanes[BEYOND][j] = beyond;
    shared.lanes[LARGEST][j] = largest, shared.lanes[ABOVE][j] = above;
    __syncthreads();
    if (warp() < SUMS) {
        double folded[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) folded[w] = shared.lanes[warp()][w * 32 + lane()];
#pragma unroll
        for (int half = WARPS / 2; half; half /= 2)
            for (int w = 0; w < half; ++w) folded[w] = fold(warp(), folded[w], folded[w + half]);
        for (int by = 16; by; by /= 2) folded[0] = fold(warp(), folded[0], __shfl_xor_sync(ALL, folded[0], by));
        if (lane() == 0) shared.sums[warp()] = folded[0];
    }
    __syncthreads();
}

// Add up a tile over a divisor; all threads of the block get its sums. Zeros in place of what is not there change no bit:
// as magnitudes are not negative, no sum is -0.0.
template <typename Key>
__device__ inline void add_tile(
    Sides& shared, const Key* values, i64 size, double threshold, double divisor = 1) {
    double below = 0, beyond = 0;
    u32 above = 0;
    Key largest = 0;
    for_lane(values, size, [&](int, Key magnitude) {
        double x = (double)widened(number_of(magnitude));
        if (divisor != 1) x /= divisor;
        const bool is_above = x > threshold;
        if (is_above) beyond += x, ++above;
        else below += x;
        largest = greater(largest, magnitude);
    });
    fold_lanes(shared, below, beyond, (double)widened(number_of(largest)), above);
}

__device__ inline void write_sums(const Sides& shared, double* sums) {
    for (int sum = 0; sum < SUMS; ++sum) sums[sum] = shared.sums[sum];
}

// Say whether a block is the last one, by which `arrived` gets to `all`: it sees what the others wrote before a barrier.
__device__ inline bool is_last_of(Sides& shared, u64* arrived, i64 all) {
    if (threadIdx.x == 0) {
        __threadfence();
        shared.is_last = atomicAdd(arrived, 1ull) + 1 == (u64)all;
        __threadfence();
    }
    __syncthreads();
    return shared.is_last;
}

// Write the sums of a tile, and say whether its block is the last one.
__device__ inline bool is_last_of(Sides& shared, double* sums, u64* arrived, i64 all) {
    if (threadIdx.x == 0) write_sums(shared, sums);
    return is_last_of(shared, arrived, all);
}

// Add up the sums of tiles, one after the other, for all threads of a block.
__device__ inline void add_up(Sides& shared, const double* sums, i64 tiles) {
    if (warp() < SUMS) {
        double total = 0;
        for (i64 first = 0; first < tiles; first += 32) {
            const u32 some = (u32)lesser(tiles - first, (i64)32);
            const double own = lane() < some ? __ldcg(sums + (first + lane()) * SUMS + warp()) : 0;
            for (u32 tile = 0; tile < some; ++tile) total = fold(warp(), total, __shfl_sync(ALL, own, (int)tile));
        }
        if (lane() == 0) shared.sums[warp()] = total;
    }
    __syncthreads();
}

// The mean and the largest magnitude of a segment, Lloyd's two magnitudes, and the threshold between them.
struct Levels {
    double mean, largest, low, high, threshold;
    __device__ double limit(i64 round) const { return round ? threshold : infinity(); }

    // Take the sums of a round, the first for the mean; false if the next one would change nothing. See
    // mpicomp/kernels/host/statistics.py, whose order of operations this is.
    __device__ bool take(const double* sums, i64 size, i64 round) {
        const double above = sums[ABOVE], before = threshold;
        if (round == 0) {
            mean = sums[BELOW] / (double)size, largest = sums[LARGEST];
            if (mean > largest) mean = largest;
            low = high = threshold = mean;
            return true;
        }
        if (above == 0 || above == (double)size) return false;
        low = lesser(threshold, sums[BELOW] / ((double)size - above));
        high = lesser(largest, sums[BEYOND] / above);
        threshold = (low + high) / 2;
        return threshold != before;
    }
};

// A segment. In the row behind the last are the numbers of all.
struct Tiled {
    i64 first, end;     // in the vector
    i64 tile, several;  // numbers of tiles before: of all segments, and of those of more than one
};

// What becomes of a segment, zeros when the kernel begins. In the row behind the last `arrived` is the ticket.
struct Lloyd {
    u64 arrived, round;    // tiles that are added up in all rounds, and rounds that are done
    Levels levels;
    u64 low, high, limit;  // both magnitudes in the values' format, and the largest number that is not above the threshold
};

template <typename Key>
__device__ inline Key rounded(double magnitude) {
    auto number = number_of((Key)0);
    narrow(magnitude, number);
    return bits_of(number);
}

template <typename Key>
__device__ inline void write_levels(Lloyd& row, const Levels& levels) {
    const Key limit = rounded<Key>(levels.threshold);
    const bool is_above = (double)widened(number_of(limit)) > levels.threshold;
    row.levels = levels;
    row.low = rounded<Key>(levels.low), row.high = rounded<Key>(levels.high), row.limit = limit - is_above;
}

template <typename Key>
__device__ inline void levels_of_a_tile(Sides& shared, const Key* values, i64 size, i64 rounds, Lloyd& found) {
    Levels levels = {};
    bool is_open = true;
    for (i64 round = 0; is_open && round <= rounds; ++round) {
        add_tile(shared, values, size, levels.limit(round));
        is_open = levels.take(shared.sums, size, round);
    }
    if (threadIdx.x == 0) write_levels<Key>(found, levels);
}

// Write the levels of each segment. rounds: of Lloyd's algorithm; without any the magnitudes are the mean. A block takes a
// job by a ticket: first a tile of any segment each, and in a segment of one tile all its rounds; then for each round the
// tiles of segments of several. A job of a round waits for the tiles of its segment of the round before: they have lower
// tickets, so blocks took them that are under way or done, and wait for lower ones only. So the block of the lowest ticket
// that is not done waits for nobody, and all end, in whatever order blocks are scheduled.
template <typename Key>
__device__ inline void magnitudes(
    const Key* values, const Tiled* parts, Lloyd* rows, i64 count, i64 rounds, double* all_sums) {
    SHARED(Sides, shared);
    const i64 tiles_of_all = parts[count].tile, several = parts[count].several;
    i64 tile = take_tile(shared.scan, &rows[count].arrived), round = 0;
    if (tile >= tiles_of_all) {
        round = 1 + (tile - tiles_of_all) / several;
        tile = (tile - tiles_of_all) % several;
    }
    const i64 number = find_row(parts, count, round ? &Tiled::several : &Tiled::tile, tile);
    const Tiled& part = parts[number];
    Lloyd& row = rows[number];
    tile -= round ? part.several : part.tile;
    const i64 size = part.end - part.first, tiles = (size + SUM_TILE - 1) / SUM_TILE, first = tile * SUM_TILE;
    const Key* own = values + part.first;
    if (tiles == 1) return levels_of_a_tile(shared, own, size, rounds, row);
    volatile u64& done = row.round;
    if (threadIdx.x == 0)
        while (done < (u64)round) __nanosleep(20);
    __threadfence();
    __syncthreads();
    if (done != (u64)round) return;  // the segment needs no more rounds
    double* sums = all_sums + part.tile * SUMS;
    add_tile(shared, own + first, size - first, row.levels.limit(round));
    if (!is_last_of(shared, sums + tile * SUMS, &row.arrived, tiles * (round + 1))) return;
    add_up(shared, sums, tiles);
    if (threadIdx.x) return;
    Levels levels = row.levels;
    const bool is_open = levels.take(shared.sums, size, round);
    write_levels<Key>(row, levels);
    __threadfence();
    done = (u64)(is_open ? round : rounds) + 1;
}

// Write the signs of values with one of the two magnitudes of their segment, up to the limit the first one.
template <typename Key>
__device__ inline void with_magnitudes(
    const Key* values, const Tiled* parts, const Lloyd* rows, i64 count, u64 mask, Key* signed_magnitudes) {
    const i64 size = parts[count].first, stride = (i64)gridDim.x * THREADS;
    i64 number = 0;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += stride) {
        if (parts[number].end <= i) number = find_row(parts, count, &Tiled::first, i);
        const Lloyd& row = rows[number];
        const Key magnitude = (Key)(values[i] & mask);
        signed_magnitudes[i] = (Key)((magnitude <= row.limit ? row.low : row.high) | (values[i] & ~mask));
    }
}

// Kernels

#define MAGNITUDES(name, Key)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) magnitudes_##name(                                     \
        const Key* values, const Tiled* parts, Lloyd* rows, i64 count, i64 rounds, double* sums) {                  \
        magnitudes(values, parts, rows, count, rounds, sums);                                                       \
    }                                                                                                               \
    KERNEL with_magnitudes_##name(                                                                                  \
        const Key* values, const Tiled* parts, const Lloyd* rows, i64 count, u64 mask, Key* signed_magnitudes) {    \
        with_magnitudes(values, parts, rows, count, mask, signed_magnitudes);                                       \
    }
IF_2(MAGNITUDES(u2, u16))
IF_4(MAGNITUDES(u4, u32))
IF_8(MAGNITUDES(u8, u64))
