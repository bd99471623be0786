"""Sums over a gradient in one read, in float64 and in the order of the host's."""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import (
    MOST_BLOCKS,
    THREADS,
    Array,
    in_tiles,
    launch,
)
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.statistics import (
    LLOYD_ROUNDS,
    Sides,
    added_sides,
    magnitudes_by_sides,
)

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


def magnitudes_in_segments(
    values: Array, bounds: Sequence[int], *, two: bool
) -> np.ndarray[Any, Any]:
    """Return the magnitudes of each segment, as `mpicomp.kernels.host.magnitudes_in_segments` does, in host memory.

    One launch, with a block of threads for each segment of up to 2^18 values; a few for
    each longer one.
    """
    edges = np.array([bounds[:-1], bounds[1:]], np.int64)
    (long,) = (edges[1] - edges[0] > _FEW).nonzero()
    edges[1, long] = edges[0, long]  # of these nothing is read
    segments = edges.shape[1]
    rows = cupy.empty((segments, 5))
    rounds = LLOYD_ROUNDS if two else 0
    args = values, cupy.asarray(edges.T.copy()), rounds, rows
    launch("magnitudes", [values.dtype], segments, *args)
    found: np.ndarray[Any, Any] = rows.get()
    for row in long.tolist():
        part = values[bounds[row] : bounds[row + 1]]
        found[row] = magnitudes_by_sides(part, sides, two=two)
    return found


def with_magnitudes(
    values: Array, bounds: Sequence[int], rows: np.ndarray[Any, Any]
) -> Array:
    """Return the signs of `values` with one of two magnitudes, as `mpicomp.kernels.host.with_magnitudes` does.

    rows: in host memory.
    """
    form = FORMATS[values.dtype]
    signed = cupy.empty_like(values)
    if values.size:
        edges = cupy.asarray(np.asarray(bounds, np.int64))
        given = cupy.asarray(np.ascontiguousarray(rows).view(form.keys))
        blocks = min(MOST_BLOCKS, in_tiles(values.size, THREADS))
        args = values.view(form.keys), edges, len(rows), given, form.mask
        launch("with_magnitudes", [form.keys], blocks, *args, signed.view(form.keys))
    return signed


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))
