"""Sums over a gradient in one read, in float64 and in the order of the host's."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import Array, launch
from mpicomp.kernels.device.selection import first_not_finite
from mpicomp.kernels.host.statistics import LLOYD_ROUNDS, Moments, Sides, added_sides, by_lloyd

_BLOCK = 16384
_FEW = 1 << 18  # values


def moments(values: Array) -> Moments:
    """Return the moments of `values`, as `mpicomp.kernels.host.moments` does: the same bits."""
    blocks = values.size // _BLOCK + 1  # the last one is padded with zeros, and may have nothing else
    sums, counts = cupy.empty(3 * blocks), cupy.empty(2 * blocks, np.int64)
    launch("block_moments", [values.dtype], blocks, values, values.size, sums, counts, blocks)
    found = cupy.empty(5)
    totals, numbers = found[:3], found[3:].view(np.int64)
    launch("add_moments", [], 1, sums, counts, blocks, totals, numbers)
    together = found.get()
    absolute, largest, product = together[:3].tolist()
    nonzeros, exponents = together[3:].view(np.int64).tolist()
    not_finite = -1 if math.isfinite(absolute) else first_not_finite(values)
    logs = math.log(product) if product > 0 else math.nan
    return Moments(nonzeros, absolute, logs + exponents * math.log(2), largest, not_finite)


def sides(values: Array, threshold: float) -> Sides:
    """Return the sums over the magnitudes up to a threshold and above it, as `mpicomp.kernels.host.sides` does."""
    blocks = values.size // _BLOCK + 1
    found = cupy.empty(3 * blocks)  # in one copy
    sums, above = found[: 2 * blocks], found[2 * blocks :]
    launch("block_sides", [values.dtype], blocks, values, values.size, _bits(threshold), sums, above)
    together = found.get()
    return added_sides(values.size, together[: 2 * blocks].reshape(blocks, 2), together[2 * blocks :].view(np.int64))


def two_magnitudes(values: Array, mean: float, largest: float) -> tuple[float, float, float]:
    """Return Lloyd's two magnitudes and the threshold between them, as `mpicomp.kernels.host.two_magnitudes` does.

    One launch for up to 2^18 values; beyond, one block of threads would take longer than a launch for each round.
    """
    if values.size > _FEW:
        return by_lloyd(lambda threshold: sides(values, threshold), mean, largest)
    found, blocks = cupy.empty(3), values.size // _BLOCK + 1
    numbers = values.size, blocks, LLOYD_ROUNDS, _bits(mean), _bits(largest)
    launch("two_magnitudes", [values.dtype], 1, values, *numbers, found)
    low, high, threshold = found.get().tolist()
    return low, high, threshold


def magnitudes_in_segments(values: Array, bounds: Sequence[int], *, two: bool) -> np.ndarray[Any, Any]:
    """Return the magnitudes of each segment, as `mpicomp.kernels.host.magnitudes_in_segments` does, in host memory.

    Launches for each segment.
    """
    found = np.zeros((len(bounds) - 1, 5))
    for row, (first, end) in zip(found, pairwise(bounds), strict=True):
        if first == end:
            continue
        sums = moments(values[first:end])
        mean = min(sums.absolute / (end - first), sums.largest)
        row[:] = mean, sums.largest, mean, mean, mean
        if two and math.isfinite(mean):
            row[2:] = two_magnitudes(values[first:end], mean, sums.largest)
    return found


def with_magnitudes(values: Array, bounds: Sequence[int], rows: np.ndarray[Any, Any]) -> Array:
    """Return the signs of `values` with one of two magnitudes, as `mpicomp.kernels.host.with_magnitudes` does.

    rows: in host memory.
    """
    each = rows if len(rows) == 1 else np.repeat(rows, np.diff(bounds), axis=0)
    low, high, limit = cupy.asarray(np.ascontiguousarray(each.T))
    return cupy.copysign(cupy.where(cupy.abs(values) <= limit, low, high), values)


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))
