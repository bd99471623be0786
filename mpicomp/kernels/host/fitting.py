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
from mpicomp.kernels.host.fused import _add_and_compact
from mpicomp.kernels.host.instructions import WORD, array_at
from mpicomp.kernels.host.segments import Summands, as_vector
from mpicomp.kernels.host.selection import Found, compact, joined
from mpicomp.kernels.host.streaming import addresses
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
    _begin(some, ends, plans, pareto, by_count, *_buffers(some.dtype))


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
    floors, parts = (
        keys_above(plans["start"], values.dtype),
        addresses([] if summands is None else summands[2]),
    )

    def compacted(start: int, end: int) -> Found:
        room, pieces = int(plans["room"].sum()), list[Found]()
        while start < end or not pieces:
            positions, found = empty_together(
                min(room, end - start) + WORD, np.dtype(np.intp), form.signed
            )
            kept = found.view(values.dtype) if vector.values.size else vector.values
            count, done = _exceeding(
                vector, edges, parts, floors, start, end, positions, found, kept
            )
            pieces.append((positions[: int(count)], found[: int(count)]))
            start, room = int(done), 4 * room
        return joined(pieces)

    positions, found = joined(in_pieces(compacted, values.size, threads))
    ends = np.searchsorted(positions, edges)
    wide = found.view(values.dtype).astype(
        np.promote_types(values.dtype, np.float32), copy=False
    )
    _end(wide, ends, plans, pareto, *_buffers(wide.dtype))
    room, floors = (
        positions.size + plans.size + WORD,
        keys_above(plans["threshold"], values.dtype),
    )
    kept_positions, kept = np.empty(room, np.intp), np.empty(room, form.signed)
    count = int(
        _keep(
            vector, edges, positions, found, ends, floors, plans, kept_positions, kept
        )
    )
    places = np.append(0, np.cumsum(plans["kept"])).tolist()
    indices = kept_positions[:count].astype(index_dtype(values.size), copy=False)
    return Selected(indices, kept[:count].view(values.dtype), places)


def _buffers(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the lanes of three sums, and room for values that are padded."""
    return np.empty(3 * _LANES), np.empty(_ROWS, dtype)


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
        one, into = a[edges[i] : edges[i + 1]], taken[ends[i] : ends[i + 1]]
        other = array_at(taken, parts[i], size) if parts.size else one
        if count == size:
            _add(one, factor, other, parts.size > 0, into)
            continue
        for first in range(0, count, RUN):
            place = _place_of_run(first // RUN, count // RUN, size)
            run = slice(place, place + RUN)
            _add(
                one[run], factor, other[run], parts.size > 0, into[first : first + RUN]
            )


@inner
def _add(one, factor, other, is_sum, into):  # type: ignore[no-untyped-def]
    if is_sum:
        for j in range(into.size):
            into[j] = factor * one[j] + other[j]
    else:
        for j in range(into.size):
            into[j] = one[j]


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


@jit
def _begin(values, edges, plans, pareto, by_count, lanes, rest):  # type: ignore[no-untyped-def]
    for i in range(len(plans)):
        some, plan = values[edges[i] : edges[i + 1]], plans[i]
        entries, total, squares = _sums(some, 0.0, lanes, rest)
        plan["start"] = plan["share"] = np.nan
        plan["nonzeros"] = plan["room"] = 0
        if not (entries > 0 and total < np.inf):
            continue
        weight = plan["size"] / some.size
        wanted = plan["wanted"] / weight
        share, stages = min(1.0, wanted / entries), plan["stages"]
        stages = 1 if share >= _FIRST else stages
        start = plan["first"]
        if not start >= 0:
            start = _excess(
                entries, total, squares, _FIRST if stages > 1 else share, pareto
            )
        plan["nonzeros"], plan["stages"], plan["share"] = weight * entries, stages, 1.0
        if stages > 1:
            plan["share"] = 0.0 if by_count else (share / _FIRST) ** (1 / (stages - 1))
        for stage in range(1, stages - 1):
            entries, total, squares = _sums(some, start, lanes, rest)
            if entries == 0:
                break
            share = (
                min(1.0, wanted / entries) ** (1 / (stages - stage))
                if by_count
                else plan["share"]
            )
            start += _excess(entries, total, squares, share, pareto)
        entries, total, squares = _sums(some, start, lanes, rest)
        plan["start"] = start
        plan["room"] = min(plan["size"], np.int64(weight * (2 * entries + RUN * RUN)))


@inner
def _sums(values, threshold, lanes, rest):  # type: ignore[no-untyped-def]
    """Return the number of magnitudes above a threshold, the sum of their excess, and of its square."""
    entries = total = squares = 0.0
    for first in range(0, values.size, _BLOCK):
        block = values[first : first + _BLOCK]
        lanes[:] = 0
        whole = block.size // _ROWS * _ROWS
        for row in range(0, whole, _ROWS):
            _add_rows(block[row : row + _ROWS], threshold, lanes)
        if whole < block.size:
            for j in range(_ROWS):
                rest[j] = block[whole + j] if whole + j < block.size else 0
            _add_rows(rest, threshold, lanes)
        half = _LANES // 2
        while half:
            for j in range(half):
                lanes[j] += lanes[j + half]
                lanes[_LANES + j] += lanes[_LANES + j + half]
                lanes[2 * _LANES + j] += lanes[2 * _LANES + j + half]
            half //= 2
        entries += lanes[0]
        total += lanes[_LANES]
        squares += lanes[2 * _LANES]
    return entries, total, squares


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
def _exceeding(vector, edges, parts, floors, start, end, positions, found, kept):  # type: ignore[no-untyped-def]
    """Write the sum, if there are parts, and compact what reaches the floor of its segment; for [start, end).

    kept: as `found`, of the dtype of the values. Returns the number of entries, and up
    to where was read: less than `end` if there is no more room.
    """
    bits, values, a = vector.bits, vector.values, vector.a
    count = np.int64(0)
    for i in range(floors.size):
        low, high = max(start, edges[i]), min(end, edges[i + 1])
        if low >= high:
            continue
        if positions.size - count < WORD:
            return count, low
        piece, room = bits[low:high], positions[count:]
        if parts.size == 0:
            more, done = compact(
                piece, vector.mask, floors[i], low, room, found[count:]
            )
        else:
            b = array_at(values, parts[i], edges[i + 1] - edges[i])[
                low - edges[i] : high - edges[i]
            ]
            summed = a[low:high], vector.factor, b, values[low:high], piece
            more, done = _add_and_compact(
                *summed, vector.mask, floors[i], low, room, kept[count:]
            )
        count += np.int64(more)
        if np.int64(done) < high - low:
            return count, low + np.int64(done)
    return count, end


@jit
def _end(values, ends, plans, pareto, lanes, rest):  # type: ignore[no-untyped-def]
    for i in range(len(plans)):
        plan = plans[i]
        entries, total, squares = _sums(
            values[ends[i] : ends[i + 1]], plan["start"], lanes, rest
        )
        plan["above"], plan["total"], plan["threshold"] = (
            ends[i + 1] - ends[i],
            total,
            plan["start"],
        )
        if entries > 0:
            share = plan["share"] if plan["share"] > 0 else plan["wanted"] / entries
            plan["threshold"] += _excess(entries, total, squares, share, pareto)


@jit
def _keep(vector, edges, positions, bits, ends, floors, plans, kept_positions, kept):  # type: ignore[no-untyped-def]
    """Copy the entries at or above the floor of their segment, else its largest value if it is not zero."""
    values, count = vector.bits, np.uint64(0)
    for i in range(floors.size):
        before, some = count, bits[ends[i] : ends[i + 1]]
        count += np.uint64(
            compact(
                some,
                vector.mask,
                floors[i],
                ends[i],
                kept_positions[count:],
                kept[count:],
            )[0]
        )
        for j in range(before, count):
            kept_positions[j] = positions[kept_positions[j]]
        if count == before:
            most, place = values.dtype.type(0), 0
            for j in range(edges[i], edges[i + 1]):
                if values.dtype.type(values[j] & vector.mask) > most:
                    most, place = values.dtype.type(values[j] & vector.mask), j
            if most != values.dtype.type(0):
                kept_positions[count], kept[count] = place, values[place]
                count += np.uint64(1)
        plans[i]["kept"] = count - before
    return count
