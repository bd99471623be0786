"""Thresholds of fitted distributions, stage by stage: on a sample, then on what exceeds a threshold, in one read.

A stage fits the magnitudes above the threshold before it, shifted by it, from three
sums: how many there are, of the excess, and of its square. Sums are of float64, and
have a fixed order: in blocks of 16384 values lane j of 256 adds the values j, j + 256,
..., eight at a time; the lanes are folded by halves, 128, 64, ..., 1; the blocks are
added in order. The last block is padded with zeros. Logarithms and exponentials of the
last stage are of additions, multiplications and divisions, so that a device has the
same bits.
"""

import math
from typing import Any

import numpy as np

from mpicomp.arrays import Array, index_dtype
from mpicomp.kernels import Selected
from mpicomp.kernels.host.bits import FORMATS, as_writable, empty_together
from mpicomp.kernels.host.compiled import inner, jit, loop
from mpicomp.kernels.host.instructions import WORD, array_at, larger, smaller, view
from mpicomp.kernels.host.segments import Summands, as_vector, largest_in_segments
from mpicomp.kernels.host.selection import Found, compact, joined
from mpicomp.kernels.host.streaming import add_and_compact, addresses
from mpicomp.threads import in_pieces

_LANES, _AT_ONCE = 256, 8
_ROWS, _BLOCK = _LANES * _AT_ONCE, 64 * _LANES
RUN = 16  # consecutive values of a sample

_FIRST = 0.25  # share that exceeds the threshold of the first of several stages
# relative variance below which rounding errors of the sums would show in it
_NO_SPREAD = 1e-5
_LN2 = math.log(2)

PLAN = np.dtype(
    [
        ("size", np.int64),  # of the segment
        ("stages", np.int64),  # in: at most; out: in use
        ("wanted", np.float64),  # entries that are to exceed the last threshold
        ("first", np.float64),  # threshold of the first stage; NaN to fit it
        # out: the threshold before the last; NaN if the sample gives none
        ("start", np.float64),
        # of the magnitudes above it that exceed the last one; 0 for wanted / above
        ("share", np.float64),
        ("nonzeros", np.float64),  # values that are not zero, by the sample
        # at most so many exceed `start`, unless the sample misleads
        ("room", np.int64),
        ("above", np.float64),  # magnitudes above `start`, and the sum of their excess
        ("total", np.float64),
        ("threshold", np.float64),  # the last one
        ("kept", np.int64),  # entries above it
    ]
)
"""What is known of a segment: the first four fields before the sample is fitted, `above` to `kept` at the end."""


def sample(
    values: Array, bounds: Any, counts: Array, *, summands: Summands | None = None
) -> Array:
    """Return `counts` values of each segment, as float32 or float64 in host memory: all, or scattered runs of 16.

    values, bounds, summands: as for `largest_in_segments`, without summands of float16;
    nothing is written. counts: a segment's length, or a multiple of 16 below it. The
    places depend on lengths and counts only.
    """
    ends, edges = np.append(0, np.cumsum(counts)), np.asarray(bounds, np.int64)
    a, scale, parts = (values, 1, []) if summands is None else summands
    given = as_writable(a.view(FORMATS[a.dtype].signed) if a.dtype == np.float16 else a)
    taken = np.empty(int(ends[-1]), given.dtype)
    _take(given, given.dtype.type(scale), addresses(parts), edges, ends, taken)
    return taken.view(values.dtype).astype(
        np.promote_types(values.dtype, np.float32), copy=False
    )


def begin_fits(
    some: Array, counts: Array, plans: Array, *, pareto: bool, by_count: bool
) -> None:
    """Set `stages` to `room` of the plans by all stages but the last, on a sample.

    some, counts: of `sample`. plans: a `PLAN` for each segment. pareto: fit generalised
    Pareto distributions, else exponential ones. by_count: a stage selects what is still
    missing, by the count of the magnitudes above the threshold before it.
    """
    ends = np.append(0, np.cumsum(counts))
    with np.errstate(all="ignore"):  # of segments without a fit
        _begin(some, ends, plans, pareto, by_count)


def end_fits(
    values: Array,
    bounds: Any,
    plans: Array,
    *,
    pareto: bool,
    summands: Summands | None = None,
    threads: int | None = None,
) -> Selected:
    """Return the values whose magnitudes are above the last threshold of each segment, in order.

    Of a segment without one, and that is not zero, the largest is returned.

    values, bounds, summands, threads: as for `largest_in_segments`, without summands of
    float16. plans: of `begin_fits`; the last fields are set. One read compacts what
    exceeds `start`, or what is not finite in a segment without one; the last stage fits
    that.
    """
    form = FORMATS[values.dtype]
    vector, edges = as_vector(values, form, summands), np.asarray(bounds, np.int64)
    parts = addresses([] if summands is None else summands[2])
    floors, room = keys_above(plans["start"], values.dtype), int(plans["room"].sum())
    pieces = in_pieces(
        lambda start, end: _reaching(vector, edges, parts, floors, start, end, room),
        values.size,
        threads,
    )
    positions, found = joined(pieces)
    ends = np.searchsorted(positions, edges)
    above = found.view(values.dtype)
    _fit_last(above, ends, plans, pareto)
    floors = keys_above(plans["threshold"], values.dtype)
    given = as_vector(above, form, None), ends, addresses([]), floors
    chosen, kept = _reaching(*given, 0, above.size, above.size)
    indices = positions[chosen].astype(index_dtype(values.size), copy=False)
    places = np.searchsorted(chosen, ends).tolist()
    entries = Selected(indices, kept.view(values.dtype), places)
    entries = _with_largest(entries, values, edges)
    plans["kept"] = np.diff(entries.places)
    return entries


def _reaching(
    vector: Any,
    edges: Array,
    parts: Array,
    floors: Array,
    start: int,
    end: int,
    room: int,
) -> Found:
    """Write the sum, if there are parts, and return what reaches the floors of segments: positions and bits.

    For positions from `start` to `end`; room: of a buffer, of which there are more if that is full.
    """
    signed = vector.bits.dtype
    pieces: list[Found] = []
    while start < end or not pieces:
        size = min(room, end - start) + WORD
        positions, found = empty_together(size, np.dtype(np.intp), signed)
        is_real = vector.values.itemsize == signed.itemsize
        kept = found.view(vector.values.dtype) if is_real else vector.values
        count, done = _exceeding(
            vector, edges, parts, floors, start, end, positions, found, kept
        )
        pieces.append((positions[: int(count)], found[: int(count)]))
        start, room = int(done), 4 * room
    return joined(pieces)


def _with_largest(entries: Selected, values: Array, edges: Array) -> Selected:
    """Return the entries, and of each segment without one the largest."""
    sizes = np.diff(edges)
    is_empty = (np.diff(entries.places) == 0) & (sizes > 0)
    if not is_empty.any():
        return entries
    k = is_empty.astype(int).tolist()
    chunks = sizes.clip(1).tolist()
    found = largest_in_segments(values, edges.tolist(), k, chunks, k)
    return entries.replaced(found, is_empty)


def keys_above(thresholds: Array, dtype: np.dtype[Any]) -> Array:
    """Return the bits of the least magnitude above each threshold, which is not rounded; of infinity above NaN."""
    form, known = FORMATS[dtype], np.where(np.isnan(thresholds), np.inf, thresholds)
    with np.errstate(over="ignore"):
        nearest = known.astype(dtype)
    keys = nearest.view(form.signed) + (nearest.astype(np.float64) <= known).astype(
        form.signed
    )
    return np.minimum(keys, form.infinity)  # type: ignore[no-any-return]


@jit
def _take(a, factor, parts, edges, ends, taken):  # type: ignore[no-untyped-def]
    """Write the sample of each segment of a, or of ``factor * a`` and parts at these addresses."""
    for i in range(edges.size - 1):
        size, count = edges[i + 1] - edges[i], ends[i + 1] - ends[i]
        one, into = view(a, edges[i], edges[i + 1]), view(taken, ends[i], ends[i + 1])
        other = array_at(taken, parts[i], size) if parts.size > 0 else one
        length = size if count == size else RUN
        runs = count // length if count > 0 else 0
        for run in range(runs):
            place = 0 if count == size else _place_of_run(run, runs, size)
            for j in range(length):
                own = one[place + j]
                into[run * length + j] = (
                    factor * own + other[place + j] if parts.size > 0 else own
                )


@inner
def _place_of_run(number, runs, size):  # type: ignore[no-untyped-def]
    """Return the first place of a run: in one of equal strides, scattered by a hash of its number."""
    start, end = number * size // runs, (number + 1) * size // runs - RUN
    scattered = np.uint64(number + 1) * np.uint64(0x9E3779B97F4A7C15)
    scattered = (scattered ^ (scattered >> np.uint64(32))) * np.uint64(
        0xD6E8FEB86659FD93
    )
    return start + np.int64(
        (scattered >> np.uint64(40)) * np.uint64(end - start) >> np.uint64(24)
    )


def _begin(
    some: Array, ends: Array, plans: Array, pareto: bool, by_count: bool
) -> None:
    """Set the plans of all segments; each step of the fits is taken in all of them at once."""
    first, nowhere = plans["first"].copy(), np.full(plans.size, np.nan)
    sums = _sums_above(some, ends, np.zeros(plans.size))
    entries, total = sums[:2]
    is_fitted = (entries > 0) & (total < np.inf)
    weight = plans["size"] / np.diff(ends)
    wanted = plans["wanted"] / weight
    share = np.fmin(1.0, wanted / entries)
    stages = np.where(is_fitted & (share < _FIRST), plans["stages"], 1)
    is_staged = stages > 1
    least = np.where(is_staged, _FIRST, share)
    start = np.where(first >= 0, first, _excesses(sums, least, pareto))
    shares = np.zeros(plans.size)
    if not by_count:
        shares = _powers(share / _FIRST, 1 / (stages - 1))
    for stage in range(1, stages.max(initial=1) - 1):
        is_open = stage < stages - 1
        sums = _sums_above(some, ends, np.where(is_open, start, nowhere))
        is_open &= sums[0] > 0
        stages_left = stages - stage
        wanted_share = np.fmin(1.0, wanted / sums[0])
        own = _powers(wanted_share, 1 / stages_left) if by_count else shares
        start = np.where(is_open, start + _excesses(sums, own, pareto), start)
    above = _sums_above(some, ends, np.where(is_fitted, start, nowhere))[0]
    plans["start"] = np.where(is_fitted, start, nowhere)
    plans["share"] = np.where(is_staged, shares, np.where(is_fitted, 1.0, nowhere))
    plans["stages"] = np.where(is_fitted, stages, plans["stages"])
    plans["nonzeros"] = np.where(is_fitted, weight * entries, 0)
    room = np.where(is_fitted, weight * (2 * above + RUN * RUN), 0)
    plans["room"] = np.minimum(plans["size"], room.astype(np.int64))


def _fit_last(above: Array, ends: Array, plans: Array, pareto: bool) -> None:
    """Set the last thresholds, by what is above those before them."""
    sums = _sums_above(above, ends, plans["start"])
    entries, total = sums[:2]
    plans["above"], plans["total"] = np.diff(ends), total
    with np.errstate(all="ignore"):  # of segments without a fit
        is_counted = ~(plans["share"] > 0)
        share = np.where(is_counted, plans["wanted"] / entries, plans["share"])
        excess = np.where(entries > 0, _excesses(sums, share, pareto), 0.0)
    plans["threshold"] = plans["start"] + excess


def _sums_above(values: Array, ends: Array, thresholds: Array) -> Array:
    """Return the magnitudes of each segment above a threshold: how many, the sums of their excess and its square.

    They are zero where the threshold is NaN.
    """
    wide = values.astype(np.promote_types(values.dtype, np.float32), copy=False)
    sums = np.zeros((3, thresholds.size))
    _add_up(
        wide, ends, thresholds, np.empty(3 * _LANES), np.empty(_ROWS, wide.dtype), sums
    )
    return sums


def _powers(bases: Array, exponents: Array) -> Array:
    """Return the powers that the C library computes; those of NumPy depend on the processor."""
    pairs = zip(bases.tolist(), exponents.tolist(), strict=True)
    return np.array([base**exponent for base, exponent in pairs])


def _excesses(sums: Array, shares: Array, pareto: bool) -> Array:
    """Return `_excess` of sums of `_sums_above`, for each segment."""
    found = np.empty(shares.size)
    _fit(*sums, shares, pareto, found)
    return found


@jit
def _fit(entries, totals, squares, shares, pareto, found):  # type: ignore[no-untyped-def]
    for i in range(found.size):
        found[i] = _excess(entries[i], totals[i], squares[i], shares[i], pareto)


@inner
def _excess(entries, total, squares, share, pareto):  # type: ignore[no-untyped-def]
    """Return the excess that a share of the entries is expected to exceed, by a fit of their sums.

    Without spread, or if squares are out of range, an exponential distribution is
    fitted in any case.
    """
    if share >= 1:
        return 0.0
    mean, exponent = total / entries, -_log(share)
    variance = squares / entries - mean * mean
    if not (pareto and _NO_SPREAD * mean * mean < variance < np.inf):
        return mean * exponent
    ratio = mean * mean / variance
    shape, scale = (1 - ratio) / 2, mean * (ratio + 1) / 2
    return scale * exponent if shape == 0 else scale / shape * _expm1(shape * exponent)


@inner
def _log(x):  # type: ignore[no-untyped-def]
    """Return the natural logarithm of a positive number: 2 artanh((m - 1) / (m + 1)) of its significand m >= 1/2."""
    significand, exponent = math.frexp(x)
    ratio, series = (significand - 1) / (significand + 1), 0.0
    for term in range(37, 0, -2):
        series = series * (ratio * ratio) + 1.0 / term
    return exponent * _LN2 + 2 * ratio * series


@inner
def _expm1(x):  # type: ignore[no-untyped-def]
    """Return exp(x) - 1: the series of x / 2^d, doubled d times."""
    doublings = 0
    while abs(x) > 0.5:
        x, doublings = x / 2, doublings + 1
    series = 0.0
    for term in range(18, 0, -1):
        series = (series + 1) * x / term
    for _ in range(doublings):
        series *= series + 2  # exp(2 x) - 1 of exp(x) - 1
    return series


@jit
def _add_up(values, ends, thresholds, lanes, rest, sums):  # type: ignore[no-untyped-def]
    """Write the sums over each segment."""
    for i in range(thresholds.size):
        threshold = thresholds[i]
        first, end = ends[i], ends[i + 1]
        while first < end and threshold == threshold:
            size = smaller(_BLOCK, end - first)
            for j in range(lanes.size):
                lanes[j] = 0
            for row in range((size + _ROWS - 1) // _ROWS):
                begin = first + row * _ROWS
                rows = rest
                if begin + _ROWS <= end:
                    rows = view(values, begin, begin + _ROWS)
                else:
                    for j in range(_ROWS):
                        rest[j] = values[begin + j] if begin + j < end else 0
                _add_rows(rows, threshold, lanes)
            half = _LANES // 2
            while half > 0:
                for part in range(3):
                    lane = part * _LANES
                    for j in range(lane, lane + half):
                        lanes[j] += lanes[j + half]
                half //= 2
            for part in range(3):
                sums[part, i] += lanes[part * _LANES]
            first += size


@loop
def _add_rows(rows, threshold, lanes):  # type: ignore[no-untyped-def]
    """Add eight values to each lane. Separate from the other loops, which makes it simpler to vectorise."""
    for j in range(_LANES):
        entries = total = squares = 0.0
        for r in range(_AT_ONCE):
            over = abs(np.float64(rows[_LANES * r + j])) - threshold
            over = 0.0 if over <= 0 else over  # NaN stays
            entries += 1.0 if over > 0 else 0.0
            total += over
            squares += over * over
        lanes[j] += entries
        lanes[_LANES + j] += total
        lanes[2 * _LANES + j] += squares


@jit
def _exceeding(vector, edges, parts, floors, start, end, positions, found, kept):  # type: ignore[no-untyped-def]
    """Write the sum, if there are parts, and compact what reaches the floor of its segment; for [start, end).

    kept: as `found`, of the dtype of the values. Returns the number of entries, and up
    to where was read: less than `end` if there is no more room.
    """
    bits, values, a = vector.bits, vector.values, vector.a
    count = np.int64(0)
    for i in range(floors.size):
        origin = edges[i]
        low, high = larger(start, origin), smaller(end, edges[i + 1])
        if low >= high:
            continue
        most = positions.size
        if most - count < WORD:
            return count, low
        piece, places = view(bits, low, high), view(positions, count, most)
        given = vector.mask, floors[i], low, places
        if parts.size == 0:
            more, done = compact(piece, *given, view(found, count, most))
        else:
            b = array_at(
                values, parts[i] + (low - origin) * values.itemsize, high - low
            )
            one, out = view(a, low, high), view(values, low, high)
            summed = one, vector.factor, b, out, piece
            more, done = add_and_compact(*summed, *given, view(kept, count, most))
        count += np.int64(more)
        if np.int64(done) < high - low:
            return count, low + np.int64(done)
    return count, end
