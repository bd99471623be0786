"""Thresholds of fitted distributions, stage by stage: on a sample, then on what exceeds a threshold, in one read.

A stage fits the magnitudes above the threshold before it, shifted by it, from three
sums: how many there are, of the excess, and of its square. Sums are of float64, and
have a fixed order: in blocks of 16384 values lane j of 256 adds the values j, j + 256,
..., eight at a time; the lanes are folded by halves, 128, 64, ..., 1; the blocks are
added in order. The last block is padded with zeros. Logarithms, exponentials and
quantiles are of additions, multiplications, divisions and square roots, so that a
device has the same bits.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.values import index_dtype, widened_values
from mpicomp.kernels import FIRST, Selected, Summands
from mpicomp.kernels.host.bits import FORMATS, as_writable, empty_entries
from mpicomp.kernels.host.compiled import inner, jit, loop
from mpicomp.kernels.host.instructions import WORD, array_at, larger, smaller, view
from mpicomp.kernels.host.segments import as_vector, largest_in_segments
from mpicomp.kernels.host.selection import Found, compact, joined
from mpicomp.kernels.host.streaming import add_and_compact, addresses
from mpicomp.threads import in_pieces

_LANES = 256
_AT_ONCE = 8
_ROWS = _LANES * _AT_ONCE
_BLOCK = 64 * _LANES
RUN = 16  # consecutive values of a sample

# Relative variance, and difference of logarithms, below which they may be rounding
# errors of the sums.
_NO_SPREAD = 1e-5
_LN2 = math.log(2)
_LOG_SQRT_2_PI = math.log(2 * math.pi) / 2
# The least share s whose log(1 - s) differs enough from 0.
_LEAST_SHARE = 1e-12


def select_by_fits(
    values: Array,
    bounds: Any,
    plans: Array,
    *,
    distribution: str,
    by_count: bool,
    summands: Summands | None = None,
    threads: int | None = None,
) -> Selected:
    """Return the values whose magnitudes are above the last threshold of each segment, in order; set the plans.

    Of a segment without one, and that is not zero, the largest is returned.

    values, bounds, summands, threads: as for `largest_in_segments`, without summands of
    float16. plans: a `PLAN` for each segment. distribution: "exponential", "pareto"
    (generalised) or "gamma" (in the first stage, and then Pareto). by_count: a stage
    selects what is still missing, by the count of the magnitudes above the threshold
    before it.

    All stages but the last see a sample. One read compacts what exceeds `start`, or
    what is not finite in a segment without one; the last stage fits that.
    """
    pareto = distribution != "exponential"
    some = sample(values, bounds, plans["sample"], summands=summands)
    ends = np.append(0, np.cumsum(plans["sample"]))
    buffers = np.empty(3 * _LANES), np.empty(_ROWS, some.dtype)
    plans["start"] = np.nan
    if distribution == "gamma":
        _fit_gamma(some, ends, plans, *buffers)
    _fit_samples(some, ends, plans, pareto, by_count, *buffers)
    form = FORMATS[values.dtype]
    vector, edges = as_vector(values, form, summands), np.asarray(bounds, np.int64)
    parts = addresses([] if summands is None else summands.parts)
    floors, room = keys_above(plans["start"], values.dtype), int(plans["room"].sum())
    pieces = in_pieces(
        lambda start, end: _reaching(vector, edges, parts, floors, start, end, room),
        values.size,
        threads,
    )
    positions, found = joined(pieces)
    above = found.view(values.dtype)
    ends = np.searchsorted(positions, edges)
    _fit_excess(above.astype(some.dtype, copy=False), ends, plans, pareto, *buffers)
    floors = keys_above(plans["threshold"], values.dtype)
    given = as_vector(above, form, None), ends, addresses([]), floors
    chosen, kept = _reaching(*given, 0, above.size, above.size)
    indices = positions[chosen].astype(index_dtype(values.size), copy=False)
    places = np.searchsorted(chosen, ends).tolist()
    entries = Selected(indices, kept.view(values.dtype), places)
    entries = entries.filled(edges, partial(largest_in_segments, values))
    plans["kept"] = np.diff(entries.places)
    return entries


def sample(
    values: Array, bounds: Any, counts: Array, *, summands: Summands | None = None
) -> Array:
    """Return `counts` values of each segment, as float32 or float64 in host memory: all, or scattered runs of 16.

    values, bounds, summands: as for `largest_in_segments`, without summands of float16;
    nothing is written. counts: a segment's length, or a multiple of 16 below it. The
    places depend on lengths and counts only.
    """
    ends, edges = np.append(0, np.cumsum(counts)), np.asarray(bounds, np.int64)
    if summands is None:
        summands = Summands(values, 1, [])
    a = summands.residual
    given = as_writable(a.view(FORMATS[a.dtype].signed) if a.dtype == np.float16 else a)
    taken = np.empty(int(ends[-1]), given.dtype)
    factor = given.dtype.type(summands.decay)
    _take(given, factor, addresses(summands.parts), edges, ends, taken)
    return widened_values(taken.view(values.dtype))


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
        positions, found = empty_entries(size, signed)
        is_real = vector.values.itemsize == signed.itemsize
        kept = found.view(vector.values.dtype) if is_real else vector.values
        count, done = _exceeding(
            vector, edges, parts, floors, start, end, positions, found, kept
        )
        pieces.append((positions[: int(count)], found[: int(count)]))
        start, room = int(done), 4 * room
    return joined(pieces)


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
            # Runs have equal strides, at places scattered by a hash.
            place, end = run * size // runs, (run + 1) * size // runs - length
            scattered = np.uint64(run + 1) * np.uint64(0x9E3779B97F4A7C15)
            scattered ^= scattered >> np.uint64(32)
            scattered = scattered * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(40)
            place += np.int64(scattered * np.uint64(end - place) >> np.uint64(24))
            for j in range(length):
                own = one[place + j]
                into[run * length + j] = (
                    factor * own + other[place + j] if parts.size > 0 else own
                )


@jit
def _fit_gamma(some, ends, plans, lanes, rest):  # type: ignore[no-untyped-def]
    """Set `start` of the plans to the threshold of the first stage; NaN without spread."""
    for i in range(plans.size):
        plan, part = plans[i], view(some, ends[i], ends[i + 1])
        sums = _sums_above(part, 0.0, lanes, rest)
        if not (sums[0] > 0 and sums[1] < np.inf):
            continue
        share = plan["wanted"] / (plan["size"] / part.size) / sums[0]
        if plan["stages"] > 1 and share < FIRST:
            share = FIRST
        mean = sums[1] / sums[0]
        spread = _log(mean) - _logarithms_of(part, lanes) / sums[0]
        if spread > _NO_SPREAD:
            root = math.sqrt((spread - 3) * (spread - 3) + 24 * spread)
            shape = (3 - spread + root) / (12 * spread)
            plan["start"] = mean / shape * _gamma_quantile(shape, share)


@jit
def _fit_samples(some, ends, plans, pareto, by_count, lanes, rest):  # type: ignore[no-untyped-def]
    """Set `stages` to `room` of the plans by all stages but the last, on a sample.

    start: the threshold of the first stage; NaN to fit it.
    """
    for i in range(plans.size):
        plan, part = plans[i], view(some, ends[i], ends[i + 1])
        start = plan["start"]
        plan["start"] = plan["share"] = np.nan
        plan["nonzeros"] = plan["room"] = 0
        sums = _sums_above(part, 0.0, lanes, rest)
        if not (sums[0] > 0 and sums[1] < np.inf):
            continue
        weight = plan["size"] / part.size
        wanted = plan["wanted"] / weight
        plan["nonzeros"] = weight * sums[0]
        share = wanted / sums[0]
        if share >= FIRST:
            plan["stages"] = 1
        stages = plan["stages"]
        if not start >= 0:
            start = _excess(sums, share if stages == 1 else FIRST, np.int64(1), pareto)
        steps = stages - 1
        share = share / FIRST if stages > 1 else 1.0
        for left in range(steps, 1, -1):
            sums = _sums_above(part, start, lanes, rest)
            if sums[0] == 0:
                break
            if by_count:
                share, steps = wanted / sums[0], left
            start += _excess(sums, share, steps, pareto)
        above = _sums_above(part, start, lanes, rest)[0]
        plan["start"] = start
        plan["share"] = np.nan if by_count and stages > 1 else share
        plan["room"] = np.int64(smaller(plan["size"], weight * (2 * above + RUN * RUN)))


@jit
def _fit_excess(above, ends, plans, pareto, lanes, rest):  # type: ignore[no-untyped-def]
    """Set `total` to `above` of the plans by the last stage, from all magnitudes above the threshold before it."""
    for i in range(plans.size):
        plan, part = plans[i], view(above, ends[i], ends[i + 1])
        sums = _sums_above(part, plan["start"], lanes, rest)
        plan["above"] = part.size
        plan["total"] = sums[1]
        plan["threshold"] = plan["start"]
        share, steps = plan["share"], plan["stages"] - 1
        if sums[0] > 0:
            if share != share:
                share, steps = plan["wanted"] / sums[0], 1
            plan["threshold"] += _excess(sums, share, steps, pareto)


@inner
def _excess(sums, share, steps, pareto):  # type: ignore[no-untyped-def]
    """Return the excess that a share of magnitudes is expected to exceed, by a fit of their sums.

    In the first of `steps` with one ratio. Without spread, or if squares are out of
    range, an exponential distribution is fitted in any case.
    """
    if share >= 1:
        return 0.0
    mean, exponent = sums[1] / sums[0], -_log(share) / steps
    variance = sums[2] / sums[0] - mean * mean
    if not (pareto and _NO_SPREAD * mean * mean < variance < np.inf):
        return mean * exponent
    ratio = mean * mean / variance
    shape, scale = (1 - ratio) / 2, mean * (ratio + 1) / 2
    return scale * exponent if shape == 0 else scale / shape * _expm1(shape * exponent)


@inner
def _gamma_quantile(shape, share):  # type: ignore[no-untyped-def]
    """Return what gamma-distributed numbers of scale 1 exceed with a probability of `share`.

    By Newton's method on the logarithm of the probability of not more than x, which is
    concave in log x: it approaches the quantile from below.
    """
    if share >= 1:
        return 0.0
    wanted = _log(1 - larger(share, _LEAST_SHARE))
    factorial = _log_factorial(shape)
    log_x, x, step = (wanted + factorial) / shape, 0.0, 1.0
    for _ in range(100):
        x = 1 + _expm1(log_x) if log_x > 0 else 1 / (1 + _expm1(-log_x))
        if not step > 1e-12:
            break
        number, term, series = shape, 1.0, 1.0
        while term > 1e-17 * series:
            number += 1
            term *= x / number
            series += term
        found = shape * log_x - x - factorial + _log(series)
        step = (wanted - found) * series / shape
        log_x += step
    return x


@inner
def _log_factorial(x):  # type: ignore[no-untyped-def]
    """Return the logarithm of the gamma function of x + 1, by Stirling's series at a number of at least 16."""
    product = 1.0
    x += 1
    while x < 16:
        product *= x
        x += 1
    square = x * x
    series = 1 / 1260 - 1 / 1680 / square
    series = 1 / 360 - series / square
    series = (1 / 12 - series / square) / x
    return (x - 0.5) * _log(x) - x + _LOG_SQRT_2_PI + series - _log(product)


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
        # This makes exp(2 x) - 1 of exp(x) - 1.
        series *= series + 2
    return series


@inner
def _sums_above(values, threshold, lanes, rest):  # type: ignore[no-untyped-def]
    """Return how many magnitudes exceed a threshold, the sum of the excesses and of their squares; zeros for NaN."""
    entries = total = squares = 0.0
    first = 0
    while first < values.size and threshold == threshold:
        end = smaller(first + _BLOCK, values.size)
        for j in range(lanes.size):
            lanes[j] = 0
        for begin in range(first, end, _ROWS):
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
        entries += lanes[0]
        total += lanes[_LANES]
        squares += lanes[2 * _LANES]
        first = end
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
def _logarithms_of(values, lanes):  # type: ignore[no-untyped-def]
    """Return the sum of the logarithms of magnitudes, taken of products of eight significands from 1/2 to 1."""
    total = 0.0
    for first in range(0, values.size, _BLOCK):
        for j in range(_LANES):
            lanes[j] = 0
        for begin in range(first, smaller(first + _BLOCK, values.size), _ROWS):
            end = smaller(begin + _ROWS, values.size)
            for j in range(_LANES):
                product, exponents = 1.0, 0
                for i in range(begin + j, end, _LANES):
                    if values[i] != 0:
                        part, exponent = math.frexp(abs(np.float64(values[i])))
                        product *= part
                        exponents += exponent
                if product < 1:
                    lanes[j] += exponents * _LN2 + _log(product)
        half = _LANES // 2
        while half > 0:
            for j in range(half):
                lanes[j] += lanes[j + half]
            half //= 2
        total += lanes[0]
    return total


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
