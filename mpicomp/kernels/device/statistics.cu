// Sums over a gradient, in float64 and in the order of mpicomp/kernels/host/statistics.py: a block of threads takes a
// block of values, thread j lane j.
#include "common.cuh"

constexpr int LANES = THREADS;
constexpr int ROWS = 64;

struct SideLanes {
    double below[LANES], beyond[LANES], largest[LANES];
    i64 above[LANES];
};

// Add up a block of values up to a threshold and above it, find the largest, and count those above it: into lane 0.
template <typename Value>
__device__ inline void add_sides(SideLanes& lanes, const Value* values, i64 size, i64 block, double threshold) {
    const int j = threadIdx.x;
    double below = 0, beyond = 0, largest = 0;
    i64 above = 0, first = block * LANES * ROWS + j;
#pragma unroll 8
    for (int row = 0; row < ROWS; ++row) {
        i64 place = first + row * LANES;
        double value = place < size ? (double)widened(values[place]) : 0.0, x = value < 0 ? -value : value;
        bool is_above = x > threshold;
        below += is_above ? 0.0 : x;
        beyond += is_above ? x : 0.0;
        largest = x > largest ? x : largest;
        above += is_above;
    }
    lanes.below[j] = below, lanes.beyond[j] = beyond, lanes.largest[j] = largest, lanes.above[j] = above;
    __syncthreads();
    for (int half = LANES / 2; half; half /= 2) {
        if (j < half) {
            lanes.below[j] += lanes.below[j + half];
            lanes.beyond[j] += lanes.beyond[j + half];
            lanes.largest[j] = greater(lanes.largest[j], lanes.largest[j + half]);
            lanes.above[j] += lanes.above[j + half];
        }
        __syncthreads();
    }
}

// Write a row for a block of values: the sums up to a threshold and above it, the largest, and how many are above it.
template <typename Value>
__device__ inline void block_sides(const Value* values, i64 size, u64 threshold, double* rows) {
    SHARED(SideLanes, lanes);
    add_sides(lanes, values, size, blockIdx.x, __longlong_as_double((i64)threshold));
    if (threadIdx.x) return;
    double* row = rows + 4 * blockIdx.x;
    row[0] = lanes.below[0], row[1] = lanes.beyond[0], row[2] = lanes.largest[0], row[3] = (double)lanes.above[0];
}

// Write Lloyd's two magnitudes, and the threshold between them: see mpicomp/kernels/host/statistics.py, whose order of
// operations this is. One block of threads; the numbers are given as bits.
template <typename Value>
__device__ inline void two_magnitudes(
    const Value* values, i64 size, i64 blocks, i64 rounds, u64 mean, u64 largest_bits, double* found) {
    SHARED(SideLanes, lanes);
    const double largest = __longlong_as_double((i64)largest_bits);
    double threshold = __longlong_as_double((i64)mean), low = threshold, high = threshold;
    for (i64 round = 0; round < rounds; ++round) {
        double sum_below = 0, sum_above = 0;
        i64 above = 0;
        for (i64 block = 0; block < blocks; ++block) {
            add_sides(lanes, values, size, block, threshold);
            sum_below += lanes.below[0], sum_above += lanes.beyond[0], above += lanes.above[0];
            __syncthreads();
        }
        if (above == 0 || above == size) break;
        low = lesser(threshold, sum_below / (double)(size - above));
        high = lesser(largest, sum_above / (double)above);
        const double before = threshold;
        threshold = (low + high) / 2;
        if (threshold == before) break;
    }
    if (threadIdx.x == 0) found[0] = low, found[1] = high, found[2] = threshold;
}

#define SIDES(name, Value)                                                                                          \
    KERNEL block_sides_##name(const Value* values, i64 size, u64 threshold, double* rows) {                         \
        block_sides(values, size, threshold, rows);                                                                 \
    }                                                                                                               \
    KERNEL two_magnitudes_##name(                                                                                   \
        const Value* values, i64 size, i64 blocks, i64 rounds, u64 mean, u64 largest, double* found) {              \
        two_magnitudes(values, size, blocks, rounds, mean, largest, found);                                         \
    }
SIDES(f2, Half)
SIDES(f4, Single)
SIDES(f8, double)
