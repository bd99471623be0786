// Thresholds of fitted distributions: see mpicomp/kernels/host/fitting.py, whose order of operations this is.
#include "common.cuh"

constexpr i64 RUN = 16;  // consecutive values of a sample
constexpr int EXCESS_ROWS = 64, EIGHT = 8;
constexpr i64 EXCESS_BLOCK = THREADS * EXCESS_ROWS;
constexpr double NO_SPREAD = 1e-5, LN2 = 0.69314718055994530942;

// Write `count` of `size` values, of the sum of `factor` times the values and `addend` if there is one.
template <typename Value>
__device__ inline void take_sample(
    const Value* values, u64 factor_bits, const Value* addend, i64 size, i64 count, typename Format<Value>::Wide* taken) {
    const typename Format<Value>::Wide factor = number_of((decltype(bits_of(*taken)))factor_bits);
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (i64)gridDim.x * THREADS) {
        i64 place = i;
        if (count < size) {
            const i64 number = i / RUN, runs = count / RUN;
            const i64 start = number * size / runs, end = (number + 1) * size / runs - RUN;
            u64 scattered = ((u64)number + 1) * 0x9E3779B97F4A7C15ull;
            scattered = (scattered ^ scattered >> 32) * 0xD6E8FEB86659FD93ull;
            place = start + (i64)((scattered >> 40) * (u64)(end - start) >> 24) + i % RUN;
        }
        Value value = values[place];
        if (addend) {
            narrow(widened(value) * factor, value);
            narrow(widened(value) + widened(addend[place]), value);
        }
        taken[i] = widened(value);
    }
}

__device__ inline double logarithm(double x) {
    const i64 bits = __double_as_longlong(x);
    const double exponent = (double)((bits >> 52) - 1022);
    const double significand = __longlong_as_double((bits & ((1ll << 52) - 1)) | 1022ll << 52);
    const double ratio = (significand - 1) / (significand + 1);
    double series = 0;
    for (int term = 37; term > 0; term -= 2) series = series * (ratio * ratio) + 1.0 / term;
    return exponent * LN2 + 2 * ratio * series;
}

__device__ inline double exponential_less_1(double x) {
    int doublings = 0;
    for (; x > 0.5 || x < -0.5; ++doublings) x = x / 2;
    double series = 0;
    for (int term = 18; term > 0; --term) series = (series + 1) * x / term;
    for (; doublings > 0; --doublings) series *= series + 2;
    return series;
}

__device__ inline double excess_of(double entries, double total, double squares, double share, bool pareto) {
    if (share >= 1) return 0;
    const double mean = total / entries, exponent = -logarithm(share), variance = squares / entries - mean * mean;
    const double none = NO_SPREAD * mean * mean, infinity = __longlong_as_double(0x7ffll << 52);
    if (!(pareto && none < variance && variance < infinity)) return mean * exponent;
    const double ratio = mean * mean / variance, shape = (1 - ratio) / 2, scale = mean * (ratio + 1) / 2;
    return shape == 0 ? scale * exponent : scale / shape * exponential_less_1(shape * exponent);
}

struct Excess { double entries[THREADS], total[THREADS], squares[THREADS]; };

// Add up the excess of `size` values, *counted if that is less, over a threshold; the last block writes the total and the
// last threshold of the fit to `found`, and to `search` the largest magnitude up to that. sums: three of a block.
// done: 0 when the kernel begins.
template <typename Value>
__device__ inline void fit_excess(
    const Value* values, i64 size, const u64* counted, u64 start_bits, u64 wanted, u64 share_bits, u64 pareto,
    double* sums, u64* done, double* found, u64* search) {
    SHARED(Excess, lanes);
    const int j = threadIdx.x;
    const double start = __longlong_as_double((i64)start_bits);
    size = lesser(size, (i64)*counted);
    double entries = 0, total = 0, squares = 0;
    for (int row = 0; row < EXCESS_ROWS; row += EIGHT) {
        double eight_entries = 0, eight = 0, eight_squares = 0;
#pragma unroll
        for (int r = 0; r < EIGHT; ++r) {
            const i64 place = blockIdx.x * EXCESS_BLOCK + (row + r) * THREADS + j;
            const double value = place < size ? (double)widened(values[place]) : 0.0;
            double over = (value < 0 ? -value : value) - start;
            over = over <= 0 ? 0 : over;
            eight_entries += over > 0;
            eight += over;
            eight_squares += over * over;
        }
        entries += eight_entries, total += eight, squares += eight_squares;
    }
    lanes.entries[j] = entries, lanes.total[j] = total, lanes.squares[j] = squares;
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (j < half) {
            lanes.entries[j] += lanes.entries[j + half];
            lanes.total[j] += lanes.total[j + half];
            lanes.squares[j] += lanes.squares[j + half];
        }
        __syncthreads();
    }
    if (j) return;
    double* own = sums + 3 * blockIdx.x;
    own[0] = lanes.entries[0], own[1] = lanes.total[0], own[2] = lanes.squares[0];
    __threadfence();
    if (atomicAdd(done, 1ull) != gridDim.x - 1) return;
    __threadfence();
    entries = total = squares = 0;
    for (i64 block = 0; block * EXCESS_BLOCK < size; ++block)
        entries += __ldcg(sums + 3 * block), total += __ldcg(sums + 3 * block + 1), squares += __ldcg(sums + 3 * block + 2);
    double threshold = start, share = __longlong_as_double((i64)share_bits);
    if (entries > 0) {
        if (!(share > 0)) share = __longlong_as_double((i64)wanted) / entries;
        threshold += excess_of(entries, total, squares, share, pareto);
    }
    found[0] = total, found[1] = threshold;
    Value nearest;
    narrow(threshold, nearest);
    search[0] = bits_of(nearest) - !((double)widened(nearest) <= threshold);
}

#define FITTING(name, Value)                                                                                        \
    KERNEL take_sample_##name(                                                                                      \
        const Value* values, u64 factor, const Value* addend, i64 size, i64 count, Format<Value>::Wide* taken) {    \
        take_sample(values, factor, addend, size, count, taken);                                                    \
    }                                                                                                               \
    KERNEL fit_excess_##name(                                                                                       \
        const Value* values, i64 size, const u64* counted, u64 start, u64 wanted, u64 share, u64 pareto,            \
        double* sums, u64* done, double* found, u64* search) {                                                      \
        fit_excess(values, size, counted, start, wanted, share, pareto, sums, done, found, search);                 \
    }
FITTING(f2, Half)
FITTING(f4, Single)
FITTING(f8, double)
