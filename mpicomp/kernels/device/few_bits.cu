// Every value in 8, 4, 2 or 1 bits, in blocks, with the rounding error: see mpicomp/kernels/host/few_bits.py.
//
// A team of block / 16 lanes works on a block of up to 256 values and holds them in registers. Lane q has four values
// from 4 q on, and as many a quarter, a half and three quarters of a block later: these have their fields in the same
// bytes, which are stored as whole words. In longer blocks a warp works on each, and computes the values again for each
// pass over them. Numbers are compared by their bits, as comparisons of `float` take subnormal numbers for zero.
#include "common.cuh"

template <typename T> struct Few;
template <> struct Few<Single> {
    typedef u32 Key;
    typedef u16 Scale;
    static const int STORED = 16, DIGITS = 23, BIAS = 127;
};
template <> struct Few<double> {
    typedef u64 Key;
    typedef u32 Scale;
    static const int STORED = 32, DIGITS = 52, BIAS = 1023;
};

constexpr int LANE_VALUES = 16;  // values of a lane

template <typename T>
__device__ inline typename Few<T>::Key magnitude(T value) {
    typedef typename Few<T>::Key Key;
    return bits_of(value) & ~((Key)1 << (8 * sizeof(Key) - 1));
}

// Two to a power for which it is a normal number.
template <typename T>
__device__ inline T power_of_two(int power) {
    return number_of((typename Few<T>::Key)(Few<T>::BIAS + power) << Few<T>::DIGITS);
}

__device__ inline void convert(i32 whole, Single& number) { number = Single((float)whole); }
__device__ inline void convert(i32 whole, double& number) { number = (double)whole; }
template <typename T>
__device__ inline T integer(i32 whole) {
    T number;
    convert(whole, number);
    return number;
}

template <typename T>
struct Rounding {  // of scales; step, coarse, least and most as bits
    typedef typename Few<T>::Key Key;
    static const Key SIGN = (Key)1 << (8 * sizeof(Key) - 1);
    i64 cut;
    Key step, coarse, least, most;

    __device__ Key infinity() const { return sizeof(Key) == 4 ? (Key)0x7f800000u : (Key)0x7ff0000000000000ull; }

    // The multiple of `step`, a power of two, that a number below `coarse` is rounded to: up, or to nearest.
    __device__ Key to_step(Key number, bool up) const {
        const T whole = T(1.5f) * power_of_two<T>(Few<T>::DIGITS), unit = number_of(step);
        const T steps = number_of(number) / unit;
        T rounded = (steps + whole) - whole;
        if (up && bits_of(rounded) < bits_of(steps)) rounded = rounded + T(1.0f);
        return bits_of(rounded * unit);
    }

    __device__ Key scale_of(Key largest, T top) const {
        if (largest >= infinity()) return infinity();
        Key scale = bits_of(number_of(largest) / top);
        if (scale < coarse) scale = to_step(scale, true);
        scale = (scale + ((Key)1 << cut) - 1) >> cut << cut;
        if (bits_of(number_of(scale) * top) > most && largest <= most) scale -= (Key)1 << cut;
        return scale < least ? 0 : scale;
    }

    __device__ Key magnitude_of(Key number) const {
        if (number < coarse) number = to_step(number, false);
        if (number >= infinity()) return infinity();
        Key rounded = (number + ((Key)1 << (cut - 1))) >> cut << cut;
        return rounded > most && number <= most ? rounded - ((Key)1 << cut) : rounded;
    }
};

// The values of a lane: four from `from` on, and from each quarter of a block on; zeros behind the `size` first.
template <typename T>
__device__ inline void read_lane(const T* from, i32 size, i32 quarter, bool is_whole, T (&to)[LANE_VALUES]) {
    typedef typename Few<T>::Key Key;
    if (is_whole) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            Key keys[4];
#pragma unroll
            for (int l = 0; l < (int)sizeof(T) / 4; ++l)
                unpack(__ldcs((const uint4*)(from + group * quarter) + l), keys + l * 16 / sizeof(T));
#pragma unroll
            for (int i = 0; i < 4; ++i) to[4 * group + i] = number_of(keys[i]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) {
            const i32 at = k / 4 * quarter + k % 4;
            to[k] = at < size ? from[at] : T(0.0f);
        }
    }
}

template <typename T>
__device__ inline void write_lane(T* to, i32 size, i32 quarter, bool is_whole, const T (&from)[LANE_VALUES]) {
    typedef typename Few<T>::Key Key;
    if (is_whole) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            Key keys[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) keys[i] = bits_of(from[4 * group + i]);
#pragma unroll
            for (int l = 0; l < (int)sizeof(T) / 4; ++l)
                *((uint4*)(to + group * quarter) + l) = pack(keys + l * 16 / sizeof(T));
        }
    } else {
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) {
            const i32 at = k / 4 * quarter + k % 4;
            if (at < size) to[at] = from[k];
        }
    }
}

template <typename T>
__device__ inline void scale_lane(T (&values)[LANE_VALUES], T factor) {
    if (bits_of(factor) == bits_of(T(1.0f))) return;
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) values[k] = factor * values[k];
}

// What a vector is made of: decay * residual + values, and coded terms.
template <typename T>
struct Sum {
    const T* residual;
    T decay;
    const i64* terms;
    i64 count;

    __device__ T own(T residual_there, T value) const {
        return residual ? decay * residual_there + value : value;
    }
};

template <typename T>
__device__ inline T signed_magnitude(u32 field, T low, T high) {
    typedef typename Few<T>::Key Key;
    const T magnitude = field & 2 ? high : low;
    return number_of((Key)(bits_of(magnitude) ^ (Key)field << (8 * sizeof(Key) - 1)));
}

// The scales of a block as numbers; but for 2 bits both are the same.
template <typename T, int BITS>
struct Scales {
    T low, high;

    __device__ Scales(const typename Few<T>::Scale* scales, i64 number) {
        typedef typename Few<T>::Key Key;
        const int each = BITS == 2 ? 2 : 1;
        low = number_of((Key)((Key)scales[number * each] << Few<T>::STORED));
        high = each == 1 ? low : number_of((Key)((Key)scales[number * each + 1] << Few<T>::STORED));
    }
};

// A number whose bits are those of another, and in the lowest byte, which is zero there, byte i of a word.
__device__ inline Single with_low_byte(u32 number, u32 word, int i) {
    return number_of(__byte_perm(word, number, 0x7540 + i));
}
__device__ inline double with_low_byte(u64 number, u32 word, int i) {
    return number_of(number | __byte_perm(word, 0, 0x4440 + i));
}

__device__ inline u32 top_word(Single value) { return bits_of(value); }
__device__ inline u32 top_word(double value) { return (u32)(bits_of(value) >> 32); }

// The codes of the values of a lane, in words: fields of a whole byte each, or bits 2 group and 2 group + 1 of a byte.
template <int BITS>
struct Codes {
    static const int STORED = BITS == 8 ? 4 : BITS == 4 ? 2 : 1;
    u32 word[BITS > 2 ? 4 : 1];

    // quarter: of a block; q: the lane's number in the team.
    __device__ void read(const u8* codes, i32 quarter, i32 q) {
        const i32 half = quarter / 8;  // of a team
        const u32* words = (const u32*)(codes + 4 * (BITS == 1 ? q & (half - 1) : q));
#pragma unroll
        for (int k = 0; k < STORED; ++k) word[k] = words[k * quarter / 4];
        if (BITS == 1) word[0] >>= q >= half;
        if (BITS == 4)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                word[k + 2] = word[k] >> 4 & 0x0f0f0f0fu;
                word[k] &= 0x0f0f0f0fu;
            }
    }

    // All lanes of a warp call, with whether theirs is a block.
    __device__ void write(u8* codes, i32 quarter, i32 q, bool is_block) const {
        const i32 half = quarter / 8;
        if (BITS == 1) {
            const u32 own = word[0] << (q >= half), both = own | __shfl_xor_sync(ALL, own, half);
            if (is_block && q < half) *(u32*)(codes + 4 * q) = both;
        } else if (is_block) {
            u32* words = (u32*)(codes + 4 * q);
#pragma unroll
            for (int k = 0; k < STORED; ++k) words[k * quarter / 4] = BITS == 4 ? word[k] | word[k + 2] << 4 : word[k];
        }
    }

    // The integer of a value, for 8 and 4 bits.
    template <typename T>
    __device__ T level(int group, int i) const {
        const typename Few<T>::Key ulp = bits_of(power_of_two<T>(Few<T>::DIGITS));  // neighbours differ by 1
        return with_low_byte(ulp, word[BITS > 2 ? group : 0], i) - with_low_byte(ulp, 1u << (BITS - 1), 0);
    }

    __device__ u32 field(int group, int i) const { return word[0] >> (8 * i + 2 * group) & (BITS == 2 ? 3u : 1u); }

    template <typename T>
    __device__ T decoded(int group, int i, const Scales<T, BITS>& scales) const {
        if (BITS > 2) return level<T>(group, i) * scales.low;
        return signed_magnitude(field(group, i), scales.low, scales.high);
    }
};

__device__ inline Single exchanged(Single value, int by) { return Single(__shfl_xor_sync(ALL, value.value, by)); }
template <typename T>
__device__ inline T exchanged(T value, int by) { return __shfl_xor_sync(ALL, value, by); }

template <typename Key>
__device__ inline Key largest_of_team(Key value, i32 lanes) {
#pragma unroll
    for (int by = 8; by; by /= 2) value = greater(value, exchanged(value, by & (lanes - 1)));
    return value;
}

// A sum over a block has lanes j, j + block / 2, which are folded by halves. Two lanes of a team share the four sums of
// both at first, and four those of four; they exchange what they have at last. both(k): terms k and k + 8 together.
template <typename T, typename Both>
__device__ inline T sum_of_team(const Both& both, i32 lanes, i32 q) {
    T sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = both(i) + both(4 + i);
    const int half = lanes / 2, quarter = lanes / 4;
    const bool is_second = q & half, is_odd = q & quarter;
    T a = is_second ? sums[2] : sums[0], b = is_second ? sums[3] : sums[1];
    a = a + exchanged(is_second ? sums[0] : sums[2], half);
    b = b + exchanged(is_second ? sums[1] : sums[3], half);
    if (lanes == 2) return (a + exchanged(a, half)) + (b + exchanged(b, half));
    T sum = is_odd ? b : a;
    sum = sum + exchanged(is_odd ? a : b, quarter);
#pragma unroll
    for (int by = 2; by; by /= 2)
        if (by < quarter) sum = sum + exchanged(sum, by);
    sum = sum + exchanged(sum, half);
    return sum + exchanged(sum, quarter);
}

// 1 for a number up to a threshold in magnitude, else 0.
__device__ inline Single is_within(Single value, Single threshold) {
    INSTRUCTION("{.reg .f32 m; abs.f32 m, %1; set.le.f32.f32 %0, m, %2;}",
        (float)(magnitude(value) <= bits_of(threshold)), value.value, value.value, threshold.value);
    return value;
}
__device__ inline double is_within(double value, double threshold) {
    return magnitude(value) <= bits_of(threshold) ? 1.0 : 0.0;
}

// How many numbers of a team are 1, from the sum of the top words of a lane's, which are 1 or 0: up to 256. That of 1 is
// a power of two times BIAS, whose inverse modulo 512 is -(BIAS + 2).
template <typename T>
__device__ inline i32 ones_of_team(u32 sum, i32 lanes) {
#pragma unroll
    for (int by = 8; by; by /= 2)
        if (by < lanes) sum += exchanged(sum, by);
    return (i32)((sum >> Few<T>::DIGITS % 32) * (u32)-(Few<T>::BIAS + 2) & 511);
}

// The smaller of two numbers that are not negative; the second one if one is NaN.
template <typename T>
__device__ inline T smaller(T a, T b) { return bits_of(a) < bits_of(b) ? a : b; }

// One round of Lloyd's algorithm, with the shares of the values up to a threshold, and how many are above it.
template <typename T>
__device__ inline void improve(T threshold, T below, T total, i32 above, i32 size, T share, T& low, T& high) {
    const T within = below / (integer<T>(size - above) * share), beyond = (total - below) / (integer<T>(above) * share);
    const bool is_small = (bits_of(beyond) & Rounding<T>::SIGN) || bits_of(beyond) < bits_of(threshold);
    if (above == 0 || above == size) return;
    low = smaller(within, threshold);
    high = is_small ? threshold : beyond;
}

template <typename T, int BITS>
__device__ inline void magnitudes_of_team(
    const T (&values)[LANE_VALUES], i32 size, i32 lanes, i32 q, T share, T& low, T& high) {
    const T half = T(0.5f);
    T shares[LANE_VALUES];
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) shares[k] = number_of(magnitude(values[k])) * share;
    const T total = sum_of_team<T>([&](int k) { return shares[k] + shares[k + 8]; }, lanes, q);
    low = high = size == lanes * LANE_VALUES ? total : total / (integer<T>(size) * share);
#pragma unroll
    for (int round = 0; round < 2 * (BITS - 1); ++round) {
        const T threshold = half * low + half * high;
        T within[LANE_VALUES];  // 1 or 0, so that products with it are exact
        u32 ones = 0;
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) {
            within[k] = is_within(values[k], threshold);
            ones += top_word(within[k]);
        }
        const T below = sum_of_team<T>(
            [&](int k) { return fused(shares[k], within[k], shares[k + 8] * within[k + 8]); }, lanes, q);
        const i32 above = lanes * LANE_VALUES - ones_of_team<T>(ones, lanes);
        improve(threshold, below, total, above, size, share, low, high);
    }
}

template <typename T>
struct Target {  // of the codes from block `first` on, before `last`
    u8* codes;
    typename Few<T>::Scale* scales;
    T* rejected;
    i64 first, last;
};

// Write a block's scales: `cells` are their bits.
template <typename T, int BITS>
__device__ inline void write_scales(
    const Target<T>& to, i64 number, i32 q, const typename Few<T>::Key (&cells)[2]) {
    const int each = BITS == 2 ? 2 : 1;
    if (q < each)
        to.scales[(number - to.first) * each + q] = (typename Few<T>::Scale)((q ? cells[1] : cells[0]) >> Few<T>::STORED);
}

// Add the coded terms to the values of a lane; zeros behind the `size` first.
template <typename T, int BITS>
__device__ inline void add_terms(const Sum<T>& sum, i64 coded, i32 size, i32 quarter, i32 q, T (&values)[LANE_VALUES]) {
    for (i64 term = 0; term < sum.count; ++term) {
        const u8* codes = ADDRESS(const u8, sum.terms[2 * term]) + coded * (quarter * BITS / 2);
        const Scales<T, BITS> scales(ADDRESS(const typename Few<T>::Scale, sum.terms[2 * term + 1]), coded);
        Codes<BITS> found;
        found.read(codes, quarter, q);
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) values[k] = values[k] + found.template decoded<T>(k / 4, k % 4, scales);
    }
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k)
        if (k / 4 * quarter + 4 * q + k % 4 >= size) values[k] = T(0.0f);
}

// BLOCK: the block if it is known to the compiler, else 0.
template <typename T, int BITS, int BLOCK>
__device__ inline void quantise_in_registers(
    const Segments<T>& all, i32 any_block, const Sum<T>& sum, const Rounding<T>& rounding, T offset, const Target<T>& to) {
    typedef typename Few<T>::Key Key;
    const i32 block = BLOCK ? BLOCK : any_block;
    const int log_block = __ffs(block) - 1;
    const i32 lanes = block / LANE_VALUES, quarter = block / 4, q = threadIdx.x & (lanes - 1);
    const i64 number = to.first + (i64)blockIdx.x * (THREADS >> (log_block - 4)) + (threadIdx.x >> (log_block - 4));
    const Block<T> c = find_block(all, number, to.last, log_block);
    const i64 coded = number - to.first;
    const T *from = c.values + 4 * q, *before = sum.residual ? sum.residual + c.place + 4 * q : 0;
    T* const rejected = to.rejected + c.place + 4 * q;
    const i32 size = c.size - 4 * q;
    const bool is_whole = c.size == block && ((u64)from | (u64)before | (u64)rejected) % 16 == 0;
    T values[LANE_VALUES];
    read_lane(from, size, quarter, is_whole, values);
    if (before) {
        T residual[LANE_VALUES];
        read_lane(before, size, quarter, is_whole, residual);
        scale_lane(residual, sum.decay);
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) values[k] = residual[k] + values[k];
    }
    if (sum.count && c.size) add_terms<T, BITS>(sum, coded, c.size, quarter, q, values);
    Key largest = 0, cells[2];
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) largest = greater(largest, magnitude(values[k]));
    largest = largest_of_team(largest, lanes);
    const bool is_finite = largest < rounding.infinity();
    if (BITS <= 2 && !is_finite)
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k)  // a field is that of a number
            if (magnitude(values[k]) > rounding.infinity()) values[k] = T(0.0f);
    Codes<BITS> found;
    T errors[LANE_VALUES];
    if (BITS > 2) {
        const T top = integer<T>((1 << (BITS - 1)) - 1);
        cells[0] = cells[1] = rounding.scale_of(largest, top);
        const T scale = number_of(cells[0]), reciprocal = T(1.0f) / scale;
        const T inverse = cells[0] && is_finite ? reciprocal : T(0.0f);
        T levels[LANE_VALUES];
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) levels[k] = values[k] * inverse + offset;
        if (!is_finite || bits_of(number_of(largest) * inverse) > bits_of(top)) {
            const Key least = bits_of(is_finite ? offset - top : offset), most = bits_of(is_finite ? offset + top : offset);
#pragma unroll
            for (int k = 0; k < LANE_VALUES; ++k) levels[k] = number_of(lesser(greater(bits_of(levels[k]), least), most));
        }
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            u32 low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const T level = levels[4 * group + i];
                low[i] = (u32)bits_of(level);
                errors[4 * group + i] = values[4 * group + i] - (level - offset) * scale;
            }
            const u32 bytes =
                __byte_perm(__byte_perm(low[0], low[1], 0x0040), __byte_perm(low[2], low[3], 0x0040), 0x5410);
            found.word[group] = BITS == 4 ? bytes & 0x0f0f0f0fu : bytes;
        }
    } else {
        T low = number_of(largest), high = low;
        const T share = power_of_two<T>(-log_block);
        magnitudes_of_team<T, BITS>(values, c.size, lanes, q, share, low, high);
        cells[0] = rounding.magnitude_of(lesser(bits_of(low), largest));
        cells[1] = rounding.magnitude_of(lesser(bits_of(high), largest));
        if (!is_finite) cells[0] = cells[1] = rounding.infinity();
        low = number_of(cells[0]), high = number_of(cells[1]);
        const Key threshold = BITS == 2 ? bits_of(T(0.5f) * low + T(0.5f) * high) : (Key)-1;
        u32 fields = 0;  // of 1 bit in every second one
#pragma unroll
        for (int i = 3; i >= 0; --i)
#pragma unroll
            for (int group = 3; group >= 0; --group) {  // fields from the highest bit on
                const T value = values[4 * group + i], number = value + T(0.0f);  // -0.0 is positive
                const bool is_large = BITS == 2 && magnitude(value) > threshold;
                if (BITS == 2) fields = __funnelshift_l(is_large ? ALL : 0, fields, 1);
                fields = __funnelshift_l(top_word(number), fields, (u32)(3 - BITS));
                const Key size = bits_of(is_large ? high : low);
                errors[4 * group + i] = value - number_of((Key)(size | (bits_of(number) & Rounding<T>::SIGN)));
            }
        found.word[0] = BITS == 2 ? fields : fields >> 1 & 0x55555555u;
    }
    const bool is_block = c.size > 0;
    found.write(to.codes + coded * (block * BITS / 8), quarter, q, is_block);
    if (!is_block) return;
    write_scales<T, BITS>(to, number, q, cells);
    if (is_finite) {
        write_lane(rejected, size, quarter, is_whole, errors);
    } else {
#pragma unroll 1
        for (int k = 0; k < LANE_VALUES; ++k) {
            const i32 at = k / 4 * quarter + k % 4;
            if (at < size) rejected[at] = sum.own(before ? before[at] : T(0.0f), from[at]);
        }
    }
}

// A longer block, whose values are computed again for each pass over them.
template <typename T>
struct LongBlock {
    const Sum<T>& sum;
    Block<T> c;
    i64 coded;
    int bits, log_block;

    __device__ T own(i32 i) const { return sum.own(sum.residual ? sum.residual[c.place + i] : T(0.0f), c.values[i]); }

    __device__ T operator[](i32 i) const {
        typedef typename Few<T>::Key Key;
        if (i >= c.size) return T(0.0f);
        T value = own(i);
        const int log_width = log_block - 3 + __ffs(bits) - 1, each = bits == 2 ? 2 : 1;
        for (i64 term = 0; term < sum.count; ++term) {
            const u8* codes = ADDRESS(const u8, sum.terms[2 * term]) + (coded << log_width);
            const auto* scales = ADDRESS(const typename Few<T>::Scale, sum.terms[2 * term + 1]) + coded * each;
            const T low = number_of((Key)((Key)scales[0] << Few<T>::STORED));
            const T high = number_of((Key)((Key)scales[each - 1] << Few<T>::STORED));
            const u32 code = codes[i & ((1 << log_width) - 1)] >> bits * (i >> log_width) & ((1 << bits) - 1);
            value = value + (bits > 2 ? integer<T>((i32)code - (1 << (bits - 1))) * low : signed_magnitude(code, low, high));
        }
        return value;
    }
};

// The sum of shares of the magnitudes up to a threshold, and how many are above it.
template <typename T>
__device__ inline T sum_up_to(const LongBlock<T>& c, typename Few<T>::Key threshold, T share, i32& above) {
    T sums[2];
    u32 found = 0;
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {  // lanes of 0, 64, 32, 96 on: one after the other takes few registers
        T sum = T(0.0f);
#pragma unroll 1
        for (i32 i = k % 2 * 64 + k / 2 * 32 + lane(); i < 1 << c.log_block; i += 128) {
            const auto size = magnitude(c[i]);
            if (size <= threshold) sum = sum + number_of(size) * share;
            found += size > threshold;
        }
        if (k < 2) sums[0] = k ? sums[0] + sum : sum;
        else sums[1] = k > 2 ? sums[1] + sum : sum;
    }
    above = warp_sum(found);
    T sum = sums[0] + sums[1];
    for (int by = 16; by; by /= 2) sum = sum + exchanged(sum, by);
    return sum;
}

template <typename T>
__device__ inline void quantise_long(
    const Segments<T>& all, int bits, i32 block, const Sum<T>& sum, const Rounding<T>& rounding, T offset,
    const Target<T>& to) {
    typedef typename Few<T>::Key Key;
    const Key SIGN = Rounding<T>::SIGN;
    const int log_block = __ffs(block) - 1;
    const i64 number = to.first + (i64)blockIdx.x * WARPS + warp();
    if (number >= to.last) return;
    const LongBlock<T> c = {sum, find_block(all, number, to.last, log_block), number - to.first, bits, log_block};
    const i32 width = block * bits / 8;
    Key largest = 0;
    for (i32 j = lane(); j < block; j += 32) largest = greater(largest, magnitude(c[j]));
    for (int by = 16; by; by /= 2) largest = greater(largest, exchanged(largest, by));
    const bool is_finite = largest < rounding.infinity();
    const T top = integer<T>((1 << (bits - 1)) - 1);
    T inverse = T(0.0f), low = number_of(largest), high = low;
    Key threshold = (Key)-1, cells[2];
    if (bits > 2) {
        cells[0] = cells[1] = rounding.scale_of(largest, top);
        if (cells[0] && is_finite) inverse = T(1.0f) / number_of(cells[0]);
    } else {
        const T share = power_of_two<T>(-log_block);
        i32 above;
        if (is_finite) {
            const T total = sum_up_to(c, (Key)-1, share, above);
            low = high = total / (integer<T>(c.c.size) * share);
            for (int round = 0; round < 2 * (bits - 1); ++round) {
                const T middle = T(0.5f) * low + T(0.5f) * high;
                const T below = sum_up_to(c, bits_of(middle), share, above);
                improve(middle, below, total, above, c.c.size, share, low, high);
            }
        }
        cells[0] = rounding.magnitude_of(lesser(bits_of(low), largest));
        cells[1] = rounding.magnitude_of(lesser(bits_of(high), largest));
        if (bits == 2) threshold = bits_of(T(0.5f) * number_of(cells[0]) + T(0.5f) * number_of(cells[1]));
    }
    low = number_of(cells[0]), high = number_of(cells[1]);
    if (bits == 2) write_scales<T, 2>(to, number, lane(), cells);
    else write_scales<T, 1>(to, number, lane(), cells);
    const bool is_clamped = !is_finite || bits_of(number_of(largest) * inverse) > bits_of(top);
    const Key least = bits_of(is_finite ? offset - top : offset), most = bits_of(is_finite ? offset + top : offset);
    for (i32 j = lane(); j < width; j += 32) {
        u32 code = 0;
        for (i32 i = j, shift = 0; shift < 8; i += width, shift += bits) {
            T value = c[i], decoded;
            if (magnitude(value) > rounding.infinity()) value = T(0.0f);
            u32 field;
            if (bits > 2) {
                T level = value * inverse + offset;
                if (is_clamped) level = number_of(lesser(greater(bits_of(level), least), most));
                field = (u32)bits_of(level);
                decoded = (level - offset) * low;
            } else {
                field = (u32)(bits_of(value) > SIGN) | (u32)(bits == 2 && magnitude(value) > threshold) << 1;
                decoded = signed_magnitude(field, low, high);
            }
            code |= (field & ((1u << bits) - 1)) << shift;
            if (i < c.c.size) to.rejected[c.c.place + i] = is_finite ? value - decoded : c.own(i);
        }
        to.codes[c.coded * width + j] = (u8)code;
    }
}

// What writes vectors of words of a team of threads to an address that is not a multiple of 16 bytes: vector l of a thread
// is number l * team + thread. Aligned vectors are written, each of parts of two that follow each other, and the words
// before the first and behind the last: stores of single words would write to each sector of 32 bytes four times.
struct Shifted {
    u32* to;  // where vector 0 of this thread belongs
    i32 team, thread;
    u32 before, mask;  // words up to a multiple of 16 bytes; the lanes of the team
    i32 next;          // the lane of the thread behind this one
    uint4 last;        // the vector that is not written yet

    __device__ Shifted(u32* to, i32 team, i32 thread) : to(to), team(team), thread(thread) {
        const u32 first = lane() - thread;
        before = (u32)(0 - (u64)to) / 4 % 4, mask = ALL >> (32 - team) << first;
        next = first + ((thread + 1) & (team - 1));
    }

    // Vector l is known: write what begins in the one before it.
    __device__ void put(int l, uint4 vector) {
        if (l == 0) write_words(vector, 0, 0, 0, before);
        else write_behind(l - 1, thread ? last : vector);
        last = vector;
    }

    // All `count` vectors are known.
    __device__ void end(int count) {
        write_behind(count - 1, last, team - 1);
        write_words(last, count - 1, team - 1, before, 4);
    }

    // following: vector l + 1 in thread 0, l in others.
    __device__ void write_behind(int l, uint4 following, i32 threads = 32) const {
        u32 words[7] = {last.x, last.y, last.z, last.w};
        words[4] = __shfl_sync(mask, following.x, next);
        words[5] = __shfl_sync(mask, following.y, next);
        words[6] = __shfl_sync(mask, following.z, next);
#pragma unroll
        for (int i = 0; i < 5; ++i) words[i] = before & 2 ? words[i + 2] : words[i];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = before & 1 ? words[i + 1] : words[i];
        if (thread < threads) *(uint4*)(to + before + 4 * l * team) = pack(words);
    }

    // Write the words from `begin` to `end` of vector l of one thread.
    __device__ void write_words(uint4 vector, int l, i32 by, u32 begin, u32 end) const {
        u32 words[4];
        unpack(vector, words);
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            if (thread == by && i >= begin && i < end) to[4 * l * team + i] = words[i];
    }
};

// Write the values of 16 codes over a divisor. inverse: of a divisor that is an integer below 2^20; else 0.
//
// Of 8 and 4 bits a value is x / d with x = level * scale, an integer of at most 16 bits (29 for double) times a power of
// two. high + low is scale / d but for 2^-48 of it, so level * high + level * low, rounded once by the last instruction,
// is x / d but for 2^-46 of it. Between x / d and the next number halfway between two of the format there is at least
// 2^-45 of it, so both round to the same number. (x / d itself is halfway for no d: it has no more than 16 bits if it
// has finitely many.) Nothing underflows if the scale is at least 2^-60. For double the distances are larger by far.
template <typename T, int BITS, int BLOCK>
__device__ inline void dequantise(
    const Segments<T>& all, i64 first, i64 last, i32 any_block, T divisor, T inverse, const u8* codes,
    const typename Few<T>::Scale* scales) {
    typedef typename Few<T>::Key Key;
    const i32 block = BLOCK ? BLOCK : any_block;
    const int log_block = __ffs(block) - 1, log_threads = log_block - 5;  // a thread is two lanes
    const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, number = first + (thread >> log_threads);
    const i32 quarter = block / 4, threads = 1 << log_threads, at = (i32)thread & (threads - 1);
    const Block<T> c = find_block(all, number, last, log_block);
    if (!c.size) return;
    Scales<T, BITS> stored(scales, number - first);
    const T small = power_of_two<T>(-60), infinity = power_of_two<T>(Few<T>::BIAS + 1);
    const bool is_usual = bits_of(inverse) && bits_of(stored.low) - bits_of(small) < bits_of(infinity) - bits_of(small);
    const T high = stored.low * inverse;
    const T low = fused(number_of(bits_of(high) ^ Rounding<T>::SIGN), divisor, stored.low) * inverse;
    if (BITS <= 2) stored.low = stored.low / divisor, stored.high = stored.high / divisor;
    Codes<BITS> found[2];
#pragma unroll
    for (int lane = 0; lane < 2; ++lane)
        found[lane].read(codes + (number - first) * (quarter * BITS / 2), quarter, at + lane * threads);
    T* const to = c.values + 4 * at;
    const auto decode = [&](int l, bool usual, Key (&keys)[4]) {
        const Codes<BITS>& own = found[l % 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T level = own.template level<T>(l / 2, i);
            if (BITS <= 2) keys[i] = bits_of(own.template decoded<T>(l / 2, i, stored));
            else if (usual) keys[i] = bits_of(fused(level, high, level * low));
            else keys[i] = bits_of(own.template decoded<T>(l / 2, i, stored) / divisor);
        }
    };
    const auto write_wide = [&](int l, const Key (&keys)[4]) {
#pragma unroll
        for (int k = 0; k < (int)sizeof(T) / 4; ++k)
            ((uint4*)(to + 4 * l * threads))[k] = pack(keys + k * 16 / sizeof(T));
    };
    Key keys[4];
    const bool is_wide = c.size == block && (u64)to % 16 == 0;
    if (is_wide && (BITS <= 2 || is_usual)) {
#pragma unroll
        for (int l = 0; l < 8; ++l) decode(l, true, keys), write_wide(l, keys);
    } else if (is_wide) {
#pragma unroll
        for (int l = 0; l < 8; ++l) decode(l, false, keys), write_wide(l, keys);
    } else if (c.size == block && sizeof(T) == 4 && threads <= 32) {
        Shifted shifted((u32*)to, threads, at);
#pragma unroll
        for (int l = 0; l < 8; ++l) {
            decode(l, is_usual, keys);
            shifted.put(l, pack(keys));
        }
        shifted.end(8);
    } else {
#pragma unroll
        for (int l = 0; l < 8; ++l) {
            decode(l, is_usual, keys);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (4 * (l * threads + at) + i < c.size) to[4 * l * threads + i] = number_of(keys[i]);
        }
    }
}

// Kernels

// With one block a multiprocessor as the bound, of double three, the compiler spills no registers to have more of them.
#define QUANTISER extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define DEQUANTISER_f4 KERNEL
#define DEQUANTISER_f8 extern "C" __global__ void __launch_bounds__(THREADS, 3)

#define FEW_BITS(dtype, T, Key, Scale)                                                                              \
    QUANTISER quantise_long_##dtype(                                                                                \
        const i64* table, i64 rows, i64 terms, T* values, i64 size, i64 first, i64 last, i64 block,                 \
        const T* residual, u64 decay, i64 cut, u64 step, u64 coarse, u64 least, u64 most, u64 offset,               \
        u8* codes, Scale* scales, T* rejected, i64 bits) {                                                          \
        SUMMED(T, Key)                                                                                              \
        quantise_long(segments, (int)bits, (i32)block, sum, rounding, number_of((Key)offset), target);              \
    }                                                                                                               \
    OF_BITS(dtype, T, Key, Scale, 8)                                                                                \
    OF_BITS(dtype, T, Key, Scale, 4)                                                                                \
    OF_BITS(dtype, T, Key, Scale, 2)                                                                                \
    OF_BITS(dtype, T, Key, Scale, 1)

#define SUMMED(T, Key)                                                                                              \
    const Segments<T> segments = {table, rows, values, size};                                                       \
    const Sum<T> sum = {                                                                                            \
        residual, number_of((Key)decay), table + 3 * rows + 2, terms};                                              \
    const Rounding<T> rounding = {cut, (Key)step, (Key)coarse, (Key)least, (Key)most};                              \
    const Target<T> target = {codes, scales, rejected, first, last};

#define OF_BITS(dtype, T, Key, Scale, BITS)                                                                         \
    QUANTISER quantise_##BITS##_##dtype(                                                                            \
        const i64* table, i64 rows, i64 terms, T* values, i64 size, i64 first, i64 last, i64 block,                 \
        const T* residual, u64 decay, i64 cut, u64 step, u64 coarse, u64 least, u64 most, u64 offset,               \
        u8* codes, Scale* scales, T* rejected) {                                                                    \
        SUMMED(T, Key)                                                                                              \
        if (block == 256) quantise_in_registers<T, BITS, 256>(segments, 0, sum, rounding, number_of((Key)offset), target); \
        else quantise_in_registers<T, BITS, 0>(segments, (i32)block, sum, rounding, number_of((Key)offset), target); \
    }                                                                                                               \
    DEQUANTISER_##dtype dequantise_##BITS##_##dtype(                                                                \
        const i64* table, i64 rows, T* values, i64 size, i64 first, i64 last, i64 block, u64 divisor, u64 inverse,  \
        const u8* codes, const Scale* scales) {                                                                     \
        const Segments<T> segments = {table, rows, values, size};                                                   \
        const T number = number_of((Key)divisor), reciprocal = number_of((Key)inverse);                             \
        if (block == 256) dequantise<T, BITS, 256>(segments, first, last, 0, number, reciprocal, codes, scales);    \
        else dequantise<T, BITS, 0>(segments, first, last, (i32)block, number, reciprocal, codes, scales);          \
    }

IF_4(FEW_BITS(f4, Single, u32, u16))
IF_8(FEW_BITS(f8, double, u64, u32))
