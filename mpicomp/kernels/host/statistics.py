"""Sums over a gradient in one read, in float64 and in a fixed order; and a checksum of an array."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.values import converted, widened_values
from mpicomp.kernels.host.bits import FORMATS, as_writable
from mpicomp.kernels.host.compiled import inner, jit, loop
from mpicomp.kernels.host.instructions import larger, smaller, view
from mpicomp.threads import in_pieces

_LANES = 256
_BLOCK = 64 * _LANES
_PIECE = 64 * _BLOCK  # values converted at a time, of float16

LLOYD_ROUNDS = 20  # at most
_LONG = 1 << 21  # values


# `checksum` multiplies the position of a word by STEP for its key; LOW has the bits of
# its lower half.
STEP = np.uint64(0x9E3779B97F4A7C15)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


class Sides(NamedTuple):
    """Sums over the magnitudes of a vector up to a threshold, and over those above it."""

    below: int  # entries, zeros among them
    above: int
    sum_below: float
    sum_above: float
    largest: float  # of all magnitudes; undefined if a sum is not finite


def sides(values: Array, threshold: float, *, threads: int | None = None) -> Sides:
    """Return the sums over the magnitudes of `values` up to a threshold and above it, in one read.

    values: 1-d contiguous float16, float32 or float64; NaN is in the sum up to the
    threshold. threshold: at least 0, compared in float64. threads: the most threads;
    None for `threads.count`. The result does not depend on it.

    The order of the additions is fixed: in blocks of 16384 values lane j of 256 adds
    the values j, j + 256, ...; the lanes are folded by halves, 128, 64, ..., 1; the
    blocks are added in order.
    """
    values, wanted = as_writable(values), np.float64(threshold)
    parts = in_pieces(
        lambda start, end: _sides_of_blocks(values[start:end], wanted),
        values.size,
        threads,
        step=_BLOCK,
    )
    rows = np.concatenate(parts)
    with np.errstate(over="ignore"):
        below, beyond, _, _ = np.add.accumulate(rows)[-1].tolist()
    above = int(rows[:, 3].sum())
    return Sides(values.size - above, above, below, beyond, float(rows[:, 2].max()))


def checksum(words: Array, *, threads: int | None = None) -> int:
    """Return 64 bits that depend on the values and the order of `words` (1-d uint64), in one read.

    The sum over i, modulo 2^64, of the product of both halves of words[i] + (i + 1) STEP
    (the NH hash of J. Black et al., UMAC, CRYPTO 1999, with keys that are public). Each
    part of the vector adds to it, so the result does not depend on the threads.
    """
    words = as_writable(words)

    def total_of(first: int, end: int) -> Array:
        total = np.empty(1, np.uint64)
        _checksum(words[first:end], np.uint64(first + 1), total)
        return total

    return int(np.add.reduce(in_pieces(total_of, words.size, threads))[0])


def by_lloyd(
    sides_of: Callable[[float], Sides], mean: float, largest: float
) -> tuple[float, float, float]:
    """Return two magnitudes, the first not above the second, and the threshold between the values that they represent.

    sides_of: returns the sums on both sides of a threshold. mean, largest: of the
    magnitudes. Lloyd's algorithm, from the mean as the threshold until it does not
    change, at most 20 rounds, each of which reads the values once. If one magnitude
    suffices, both are the mean.
    """
    low, high, threshold = mean, mean, mean
    for _ in range(LLOYD_ROUNDS):
        found = sides_of(threshold)
        if not (found.below and found.above):
            break
        # Rounding could move a mean above the threshold, or above the largest
        # magnitude.
        low = min(found.sum_below / found.below, threshold)
        high = min(found.sum_above / found.above, largest)
        before, threshold = threshold, (low + high) / 2
        if threshold == before:
            break
    return low, high, threshold


def magnitudes_in_segments(values: Array, bounds: Sequence[int], *, two: bool) -> Array:
    """Return the mean and the largest magnitude of each segment, and what `by_lloyd` does: shape (segments, 5).

    values: as for `sides`. bounds: the first position of each segment, and the length.
    two: False leaves out Lloyd's rounds, and both magnitudes and the threshold are the
    mean. The bits are those of `sides` and `by_lloyd` of each segment; without a
    finite mean (NaN, infinities, sums out of range) the row is not defined. In long
    vectors several threads add up one segment after the other.
    """
    if values.size >= _LONG:
        parts = (values[first:end] for first, end in pairwise(bounds))
        rows = [_by_sides(part, two=two) if part.size else [0] * 5 for part in parts]
        return np.array(rows, np.float64)
    found = np.zeros((len(bounds) - 1, 5))
    _magnitudes(
        as_writable(widened_values(values)),
        np.asarray(bounds, np.int64),
        LLOYD_ROUNDS if two else 0,
        np.empty((3, _LANES)),
        found,
    )
    return found


def with_magnitudes(
    values: Array, bounds: Sequence[int], *, two: bool
) -> tuple[Array, Array]:
    """Return the signs of `values` with the magnitudes of their segments, and what `magnitudes_in_segments` does.

    Arguments as there. A value is compared with the threshold in float64. The values
    of a segment without a finite mean are not defined.
    """
    levels = magnitudes_in_segments(values, bounds, two=two)
    rows = np.ascontiguousarray(converted(levels[:, 2:], values.dtype))
    # Rounded down, the threshold divides values of the dtype as it does in float64.
    limits = rows[:, 2]
    np.nextafter(limits, 0, out=limits, where=limits > levels[:, 4])
    form = FORMATS[values.dtype]
    signed = np.empty_like(values)
    _with_magnitudes(
        as_writable(values).view(form.signed),
        np.asarray(bounds, np.int64),
        rows.view(form.signed),
        form.mask,
        signed.view(form.signed),
    )
    return signed, levels


def _by_sides(values: Array, *, two: bool) -> tuple[float, ...]:
    """Return the row of `magnitudes_in_segments` for one segment, which is not empty."""
    sums = sides(values, math.inf)
    mean = min(sums.sum_below / values.size, sums.largest)
    if not (two and math.isfinite(mean)):
        return mean, sums.largest, mean, mean, mean
    found = by_lloyd(partial(sides, values), mean, sums.largest)
    return mean, sums.largest, *found


def _sides_of_blocks(values: Array, threshold: np.float64) -> Array:
    """Return a row for every block; float16 is converted to float32, in pieces that fit the cache."""
    rows = np.zeros((values.size // _BLOCK + 1, 4))
    for start in range(0, values.size, _PIECE):
        part = widened_values(values[start : start + _PIECE])
        _add_sides(part, threshold, np.empty((3, _LANES)), rows[start // _BLOCK :])
    return rows


@jit
def _add_sides(values, threshold, lanes, rows):  # type: ignore[no-untyped-def]
    """Write a row for each block of values."""
    for first in range(0, values.size, _BLOCK):
        block = view(values, first, smaller(first + _BLOCK, values.size))
        below, beyond, largest, above = _sides_of(block, threshold, lanes)
        row = rows[first // _BLOCK]
        row[0], row[1], row[2], row[3] = below, beyond, largest, above


@jit
def _checksum(words, first, total):  # type: ignore[no-untyped-def]
    """Write the checksum of words, the first of which has the number `first`, counted from 1."""
    added = np.uint64(0)
    for i in range(words.size):
        mixed = words[i] + (np.uint64(i) + first) * STEP
        added += (mixed & LOW) * (mixed >> HALF)
    total[0] = added


@jit
def _magnitudes(values, edges, rounds, lanes, found):  # type: ignore[no-untyped-def]
    """Write the rows of `magnitudes_in_segments`. lanes: three buffers."""
    for i in range(len(found)):
        part = view(values, edges[i], edges[i + 1])
        if part.size == 0:
            continue
        total, _, largest, _ = _sides_of(part, np.inf, lanes)
        mean = total / part.size
        mean = largest if mean > largest else mean  # NaN stays
        low, high, threshold = mean, mean, mean
        for _ in range(rounds):
            below, beyond, _, above = _sides_of(part, threshold, lanes)
            if above == 0 or above == part.size:
                break
            low, high = (
                smaller(below / (part.size - above), threshold),
                smaller(beyond / above, largest),
            )
            before, threshold = threshold, (low + high) / 2
            if threshold == before:
                break
        found[i, 0], found[i, 1], found[i, 2], found[i, 3], found[i, 4] = (
            mean,
            largest,
            low,
            high,
            threshold,
        )


@inner
def _sides_of(values, threshold, lanes):  # type: ignore[no-untyped-def]
    """Return the sums of magnitudes up to the threshold and above it, the largest, and the number above."""
    below, beyond, largest, above = 0.0, 0.0, 0.0, 0
    for first in range(0, values.size, _BLOCK):
        end, half = smaller(first + _BLOCK, values.size), _LANES // 2
        while half >= end - first:  # the other lanes are zero
            half //= 2
        for j in range(larger(1, 2 * half)):
            lanes[0, j] = lanes[1, j] = lanes[2, j] = 0
        for start in range(first, end, _LANES):
            row = view(values, start, smaller(start + _LANES, end))
            above += _add_sides_of_row(row, threshold, lanes)
        while half:
            for j in range(half):
                lanes[0, j] += lanes[0, j + half]
                lanes[1, j] += lanes[1, j + half]
                lanes[2, j] = larger(lanes[2, j], lanes[2, j + half])
            half //= 2
        below += lanes[0, 0]
        beyond += lanes[1, 0]
        largest = larger(largest, lanes[2, 0])
    return below, beyond, largest, above


@loop
def _add_sides_of_row(row, threshold, lanes):  # type: ignore[no-untyped-def]
    """Add one value to each lane. Separate from the other loops, which makes it simpler to vectorise."""
    above = 0
    for j in range(row.size):
        x = abs(np.float64(row[j]))
        is_above = x > threshold
        lanes[0, j] += 0.0 if is_above else x
        lanes[1, j] += x if is_above else 0.0
        lanes[2, j] = x if x > lanes[2, j] else lanes[2, j]
        above += 1 if is_above else 0
    return above


@jit
def _with_magnitudes(bits, edges, rows, mask, signed):  # type: ignore[no-untyped-def]
    """Write the signs of values with the magnitudes of each segment, as bits."""
    for row in range(len(rows)):
        low, high, limit = rows[row, 0], rows[row, 1], rows[row, 2]
        for i in range(edges[row], edges[row + 1]):
            magnitude = low if bits[i] & mask <= limit else high
            signed[i] = magnitude | (bits[i] & ~mask)
