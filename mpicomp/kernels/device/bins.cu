// The entries of bins of consecutive values that reach the bin's maximum after an addend of each is added. A warp takes a
// share of the bins, and holds several at a time in registers. It marks the entries with a bit each, and the signs: from
// these they are written once the magnitude of their segment is known.
#include "common.cuh"

// A segment with bins of its own length; in the row behind the last the numbers before it are those of all.
struct Bins {
    i64 first, end;     // in the vector
    i64 before, words;  // numbers of bins, and of words of marks, before
    i64 bin, marks;     // values of a bin, and words for it
    i64 tile;           // number of tiles of bins, whose sums `mean_of_bins` adds up, before
    u64 addend;         // address of the segment's addends
};

// Bits of 32 values: which are selected, and which are negative.
struct __align__(8) Mark {
    u32 chosen, negative;
};

template <typename Key>
__device__ inline bool is_negative(Key value) { return value >> (8 * sizeof(Key) - 1); }
template <typename Key>
__device__ inline Key absolute(Key value) { return (Key)(value & (Key)~((Key)1 << (8 * sizeof(Key) - 1))); }

// Call `work` with the bins of each segment that are in this warp's share of all: the segment, the first one's number in
// it, and how many.
template <typename Work>
__device__ inline void for_share(const Bins* rows, i64 count, i64 share, Work work) {
    // the compiler knows of a maximum that all lanes have it: it needs no code for lanes that part, and few registers
    i64 bin = ((i64)blockIdx.x * WARPS + warp_max(warp())) * share;
    if (bin >= rows[count].before) return;
    int left = (int)lesser(share, rows[count].before - bin);
    for (int row = (int)find_row(rows, count, &Bins::before, bin); left > 0; ++row) {
        const int bins = (int)lesser((i64)left, rows[row + 1].before - bin);
        work(row, bin - rows[row].before, bins);
        left -= bins, bin += bins;
    }
}

// Words of 32 values, of which each lane has one, and their addends; zeros where a bin has no value.
template <typename Key>
struct Held {
    static const int WORDS = sizeof(Key) == 8 ? 4 : 8;
    typedef decltype(widened(number_of(Key()))) Wide;
    Key value[WORDS], addend[WORDS];
};

template <typename Key>
__device__ inline bool is_reached_in_double(Key value, Key addend, Key largest) {
    const double sum = (double)widened(number_of(value)) + (double)widened(number_of(addend));
    return (sum < 0 ? -sum : sum) >= (double)widened(number_of(largest)) && absolute(value);
}

// What a warp has found: in what it holds, and in its share.
template <typename Key>
struct Found {
    Mark marks[Held<Key>::WORDS];
    Key largest[Held<Key>::WORDS];
    u32 selected;  // of the share
};

// Bins of a segment that are left of a share. In integers of 32 bits: 2^31 values of a share are 2^44 of the vector.
template <typename Key>
struct Part {
    const Key* values;
    i64 addends, sums;  // bytes from each value to its addend, and to the sum that is selected from: the value itself, or
    bool adds;          // if this is so, `factor` times the value and the addend, which is written
    u64 factor;
    Key* largest;
    Mark* marks;
    int size, words, place;  // of a bin, its words, and the place of the first one that is left
};

template <typename T>
__device__ inline T* moved(T* values, i64 bytes) { return (T*)((char*)values + bytes); }

// What lanes have seen of a part: how many are selected, places in it, and a sum that is NaN if that of a value and its
// addend was not finite.
template <typename Key>
struct Seen {
    u32 selected;
    int lowest, highest;
    typename Held<Key>::Wide sum;
};

// Read values of bins, and their addends. OF_A_BIN: the words of each. limit: of the values of one bin. from: bytes from
// each value to what is read in its place.
template <int OF_A_BIN, typename Key>
__device__ inline void read(Held<Key>& held, const Part<Key>& part, const Key* values, int limit, i64 from = 0) {
    constexpr int BINS = Held<Key>::WORDS / OF_A_BIN;
    u32 place = lane() * (u32)sizeof(Key);  // 32 bits of this lane's, behind an address that all share
#pragma unroll
    for (int b = 0; b < BINS; ++b, place += part.size * (u32)sizeof(Key)) {
        const Key* own = moved(values, place);
#pragma unroll
        for (int w = 0; w < OF_A_BIN; ++w) {
            const bool is_there = w * 32 + (int)lane() < (BINS > 1 ? part.size : limit);
            held.value[b * OF_A_BIN + w] = is_there ? __ldcs(moved(own, from) + w * 32) : (Key)0;
            held.addend[b * OF_A_BIN + w] = is_there ? __ldcs(moved(own, part.addends) + w * 32) : (Key)0;
        }
    }
}

// Make values that are held their sums with the addends, and write them.
template <int OF_A_BIN, typename Key>
__device__ inline void add(Held<Key>& held, const Part<Key>& part, const Key* values, int limit) {
    constexpr int BINS = Held<Key>::WORDS / OF_A_BIN;
    u32 place = lane() * (u32)sizeof(Key);
#pragma unroll
    for (int b = 0; b < BINS; ++b, place += part.size * (u32)sizeof(Key)) {
        Key* own = (Key*)moved(moved(values, place), part.sums);
#pragma unroll
        for (int w = 0; w < OF_A_BIN; ++w) {
            Key& value = held.value[b * OF_A_BIN + w];
            value = scale_and_add(value, part.factor, held.addend[b * OF_A_BIN + w]);
            if (w * 32 + (int)lane() < (BINS > 1 ? part.size : limit)) own[w * 32] = value;
        }
    }
}

// Mark the selected ones of the values that are held, and write the marks of `words` words. top: the largest magnitude of
// each bin. first: the place of the first value, in its bin.
//
// A sum in double, as the host decides, is compared with the largest magnitude M: a number that the shorter format Wide
// has. Rounding to nearest is monotone and leaves M and -M as they are. So if the sum rounded to Wide is beyond M, the
// exact one is, and it does not come to lie below M in double. If the rounded one is below M, the exact one is at most half
// way from M to the number before it in Wide; that place is a double, below M, beyond which no rounding takes it. Only where
// the rounded sum equals M does double say more.
template <int OF_A_BIN, typename Key>
__device__ inline void mark(
    const Held<Key>& held, const Key* top, const Part<Key>& part, int first, int limit, int words, Found<Key>& found,
    Seen<Key>& seen) {
    typedef decltype(bits_of(seen.sum)) Bits;
    bool is_tie = false;
#pragma unroll
    for (int h = 0; h < Held<Key>::WORDS; ++h) {
        const auto sum = widened(number_of(held.value[h])) + widened(number_of(held.addend[h]));
        seen.sum = fused(sum, decltype(sum)(0.0f), seen.sum);
        // zeros do not tie in a bin of them
        const Bits least = greater(bits_of(widened(number_of(top[h / OF_A_BIN]))), (Bits)1);
        const bool is_reached = absolute(bits_of(sum)) >= least;
        is_tie |= absolute(bits_of(sum)) == least;
        const u32 chosen = __ballot_sync(ALL, is_reached && absolute(held.value[h]));
        const u32 negative = __ballot_sync(ALL, is_negative(held.value[h]));
        if (lane() == 0) found.marks[h] = Mark{chosen, negative};
    }
    __syncwarp();
    if (sizeof(Bits) == 4 && __any_sync(ALL, is_tie)) {
#pragma unroll 1
        for (int h = 0; h < Held<Key>::WORDS; ++h) {
            const int within = first + h % OF_A_BIN * 32 + lane(), i = h / OF_A_BIN * part.size + within;
            Key value = 0, addend = 0;
            if (within < limit) {
                value = moved(part.values, part.sums)[i], addend = moved(part.values, part.addends)[i];
            }
            const bool is_chosen = is_reached_in_double(value, addend, found.largest[h / OF_A_BIN]);
            const u32 chosen = __ballot_sync(ALL, is_chosen);
            if (lane() == 0) found.marks[h].chosen = chosen;
        }
        __syncwarp();
    }
    const int h = lane();
    if (h < words) {
        const Mark own = part.marks[first / 32 + h] = found.marks[h];
        const int place = part.place + first + h / OF_A_BIN * part.size + h % OF_A_BIN * 32;
        if (own.chosen) {
            seen.selected += __popc(own.chosen);
            seen.lowest = lesser(seen.lowest, place + __ffs(own.chosen) - 1);
            seen.highest = place + 31 - __clz(own.chosen);
        }
    }
}

// Mark the selected values of the first bins of a part, as many as have OF_A_BIN words each and can be held together, and
// go on behind them. If that is one, it may be longer, with some words read twice; or shorter: it has `limit` values.
template <int OF_A_BIN, typename Key>
__device__ inline void mark_bins(Part<Key>& part, int limit, Found<Key>& found, Seen<Key>& seen) {
    constexpr int WORDS = Held<Key>::WORDS, BINS = WORDS / OF_A_BIN, REACH = WORDS * 32;
    const int stop = BINS > 1 ? 1 : part.size;
    Held<Key> held;
    Key top[BINS];
#pragma unroll
    for (int b = 0; b < BINS; ++b) top[b] = 0;
    for (int first = 0; first < stop; first += REACH) {
        read<OF_A_BIN>(held, part, part.values + first, limit - first);
        if (part.adds) add<OF_A_BIN>(held, part, part.values + first, limit - first);
#pragma unroll
        for (int h = 0; h < WORDS; ++h) top[h / OF_A_BIN] = greater(top[h / OF_A_BIN], absolute(held.value[h]));
    }
#pragma unroll
    for (int b = 0; b < BINS; ++b) {
        top[b] = (Key)warp_max(top[b]);
        if (lane() == 0) found.largest[b] = top[b];
    }
    for (int first = 0; first < stop; first += REACH) {
        if (stop > REACH) read<OF_A_BIN>(held, part, part.values + first, limit - first, part.sums);
        const int words = BINS > 1 ? WORDS : lesser(part.words - first / 32, (int)WORDS);
        mark<OF_A_BIN>(held, top, part, first, limit, words, found, seen);
        if (first == 0 && lane() < BINS) part.largest[lane()] = found.largest[lane()];
        __syncwarp();
    }
    part.values += BINS * part.size, part.place += BINS * part.size;
    part.largest += BINS, part.marks += BINS * part.words;
}

// Mark the selected values of each bin, and write its largest magnitude, how many are selected in each share, and, added
// to zeros, in each segment. With `out` the values are first made the sum of `factor` times themselves and the addends.
// said: as of a selection, with all bits of the first position inverted; a number that is not finite may be a sum. Zeros
// when the kernel begins.
template <typename Key>
__device__ inline void mark_in_bins(
    const Key* values, u64 factor, Key* out, const Bins* rows, i64 count, i64 share, Key* largest, Mark* marks,
    u32* shares, u64* selected, Said* said) {
    typedef Found<Key> OfWarps[WARPS];
    SHARED(OfWarps, all_found);
    constexpr int WORDS = Held<Key>::WORDS;
    Found<Key>& found = all_found[warp()];
    if (lane() == 0) found.selected = 0;
    for_share(rows, count, share, [&](int row, i64 bin, int bins) {
        const Bins own = rows[row];
        const i64 within = bin * own.bin, first = own.first + within;
        const Key* addends = ADDRESS(const Key, own.addend) + within;
        Part<Key> part = {
            values + first, (const char*)addends - (const char*)(values + first), out ? (char*)out - (const char*)values : 0,
            out != 0, factor, largest + own.before + bin, marks + own.words + bin * own.marks, (int)own.bin,
            (int)own.marks, 0};
        Seen<Key> seen = {0, 0x7fffffff, -1, decltype(Seen<Key>::sum)(0.0f)};
        const int size = (int)lesser(own.end - first, bins * own.bin);
        const int stop = size - WORDS / part.words * part.size;
        if (part.words == 2)
            while (part.place <= stop) mark_bins<2>(part, part.size, found, seen);
        while (part.place < size) mark_bins<WORDS>(part, lesser(part.size, size - part.place), found, seen);
        if (__any_sync(ALL, absolute(bits_of(seen.sum)) != 0) && lane() == 0) atomicMax(&said->bad, 1ull);
        const u32 chosen = warp_sum(seen.selected);
        if (chosen == 0) return;
        const u64 lowest = first + ~warp_max(~(u32)seen.lowest), highest = first + warp_max((u32)(seen.highest + 1)) - 1;
        if (lane() == 0) {
            found.selected += chosen, atomicAdd(&selected[row], (u64)chosen);
            atomicMax(&said->first, ~lowest), atomicMax(&said->last, highest);
        }
    });
    if (lane() == 0) shares[(i64)blockIdx.x * WARPS + warp()] = found.selected;
}

struct Means {
    Sides sides;
    u64 bin, place;
};

// Write the magnitude of each segment's entries, the mean of the largest ones of its bins, above zero if one is: a block for
// each tile of bins, and a segment's last one adds up. If none is selected, and the magnitude is not zero, mark its largest.
// sums: of each tile. arrived: of each segment, 0 when the kernel begins.
template <typename Key>
__device__ inline void mean_of_bins(
    const Key* values, const Bins* rows, i64 count, u64 mask, const Key* largest, Mark* marks, i64 share, u32* shares,
    double* sums, u64* arrived, Key* scales, u64* selected, Said* said) {
    SHARED(Means, shared);
    if (threadIdx.x == 0) shared.bin = shared.place = ~0ull;
    const i64 row = find_row(rows, count, &Bins::tile, blockIdx.x);
    const Bins own = rows[row];
    const i64 bins = rows[row + 1].before - own.before, tiles = rows[row + 1].tile - own.tile;
    const i64 first = (blockIdx.x - own.tile) * SUM_TILE;
    const Key* maxima = largest + own.before;
    add_tile(shared.sides, maxima + first, bins - first, infinity());
    if (!is_last_of(shared.sides, sums + blockIdx.x * SUMS, arrived + row, tiles)) return;
    add_up(shared.sides, sums + own.tile * SUMS, tiles);
    const double total = shared.sides.sums[BELOW], most = shared.sides.sums[LARGEST];
    double mean = total / (double)bins;
    if (sizeof(Key) == 8 && !(total < infinity())) {  // the sum is out of range
        mean = 0;
        for (i64 start = 0; start < bins; start += SUM_TILE) {
            add_tile(shared.sides, maxima + start, bins - start, infinity(), (double)bins);
            mean += shared.sides.sums[BELOW];
        }
    }
    auto scale = number_of((Key)0), top = scale;
    narrow(mean > most ? most : mean, scale);
    narrow(most, top);
    const Key magnitude = greater(bits_of(scale), (Key)(most > 0));
    const bool is_none = selected[row] == 0 && magnitude;
    if (threadIdx.x == 0) scales[row] = magnitude;
    if (!is_none) return;
    for (i64 bin = threadIdx.x; bin < bins; bin += THREADS)
        if (maxima[bin] == bits_of(top)) atomicMin(&shared.bin, (u64)bin);
    __syncthreads();
    const i64 bin = (i64)shared.bin, start = own.first + bin * own.bin, end = lesser(start + own.bin, own.end);
    for (i64 i = start + threadIdx.x; i < end; i += THREADS)
        if ((Key)(values[i] & mask) == bits_of(top)) atomicMin(&shared.place, (u64)i);
    __syncthreads();
    if (threadIdx.x) return;
    selected[row] = 1, atomicAdd(&shares[(own.before + bin) / share], 1u);
    const u64 at = shared.place - (u64)start;
    marks[own.words + bin * own.marks + at / 32].chosen = 1u << at % 32;
    atomicMax(&said->first, ~shared.place), atomicMax(&said->last, shared.place);
}

struct Writing {
    u64 before[WARPS];
    u16 entries[WARPS][32 * 32];
};

// Write the positions of the marked values, and the magnitude of their segment with their signs. A warp takes its share of
// bins, as above; the entries before it are those of the shares before, which each block adds up.
template <typename Index, typename Key>
__device__ inline void entries_of_bins(
    const Bins* rows, i64 count, i64 share, const Mark* marks, const u32* shares, const Key* scales, Index* positions,
    Key* found) {
    SHARED(Writing, shared);
    const i64 shares_before = (i64)blockIdx.x * WARPS;
    u64 sum = 0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < shares_before; i += THREADS) sum += shares[i];
    sum = warp_sum(sum);
    if (lane() == 0) shared.before[warp()] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < WARPS; ++i) sum += shared.before[i] + (i < warp() ? shares[shares_before + i] : 0);
    positions += sum, found += sum;
    u16* const entries = shared.entries[warp()];
    for_share(rows, count, share, [&](int row, i64 bin, int bins) {
        const Bins own = rows[row];
        const Key scale = scales[row];
        const Mark* own_marks = marks + own.words + bin * own.marks;
        const i64 words = bins * own.marks;
        i64 word = lane() % own.marks, place = own.first + (bin + lane() / own.marks) * own.bin + word * 32;
        const i64 by_words = 32 % own.marks, by = 32 / own.marks * own.bin + by_words * 32;
        for (i64 first = 0; first < words; first += 32) {
            const Mark mark = first + lane() < words ? own_marks[first + lane()] : Mark{0, 0};
            const u32 number = __popc(mark.chosen), through = warp_scan(number), all = __shfl_sync(ALL, through, 31);
            const i64 base = __shfl_sync(ALL, place, 0);
            const u32 offset = (u32)(place - base);
            u32 to = through - number;
            for (u32 left = mark.chosen; left; left &= left - 1) {
                const u32 bit = __ffs(left) - 1;
                entries[to++] = (u16)((mark.negative >> bit) << 15 | (offset + bit));
            }
            __syncwarp();
#pragma unroll 1
            for (u32 i = lane(); i < all; i += 32) {
                const u16 entry = entries[i];
                positions[i] = (Index)(base + absolute(entry));
                found[i] = (Key)(scale | (Key)is_negative(entry) << (8 * sizeof(Key) - 1));
            }
            __syncwarp();
            positions += all, found += all, word += by_words, place += by;
            if (word >= own.marks) word -= own.marks, place += own.bin - own.marks * 32;
        }
    });
}

// Kernels

#define IN_BINS(key, Key, blocks)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) mark_in_bins_##key(                               \
        const Key* values, u64 factor, Key* out, const Bins* rows, i64 count, i64 share, Key* largest, Mark* marks, \
        u32* shares, u64* selected, Said* said) {                                                                   \
        mark_in_bins(values, factor, out, rows, count, share, largest, marks, shares, selected, said);              \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) mean_of_bins_##key(                                    \
        const Key* values, const Bins* rows, i64 count, u64 mask, const Key* largest, Mark* marks, i64 share,       \
        u32* shares, double* sums, u64* arrived, Key* scales, u64* selected, Said* said) {                          \
        mean_of_bins(values, rows, count, mask, largest, marks, share, shares, sums, arrived, scales, selected,     \
                     said);                                                                                         \
    }
IF_2(IN_BINS(u2, u16, 4))
IF_4(IN_BINS(u4, u32, 4))
IF_8(IN_BINS(u8, u64, 3))

#define ENTRIES_OF_BINS(index, Index, key, Key)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 5)                                                        \
        entries_of_bins_##index##_##key(                                                                            \
        const Bins* rows, i64 count, i64 share, const Mark* marks, const u32* shares, const Key* scales,            \
        Index* positions, Key* found) {                                                                             \
        entries_of_bins(rows, count, share, marks, shares, scales, positions, found);                               \
    }
FOR_INDEX_AND_KEY_OF_ROWS(ENTRIES_OF_BINS)
