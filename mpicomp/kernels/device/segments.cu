// The largest magnitudes of each segment of a vector, all segments in one set of launches. A row of a table describes a
// segment. A sample gives each segment a threshold that a few more of its magnitudes than are wanted are expected to
// reach; one read of the vector marks those, a bit for each value; the marked ones are compacted; an exact selection among
// them writes the result.
#include "common.cuh"

// A segment, which is not empty; in the row behind the last the numbers before it are those of all segments.
struct Row {
    i64 first, end;      // in the vector
    i64 tile, job;       // numbers of tiles, and of blocks of `largest_in_rows`, before
    u64 k, rank;         // entries to select; rank in the sample of the threshold, 0 to take every value that is not zero
    u64 addend;          // address of the segment's part of a second vector, or 0
    i64 digits;          // where its counts of digits begin, if several blocks select from it
};

// Return a magnitude that the k largest of the keys of a block reach, and no other one but by a tie with them; 0 where there
// are fewer. It is found bit by bit, until exactly k keys reach it. ties: how many that equal it are of the k largest, at
// most. keys: magnitudes, 0 where a thread has none. counts: 64 words, of two rounds in turn, so that one barrier is enough.
template <int threads, int COUNT, typename Key>
__device__ inline Key reached_by(u32* counts, const Key (&keys)[COUNT], u64 width, u64 k, u64& ties) {
    Key found = 0;
    ties = k;
    for (int bit = (int)width - 1; bit >= 0; --bit) {
        const Key candidate = (Key)(found | (Key)1 << bit);
        u32 own = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) own += keys[i] >= candidate;
        own = warp_sum(own);
        u32* of_warps = counts + bit % 2 * 32;
        if (lane() == 0) of_warps[warp()] = own;
        __syncthreads();
        const u32 reaching = warp_sum(lane() < threads / 32 ? of_warps[lane()] : 0);
        if (reaching >= k) found = candidate;
        else ties = k - reaching;
        if (reaching == k) break;
    }
    return found;
}

struct SampleCounts { u32 of_warps[64]; };

// Set floors[row] to a magnitude, at least 1, that as many of a sample of the segment reach as row.rank says, and what
// equals the last of them: a block of 1024 threads for each segment. A segment of up to 16384 values is its own sample.
template <typename Key>
__device__ inline void sample_floors(
    const Key* values, u64 factor, const Row* rows, u64 mask, u64 width, u64* floors) {
    SHARED(SampleCounts, shared);
    const Row row = rows[blockIdx.x];
    const i64 size = row.end - row.first;
    if (row.rank == 0) {
        if (threadIdx.x == 0) floors[blockIdx.x] = 1;
        return;
    }
    const Key *own = values + row.first, *others = ADDRESS(const Key, row.addend);
    const int READ = Items<Key>::VECTOR;  // at a time
    Key keys[SAMPLES];
#pragma unroll
    for (int first = 0; first < SAMPLES; first += READ) {
        Key addends[READ];
#pragma unroll
        for (int s = 0; s < READ; ++s) {
            const u32 number = (first + s) * SAMPLERS + threadIdx.x;
            const i64 place = size > SAMPLERS * SAMPLES ? sample_place(number, size) : number;
            keys[first + s] = number < size ? own[place] : (Key)0;
            addends[s] = number < size && row.addend ? others[place] : (Key)0;
        }
        if (!row.addend) continue;
#pragma unroll
        for (int s = 0; s < READ; ++s) keys[first + s] = scale_and_add(keys[first + s], factor, addends[s]);
    }
#pragma unroll
    for (int s = 0; s < SAMPLES; ++s) keys[s] = s * SAMPLERS + threadIdx.x < size ? keys[s] & (Key)mask : (Key)0;
    u64 ties;
    const Key floor = reached_by<SAMPLERS>(shared.of_warps, keys, width, row.rank, ties);
    if (threadIdx.x == 0) floors[blockIdx.x] = greater(floor, (Key)1);
}

// Return the sum over the threads of a block before this one, and set `all` to that over all of them.
template <typename T>
__device__ inline T sum_before(u64 (&warps)[WARPS], T own, T& all) {
    const T through = warp_scan(own);
    __syncthreads();  // what was there is read
    if (lane() == 31) warps[warp()] = through;
    __syncthreads();
    const T of_warp = lane() < WARPS ? (T)warps[lane()] : 0;
    all = warp_sum(of_warp);
    return through - own + warp_sum(lane() < warp() ? of_warp : 0);
}

// Mark the magnitudes at or above the floor of their segment: marks has a word of a thread for each tile, with a bit for
// each of its items, and counts the number of those that each block marked. The tiles of a segment begin at a multiple of
// 16 bytes: at its first value, or up to a vector before. With `out` the values are first made the sum of
// `factor` times themselves and the addends. share: tiles of a block, at most.
template <typename Key>
__device__ inline void mark(
    const Key* values, u64 factor, Key* out, const Row* rows, i64 count, u64 mask, const u64* floors, u16* marks,
    u32* counts, i64 share) {
    SHARED(Scan<1>, scan);
    const i64 begin = blockIdx.x * share, end = lesser(begin + share, rows[count].tile);
    i64 row = find_row(rows, count, &Row::tile, begin);
    u32 own = 0;
    for (i64 tile = begin; tile < end; ++tile) {
        while (rows[row + 1].tile <= tile) ++row;
        const u32 head = keys_before((out ? out : values) + rows[row].first);
        const i64 start = rows[row].first - head, size = rows[row].end - start;
        const i64 first = (tile - rows[row].tile) * Items<Key>::TILE + warp() * Items<Key>::WARP;
        const Key least = (Key)floors[row];
        Items<Key> items;
        if (out) {
            read_sum(values + start, factor, ADDRESS(const Key, rows[row].addend) - head, size, first, items, head);
            write(out + start, size, first, items, head);
        } else {
            read(values + start, size, first, items, head);
        }
        u32 chosen = 0;
#pragma unroll
        for (int i = 0; i < Items<Key>::COUNT; ++i) chosen |= (u32)((Key)(items.key[i] & mask) >= least) << i;
        chosen &= real_items<Key>(first, size, head);
        own += __popc(chosen);
        marks[tile * THREADS + threadIdx.x] = (u16)chosen;
    }
    u32 all;
    sum_before(scan.warps[0], own, all);
    if (threadIdx.x == 0) counts[blockIdx.x] = all;
}

constexpr int PAIRS = 16;    // of lanes: a warp marked 512 bits of a tile, at most, two lanes in a word of 32
constexpr int GATHERED = 4;  // values of a thread that it reads at a time

// Write indices and bits of the marked values, in order, as far as there is room; starts: the number before each segment,
// and at last that of all. Blocks take the tiles that those of `mark` took; a thread takes the marks of a warp.
template <typename Index, typename Key>
__device__ inline void compact_marked(
    const Key* values, const uint4* marks, const Row* rows, i64 count, const u32* counts, i64 share, Index* indices,
    Key* kept, u64 room, u64* starts) {
    SHARED(Scan<1>, scan);
    const int VECTOR = Items<Key>::VECTOR;
    const u32 LOW = (1u << VECTOR) - 1;  // the marks that a lane has of one load, as of one segment of the warp's values
    u64 before = 0, begin;
    for (i64 block = threadIdx.x; block < blockIdx.x; block += THREADS) before += counts[block];
    sum_before(scan.warps[0], before, begin);
    u64 place = begin;
    const i64 last = lesser((blockIdx.x + 1) * share, rows[count].tile) * WARPS;
    for (i64 first = blockIdx.x * share * WARPS; first < last; first += THREADS) {
        const i64 number = first + threadIdx.x;
        u32 pairs[PAIRS] = {}, own = 0, all;
        if (number < last) {
#pragma unroll
            for (int p = 0; p < PAIRS; p += 4) unpack(marks[(number * PAIRS + p) / 4], pairs + p);
        }
        u64 filled = 0;  // a bit for each load and pair that has marks
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            own += __popc(pairs[p]);
#pragma unroll
            for (int l = 0; l < Items<Key>::LOADS; ++l)
                filled |= (u64)((pairs[p] & (LOW | LOW << 16) << (l * VECTOR)) != 0) << (l * PAIRS + p);
        }
        u64 at = place + sum_before(scan.warps[0], own, all);
        place += all;
        if (number >= last) continue;
        const i64 row = find_row(rows, count, &Row::tile, number / WARPS), of_row = number - rows[row].tile * WARPS;
        const i64 start = rows[row].first - keys_before(values + rows[row].first) + of_row * Items<Key>::WARP;
        if (of_row == 0) starts[row] = at;
        for (; filled; filled &= filled - 1) {
            const u32 next = __ffsll((i64)filled) - 1, both = ((const u32*)marks)[number * PAIRS + next % PAIRS];
            const u32 shift = next / PAIRS * VECTOR;
            u32 part = (both >> shift & LOW) | (both >> (shift + 16) & LOW) << VECTOR;
            for (; part; part &= part - 1, ++at)
                if (at < room) indices[at] = (Index)(start + next * 2 * VECTOR + __ffs((i32)part) - 1);
        }
    }
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) starts[count] = place;
    __syncthreads();
    const u64 end = lesser(place, room);
    for (u64 first = begin + threadIdx.x; first < end; first += GATHERED * THREADS) {
        Key found[GATHERED];
#pragma unroll
        for (int g = 0; g < GATHERED; ++g) found[g] = values[indices[lesser(first + g * THREADS, end - 1)]];
#pragma unroll
        for (int g = 0; g < GATHERED; ++g)
            if (first + g * THREADS < end) kept[first + g * THREADS] = found[g];
    }
}

// The sums of two numbers over a block. A barrier is due before what is read here is overwritten: append_chunk and a second
// call come behind those of the selection of a digit.
template <int threads>
__device__ inline void sum_of_block(ChunkShared<threads>& shared, u64& a, u64& b) {
    a = warp_sum(a), b = warp_sum(b);
    if (lane() == 0) shared.warps[0][warp()] = a, shared.warps[1][warp()] = b;
    __syncthreads();
    a = warp_sum(lane() < threads / 32 ? shared.warps[0][lane()] : 0);
    b = warp_sum(lane() < threads / 32 ? shared.warps[1][lane()] : 0);
}

// One of the jobs by which several blocks select from long candidates, tile by tile: to count the first digits, those of
// the next digit, ..., and at last to write. A job needs the counts of all tiles of the digit before, so it waits for
// those blocks. They have lower tickets: they were taken by blocks that are under way or done, and wait for lower ones
// only. So the block of the lowest ticket that is not done waits for nobody, and all end, in whatever order blocks are
// scheduled. digits: counts of each digit, how many blocks have counted, and the states of the look-back; zeros.
template <typename Key, typename Keep>
__device__ inline void largest_by_blocks(
    ChunkShared<SELECTORS>& shared, const Key* keys, i64 size, u64 k, i64 job, i64 jobs, u64 mask, u64 width,
    u64* digits, u64 before, const Keep& keep) {
    const i64 TILE = SELECTORS * Items<Key>::COUNT, last = (width + DIGIT - 1) / DIGIT, tiles = jobs / (last + 1);
    const i64 role = job / tiles, tile = job - role * tiles, start = tile * TILE, first = warp() * Items<Key>::WARP;
    u64 *done = digits + last * BINS, *states = done + last;
    u64 prefix = 0, left = k, shift = width, digit = lesser((u64)DIGIT, width);
    const i64 length = lesser(TILE, size - start);
    Items<Key> items;
    read(keys + start, length, first, items);
    for (i64 r = 0; r < role; ++r) {
        if (threadIdx.x == 0)
            while (*(volatile u64*)(done + r) != (u64)tiles) __nanosleep(20);
        __threadfence();
        __syncthreads();
        find_bin<SELECTORS>(shared.finder, [&](int bin) { return __ldcg(digits + r * BINS + bin); }, left);
        prefix = prefix << digit | shared.finder.bin;
        left = shared.finder.k;
        shift -= digit;
        digit = lesser((u64)DIGIT, shift);
    }
    if (role == last) {
        u32 above, equal;
        compare(items, first, length, mask, prefix, above, equal);
        u64 counts[2] = {(u64)__popc(above), (u64)__popc(equal)};
        sum_of_block(shared, counts[0], counts[1]);
        if (start >= size) return;
        if (warp() < 2) {
            const u64 sum = look_back(states + warp() * tiles, tile, counts[warp()]);
            if (lane() == 0) shared.finder.warps[warp()] = sum;
        }
        __syncthreads();
        counts[0] = before + shared.finder.warps[0], counts[1] = shared.finder.warps[1];
        append_chunk(
            shared, keys + start, length, items, mask, prefix, left, counts[0], counts[1],
            [&](u64 at, i64 place, Key key) { keep(at, start + place, key); });
        return;
    }
    shift -= digit;
    for (int b = threadIdx.x; b < BINS; b += SELECTORS) shared.bins[b] = 0;
    __syncthreads();
    count_digits(items.key, real_items<Key>(first, length), mask, prefix, shift, digit, shared.bins);
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += SELECTORS)
        if (shared.bins[b]) atomicAdd(digits + role * BINS + b, (u64)shared.bins[b]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(done + role, 1ull);
}

// The largest among the candidates of each segment, of which several blocks take the longest ones. Jobs of one segment are
// of a tile of 512 threads each: to count its first digits, its second ones, ..., and at last to write.
template <typename Index, typename Key>
__device__ inline void largest_in_rows(
    const Index* indices, const Key* keys, u64 room, const Row* rows, i64 count, const u64* starts, u64 mask, u64 width,
    u64 infinity, u64* ticket, u64* digits, Index* positions, Key* kept, Said* said) {
    SHARED(ChunkShared<SELECTORS>, shared);
    const i64 job = take_tile(shared.scan, ticket);
    const i64 number = find_row(rows, count, &Row::job, job);
    const Row row = rows[number];
    u64 before = 0, all = 0;
    for (i64 r = threadIdx.x; r < count; r += SELECTORS) {
        const u64 own = lesser(rows[r].k, starts[r + 1] - starts[r]);
        before += r < number ? own : 0;
        all += own;
    }
    sum_of_block(shared, before, all);
    const u64 begin = starts[number], end = lesser(starts[number + 1], room);
    if (begin >= end) return;
    const Key* own = keys + begin;
    const i64 size = end - begin;
    const auto keep = [&](u64 at, i64 place, Key key) {
        const Index position = indices[begin + place];
        positions[at] = position, kept[at] = key;
        if (at == 0) said->first = (u64)position;
        if (at == all - 1) said->last = (u64)position;
        if ((key & mask) >= infinity) atomicMax(&said->bad, 1ull);
    };
    const i64 jobs = rows[number + 1].job - row.job;
    Items<Key> items;
    if (jobs == 1) {
        read(own, size, warp() * Items<Key>::WARP, items);
        u64 threshold, ties = row.k;
        if (size <= SELECTORS * Items<Key>::COUNT) {
            Key magnitudes[Items<Key>::COUNT];
#pragma unroll
            for (int i = 0; i < Items<Key>::COUNT; ++i) magnitudes[i] = items.key[i] & (Key)mask;
            threshold = reached_by<SELECTORS>(shared.bins, magnitudes, width, row.k, ties);
        } else {
            find_kth(shared, own, size, items, mask, width, threshold, ties);
        }
        append_chunk(shared, own, size, items, mask, threshold, ties, before, 0, keep);
        return;
    }
    largest_by_blocks(shared, own, size, row.k, job - row.job, jobs, mask, width, digits + row.digits, before, keep);
}

// Kernels

#define SAMPLE_AND_MARK(key, Key)                                                                                   \
    extern "C" __global__ void __launch_bounds__(SAMPLERS) sample_floors_##key(                                     \
        const Key* values, u64 factor, const Row* rows, u64 mask, u64 width, u64* floors) {                         \
        sample_floors(values, factor, rows, mask, width, floors);                                                   \
    }                                                                                                               \
    KERNEL mark_##key(                                                                                              \
        const Key* values, const Row* rows, i64 count, u64 mask, const u64* floors, u16* marks, u32* counts,        \
        i64 share) {                                                                                                \
        mark(values, 0, (Key*)0, rows, count, mask, floors, marks, counts, share);                                  \
    }                                                                                                               \
    KERNEL add_and_mark_##key(                                                                                      \
        const Key* values, u64 factor, Key* out, const Row* rows, i64 count, u64 mask, const u64* floors,           \
        u16* marks, u32* counts, i64 share) {                                                                       \
        mark(values, factor, out, rows, count, mask, floors, marks, counts, share);                                 \
    }
IF_2(SAMPLE_AND_MARK(u2, u16))
IF_4(SAMPLE_AND_MARK(u4, u32))
IF_8(SAMPLE_AND_MARK(u8, u64))

#define COMPACT_AND_SELECT(index, Index, key, Key)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 5) compact_marked_##index##_##key(                        \
        const Key* values, const uint4* marks, const Row* rows, i64 count, const u32* counts, i64 share,            \
        Index* indices, Key* kept, u64 room, u64* starts) {                                                         \
        compact_marked(values, marks, rows, count, counts, share, indices, kept, room, starts);                     \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(SELECTORS, 1) largest_in_rows_##index##_##key(                         \
        const Index* indices, const Key* keys, u64 room, const Row* rows, i64 count, const u64* starts, u64 mask,   \
        u64 width, u64 infinity, u64* ticket, u64* digits, Index* positions, Key* kept, Said* said) {               \
        largest_in_rows(indices, keys, room, rows, count, starts, mask, width, infinity, ticket, digits, positions, \
                        kept, said);                                                                                \
    }
FOR_INDEX_AND_KEY_OF_ROWS(COMPACT_AND_SELECT)
