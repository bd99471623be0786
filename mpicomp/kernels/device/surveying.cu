// A survey of a gradient in one read: see mpicomp/kernels/host/surveying.py, whose order of additions this is. A warp
// takes a group of tiles, lane j column j of them.
#include "common.cuh"

constexpr int COLUMNS = 32, TILE_ROWS = 32, AT_ONCE = 8;  // of a tile
constexpr int GROUP = 16;                                 // tiles
constexpr int GROUP_LANES = 64;                           // that groups are dealt to
constexpr int SUMS = 6 * COLUMNS;  // of a group: absolute, squares, excess, its squares, non-zeros, not above `high`

__device__ inline Single floating(u32 key) { return Single(__uint_as_float(key)); }
__device__ inline double floating(u64 key) { return __longlong_as_double((i64)key); }
__device__ inline u32 key_of(Single value) { return __float_as_uint(value.value) & 0x7fffffffu; }
__device__ inline u64 key_of(double value) { return (u64)__double_as_longlong(value) & 0x7fffffffffffffffull; }

template <typename Wide> struct Keys;
template <> struct Keys<Single> { typedef u32 Key; };
template <> struct Keys<double> { typedef u64 Key; };

// What is to be written down of the tiles of each warp: a bit for each row of a column.
struct SurveyShared {
    Scan<2> scan;
    u32 beyond[WARPS][GROUP][COLUMNS], between[WARPS][GROUP][COLUMNS];
};

// Add up the groups, and write down what exceeds the cut, by rows, and what lies between the thresholds, by columns.
// limits: the least keys above low, high and the cut. scaling: the scale, and the shift times it, as bits. totals: how
// many there are of both. full: set where a tile's might not have found room.
template <typename Value>
__device__ inline void survey(
    const Value* values, i64 size, u64 low_key, u64 high_key, u64 cut_key, u64 scale_bits, u64 shift_bits, double* sums,
    i64* positions, Value* found, typename Format<Value>::Wide* between, u64 room, u64* totals, u64* ticket, u64* states,
    i64 tiles) {
    typedef typename Format<Value>::Wide Wide;
    typedef typename Keys<Wide>::Key Key;
    SHARED(SurveyShared, shared);
    const Key low = (Key)low_key, high = (Key)high_key, cut = (Key)cut_key;
    const Wide scale = floating((Key)scale_bits), shift = floating((Key)shift_bits);
    const i64 group = take_tile(shared.scan, ticket) * WARPS + warp();
    double absolute = 0, squares = 0, excess = 0, excess_squares = 0;
    u32 nonzeros = 0, not_above = 0;
    u64 counts[2] = {0, 0};
    for (int t = 0; t < GROUP; ++t) {
        i64 first = (group * GROUP + t) * COLUMNS * TILE_ROWS + lane();
        Wide sum(0.0f), sum_squares(0.0f), sum_excess(0.0f), sum_excess_squares(0.0f);
        u32 rows_beyond = 0, rows_between = 0;
        for (int row = 0; row < TILE_ROWS; row += AT_ONCE) {
            Wide eight(0.0f), eight_squares(0.0f), eight_excess(0.0f), eight_excess_squares(0.0f);
            Key keys[AT_ONCE];
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r) {
                i64 place = first + (row + r) * COLUMNS;
                keys[r] = place < size ? key_of(widened(values[place])) : 0;
            }
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r) {
                Key key = keys[r];
                nonzeros += key != 0;
                not_above += key < high;
                rows_beyond |= (u32)(key >= cut) << (row + r);
                rows_between |= (u32)(key >= low && key < high) << (row + r);
                Wide x = floating(key) * scale, over = positive(x - shift);
                eight += x;
                eight_squares += x * x;
                eight_excess += over;
                eight_excess_squares += over * over;
            }
            sum += eight, sum_squares += eight_squares;
            sum_excess += eight_excess, sum_excess_squares += eight_excess_squares;
        }
        absolute += sum, squares += sum_squares, excess += sum_excess, excess_squares += sum_excess_squares;
        shared.beyond[warp()][t][lane()] = rows_beyond;
        shared.between[warp()][t][lane()] = rows_between;
        counts[0] += __popc(rows_beyond), counts[1] += __popc(rows_between);
    }
    double* own = sums + group * SUMS + lane();
    own[0] = absolute, own[COLUMNS] = squares, own[2 * COLUMNS] = excess, own[3 * COLUMNS] = excess_squares;
    own[4 * COLUMNS] = nonzeros, own[5 * COLUMNS] = not_above;
    counts[0] = warp_sum(counts[0]), counts[1] = warp_sum(counts[1]);
    const bool any = counts[0] + counts[1];
    scan_grid(shared.scan, counts, states, tiles, totals);
    for (int t = 0; t < GROUP && any; ++t) {
        const u32 rows_beyond = shared.beyond[warp()][t][lane()], rows_between = shared.between[warp()][t][lane()];
        if (!__any_sync(ALL, (rows_beyond | rows_between) != 0)) continue;
        if (greater(counts[0], counts[1]) + COLUMNS * TILE_ROWS > room) {  // as the host asks before it writes
            if (lane() == 0) atomicExch(totals + 2, 1ull);
            break;
        }
        i64 first = (group * GROUP + t) * COLUMNS * TILE_ROWS + lane();
        for (int row = 0; row < TILE_ROWS; ++row) {
            u32 columns = __ballot_sync(ALL, rows_beyond >> row & 1);
            if (!columns) continue;
            if (rows_beyond >> row & 1) {
                u64 at = counts[0] + __popc(columns & ((1u << lane()) - 1));
                positions[at] = first + row * COLUMNS;
                found[at] = values[first + row * COLUMNS];
            }
            counts[0] += __popc(columns);
        }
        u32 held = __popc(rows_between), through = warp_scan(held);
        u64 at = counts[1] + through - held;
        for (u32 left = rows_between; left; left &= left - 1)
            between[at++] = floating(key_of(widened(values[first + (__ffs(left) - 1) * COLUMNS])));
        counts[1] += __shfl_sync(ALL, through, 31);
    }
}

// resident: blocks of a multiprocessor at a time, few enough that registers suffice.
#define SURVEY(name, Value, resident)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, resident) name(                                           \
        const Value* values, i64 size, u64 low, u64 high, u64 cut, u64 scale, u64 shift, double* sums,              \
        i64* positions, Value* found, Format<Value>::Wide* between, u64 room, u64* totals, u64* ticket,             \
        u64* states, i64 tiles) {                                                                                   \
        survey(values, size, low, high, cut, scale, shift, sums, positions, found, between, room, totals, ticket,   \
               states, tiles);                                                                                      \
    }
SURVEY(survey_f2, Half, 4)
SURVEY(survey_f4, Single, 4)
SURVEY(survey_f8, double, 3)

constexpr int AT_A_TIME = THREADS / GROUP_LANES;  // sums that a block folds

// Add up the sums of groups: group g on lane g mod 64, in order; then the lanes by halves. SUMS / 4 blocks.
KERNEL fold_groups(const double* sums, i64 groups, double* totals) {
    struct Folded { double lanes[GROUP_LANES][AT_A_TIME]; };
    SHARED(Folded, shared);
    const int which = threadIdx.x % AT_A_TIME, j = threadIdx.x / AT_A_TIME;
    const int column = blockIdx.x * AT_A_TIME + which;
    double sum = 0;
    for (i64 group = j; group < groups; group += GROUP_LANES) sum += sums[group * SUMS + column];
    shared.lanes[j][which] = sum;
    __syncthreads();
    for (int half = GROUP_LANES / 2; half; half /= 2) {
        if (j < half) shared.lanes[j][which] += shared.lanes[j + half][which];
        __syncthreads();
    }
    if (j == 0) totals[column] = shared.lanes[0][which];
}
