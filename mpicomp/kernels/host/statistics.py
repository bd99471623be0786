"""Sums over a gradient in one read, in float64 and in a fixed order: for estimators that need logarithms."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, as_writable, jit
from mpicomp.kernels.host.instructions import bare
from mpicomp.kernels.host.selection import first_not_finite
from mpicomp.threads import in_pieces

_LANES = 256
_BLOCK = 64 * _LANES
_PIECE = 64 * _BLOCK  # values converted at a time, of float16
_LONGEST = 1 << 30  # values of a part: its counts fit 32 bits

LLOYD_ROUNDS = 20  # at most

_BIAS = 1023
_FRACTION, _ONE = (1 << 52) - 1, _BIAS << 52


class Moments(NamedTuple):
    """Sums over the magnitudes of a vector; zeros add to none of them, and `logs` is of natural logarithms.

    If `not_finite` is not -1 the sums and the largest are undefined.
    """

    nonzeros: int
    absolute: float  # sum of |x|
    logs: float  # sum of log|x| over the non-zeros
    largest: float  # max of |x|; 0 for no values
    not_finite: int  # the first position of a NaN or an infinity; -1 if there is none


class Sides(NamedTuple):
    """Sums over the magnitudes of a vector up to a threshold, and over those above it."""

    below: int  # entries, zeros among them
    above: int
    sum_below: float
    sum_above: float


def moments(values: Array, *, threads: int | None = None) -> Moments:
    """Return the moments of `values` (1-d contiguous float16, float32 or float64) in one read.

    threads: the most threads; None for `threads.count`. The result does not depend on it.

    The order of the additions is fixed: in blocks of 16384 values lane j of 256 adds the values j, j + 256, ...; the
    lanes are folded by halves, 128, 64, ..., 1; the blocks are added in order. The last block is padded with zeros.
    The sum of logarithms is the logarithm of a product: significands are multiplied and exponents added, which takes
    one logarithm in all and is more accurate than a sum of rounded ones.
    """
    totals, numbers = np.array([0.0, 0.0, 1.0]), np.zeros(2, np.int64)
    values = as_writable(values)
    for sums, counts in in_pieces(lambda start, end: _of_blocks(values[start:end]), values.size, threads, step=_BLOCK):
        _add_up(sums, counts, totals, numbers)
    absolute, largest, product = totals.tolist()
    nonzeros, exponents = numbers.tolist()
    not_finite = -1 if math.isfinite(absolute) else first_not_finite(values, threads)
    return Moments(nonzeros, absolute, math.log(product) + exponents * math.log(2), largest, not_finite)


def sides(values: Array, threshold: float, *, threads: int | None = None) -> Sides:
    """Return the sums over the magnitudes of `values` (as for `moments`) up to a threshold and above it, in one read.

    values: finite. threshold: at least 0, compared in float64. threads, and the order of the additions: as for
    `moments`.
    """
    values, wanted = as_writable(values), np.float64(threshold)
    parts = in_pieces(lambda start, end: _sides_of_blocks(values[start:end], wanted), values.size, threads, step=_BLOCK)
    return added_sides(values.size, *(np.concatenate(each) for each in zip(*parts, strict=True)))


def two_magnitudes(values: Array, mean: float, largest: float) -> tuple[float, float, float]:
    """Return two magnitudes, the first not above the second, and the threshold between the values that they represent.

    values: 1-d, finite; mean, largest: of the magnitudes. Lloyd's algorithm, from the mean as the threshold until it
    does not change, at most 20 rounds, each of which reads the values once. If one magnitude suffices, both are the
    mean.
    """
    return by_lloyd(lambda threshold: sides(values, threshold), mean, largest)


def by_lloyd(sides_of: Callable[[float], Sides], mean: float, largest: float) -> tuple[float, float, float]:
    """Return the result of `two_magnitudes`; `sides_of` returns the sums on both sides of a threshold."""
    low, high, threshold = mean, mean, mean
    for _ in range(LLOYD_ROUNDS):
        found = sides_of(threshold)
        if not (found.below and found.above):
            break
        low = min(found.sum_below / found.below, threshold)  # whatever rounding does to a mean
        high = min(found.sum_above / found.above, largest)
        before, threshold = threshold, (low + high) / 2
        if threshold == before:
            break
    return low, high, threshold


def magnitudes_in_segments(values: Array, bounds: Sequence[int], *, two: bool) -> Array:
    """Return the mean and the largest magnitude of each segment, and what `two_magnitudes` does: shape (segments, 5).

    values: as for `moments`. bounds: the first position of each segment, and the length. two: False leaves out Lloyd's
    rounds, and both magnitudes and the threshold are the mean. The bits are those of `moments` and `two_magnitudes` of
    each segment; without a finite mean (NaN, infinities, sums out of range) the row is not defined.
    """
    wide = as_writable(values.astype(np.promote_types(values.dtype, np.float32), copy=False))
    found = np.zeros((len(bounds) - 1, 5))
    _magnitudes(wide, np.asarray(bounds, np.int64), LLOYD_ROUNDS if two else 0, np.empty((2, _LANES)), found)
    return found


def with_magnitudes(values: Array, bounds: Sequence[int], rows: Array) -> Array:
    """Return the signs of `values` with one of two magnitudes: up to a limit the first one, above it the second.

    values: 1-d contiguous, without NaN. bounds: as for `magnitudes_in_segments`. rows: of the dtype of the values, for
    each segment both magnitudes and the limit, at least 0.
    """
    form, signed = FORMATS[values.dtype], np.empty_like(values)
    bits, keys = as_writable(values).view(form.signed), np.ascontiguousarray(rows).view(form.signed)
    _with_magnitudes(bits, np.asarray(bounds, np.int64), keys, form.mask, signed.view(form.signed))
    return signed


def added_sides(size: int, sums: Array, above: Array) -> Sides:
    """Add up the sums of the blocks of `size` values, a row each: up to the threshold, and above it; in order."""
    below, beyond = np.add.accumulate(sums)[-1].tolist()
    entries = int(above.sum())
    return Sides(size - entries, entries, below, beyond)


def _sides_of_blocks(values: Array, threshold: np.float64) -> tuple[Array, Array]:
    """Return the sums of every block up to a threshold and above it, and the number of values above it."""
    sums, above, done = np.empty((values.size // _BLOCK + 1, 2)), np.empty(values.size // _BLOCK + 1, np.int64), 0
    for part in blocks(values, _BLOCK):
        end = done + part.size // _BLOCK
        _add_sides(part, threshold, sums[done:end], above[done:end])
        done = end
    return sums, above


def _of_blocks(values: Array) -> tuple[Array, Array]:
    """Return the sums of every block: absolute, largest, product, and nonzeros, exponents."""
    size = values.size // _BLOCK + 1
    sums, counts, done = np.empty((size, 3)), np.empty((size, 2), np.int64), 0
    for part in blocks(values, _BLOCK):
        end = done + part.size // _BLOCK
        _add_blocks(part, sums[done:end], counts[done:end])
        done = end
    return sums, counts


def blocks(values: Array, size: int) -> Iterator[Array]:
    """Yield the values in whole blocks of a power of two, many at a time, the last one padded with zeros.

    float16 is converted to float32, in pieces that fit the cache.
    """
    wide = np.promote_types(values.dtype, np.float32)
    full, piece = values.size // size * size, _LONGEST if values.dtype == wide else _PIECE
    for start in range(0, full, piece):
        yield values[start : min(start + piece, full)].astype(wide, copy=False)
    last = np.zeros(size, wide)
    last[: values.size - full] = values[full:]
    yield last


@jit
def _add_blocks(values, block_sums, block_counts):  # type: ignore[no-untyped-def]
    """Write the sums of each block of `values`: absolute, largest, product, and nonzeros, exponents."""
    values, sums, counts = bare(values), np.empty((3, _LANES)), np.empty((2, _LANES), np.int64)
    for i in range(values.size // _BLOCK):
        _clear(sums, counts)
        for j in range(_BLOCK // _LANES):
            _add_row(values[_BLOCK * i + _LANES * j : _BLOCK * i + _LANES * (j + 1)], sums, counts)
        _fold(sums, counts)
        for j in range(3):
            block_sums[i, j] = sums[j, 0]
        for j in range(2):
            block_counts[i, j] = counts[j, 0]


@jit
def _add_up(sums, counts, totals, numbers):  # type: ignore[no-untyped-def]
    """Add the sums of blocks, in order, to `totals` and `numbers`. The product is kept with a power of two."""
    for i in range(len(sums)):
        totals[0] += sums[i, 0]
        totals[1] = max(totals[1], sums[i, 1])
        totals[2], shift = math.frexp(totals[2] * sums[i, 2])
        numbers[0] += counts[i, 0]
        numbers[1] += counts[i, 1] + shift


@jit
def _clear(sums, counts):  # type: ignore[no-untyped-def]
    for j in range(_LANES):  # expressions of whole arrays would take Numba seconds to compile
        sums[0, j] = sums[1, j] = 0
        sums[2, j] = 1
        counts[0, j] = counts[1, j] = 0


@jit
def _add_row(row, sums, counts):  # type: ignore[no-untyped-def]
    """Add one value to each lane. Separate from the other loops, which makes it simpler to vectorise."""
    absolute, largest, product = sums[0], sums[1], sums[2]
    nonzeros, exponents = counts[0], counts[1]
    for j in range(_LANES):
        absolute[j] += abs(np.float64(row[j]))
    for j in range(_LANES):
        x = abs(np.float64(row[j]))
        largest[j] = x if x > largest[j] else largest[j]
        nonzeros[j] += 1 if x > 0 else 0
    for j in range(_LANES):
        magnitude = abs(np.float64(row[j]))
        x = magnitude if magnitude > 0 else np.float64(1)
        product[j], shift = _split(product[j] * (x * 2.0**54 if x < 1 else x * 2.0**-54))  # normal, and in range
        exponents[j] += shift + (-54 if x < 1 else 54)


@jit
def _split(x):  # type: ignore[no-untyped-def]
    """Return the significand, 1 <= m < 2, and the exponent of a positive number that is not subnormal."""
    bits = np.float64(x).view(np.int64)
    return np.int64(bits & _FRACTION | _ONE).view(np.float64), (bits >> 52) - _BIAS


@jit
def _fold(sums, counts):  # type: ignore[no-untyped-def]
    """Fold the lanes by halves into the first one."""
    half = _LANES // 2
    while half:
        for j in range(half):
            sums[0, j] += sums[0, j + half]
            sums[1, j] = max(sums[1, j], sums[1, j + half])
            sums[2, j] *= sums[2, j + half]
            counts[0, j] += counts[0, j + half]
            counts[1, j] += counts[1, j + half]
        half //= 2


@jit
def _add_sides(values, threshold, block_sums, block_above):  # type: ignore[no-untyped-def]
    """Write the sums of each block up to the threshold and above it, and the number of values above it."""
    values, below, beyond = bare(values), np.empty(_LANES), np.empty(_LANES)
    for i in range(values.size // _BLOCK):
        above = 0
        for j in range(_LANES):
            below[j] = beyond[j] = 0
        for start in range(_BLOCK * i, _BLOCK * (i + 1), _LANES):
            above += _add_sides_of_row(values[start : start + _LANES], threshold, below, beyond)
        half = _LANES // 2
        while half:
            for j in range(half):
                below[j] += below[j + half]
                beyond[j] += beyond[j + half]
            half //= 2
        block_sums[i, 0], block_sums[i, 1], block_above[i] = below[0], beyond[0], above


@jit
def _add_sides_of_row(row, threshold, below, beyond):  # type: ignore[no-untyped-def]
    above = 0
    for j in range(row.size):
        x = abs(np.float64(row[j]))
        is_above = x > threshold
        below[j] += 0.0 if is_above else x
        beyond[j] += x if is_above else 0.0
        above += 1 if is_above else 0
    return above


@jit
def _magnitudes(values, edges, rounds, lanes, found):  # type: ignore[no-untyped-def]
    """Write the rows of `magnitudes_in_segments`. lanes: two buffers."""
    values, lanes = bare(values), bare(lanes)
    for i in range(len(found)):
        part = values[edges[i] : edges[i + 1]]
        if part.size == 0:
            continue
        total, _, _ = _sides_of(part, np.inf, lanes)
        largest = np.float64(0)
        for j in range(part.size):
            largest = max(largest, abs(np.float64(part[j])))
        mean = total / part.size
        mean = largest if mean > largest else mean  # NaN stays
        low, high, threshold = mean, mean, mean
        for _ in range(rounds):
            below, beyond, above = _sides_of(part, threshold, lanes)
            if above == 0 or above == part.size:
                break
            low, high = min(below / (part.size - above), threshold), min(beyond / above, largest)
            before, threshold = threshold, (low + high) / 2
            if threshold == before:
                break
        found[i, 0], found[i, 1], found[i, 2], found[i, 3], found[i, 4] = mean, largest, low, high, threshold


@jit
def _sides_of(values, threshold, lanes):  # type: ignore[no-untyped-def]
    """Return the sums of magnitudes up to the threshold and above it, in the order of `sides`, and the number above."""
    below, beyond, above = np.float64(0), np.float64(0), 0
    for first in range(0, values.size, _BLOCK):
        for j in range(_LANES):
            lanes[0, j] = lanes[1, j] = 0
        for start in range(first, min(first + _BLOCK, values.size), _LANES):  # padding would add zeros
            above += _add_sides_of_row(values[start : min(start + _LANES, values.size)], threshold, lanes[0], lanes[1])
        half = _LANES // 2
        while half:
            for j in range(half):
                lanes[0, j] += lanes[0, j + half]
                lanes[1, j] += lanes[1, j + half]
            half //= 2
        below += lanes[0, 0]
        beyond += lanes[1, 0]
    return below, beyond, above


@jit
def _with_magnitudes(bits, edges, rows, mask, signed):  # type: ignore[no-untyped-def]
    """Write the signs of values with the magnitudes of each segment, as bits."""
    for row in range(len(rows)):
        low, high, limit = rows[row, 0], rows[row, 1], rows[row, 2]
        for i in range(edges[row], edges[row + 1]):
            magnitude = low if bits[i] & mask <= limit else high
            signed[i] = magnitude | (bits[i] & ~mask)
