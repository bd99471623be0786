// Sums over a gradient, in float64 and in the order of mpicomp/kernels/host/statistics.py: a block of threads takes a
// block of values, thread j lane j; then one block adds up the blocks, one after the other.
#include "common.cuh"

constexpr int LANES = THREADS;
constexpr int ROWS = 64;
constexpr i64 FRACTION = (1ll << 52) - 1;

struct Lanes {
    double absolute[LANES], largest[LANES], product[LANES];
    i64 nonzeros[LANES], exponents[LANES];
};

// Part a positive number that is not subnormal into a significand, at least 2^(bias - 1023), and a power of two.
__device__ inline double split(double x, i64 bias, i64& exponent) {
    i64 bits = __double_as_longlong(x);
    exponent = (bits >> 52) - bias;
    return __longlong_as_double((bits & FRACTION) | bias << 52);
}

// Write the sums of a block of values. sums: rows of `blocks` for absolute, largest, product; counts: for nonzeros,
// exponents.
template <typename Value>
__device__ inline void block_moments(const Value* values, i64 size, double* sums, i64* counts, i64 blocks) {
    SHARED(Lanes, lanes);
    const int j = threadIdx.x;
    double absolute = 0, largest = 0, product = 1;
    i64 nonzeros = 0, exponents = 0, first = (i64)blockIdx.x * LANES * ROWS + j;
#pragma unroll 8
    for (int row = 0; row < ROWS; ++row) {
        i64 place = first + row * LANES;
        double value = place < size ? (double)widened(values[place]) : 0.0, x = value < 0 ? -value : value;
        absolute += x;
        largest = x > largest ? x : largest;
        nonzeros += x > 0;
        double factor = x > 0 ? x : 1.0;
        i64 shift, by = factor < 1 ? -54 : 54;
        product = split(product * (factor < 1 ? factor * 18014398509481984.0 : factor * 5.551115123125783e-17), 1023, shift);
        exponents += shift + by;
    }
    lanes.absolute[j] = absolute, lanes.largest[j] = largest, lanes.product[j] = product;
    lanes.nonzeros[j] = nonzeros, lanes.exponents[j] = exponents;
    __syncthreads();
    for (int half = LANES / 2; half; half /= 2) {
        if (j < half) {
            lanes.absolute[j] += lanes.absolute[j + half];
            lanes.largest[j] = greater(lanes.largest[j], lanes.largest[j + half]);
            lanes.product[j] *= lanes.product[j + half];
            lanes.nonzeros[j] += lanes.nonzeros[j + half];
            lanes.exponents[j] += lanes.exponents[j + half];
        }
        __syncthreads();
    }
    if (j) return;
    i64 b = blockIdx.x;
    sums[b] = lanes.absolute[0], sums[blocks + b] = lanes.largest[0], sums[2 * blocks + b] = lanes.product[0];
    counts[b] = lanes.nonzeros[0], counts[blocks + b] = lanes.exponents[0];
}

KERNEL block_moments_f2(const Half* values, i64 size, double* sums, i64* counts, i64 blocks) {
    block_moments(values, size, sums, counts, blocks);
}
KERNEL block_moments_f4(const Single* values, i64 size, double* sums, i64* counts, i64 blocks) {
    block_moments(values, size, sums, counts, blocks);
}
KERNEL block_moments_f8(const double* values, i64 size, double* sums, i64* counts, i64 blocks) {
    block_moments(values, size, sums, counts, blocks);
}

// Add up the blocks in order: one block of threads, a warp for each sum. The threads read ahead for all of them.
KERNEL add_moments(const double* sums, const i64* counts, i64 blocks, double* totals, i64* numbers) {
    SHARED(Lanes, lanes);
    const int j = threadIdx.x;
    double total = warp() == 2 ? 1 : 0;
    i64 number = 0;
    for (i64 first = 0; first < blocks; first += LANES) {
        i64 b = first + j, end = lesser((i64)LANES, blocks - first);
        if (b < blocks) {
            lanes.absolute[j] = sums[b], lanes.largest[j] = sums[blocks + b], lanes.product[j] = sums[2 * blocks + b];
            lanes.nonzeros[j] = counts[b], lanes.exponents[j] = counts[blocks + b];
        }
        __syncthreads();
        for (i64 i = 0; i < end && lane() == 0; ++i) {
            i64 exponent;
            if (warp() == 0) total += lanes.absolute[i];
            if (warp() == 1) total = greater(total, lanes.largest[i]), number += lanes.nonzeros[i];
            if (warp() == 2) {
                total = split(total * lanes.product[i], 1022, exponent);
                number += lanes.exponents[i] + exponent;
            }
        }
        __syncthreads();
    }
    if (lane() == 0 && warp() < 3) totals[warp()] = total;
    if (lane() == 0 && (warp() == 1 || warp() == 2)) numbers[warp() - 1] = number;
}

struct SideLanes {
    double below[LANES], beyond[LANES];
    i64 above[LANES];
};

// Add up a block of values up to a threshold and above it, and count those above it: into lane 0.
template <typename Value>
__device__ inline void add_sides(SideLanes& lanes, const Value* values, i64 size, i64 block, double threshold) {
    const int j = threadIdx.x;
    double below = 0, beyond = 0;
    i64 above = 0, first = block * LANES * ROWS + j;
#pragma unroll 8
    for (int row = 0; row < ROWS; ++row) {
        i64 place = first + row * LANES;
        double value = place < size ? (double)widened(values[place]) : 0.0, x = value < 0 ? -value : value;
        bool is_above = x > threshold;
        below += is_above ? 0.0 : x;
        beyond += is_above ? x : 0.0;
        above += is_above;
    }
    lanes.below[j] = below, lanes.beyond[j] = beyond, lanes.above[j] = above;
    __syncthreads();
    for (int half = LANES / 2; half; half /= 2) {
        if (j < half) {
            lanes.below[j] += lanes.below[j + half];
            lanes.beyond[j] += lanes.beyond[j + half];
            lanes.above[j] += lanes.above[j + half];
        }
        __syncthreads();
    }
}

// Write the sums of a block of values up to a threshold and above it, a row of sums, and the number of values above it.
template <typename Value>
__device__ inline void block_sides(const Value* values, i64 size, u64 threshold, double* sums, i64* counts) {
    SHARED(SideLanes, lanes);
    add_sides(lanes, values, size, blockIdx.x, __longlong_as_double((i64)threshold));
    if (threadIdx.x) return;
    sums[2 * blockIdx.x] = lanes.below[0], sums[2 * blockIdx.x + 1] = lanes.beyond[0];
    counts[blockIdx.x] = lanes.above[0];
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

KERNEL block_sides_f2(const Half* values, i64 size, u64 threshold, double* sums, i64* counts) {
    block_sides(values, size, threshold, sums, counts);
}
KERNEL block_sides_f4(const Single* values, i64 size, u64 threshold, double* sums, i64* counts) {
    block_sides(values, size, threshold, sums, counts);
}
KERNEL block_sides_f8(const double* values, i64 size, u64 threshold, double* sums, i64* counts) {
    block_sides(values, size, threshold, sums, counts);
}

#define TWO_MAGNITUDES(name, Value)                                                                                 \
    KERNEL name(                                                                                                    \
        const Value* values, i64 size, i64 blocks, i64 rounds, u64 mean, u64 largest, double* found) {              \
        two_magnitudes(values, size, blocks, rounds, mean, largest, found);                                         \
    }
TWO_MAGNITUDES(two_magnitudes_f2, Half)
TWO_MAGNITUDES(two_magnitudes_f4, Single)
TWO_MAGNITUDES(two_magnitudes_f8, double)
