// Sums over a gradient, in float64 and in the order of mpicomp/kernels/host/statistics.py: a block of threads takes a
// block of values, thread j lane j.
#include "common.cuh"

constexpr int LANES = THREADS;
constexpr int ROWS = 64;

struct SideLanes {
    double below[LANES], beyond[LANES], largest[LANES];
    i64 above[LANES];
};

// Add up a block of values, over a divisor, up to a threshold and above it, find the largest, and count those above it: into lane 0.
template <typename Value>
__device__ inline void add_sides(
    SideLanes& lanes, const Value* values, i64 size, i64 block, double threshold, double divisor = 1) {
    const int j = threadIdx.x;
    double below = 0, beyond = 0, largest = 0;
    i64 above = 0, first = block * LANES * ROWS + j;
#pragma unroll 8
    for (int row = 0; row < ROWS; ++row) {
        i64 place = first + row * LANES;
        double value = place < size ? (double)widened(values[place]) : 0.0, x = value < 0 ? -value : value;
        if (divisor != 1) x /= divisor;
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

// Add up the blocks of values up to a threshold and above it; all threads get the sums.
template <typename Value>
__device__ inline void add_all_sides(
    SideLanes& lanes, const Value* values, i64 size, double threshold, double& below, double& beyond, double& largest,
    i64& above, double divisor = 1) {
    below = beyond = largest = 0, above = 0;
    for (i64 block = 0; block * LANES * ROWS < size; ++block) {
        add_sides(lanes, values, size, block, threshold, divisor);
        below += lanes.below[0], beyond += lanes.beyond[0], above += lanes.above[0];
        largest = greater(largest, lanes.largest[0]);
        __syncthreads();
    }
}

// Write the mean and the largest magnitude of each segment, Lloyd's two magnitudes, and the threshold between them: see
// mpicomp/kernels/host/statistics.py, whose order of operations this is. A block of threads for each segment. edges: the
// first position of each, and its end. rounds: of Lloyd's algorithm; without any all three are the mean.
template <typename Value>
__device__ inline void magnitudes(const Value* values, const i64* edges, i64 rounds, double* rows) {
    SHARED(SideLanes, lanes);
    const i64 first = edges[2 * blockIdx.x], size = edges[2 * blockIdx.x + 1] - first;
    const Value* own = values + first;
    double below, beyond, largest, mean = 0, ignored;
    i64 above;
    add_all_sides(lanes, own, size, __longlong_as_double(0x7ffll << 52), below, beyond, largest, above);
    if (size) mean = below / (double)size;
    if (mean > largest) mean = largest;
    double threshold = mean, low = mean, high = mean;
    for (i64 round = 0; round < rounds; ++round) {
        add_all_sides(lanes, own, size, threshold, below, beyond, ignored, above);
        if (above == 0 || above == size) break;
        low = lesser(threshold, below / (double)(size - above));
        high = lesser(largest, beyond / (double)above);
        const double before = threshold;
        threshold = (low + high) / 2;
        if (threshold == before) break;
    }
    if (threadIdx.x) return;
    double* row = rows + 5 * blockIdx.x;
    row[0] = mean, row[1] = largest, row[2] = low, row[3] = high, row[4] = threshold;
}

// Write the signs of values with one of two magnitudes, up to a limit the first one: `rows` has both and the limit for
// each segment, as bits.
template <typename Key>
__device__ inline void with_magnitudes(
    const Key* values, const i64* edges, i64 segments, const Key* rows, u64 mask, Key* signed_magnitudes) {
    const i64 size = edges[segments], stride = (i64)gridDim.x * THREADS;
    i64 segment = 0;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < size; i += stride) {
        if (edges[segment + 1] <= i) segment = lower_bound(edges, segment + 1, segments + 1, i + 1) - 1;
        const Key* own = rows + 3 * segment;
        const Key magnitude = (Key)(values[i] & mask);
        signed_magnitudes[i] = (Key)((magnitude <= own[2] ? own[0] : own[1]) | (values[i] & ~mask));
    }
}

#define SIDES(name, Value)                                                                                          \
    KERNEL block_sides_##name(const Value* values, i64 size, u64 threshold, double* rows) {                         \
        block_sides(values, size, threshold, rows);                                                                 \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) magnitudes_##name(                                     \
        const Value* values, const i64* edges, i64 rounds, double* rows) {                                          \
        magnitudes(values, edges, rounds, rows);                                                                    \
    }
SIDES(f2, Half)
SIDES(f4, Single)
SIDES(f8, double)

#define WITH_MAGNITUDES(name, Key)                                                                                  \
    KERNEL name(                                                                                                    \
        const Key* values, const i64* edges, i64 segments, const Key* rows, u64 mask, Key* signed_magnitudes) {     \
        with_magnitudes(values, edges, segments, rows, mask, signed_magnitudes);                                    \
    }
WITH_MAGNITUDES(with_magnitudes_u2, u16)
WITH_MAGNITUDES(with_magnitudes_u4, u32)
WITH_MAGNITUDES(with_magnitudes_u8, u64)
