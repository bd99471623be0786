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

// The segments of a vector. table: the first block of each and the end, the first value of each and the end, addresses
// of values, then pairs of addresses of codes and scales; none for one segment, whose values are at `only`.
template <typename T>
struct Segments {
    const i64* table;
    i64 rows;
    T* only;
    i64 size;
};

// A block of a segment: where its values are in the segment, their place in the vector, and how many there are.
template <typename T>
struct Block {
    T* values;
    i64 place;
    i32 size;
};

// Find a block by its number; all lanes of a warp call, whose numbers do not decrease.
template <typename T>
__device__ inline Block<T> find_block(const Segments<T>& all, i64 number, i64 last, int log_block) {
    const i64 block = (i64)1 << log_block;
    i64 first = 0, place = 0, size = all.size;
    T* values = all.only;
    if (all.table) {
        const i64 least = __shfl_sync(ALL, number, 0), *ends = all.table + 1;
        i64 row = 0;
        for (i64 start = 0; start < all.rows; start += 32) {
            const u32 before = __popc(__ballot_sync(ALL, start + lane() < all.rows && ends[start + lane()] <= least));
            row += before;
            if (before < 32) break;
        }
        while (row < all.rows - 1 && ends[row] <= number) ++row;
        row = lesser(row, all.rows - 1);
        const i64* edges = all.table + all.rows + 1;
        first = all.table[row], place = edges[row], size = edges[row + 1] - place;
        values = ADDRESS(T, edges[all.rows + 1 + row]);
    }
    const i64 start = (number - first) << log_block;
    const i64 left = number < last ? size - start : 0;
    return {values + start, place + start, (i32)(left < block ? left < 0 ? 0 : left : block)};
}

// Read four values, zeros behind the `size` first.
template <typename T>
__device__ inline void read_four(const T* from, i32 size, T* to) {
    typedef typename Few<T>::Key Key;
    if (size >= 4 && (u64)from % 16 == 0) {
        Key keys[4];
#pragma unroll
        for (int l = 0; l < (int)sizeof(T) / 4; ++l) unpack(__ldcs((const uint4*)from + l), keys + l * 16 / sizeof(T));
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = number_of(keys[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = i < size ? from[i] : T(0.0f);
    }
}

template <typename T>
__device__ inline void write_four(T* to, i32 size, const T* from) {
    typedef typename Few<T>::Key Key;
    if (size >= 4 && (u64)to % 16 == 0) {
        Key keys[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) keys[i] = bits_of(from[i]);
#pragma unroll
        for (int l = 0; l < (int)sizeof(T) / 4; ++l) *((uint4*)to + l) = pack(keys + l * 16 / sizeof(T));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < size) to[i] = from[i];
    }
}

__device__ inline u32 read_word(const u8* from) {
    if ((u64)from % 4 == 0) return *(const u32*)from;
    return from[0] | (u32)from[1] << 8 | (u32)from[2] << 16 | (u32)from[3] << 24;
}

__device__ inline void write_word(u8* to, u32 word) {
    if ((u64)to % 4 == 0) {
        *(u32*)to = word;
    } else {
        for (int i = 0; i < 4; ++i) to[i] = (u8)(word >> 8 * i);
    }
}

// What a vector is made of: decay * residual + scale * values, and coded terms.
template <typename T>
struct Sum {
    const T* residual;
    T decay, scale;
    const i64* terms;
    i64 count;

    __device__ T own(T residual_there, T value) const {
        return residual ? decay * residual_there + scale * value : scale * value;
    }
};

template <typename T>
__device__ inline void read_own(const Sum<T>& sum, const Block<T>& c, i32 at, T* to) {
    T before[4];
    read_four(c.values + at, c.size - at, to);
    if (sum.residual) read_four(sum.residual + c.place + at, c.size - at, before);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = sum.own(before[i], to[i]);
}

template <typename T>
__device__ inline T signed_magnitude(u32 field, T low, T high) {
    const T magnitude = field & 2 ? high : low;
    return number_of((typename Few<T>::Key)(bits_of(magnitude) ^ (field & 1 ? Rounding<T>::SIGN : 0)));
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

// The codes of the values of a lane, in words: fields of a whole byte each, or bits 2 group and 2 group + 1 of a byte.
template <int BITS>
struct Codes {
    static const int STORED = BITS == 8 ? 4 : BITS == 4 ? 2 : 1;
    u32 word[BITS > 2 ? 4 : 1];

    // quarter: of a block; q: the lane's number in the team.
    __device__ void read(const u8* codes, i32 quarter, i32 q) {
        const i32 half = quarter / 8;  // of a team
#pragma unroll
        for (int k = 0; k < STORED; ++k) word[k] = read_word(codes + k * quarter + 4 * (BITS == 1 ? q % half : q));
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
            if (is_block && q < half) write_word(codes + 4 * q, both);
            return;
        }
        if (is_block)
#pragma unroll
            for (int k = 0; k < STORED; ++k)
                write_word(codes + k * quarter + 4 * q, BITS == 4 ? word[k] | word[k + 2] << 4 : word[k]);
    }

    // The integer of a value times 1, for 8 and 4 bits.
    template <typename T>
    __device__ T level(int group, int i) const {
        typedef typename Few<T>::Key Key;
        const Key ulp = bits_of(power_of_two<T>(Few<T>::DIGITS));  // of a number whose neighbours differ by 1
        const T middle = number_of((Key)(ulp | (Key)1 << (BITS - 1)));
        return number_of((Key)(ulp | (word[BITS > 2 ? group : 0] >> 8 * i & 0xffu))) - middle;
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
    for (int by = 8; by; by /= 2)
        if (by < lanes) value = greater(value, exchanged(value, by));
    return value;
}

// Sums over a block, and how many are above a threshold. A sum has lanes j, j + block / 2, which are folded by halves.
template <typename T>
__device__ inline T sum_of_team(const T (&values)[LANE_VALUES], i32 lanes) {
    T sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = (values[i] + values[8 + i]) + (values[4 + i] + values[12 + i]);
#pragma unroll
    for (int by = 8; by; by /= 2)
        if (by < lanes)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = sums[i] + exchanged(sums[i], by);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

__device__ inline u32 count_of_team(u32 value, i32 lanes) {
#pragma unroll
    for (int by = 8; by; by /= 2)
        if (by < lanes) value += exchanged(value, by);
    return value;
}

// The smaller of two numbers that are not negative; the second one if one is NaN.
template <typename T>
__device__ inline T smaller(T a, T b) { return bits_of(a) < bits_of(b) ? a : b; }

// One round of Lloyd's algorithm, with the shares of the values up to a threshold, and how many are above it.
template <typename T>
__device__ inline void improve(T threshold, T below, T total, i64 above, i64 size, T share, T& low, T& high) {
    if (above == 0 || above == size) return;
    low = smaller(below / (T((float)(size - above)) * share), threshold);
    const T beyond = (total - below) / (T((float)above) * share);
    high = (bits_of(beyond) & Rounding<T>::SIGN) || bits_of(beyond) < bits_of(threshold) ? threshold : beyond;
}

template <typename T, int BITS>
__device__ inline void magnitudes_of_team(const T (&values)[LANE_VALUES], i32 size, i32 lanes, T share, T& low, T& high) {
    const T half = T(0.5f);
    T shares[LANE_VALUES];
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) shares[k] = number_of(magnitude(values[k])) * share;
    const T total = sum_of_team(shares, lanes);
    low = high = total / (T((float)size) * share);
#pragma unroll
    for (int round = 0; round < 2 * (BITS - 1); ++round) {
        const T threshold = half * low + half * high;
        T some[LANE_VALUES];
        u32 above = 0;
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) {
            const bool is_above = magnitude(values[k]) > bits_of(threshold);
            some[k] = is_above ? T(0.0f) : shares[k];
            above += is_above;
        }
        const T below = sum_of_team(some, lanes);
        improve(threshold, below, total, count_of_team(above, lanes), size, share, low, high);
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
        to.scales[(number - to.first) * each + q] = (typename Few<T>::Scale)(cells[q] >> Few<T>::STORED);
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

template <typename T, int BITS>
__device__ inline void quantise_in_registers(
    const Segments<T>& all, i32 block, const Sum<T>& sum, const Rounding<T>& rounding, T offset, const Target<T>& to) {
    typedef typename Few<T>::Key Key;
    const int log_block = __ffs(block) - 1;
    const i32 lanes = block / LANE_VALUES, quarter = block / 4, q = threadIdx.x & (lanes - 1);
    const i64 number = to.first + (i64)blockIdx.x * (THREADS >> (log_block - 4)) + (threadIdx.x >> (log_block - 4));
    const Block<T> c = find_block(all, number, to.last, log_block);
    const i64 coded = number - to.first;
    T values[LANE_VALUES];
#pragma unroll
    for (int group = 0; group < 4; ++group) read_own(sum, c, group * quarter + 4 * q, values + 4 * group);
    if (sum.count && c.size) add_terms<T, BITS>(sum, coded, c.size, quarter, q, values);
    Key largest = 0, cells[2];
#pragma unroll
    for (int k = 0; k < LANE_VALUES; ++k) largest = greater(largest, magnitude(values[k]));
    largest = largest_of_team(largest, lanes);
    const bool is_finite = largest < rounding.infinity();
    if (!is_finite)
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k)  // a field is that of a number
            if (magnitude(values[k]) > rounding.infinity()) values[k] = T(0.0f);
    Codes<BITS> found;
    T errors[LANE_VALUES];
    if (BITS > 2) {
        const T top = T((float)((1 << (BITS - 1)) - 1));
        cells[0] = cells[1] = rounding.scale_of(largest, top);
        const T scale = number_of(cells[0]), inverse = cells[0] && is_finite ? T(1.0f) / scale : T(0.0f);
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
        magnitudes_of_team<T, BITS>(values, c.size, lanes, share, low, high);
        cells[0] = rounding.magnitude_of(lesser(bits_of(low), largest));
        cells[1] = rounding.magnitude_of(lesser(bits_of(high), largest));
        if (!is_finite) cells[0] = cells[1] = rounding.infinity();
        low = number_of(cells[0]), high = number_of(cells[1]);
        const Key threshold = BITS == 2 ? bits_of(T(0.5f) * low + T(0.5f) * high) : (Key)-1;
        found.word[0] = 0;
#pragma unroll
        for (int k = 0; k < LANE_VALUES; ++k) {
            const bool is_negative = bits_of(values[k]) > Rounding<T>::SIGN;
            const bool is_large = BITS == 2 && magnitude(values[k]) > threshold;
            const u32 field = (u32)is_negative | (u32)is_large << 1;
            found.word[0] |= field << (k % 4 * 8 + k / 4 * 2);
            errors[k] = values[k] - signed_magnitude(field, low, high);
        }
    }
    const bool is_block = number < to.last;
    found.write(to.codes + coded * (block * BITS / 8), quarter, q, is_block);
    if (!is_block) return;
    write_scales<T, BITS>(to, number, q, cells);
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        const i32 at = group * quarter + 4 * q;
        if (!is_finite) read_own(sum, c, at, errors + 4 * group);
        write_four(to.rejected + c.place + at, c.size - at, errors + 4 * group);
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
            value = value + (bits > 2 ? T((float)((i32)code - (1 << (bits - 1)))) * low : signed_magnitude(code, low, high));
        }
        return value;
    }
};

// The sum of shares of the magnitudes up to a threshold, and how many are above it.
template <typename T>
__device__ inline T sum_up_to(const LongBlock<T>& c, typename Few<T>::Key threshold, T share, i64& above) {
    T lanes[4] = {T(0.0f), T(0.0f), T(0.0f), T(0.0f)};
    u32 found = 0;  // with 64 bits registers spill on sm_90
    for (i32 start = 0; start < 1 << c.log_block; start += 128)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const auto size = magnitude(c[start + 32 * k + lane()]);
            if (size <= threshold) lanes[k] = lanes[k] + number_of(size) * share;
            found += size > threshold;
        }
    above = warp_sum(found);
    T sum = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
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
    const T top = T((float)((1 << (bits - 1)) - 1));
    T inverse = T(0.0f), low = number_of(largest), high = low;
    Key threshold = (Key)-1, cells[2];
    if (bits > 2) {
        cells[0] = cells[1] = rounding.scale_of(largest, top);
        if (cells[0] && is_finite) inverse = T(1.0f) / number_of(cells[0]);
    } else {
        const T share = power_of_two<T>(-log_block);
        i64 above;
        if (is_finite) {
            const T total = sum_up_to(c, (Key)-1, share, above);
            low = high = total / (T((float)c.c.size) * share);
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

// Write the values of 16 codes over a divisor. inverse: of a divisor that is an integer below 2^20; else 0.
//
// Of 8 and 4 bits a value is x / d with x = level * scale, an integer of at most 16 bits (29 for double) times a power of
// two. high + low is scale / d but for 2^-48 of it, so level * high + level * low, rounded once by the last instruction,
// is x / d but for 2^-46 of it. Between x / d and the next number halfway between two of the format there is at least
// 2^-45 of it, so both round to the same number. (x / d itself is halfway for no d: it has no more than 16 bits if it
// has finitely many.) Nothing underflows if the scale is at least 2^-60. For double the distances are larger by far.
template <typename T, int BITS>
__device__ inline void dequantise(
    const Segments<T>& all, i64 first, i64 last, i32 block, T divisor, T inverse, const u8* codes,
    const typename Few<T>::Scale* scales) {
    const int log_block = __ffs(block) - 1, log_lanes = log_block - 4;
    const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, number = first + (thread >> log_lanes);
    const i32 quarter = block / 4, q = (i32)thread & (block / LANE_VALUES - 1);
    const Block<T> c = find_block(all, number, last, log_block);
    if (!c.size) return;
    const Scales<T, BITS> stored(scales, number - first);
    Codes<BITS> found;
    found.read(codes + (number - first) * (quarter * BITS / 2), quarter, q);
    const T small = power_of_two<T>(-60), infinity = power_of_two<T>(Few<T>::BIAS + 1);
    const bool is_usual = bits_of(inverse) && bits_of(stored.low) - bits_of(small) < bits_of(infinity) - bits_of(small);
    const T high = stored.low * inverse, low = fused(number_of(bits_of(high) ^ Rounding<T>::SIGN), divisor, stored.low) * inverse;
    Scales<T, BITS> over = stored;
    if (BITS <= 2) over.low = stored.low / divisor, over.high = stored.high / divisor;
#pragma unroll
    for (int group = 0; group < 4; ++group) {
        T values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (BITS <= 2) values[i] = found.template decoded<T>(group, i, over);
            else if (is_usual) {
                const T level = found.template level<T>(group, i);
                values[i] = fused(level, high, level * low);
            } else values[i] = found.template decoded<T>(group, i, stored) / divisor;
        }
        write_four(c.values + group * quarter + 4 * q, c.size - (group * quarter + 4 * q), values);
    }
}

#define FEW_BITS(dtype, T, Key, Scale)                                                                              \
    KERNEL quantise_long_##dtype(                                                                                   \
        const i64* table, i64 rows, i64 terms, T* values, i64 size, i64 first, i64 last, i64 block,                 \
        const T* residual, u64 decay, u64 scale, i64 cut, u64 step, u64 coarse, u64 least, u64 most, u64 offset,    \
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
        residual, number_of((Key)decay), number_of((Key)scale), table + 3 * rows + 2, terms};                       \
    const Rounding<T> rounding = {cut, (Key)step, (Key)coarse, (Key)least, (Key)most};                              \
    const Target<T> target = {codes, scales, rejected, first, last};

#define OF_BITS(dtype, T, Key, Scale, BITS)                                                                         \
    KERNEL quantise_##BITS##_##dtype(                                                                               \
        const i64* table, i64 rows, i64 terms, T* values, i64 size, i64 first, i64 last, i64 block,                 \
        const T* residual, u64 decay, u64 scale, i64 cut, u64 step, u64 coarse, u64 least, u64 most, u64 offset,    \
        u8* codes, Scale* scales, T* rejected) {                                                                    \
        SUMMED(T, Key)                                                                                              \
        quantise_in_registers<T, BITS>(segments, (i32)block, sum, rounding, number_of((Key)offset), target);        \
    }                                                                                                               \
    KERNEL dequantise_##BITS##_##dtype(                                                                             \
        const i64* table, i64 rows, T* values, i64 size, i64 first, i64 last, i64 block, u64 divisor, u64 inverse,  \
        const u8* codes, const Scale* scales) {                                                                     \
        const Segments<T> segments = {table, rows, values, size};                                                   \
        dequantise<T, BITS>(                                                                                        \
            segments, first, last, (i32)block, number_of((Key)divisor), number_of((Key)inverse), codes, scales);    \
    }

FEW_BITS(f4, Single, u32, u16)
FEW_BITS(f8, double, u64, u32)
