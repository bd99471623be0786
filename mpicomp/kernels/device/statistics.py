"""Sums over a gradient in one read, in float64 and in the order of the host's."""

import math

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import Array, launch
from mpicomp.kernels.device.selection import first_not_finite
from mpicomp.kernels.host.statistics import Moments, Sides, added_sides

_BLOCK = 16384


def moments(values: Array) -> Moments:
    """Return the moments of `values`, as `mpicomp.kernels.host.moments` does: the same bits."""
    blocks = values.size // _BLOCK + 1  # the last one is padded with zeros, and may have nothing else
    sums, counts = cupy.empty(4 * blocks), cupy.empty(2 * blocks, np.int64)
    launch("block_moments", [values.dtype], blocks, values, values.size, sums, counts, blocks)
    found = cupy.empty(6)
    totals, numbers = found[:4], found[4:].view(np.int64)
    launch("add_moments", [], 1, sums, counts, blocks, totals, numbers)
    together = found.get()
    absolute, squares, largest, product = together[:4].tolist()
    nonzeros, exponents = together[4:].view(np.int64).tolist()
    not_finite = -1 if math.isfinite(absolute) else first_not_finite(values)
    logs = math.log(product) if product > 0 else math.nan
    return Moments(nonzeros, absolute, squares, logs + exponents * math.log(2), largest, not_finite)


def sides(values: Array, threshold: float) -> Sides:
    """Return the sums over the magnitudes up to a threshold and above it, as `mpicomp.kernels.host.sides` does."""
    blocks = values.size // _BLOCK + 1
    sums, above = cupy.empty((blocks, 2)), cupy.empty(blocks, np.int64)
    limit = int(np.float64(threshold).view(np.int64))
    launch("block_sides", [values.dtype], blocks, values, values.size, limit, sums, above)
    return added_sides(values.size, sums.get(), above.get())
