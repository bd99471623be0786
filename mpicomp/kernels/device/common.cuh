// What all kernels share: formats of values, and counts over a whole grid in order.
//
// Blocks have 256 threads. Kernels take pointers and 64-bit integers; a kernel's name ends with the dtypes it is for, as
// NumPy abbreviates them. Every sum of floating-point numbers has a fixed order (and no product is fused with a sum:
// --fmad=false), atomics are of integers only, so results are the same in every run, and those of the host's kernels.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

// A module has the kernels of all formats of numbers and indices, or those of the ones with so many bytes: to compile all
// takes long.
#if !defined(ITEMSIZE) || ITEMSIZE == 2
#define IF_2(...) __VA_ARGS__
#else
#define IF_2(...)
#endif
#if !defined(ITEMSIZE) || ITEMSIZE == 4
#define IF_4(...) __VA_ARGS__
#else
#define IF_4(...)
#endif
#if !defined(ITEMSIZE) || ITEMSIZE == 8
#define IF_8(...) __VA_ARGS__
#else
#define IF_8(...)
#endif
#if !defined(INDEX_ITEMSIZE) || INDEX_ITEMSIZE == 4
#define IF_I4(...) __VA_ARGS__
#else
#define IF_I4(...)
#endif
#if !defined(INDEX_ITEMSIZE) || INDEX_ITEMSIZE == 8
#define IF_I8(...) __VA_ARGS__
#else
#define IF_I8(...)
#endif

#ifndef SHARED
#define SHARED(type, name) __shared__ type name
#endif

// An array whose address is in a table.
#ifndef ADDRESS
#define ADDRESS(type, number) ((type*)(number))
#endif

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffffu;

__device__ inline u32 lane() { return threadIdx.x % 32; }
__device__ inline u32 warp() { return threadIdx.x / 32; }

template <typename T>
__device__ inline T lesser(T a, T b) { return b < a ? b : a; }
template <typename T>
__device__ inline T greater(T a, T b) { return b > a ? b : a; }

// Formats. CuPy compiles with -ftz=true, whatever else is asked for: operators of `float` take subnormal numbers, and
// with them most halves below 2^-14, for zero. An instruction that is written out does not. So no kernel works with
// `float`, but with Single, which has the bits of one. Half is one value of 16 bits; it is added as a Single.

#ifdef __CUDACC__
#define INSTRUCTION(text, expression, result, a, b) asm(text : "=f"(result) : "f"(a), "f"(b))
#define CONVERSION(text, expression, to, result, from, value) asm(text : to(result) : from(value))
#else
#define INSTRUCTION(text, expression, result, a, b) result = as_on_a_gpu(expression)
#define CONVERSION(text, expression, to, result, from, value) result = expression
#endif

struct Single {
    float value;
    Single() = default;
    __device__ explicit Single(float of) : value(of) {}
    __device__ explicit Single(double of) { CONVERSION("cvt.rn.f32.f64 %0, %1;", (float)of, "=f", value, "d", of); }
    __device__ explicit operator double() const {
        double wide;
        CONVERSION("cvt.f64.f32 %0, %1;", (double)value, "=d", wide, "f", value);
        return wide;
    }
};
__device__ inline Single operator+(Single a, Single b) {
    INSTRUCTION("add.rn.f32 %0, %1, %2;", a.value + b.value, a.value, a.value, b.value);
    return a;
}
__device__ inline Single operator-(Single a, Single b) {
    INSTRUCTION("sub.rn.f32 %0, %1, %2;", a.value - b.value, a.value, a.value, b.value);
    return a;
}
__device__ inline Single operator*(Single a, Single b) {
    INSTRUCTION("mul.rn.f32 %0, %1, %2;", a.value * b.value, a.value, a.value, b.value);
    return a;
}
__device__ inline Single operator/(Single a, Single b) {
    INSTRUCTION("div.rn.f32 %0, %1, %2;", a.value / b.value, a.value, a.value, b.value);
    return a;
}
__device__ inline Single& operator+=(Single& a, Single b) { return a = a + b; }
__device__ inline double operator+(double a, Single b) { return a + (double)b; }
__device__ inline double operator+(Single a, double b) { return (double)a + b; }
__device__ inline double& operator+=(double& a, Single b) { return a = a + b; }

// a * b + c, rounded once.
__device__ inline Single fused(Single a, Single b, Single c) {
    return Single(__fmaf_ieee_rn(a.value, b.value, c.value));
}
__device__ inline double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// The number if it is above zero, else zero.
__device__ inline double positive(double a) { return a > 0 ? a : 0; }
__device__ inline Single positive(Single a) {
    INSTRUCTION("max.f32 %0, %1, %2;", a.value > 0 ? a.value : 0.0f, a.value, a.value, 0.0f);
    return a;
}

struct Half { u16 bits; };

__device__ inline Single widened(Single value) { return value; }
__device__ inline double widened(double value) { return value; }
__device__ inline Single widened(Half value) {
    u32 magnitude = value.bits & 0x7fffu, sign = (u32)(value.bits & 0x8000u) << 16;
    Single scaled = Single(__uint_as_float(magnitude << 13)) * Single(5.192296858534828e33f);  // 2^112: this is exact
    u32 finite = __float_as_uint(scaled.value);
    return Single(__uint_as_float(sign | (magnitude >= 0x7c00u ? 0x7f800000u | magnitude << 13 : finite)));
}

// Round to nearest, ties to even.
__device__ inline void narrow(Single value, Single& result) { result = value; }
__device__ inline void narrow(double value, double& result) { result = value; }
__device__ inline void narrow(Single value, double& result) { result = (double)value; }
__device__ inline void narrow(double value, Single& result) { result = Single(value); }
__device__ inline void narrow(Single value, Half& result) {
    u32 bits = __float_as_uint(value.value), magnitude = bits & 0x7fffffffu, rounded;
    if (magnitude > 0x7f800000u)
        rounded = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    else if (magnitude >= 0x47800000u)  // 2^16; what lies between the largest half and it, the carry makes infinite
        rounded = 0x7c00u;
    else if (magnitude < 0x38800000u)  // 2^-14: the last bit of 1/2 is the last one of a subnormal half
        rounded = __float_as_uint((Single(__uint_as_float(magnitude)) + Single(0.5f)).value) - 0x3f000000u;
    else
        rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    result.bits = (u16)((bits >> 16 & 0x8000u) | rounded);
}
__device__ inline void narrow(double value, Half& result) {
    u64 bits = (u64)__double_as_longlong(value), magnitude = bits & 0x7fffffffffffffffull, rounded;
    if (magnitude > 0x7ff0000000000000ull)
        rounded = 0x7e00u | (magnitude >> 42 & 0x3ffu);
    else if (magnitude >= 0x40f0000000000000ull)
        rounded = 0x7c00u;
    else if (magnitude < 0x3f10000000000000ull)
        rounded = (u64)__double_as_longlong(__longlong_as_double((i64)magnitude) + 268435456.0) - 0x41b0000000000000ull;
    else
        rounded = (magnitude - 0x3f00000000000000ull + 0x1ffffffffffull + (magnitude >> 42 & 1u)) >> 42;
    result.bits = (u16)((bits >> 48 & 0x8000u) | rounded);
}

// Numbers and their bits.
__device__ inline Half number_of(u16 bits) { return Half{bits}; }
__device__ inline Single number_of(u32 bits) { return Single(__uint_as_float(bits)); }
__device__ inline double number_of(u64 bits) { return __longlong_as_double((i64)bits); }
__device__ inline u16 bits_of(Half value) { return value.bits; }
__device__ inline u32 bits_of(Single value) { return __float_as_uint(value.value); }
__device__ inline u64 bits_of(double value) { return (u64)__double_as_longlong(value); }

// The bits of the sum of two numbers of one format, rounded once.
template <typename Key>
__device__ inline Key add_bits(Key a, Key b) {
    auto sum = number_of(a);
    narrow(widened(sum) + widened(number_of(b)), sum);
    return bits_of(sum);
}

template <typename T> struct Format;
template <> struct Format<Half> { typedef Single Wide; };
template <> struct Format<Single> { typedef Single Wide; };
template <> struct Format<double> { typedef double Wide; };

// Sums within a warp. All 32 lanes take part.

template <typename T>
__device__ inline T warp_sum(T value) {
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(ALL, value, by);
    return value;
}

#ifdef __CUDACC__
__device__ inline u32 warp_sum(u32 value) { return __reduce_add_sync(ALL, value); }
#endif

// The largest number of a warp, in all lanes.
__device__ inline u64 warp_max(u64 value) {
    for (int by = 16; by; by /= 2) value = greater(value, __shfl_xor_sync(ALL, value, by));
    return value;
}
__device__ inline u32 warp_max(u32 value) {
#ifdef __CUDACC__
    return __reduce_max_sync(ALL, value);
#else
    return (u32)warp_max((u64)value);
#endif
}
__device__ inline u32 warp_max(u16 value) { return warp_max((u32)value); }

// The sum over this lane and those before it.
template <typename T>
__device__ inline T warp_scan(T value) {
    for (u32 by = 1; by < 32; by *= 2) {
        T other = __shfl_up_sync(ALL, value, by);
        if (lane() >= by) value += other;
    }
    return value;
}

// What is said of the entries that a kernel writes: 1 if a value is not finite; the first and the last index.
struct Said {
    u64 bad, first, last;
};

// Counts over the grid in one pass: "decoupled look-back" (D. Merrill and M. Garland, NVIDIA NVR-2016-002). A tile takes
// a ticket, so that all tiles before it are under way or done, however blocks are scheduled. A word says all about a
// tile that others need, so that no fence is needed: its count, or the count up to its end.

constexpr u64 COUNTED = 1ull << 62, SUMMED = 1ull << 63;

// Return the count before a tile, in all lanes of the warp that calls, and publish the count up to its end.
__device__ inline u64 look_back(volatile u64* states, i64 tile, u64 own) {
    if (tile && lane() == 0) states[tile] = COUNTED | own;
    u64 before = 0;
    for (i64 last = tile - 1; last >= 0; last -= 32) {
        i64 at = last - lane();
        u64 state;
        u32 empty, summed;
        while (true) {
            state = SUMMED;
            if (at >= 0) state = states[at];
            empty = __ballot_sync(ALL, !(state >> 62)), summed = __ballot_sync(ALL, (state >> 63) != 0);
            if (!(empty & (summed ? (summed & (0 - summed)) - 1 : ALL))) break;
            __nanosleep(20);
        }
        u32 nearest = summed ? __ffs(summed) - 1 : 31;
        before += warp_sum(lane() <= nearest ? state & (COUNTED - 1) : 0);
        if (summed) break;
    }
    if (lane() == 0) states[tile] = SUMMED | (before + own);
    return before;
}

template <int COUNTERS>
struct Scan {
    i64 tile;
    u64 warps[COUNTERS][WARPS];
};

// Return the number of the tile that this block works on; `ticket` is 0 when the kernel begins.
template <int COUNTERS>
__device__ inline i64 take_tile(Scan<COUNTERS>& scan, u64* ticket) {
    if (threadIdx.x == 0) scan.tile = (i64)atomicAdd(ticket, 1ull);
    __syncthreads();
    return scan.tile;
}

// Turn counts of warps into the counts before them in the grid. counts: the same in all lanes of a warp. states: zeros,
// COUNTERS * tiles of them. totals: gets the counts of the whole grid.
template <int COUNTERS>
__device__ inline void scan_grid(Scan<COUNTERS>& scan, u64 (&counts)[COUNTERS], u64* states, i64 tiles, u64* totals) {
    for (int c = 0; c < COUNTERS; ++c)
        if (lane() == 0) scan.warps[c][warp()] = counts[c];
    __syncthreads();
    if (warp() < COUNTERS) {
        u64 own = lane() < WARPS ? scan.warps[warp()][lane()] : 0;
        u64 through = warp_scan(own), sum = __shfl_sync(ALL, through, 31);
        u64 before = look_back(states + warp() * tiles, scan.tile, sum);
        if (lane() < WARPS) scan.warps[warp()][lane()] = before + through - own;
        if (lane() == 0 && scan.tile == tiles - 1) totals[warp()] = before + sum;
    }
    __syncthreads();
    for (int c = 0; c < COUNTERS; ++c) counts[c] = scan.warps[c][warp()];
}

// Reading keys: a thread takes 16 bytes at a time, up to four times, so that enough bytes are in flight.

template <typename Key>
struct Items {
    static const int VECTOR = 16 / sizeof(Key), LOADS = sizeof(Key) == 2 ? 2 : 4;
    static const int COUNT = VECTOR * LOADS;  // of a thread
    static const int WARP = 32 * COUNT, TILE = THREADS * COUNT;
    Key key[COUNT];
};

__device__ inline void unpack(uint4 from, u64* to) {
    to[0] = from.x | (u64)from.y << 32, to[1] = from.z | (u64)from.w << 32;
}
__device__ inline void unpack(uint4 from, u32* to) { to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w; }
__device__ inline void unpack(uint4 from, u16* to) {
    to[0] = (u16)from.x, to[1] = (u16)(from.x >> 16), to[2] = (u16)from.y, to[3] = (u16)(from.y >> 16);
    to[4] = (u16)from.z, to[5] = (u16)(from.z >> 16), to[6] = (u16)from.w, to[7] = (u16)(from.w >> 16);
}

__device__ inline uint4 pack(const u64* from) {
    return uint4{(u32)from[0], (u32)(from[0] >> 32), (u32)from[1], (u32)(from[1] >> 32)};
}
__device__ inline uint4 pack(const u32* from) { return uint4{from[0], from[1], from[2], from[3]}; }
__device__ inline uint4 pack(const u16* from) {
    return uint4{from[0] | (u32)from[1] << 16, from[2] | (u32)from[3] << 16,
                 from[4] | (u32)from[5] << 16, from[6] | (u32)from[7] << 16};
}

// The place of item i of this thread, among those of a warp.
template <typename Key>
__device__ inline u32 place_of(int i) {
    return (i / Items<Key>::VECTOR * 32 + lane()) * Items<Key>::VECTOR + i % Items<Key>::VECTOR;
}

// How many keys before this one are in its 16 bytes.
template <typename Key>
__device__ inline u32 keys_before(const Key* key) { return (u32)(u64)key % 16 / sizeof(Key); }

// Which items of a warp, which begin at `first`, are real: those among the first `size`, but for the `head` first ones,
// which are fewer than a vector.
template <typename Key>
struct Real {
    u32 begin;
    i64 end;

    __device__ Real(i64 first, i64 size, u32 head) : begin(first ? 0 : head), end(size - first) {}
    __device__ bool all() const { return end >= Items<Key>::WARP && !begin; }
    __device__ bool has(u32 place) const {
        return place - begin < (u32)lesser(greater(end, (i64)0), (i64)Items<Key>::WARP) - begin;
    }
};

// A bit for each item of this thread that is real.
template <typename Key>
__device__ inline u32 real_items(i64 first, i64 size, u32 head = 0) {
    const Real<Key> real(first, size, head);
    if (real.all()) return (u32)((1ull << Items<Key>::COUNT) - 1);
    u32 bits = 0;
    for (int i = 0; i < Items<Key>::COUNT; ++i) bits |= (u32)real.has(place_of<Key>(i)) << i;
    return bits;
}

// Read the items of a warp; zeros for those that are not real.
template <typename Key>
__device__ inline void read(const Key* keys, i64 size, i64 first, Items<Key>& items, u32 head = 0) {
    const int VECTOR = Items<Key>::VECTOR, LOADS = Items<Key>::LOADS;
    const Real<Key> real(first, size, head);
    if (real.all() && (u64)keys % 16 == 0) {
        uint4 loaded[LOADS];
        const uint4* own = (const uint4*)(keys + first) + lane();
#pragma unroll
        for (int l = 0; l < LOADS; ++l) loaded[l] = __ldcs(own + l * 32);
#pragma unroll
        for (int l = 0; l < LOADS; ++l) unpack(loaded[l], items.key + l * VECTOR);
    } else {
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) {
            const u32 place = place_of<Key>(i);
            items.key[i] = real.has(place) ? (keys + first)[place] : (Key)0;
        }
    }
}

// Write the items of a warp that are real.
template <typename Key>
__device__ inline void write(Key* keys, i64 size, i64 first, const Items<Key>& items, u32 head = 0) {
    const int VECTOR = Items<Key>::VECTOR, LOADS = Items<Key>::LOADS;
    const Real<Key> real(first, size, head);
    if (real.all() && (u64)keys % 16 == 0) {
        uint4* own = (uint4*)(keys + first) + lane();
#pragma unroll
        for (int l = 0; l < LOADS; ++l) own[l * 32] = pack(items.key + l * VECTOR);
    } else {
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) {
            const u32 place = place_of<Key>(i);
            if (real.has(place)) (keys + first)[place] = items.key[i];
        }
    }
}

// The first of `size` increasing numbers that is not below `number`, looked for from `low` on.
template <typename Index>
__device__ inline i64 lower_bound(const Index* numbers, i64 low, i64 size, i64 number) {
    while (low < size) {
        i64 middle = low + (size - low) / 2;
        if (numbers[middle] < number) low = middle + 1;
        else size = middle;
    }
    return low;
}

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
