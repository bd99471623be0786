// Every value in 8, 4, 2 or 1 bits, in blocks, with the rounding error: see mpicomp/kernels/host/few_bits.py.
//
// A warp works on a block. It reads the values again for each pass over them, from the cache. Numbers are compared by
// their bits, as comparisons of `float` take subnormal numbers for zero.
#include "common.cuh"

template <typename T> struct Few;
template <> struct Few<Single> {
    typedef u32 Key;
    typedef u16 Scale;
    static const int STORED = 16;
};
template <> struct Few<double> {
    typedef u64 Key;
    typedef u32 Scale;
    static const int STORED = 32;
};

__device__ inline Single quotient(Single a, Single b) {
    INSTRUCTION("div.rn.f32 %0, %1, %2;", a.value / b.value, a.value, a.value, b.value);
    return a;
}
__device__ inline double quotient(double a, double b) { return a / b; }

template <typename T>
struct Rounding {  // of scales; step, coarse, least and most as bits
    typedef typename Few<T>::Key Key;
    static const Key SIGN = (Key)1 << (8 * sizeof(Key) - 1);
    i64 bits, cut;
    Key step, coarse, least, most;

    __device__ Key infinity() const { return sizeof(Key) == 4 ? (Key)0x7f800000u : (Key)0x7ff0000000000000ull; }

    // The multiple of `step` that a number below `coarse` is rounded to: up, or to nearest.
    __device__ Key to_step(Key number, bool up) const {
        double unit = (double)number_of(step), steps = (double)number_of(number) / unit;
        u32 whole = (u32)steps;
        double rest = steps - (double)whole;
        whole += up ? rest > 0 : rest > 0.5 || (rest == 0.5 && whole % 2);
        return bits_of(T((double)whole * unit));
    }

    __device__ Key scale_of(Key largest, T top) const {
        if (largest >= infinity()) return infinity();
        Key scale = bits_of(quotient(number_of(largest), top));
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

template <typename T>
struct Block {  // of values, with zeros behind the last
    const T* values;
    i64 size;

    __device__ T operator[](i64 i) const { return i < size ? values[i] : T(0.0); }
};

template <typename Key>
__device__ inline Key warp_largest(Key value) {
    for (int by = 16; by; by /= 2) value = greater(value, __shfl_xor_sync(ALL, value, by));
    return value;
}
__device__ inline Single warp_total(Single value) {
    for (int by = 16; by; by /= 2) value += Single(__shfl_xor_sync(ALL, value.value, by));
    return value;
}
__device__ inline double warp_total(double value) { return warp_sum(value); }

// The sum of shares of the magnitudes up to a threshold, and how many are above it.
template <typename T, typename Key>
__device__ inline T sum_up_to(const Block<T>& c, i64 block, Key threshold, T share, i64& above) {
    T lanes[4] = {T(0.0), T(0.0), T(0.0), T(0.0)};
    u32 found = 0;  // with 64 bits registers spill on sm_90
    for (i64 start = 0; start < block; start += 128)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            i64 j = start + 32 * k + lane();
            Key magnitude = j < block ? bits_of(c[j]) & ~Rounding<T>::SIGN : 0;
            if (magnitude <= threshold) lanes[k] = lanes[k] + number_of(magnitude) * share;
            found += magnitude > threshold;
        }
    above = warp_sum(found);
    return warp_total((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
}

// The smaller of two numbers that are not negative; the second one if one is NaN.
template <typename T>
__device__ inline T smaller(T a, T b) { return bits_of(a) < bits_of(b) ? a : b; }

template <typename T>
__device__ inline void find_magnitudes(const Block<T>& c, i64 block, i64 bits, T& low, T& high) {
    typedef typename Few<T>::Key Key;
    const T half = T(0.5), share = quotient(T(1.0), T((double)block));
    i64 above;
    const Key every = (Key)-1;
    T total = sum_up_to(c, block, every, share, above);
    low = high = quotient(total, T((double)c.size) * share);
    for (i64 round = 0; round < 2 * (bits - 1); ++round) {
        T threshold = half * low + half * high;
        T below = sum_up_to(c, block, bits_of(threshold), share, above);
        if (above == 0 || above == c.size) break;
        low = smaller(quotient(below, T((double)(c.size - above)) * share), threshold);
        T beyond = quotient(total - below, T((double)above) * share);
        high = (bits_of(beyond) & Rounding<T>::SIGN) || bits_of(beyond) < bits_of(threshold) ? threshold : beyond;
    }
}

template <typename T>
__device__ inline T signed_magnitude(u32 field, T low, T high) {
    T magnitude = field & 2 ? high : low;
    return number_of((typename Few<T>::Key)(bits_of(magnitude) ^ (field & 1 ? Rounding<T>::SIGN : 0)));
}

template <typename T>
__device__ inline void quantise(
    const T* values, i64 size, i64 block, const Rounding<T>& rounding, u64 offset_bits, u8* codes,
    typename Few<T>::Scale* scales, T* rejected) {
    typedef typename Few<T>::Key Key;
    const i64 number = (i64)blockIdx.x * WARPS + warp(), first = number * block, bits = rounding.bits;
    if (first >= size) return;
    const Block<T> c = {values + first, lesser(block, size - first)};
    const i64 width = block * bits / 8;
    const Key SIGN = Rounding<T>::SIGN;
    Key largest = 0;
    for (i64 j = lane(); j < block; j += 32) largest = greater(largest, bits_of(c[j]) & (Key)~SIGN);
    largest = warp_largest(largest);
    const T offset = number_of((Key)offset_bits), top = T((double)((1 << (bits - 1)) - 1));
    T scale, inverse = T(0.0), low, high;
    Key limit = 0, threshold = 0, cells[2];
    if (bits > 2) {
        cells[0] = cells[1] = rounding.scale_of(largest, top);
        scale = number_of(cells[0]);
        if (cells[0] && cells[0] < rounding.infinity()) inverse = quotient(T(1.0), scale);
        limit = bits_of(number_of(largest) * inverse) > bits_of(top);
    } else {
        low = high = number_of(largest);
        if (largest < rounding.infinity()) find_magnitudes(c, block, bits, low, high);
        cells[0] = rounding.magnitude_of(lesser(bits_of(low), largest));
        cells[1] = rounding.magnitude_of(lesser(bits_of(high), largest));
        low = number_of(cells[0]), high = number_of(cells[1]);
        threshold = bits == 2 ? bits_of(T(0.5) * low + T(0.5) * high) : (Key)-1;
    }
    const i64 each = bits == 2 ? 2 : 1;
    if (lane() < each) scales[number * each + lane()] = (typename Few<T>::Scale)(cells[lane() ? 1 : 0] >> Few<T>::STORED);
    const u32 mask = (1u << bits) - 1;
    for (i64 j = lane(); j < width; j += 32) {
        u32 code = 0;
        for (i64 field = 0; field < 8 / bits; ++field) {
            const i64 i = field * width + j;
            const T value = c[i];
            T decoded;
            u32 found;
            if (bits > 2) {
                T y = cells[0] < rounding.infinity() ? value * inverse + offset : offset;
                if (limit) {
                    Key least = bits_of(offset - top), most = bits_of(offset + top), key = bits_of(y);
                    y = number_of(key < least ? least : key > most ? most : key);
                }
                found = (u32)bits_of(y) & mask;
                decoded = (y - offset) * scale;
            } else {
                found = (u32)(bits_of(value) > SIGN) | (u32)((bits_of(value) & (Key)~SIGN) > threshold) << 1;
                decoded = signed_magnitude(found, low, high);
                found &= mask;
            }
            code |= found << (bits * field);
            if (i < c.size && cells[0] < rounding.infinity()) rejected[first + i] = value - decoded;
        }
        codes[number * width + j] = (u8)code;
    }
}

// Call emit(place, value) for the values of a byte of codes.
template <typename T, typename Emit>
__device__ inline void decode(
    const u8* codes, const typename Few<T>::Scale* scales, i64 size, i64 bits, i64 block, i64 bytes, const Emit& emit) {
    typedef typename Few<T>::Key Key;
    const i64 j = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (j >= bytes) return;
    const i64 width = block * bits / 8, number = j / width, each = bits == 2 ? 2 : 1;
    const T low = number_of((Key)((Key)scales[number * each] << Few<T>::STORED));
    const T high = number_of((Key)((Key)scales[number * each + each - 1] << Few<T>::STORED));
    const u32 mask = (1u << bits) - 1, code = codes[j];
    for (i64 field = 0; field < 8 / bits; ++field) {
        const i64 i = number * block + field * width + j % width;
        const u32 found = code >> (bits * field) & mask;
        if (i >= size) continue;
        if (bits > 2)
            emit(i, T((double)((i32)found - (1 << (bits - 1)))) * low);
        else
            emit(i, signed_magnitude(found, low, high));
    }
}

#define FEW_BITS(dtype, T, Key, Scale)                                                                              \
    KERNEL quantise_##dtype(                                                                                        \
        const T* values, i64 size, i64 bits, i64 block, i64 cut, u64 step, u64 coarse, u64 least, \
        u64 most, u64 offset, u8* codes, Scale* scales, T* rejected) {                                              \
        const Rounding<T> rounding = {bits, cut, (Key)step, (Key)coarse, (Key)least, (Key)most};                    \
        quantise(values, size, block, rounding, offset, codes, scales, rejected);                         \
    }                                                                                                               \
    KERNEL dequantise_##dtype(                                                                                      \
        const u8* codes, const Scale* scales, i64 size, i64 bits, i64 block, i64 bytes, T* out) {                   \
        decode<T>(codes, scales, size, bits, block, bytes, [=](i64 place, T value) { out[place] = value; });        \
    }                                                                                                               \
    KERNEL add_quantised_##dtype(                                                                                   \
        const u8* codes, const Scale* scales, i64 size, i64 bits, i64 block, i64 bytes, T* total) {                 \
        decode<T>(codes, scales, size, bits, block, bytes,                                                          \
                  [=](i64 place, T value) { total[place] = total[place] + value; });                                \
    }

FEW_BITS(f4, Single, u32, u16)
FEW_BITS(f8, double, u64, u32)
