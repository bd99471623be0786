// Sums of sparse vectors, and what goes between sparse and dense ones. float16 is added in float32 and rounded once.
#include "common.cuh"

constexpr int STEPS = 4;  // of a merge, by one thread
constexpr int ROUNDS = 4;  // of entries or words that a thread packs

// How many of the first `diagonal` entries of a merge come from a; where both have an index, a's entry comes first.
template <typename Index>
__device__ inline i64 merge_path(const Index* a, i64 size_a, const Index* b, i64 size_b, i64 diagonal) {
    i64 low = greater(diagonal - size_b, (i64)0), high = lesser(diagonal, size_a);
    while (low < high) {
        i64 middle = low + (high - low) / 2;
        if (a[middle] <= b[diagonal - 1 - middle]) low = middle + 1;
        else high = middle;
    }
    return low;
}

struct MergeShared {
    Scan<1> scan;
    i64 ends[2];
};

// Write the sum of two sparse vectors, one of which has entries, over the union of their supports; *total is how many
// entries it has. A block finds where its stretch of the merge begins and ends in a and b, and its threads find theirs.
template <typename Index, typename Value>
__device__ inline void merge(
    const Index* a, const Value* values_a, i64 size_a, const Index* b, const Value* values_b, i64 size_b,
    u64 mask, u64 infinity, Index* indices, Value* values, Said* said, u64* total, u64* ticket, u64* states, i64 tiles) {
    SHARED(MergeShared, shared);
    i64 first = take_tile(shared.scan, ticket) * THREADS * STEPS, end = lesser(first + THREADS * STEPS, size_a + size_b);
    if (warp() < 2 && lane() == 0) shared.ends[warp()] = merge_path(a, size_a, b, size_b, warp() ? end : first);
    __syncthreads();
    i64 start_a = shared.ends[0], start_b = first - start_a, diagonal = lesser(first + threadIdx.x * STEPS, end);
    i64 at_a = start_a + merge_path(a + start_a, shared.ends[1] - start_a, b + start_b,
                                    end - shared.ends[1] - start_b, diagonal - first);
    i64 at_b = diagonal - at_a;
    Index index[STEPS];
    typename Format<Value>::Wide sum[STEPS];
    u32 kept = 0;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        if (diagonal + i >= end) break;
        if (at_a < size_a && (at_b >= size_b || a[at_a] <= b[at_b])) {
            index[i] = a[at_a];
            sum[i] = widened(values_a[at_a]);
            if (at_b < size_b && b[at_b] == index[i]) sum[i] = sum[i] + widened(values_b[at_b]);
            kept |= 1u << i;
            ++at_a;
        } else {
            index[i] = b[at_b];
            sum[i] = widened(values_b[at_b]);
            if (!at_a || a[at_a - 1] != index[i]) kept |= 1u << i;
            ++at_b;
        }
    }
    u64 own = __popc(kept), through = warp_scan(own), counts[1] = {__shfl_sync(ALL, through, 31)};
    scan_grid(shared.scan, counts, states, tiles, total);
    u64 at = counts[0] + through - own;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (kept >> i & 1) {
            Value value;
            narrow(sum[i], value);
            indices[at] = index[i], values[at++] = value;
            if ((bits_of(value) & mask) >= infinity) atomicMax(&said->bad, 1ull);
        }
    if (first == 0 && threadIdx.x == 0) {
        said->first = (u64)(size_b && (!size_a || b[0] < a[0]) ? b[0] : a[0]);
        said->last = (u64)(size_b && (!size_a || b[size_b - 1] > a[size_a - 1]) ? b[size_b - 1] : a[size_a - 1]);
    }
}

// Sums of many sparse vectors, one behind the other from `starts` on. Each entry finds its place in the order of all
// (the vectors' order, where several have an index); the first one at an index adds up those of the vectors behind it.
// sorted: indices by place; -1 where another vector's entry came first.
template <typename Index, typename Value>
__device__ inline void accumulate(
    const Index* indices, const Value* values, const i64* starts, i64 parts, i64 size, Index* sorted,
    typename Format<Value>::Wide* sums) {
    i64 entry = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (entry >= size) return;
    i64 own = lower_bound(starts, 0, parts + 1, entry + 1) - 1, place = entry - starts[own];
    Index index = indices[entry];
    typename Format<Value>::Wide sum = widened(values[entry]);
    bool first = true;
    for (i64 p = 0; p < parts; ++p) {
        if (p == own) continue;
        i64 start = starts[p], at = lower_bound(indices, start, starts[p + 1], index);
        bool same = at < starts[p + 1] && indices[at] == index;
        place += at - start + (same && p < own);
        first = first && !(same && p < own);
        if (same && p > own) sum = sum + widened(values[at]);
    }
    sorted[place] = first ? index : (Index)-1;
    sums[place] = sum;
}

// Keep the entries whose index is not negative, in order; round sums to the format of the values.
template <typename Index, typename Value>
__device__ inline void pack(
    const Index* sorted, const typename Format<Value>::Wide* sums, i64 size, Index* indices, Value* values, u64* total,
    u64* ticket, u64* states, i64 tiles) {
    SHARED(Scan<1>, scan);
    i64 first = take_tile(scan, ticket) * THREADS * ROUNDS + warp() * 32 * ROUNDS;
    Index index[ROUNDS];
    u64 counts[1] = {0};
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        i64 at = first + r * 32 + lane();
        index[r] = at < size ? sorted[at] : (Index)-1;
        counts[0] += __popc(__ballot_sync(ALL, index[r] >= 0));
    }
    scan_grid(scan, counts, states, tiles, total);
    u64 place = counts[0];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        u32 kept = __ballot_sync(ALL, index[r] >= 0);
        if (index[r] >= 0) {
            u64 at = place + __popc(kept & ((1u << lane()) - 1));
            indices[at] = index[r];
            narrow(sums[first + r * 32 + lane()], values[at]);
        }
        place += __popc(kept);
    }
}

// Part entries into those at `positions`, which increase, and the others.
template <typename Index, typename Key>
__device__ inline void divide(
    const Index* indices, const Key* values, i64 size, const i64* positions, i64 chosen, Index* indices_a,
    Key* values_a, Index* indices_b, Key* values_b) {
    i64 entry = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (entry >= size) return;
    i64 before = lower_bound(positions, 0, chosen, entry), other = entry - before;
    if (before < chosen && positions[before] == entry) {
        indices_a[before] = indices[entry];
        values_a[before] = values[entry];
    } else if (other < size - chosen) {
        indices_b[other] = indices[entry];
        values_b[other] = values[entry];
    }
}

template <typename Index, typename Key>
__device__ inline void gather(const Key* dense, const Index* indices, i64 size, Key* out) {
    i64 entry = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (entry < size) out[entry] = dense[indices[entry]];
}

// Gather values, and write their scores: the values themselves, times a factor where `bonus` is not zero.
template <typename Index, typename Value, typename Wide>
__device__ inline void gather_scores(
    const Value* dense, const Index* indices, const Wide* bonus, u64 factor, i64 size, Value* values, Wide* scores) {
    const i64 entry = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (entry >= size) return;
    const Value value = dense[indices[entry]];
    const Wide score = widened(value);
    values[entry] = value;
    scores[entry] = bits_of(bonus[entry]) ? score * (Wide)number_of(factor) : score;
}

// Clear the segments of a vector: a block of threads for each CLEARED values of one.
constexpr int LOG_CLEARED = 12, CLEARED = 1 << LOG_CLEARED;

template <typename Key>
__device__ inline void clear_segments(const Segments<Key>& all, i64 blocks) {
    const Block<Key> c = find_block(all, (i64)blockIdx.x, blocks, LOG_CLEARED);
    if (c.size == CLEARED && (u64)c.values % 16 == 0) {
        for (int i = threadIdx.x; i < CLEARED * (int)sizeof(Key) / 16; i += THREADS)
            ((uint4*)c.values)[i] = uint4{0, 0, 0, 0};
    } else {
        for (int i = threadIdx.x; i < c.size; i += THREADS) c.values[i] = 0;
    }
}

// Write entries of a vector to its segments.
template <typename Index, typename Key>
__device__ inline void scatter_to_segments(
    const Segments<Key>& all, const Index* indices, const Key* values, i64 size) {
    const i64 entry = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (entry >= size) return;
    const i64 index = (i64)indices[entry];
    if (!all.table) {
        all.only[index] = values[entry];
        return;
    }
    const i64 *edges = all.table + all.rows + 1, *addresses = edges + all.rows + 1;
    const i64 row = lower_bound(edges, 0, all.rows + 1, index + 1) - 1;
    ADDRESS(Key, addresses[row])[index - edges[row]] = values[entry];
}

enum Operation { PLUS, MINUS, TIMES, OVER };

// The wider of two formats.
template <typename A, typename B> struct Common { typedef double Type; };
template <> struct Common<Half, Half> { typedef Half Type; };
template <> struct Common<Half, Single> { typedef Single Type; };
template <> struct Common<Single, Half> { typedef Single Type; };
template <> struct Common<Single, Single> { typedef Single Type; };

// Write `factor * a` (operation) b, as NumPy computes both in turn: the product is rounded to the format of a, the result
// to the wider format of both, then to that of `out`. No b: the product alone, or with OVER a / factor. factor: the bits
// of a double that A's format has.
template <typename A, typename B, typename Out>
__device__ inline void combine(const A* a, u64 factor, i64 operation, const B* b, i64 size, Out* out) {
    typedef typename Common<A, B>::Type Result;
    typedef typename Format<A>::Wide Own;
    typedef typename Format<Result>::Wide Wide;
    const i64 place = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (place >= size) return;
    const Own number = (Own)number_of(factor);
    A scaled = a[place];
    if (b || operation != OVER) narrow(widened(scaled) * number, scaled);
    Wide left = (Wide)widened(scaled);
    if (b || operation == OVER) {
        const Wide right = b ? (Wide)widened(b[place]) : (Wide)number;
        left = operation == PLUS ? left + right : operation == MINUS ? left - right : left / right;
    }
    Result result;
    narrow(left, result);
    narrow(widened(result), out[place]);
}

// Write `factor` times a vector, plus or minus its segments' values, to `out`: a block of threads for each CLEARED values
// of one.
template <typename Value>
__device__ inline void add_segments(
    const Value* a, u64 factor, i64 sign, const Segments<const Value>& parts, i64 blocks, Value* out) {
    typedef typename Format<Value>::Wide Wide;
    const Block<const Value> part = find_block(parts, (i64)blockIdx.x, blocks, LOG_CLEARED);
    for (int i = threadIdx.x; i < part.size; i += THREADS) {
        Value scaled = a[part.place + i];
        narrow(widened(scaled) * (Wide)number_of(factor), scaled);
        const Wide left = widened(scaled), right = widened(part.values[i]);
        narrow(sign > 0 ? left + right : left - right, out[part.place + i]);
    }
}

// Add to dense[indices], which are unique, or subtract; the sum is rounded once to the format of `dense`.
template <typename Dense, typename Index, typename Value>
__device__ inline void scatter_add(Dense* dense, const Index* indices, const Value* values, i64 size, i64 sign) {
    typedef typename Format<typename Common<Dense, Value>::Type>::Wide Wide;
    const i64 entry = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (entry >= size) return;
    Dense& place = dense[indices[entry]];
    const Wide held = (Wide)widened(place), value = (Wide)widened(values[entry]);
    narrow(sign > 0 ? held + value : held - value, place);
}

// Lower found[0] to the first place where indices leave [0, length) or do not increase, and found[1] to the first of
// `count` values whose magnitude reaches `infinity`; found[2], found[3]: the first and the last index.
template <typename Index, typename Key>
__device__ inline void inspect(
    const Index* indices, i64 size, i64 length, const Key* values, i64 count, u64 mask, u64 infinity, u64* found) {
    const i64 start = (i64)blockIdx.x * THREADS + threadIdx.x, stride = (i64)gridDim.x * THREADS;
    for (i64 i = start; i < size; i += stride) {
        i64 previous = i ? (i64)indices[i - 1] : -1;
        if (indices[i] <= previous || indices[i] >= length) {
            atomicMin(found, (u64)i);
            break;
        }
    }
    for (i64 i = start; i < count; i += stride)
        if ((values[i] & mask) >= infinity) {
            atomicMin(found + 1, (u64)i);
            break;
        }
    if (start == 0) found[2] = (u64)(i64)indices[0], found[3] = (u64)(i64)indices[size - 1];
}

// Kernels

#define MERGING(index, Index)                                                                                     \
    IF_2(FOR_INDEX_AND_VALUE(index, Index, f2, Half))                                                               \
    IF_4(FOR_INDEX_AND_VALUE(index, Index, f4, Single))                                                             \
    IF_8(FOR_INDEX_AND_VALUE(index, Index, f8, double))                                                             \
    IF_2(FOR_INDEX_AND_KEY(index, Index, u2, u16))                                                                  \
    IF_4(FOR_INDEX_AND_KEY(index, Index, u4, u32))                                                                  \
    IF_8(FOR_INDEX_AND_KEY(index, Index, u8, u64))

#define FOR_INDEX_AND_VALUE(index, Index, value, Value)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) merge_##index##_##value(                              \
        const Index* a, const Value* values_a, i64 size_a, const Index* b, const Value* values_b, i64 size_b,       \
        u64 mask, u64 infinity, Index* indices, Value* values, Said* said, u64* total, u64* ticket, u64* states,    \
        i64 tiles) {                                                                                                \
        merge(a, values_a, size_a, b, values_b, size_b, mask, infinity, indices, values, said, total, ticket,       \
              states, tiles);                                                                                       \
    }                                                                                                               \
    KERNEL accumulate_##index##_##value(                                                                            \
        const Index* indices, const Value* values, const i64* starts, i64 parts, i64 size, Index* sorted,           \
        Format<Value>::Wide* sums) {                                                                                \
        accumulate(indices, values, starts, parts, size, sorted, sums);                                             \
    }                                                                                                               \
    KERNEL pack_##index##_##value(                                                                                  \
        const Index* sorted, const Format<Value>::Wide* sums, i64 size, Index* indices, Value* values, u64* total,  \
        u64* ticket, u64* states, i64 tiles) {                                                                      \
        pack(sorted, sums, size, indices, values, total, ticket, states, tiles);                                    \
    }                                                                                                               \
    KERNEL gather_scores_##index##_##value(                                                                         \
        const Value* dense, const Index* indices, const Format<Value>::Wide* bonus, u64 factor, i64 size,           \
        Value* values, Format<Value>::Wide* scores) {                                                               \
        gather_scores(dense, indices, bonus, factor, size, values, scores);                                         \
    }                                                                                                               \
    SCATTER_ADD(index, Index, value, Value, f2, Half)                                                               \
    SCATTER_ADD(index, Index, value, Value, f4, Single)                                                             \
    SCATTER_ADD(index, Index, value, Value, f8, double)

#define SCATTER_ADD(index, Index, value, Value, dense_dtype, Dense)                                                 \
    KERNEL scatter_add_##dense_dtype##_##index##_##value(                                                           \
        Dense* dense, const Index* indices, const Value* values, i64 size, i64 sign) {                              \
        scatter_add(dense, indices, values, size, sign);                                                            \
    }

#define FOR_INDEX_AND_KEY(index, Index, key, Key)                                                                   \
    KERNEL divide_##index##_##key(                                                                                  \
        const Index* indices, const Key* values, i64 size, const i64* positions, i64 chosen, Index* indices_a,      \
        Key* values_a, Index* indices_b, Key* values_b) {                                                           \
        divide(indices, values, size, positions, chosen, indices_a, values_a, indices_b, values_b);                 \
    }                                                                                                               \
    KERNEL inspect_##index##_##key(                                                                                 \
        const Index* indices, i64 size, i64 length, const Key* values, i64 count, u64 mask, u64 infinity,           \
        u64* found) {                                                                                               \
        inspect(indices, size, length, values, count, mask, infinity, found);                                       \
    }                                                                                                               \
    KERNEL scatter_to_segments_##index##_##key(                                                                     \
        const i64* table, i64 rows, Key* only, i64 length, const Index* indices, const Key* values, i64 size) {     \
        scatter_to_segments(Segments<Key>{table, rows, only, length}, indices, values, size);                       \
    }                                                                                                               \
    KERNEL gather_##index##_##key(const Key* dense, const Index* indices, i64 size, Key* out) {                     \
        gather(dense, indices, size, out);                                                                          \
    }

IF_I4(MERGING(i4, i32))
IF_I8(MERGING(i8, i64))

#define COMBINE(a, A, b, B, result, Result)                                                                        \
    KERNEL combine_##a##_##b##_##result(                                                                            \
        const A* one, u64 factor, i64 operation, const B* other, i64 size, Result* out) {                           \
        combine(one, factor, operation, other, size, out);                                                          \
    }

#define COMBINE_INTO(a, A, b, B)                                                                                    \
    IF_2(COMBINE(a, A, b, B, f2, Half))                                                                             \
    IF_4(COMBINE(a, A, b, B, f4, Single))                                                                           \
    IF_8(COMBINE(a, A, b, B, f8, double))
#define COMBINE_WITH(a, A) COMBINE_INTO(a, A, f2, Half) COMBINE_INTO(a, A, f4, Single) COMBINE_INTO(a, A, f8, double)
COMBINE_WITH(f2, Half)
COMBINE_WITH(f4, Single)
COMBINE_WITH(f8, double)

#define CLEARING(key, Key)                                                                                          \
    KERNEL clear_segments_##key(const i64* table, i64 rows, Key* only, i64 length, i64 blocks) {                    \
        clear_segments(Segments<Key>{table, rows, only, length}, blocks);                                           \
    }

IF_2(CLEARING(u2, u16))
IF_4(CLEARING(u4, u32))
IF_8(CLEARING(u8, u64))

#define ADDING(value, Value)                                                                                        \
    KERNEL add_segments_##value(                                                                                    \
        const Value* a, u64 factor, i64 sign, const i64* table, i64 rows, const Value* only, i64 length,            \
        i64 blocks, Value* out) {                                                                                   \
        add_segments(a, factor, sign, Segments<const Value>{table, rows, only, length}, blocks, out);               \
    }

IF_2(ADDING(f2, Half))
IF_4(ADDING(f4, Single))
IF_8(ADDING(f8, double))
