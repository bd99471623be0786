"""Sums over a gradient in one read, in float64 and in the order of the host's."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from mpicomp.arrays import magnitudes
from mpicomp.kernels.device.compiling import Array, launch
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.statistics import LLOYD_ROUNDS, Sides, added_sides, by_lloyd

_BLOCK = 16384
_FEW = 1 << 18  # values


def sides(values: Array, threshold: float) -> Sides:
    """Return the sums over the magnitudes up to a threshold and above it, as `mpicomp.kernels.host.sides` does."""
    blocks = values.size // _BLOCK + 1
    rows = cupy.empty((blocks, 4))
    launch(
        "block_sides",
        [values.dtype],
        blocks,
        values,
        values.size,
        _bits(threshold),
        rows,
    )
    return added_sides(values.size, rows.get())


def two_magnitudes(
    values: Array, mean: float, largest: float
) -> tuple[float, float, float]:
    """Return Lloyd's two magnitudes and the threshold between them, as `mpicomp.kernels.host.two_magnitudes` does.

    One launch for up to 2^18 values; beyond, one block of threads would take longer
    than a launch for each round.
    """
    if values.size > _FEW:
        return by_lloyd(lambda threshold: sides(values, threshold), mean, largest)
    found, blocks = cupy.empty(3), values.size // _BLOCK + 1
    numbers = values.size, blocks, LLOYD_ROUNDS, _bits(mean), _bits(largest)
    launch("two_magnitudes", [values.dtype], 1, values, *numbers, found)
    low, high, threshold = found.get().tolist()
    return low, high, threshold


def magnitudes_in_segments(
    values: Array, bounds: Sequence[int], *, two: bool
) -> np.ndarray[Any, Any]:
    """Return the magnitudes of each segment, as `mpicomp.kernels.host.magnitudes_in_segments` does, in host memory.

    Launches for each segment.
    """
    found = np.zeros((len(bounds) - 1, 5))
    for row, (first, end) in zip(found, pairwise(bounds), strict=True):
        if first == end:
            continue
        sums = sides(values[first:end], math.inf)
        mean = min(sums.sum_below / (end - first), sums.largest)
        row[:] = mean, sums.largest, mean, mean, mean
        if two and math.isfinite(mean):
            row[2:] = two_magnitudes(values[first:end], mean, sums.largest)
    return found


def with_magnitudes(
    values: Array, bounds: Sequence[int], rows: np.ndarray[Any, Any]
) -> Array:
    """Return the signs of `values` with one of two magnitudes, as `mpicomp.kernels.host.with_magnitudes` does.

    rows: in host memory.
    """
    each = rows if len(rows) == 1 else np.repeat(rows, np.diff(bounds), axis=0)
    low, high, limit = cupy.asarray(np.ascontiguousarray(each.T))
    # as integers: CuPy compares floats after it has flushed subnormals
    keys = FORMATS[values.dtype].keys
    is_low = magnitudes(values).view(keys) <= limit.view(keys)
    return cupy.copysign(cupy.where(is_low, low, high), values)


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))
