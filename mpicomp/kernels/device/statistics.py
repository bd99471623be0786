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
    table_on_device,
    upload,
)
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.statistics import LLOYD_ROUNDS, Sides, added_sides

SUM_TILE = 16384  # values that a block of threads adds up
SUMS = 4  # of a tile
_LEVELS = 5


def sides(values: Array, threshold: float) -> Sides:
    """Return the sums over the magnitudes up to a threshold and above it, as `mpicomp.kernels.host.sides` does."""
    blocks = values.size // SUM_TILE + 1
    rows = cupy.empty((blocks, SUMS))
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

    One launch and one wait, whatever the number and the lengths of the segments.
    """
    edges = np.array(bounds, np.int64)
    tiles = in_tiles(np.diff(edges), SUM_TILE)
    # bounds, tiles before, and those of segments of several; then what the kernel writes
    rows = np.zeros((edges.size, 6 + _LEVELS), np.int64)
    rows[:, 0] = edges
    rows[:-1, 1] = edges[1:]
    rows[1:, 2] = tiles.cumsum()
    rows[1:, 3] = np.where(tiles > 1, tiles, 0).cumsum()
    found = upload(rows)
    rounds = LLOYD_ROUNDS if two else 0
    total, several = rows[-1, 2:4].tolist()
    if total:
        sums = cupy.empty((total, SUMS))
        args = values, found, tiles.size, rounds, sums
        launch("magnitudes", [values.dtype], total + rounds * several, *args)
    levels: np.ndarray[Any, Any] = found.get()[:-1, -_LEVELS:].view(np.float64)
    return levels


def with_magnitudes(
    values: Array, bounds: Sequence[int], rows: np.ndarray[Any, Any]
) -> Array:
    """Return the signs of `values` with one of two magnitudes, as `mpicomp.kernels.host.with_magnitudes` does.

    rows: in host memory.
    """
    form = FORMATS[values.dtype]
    signed = cupy.empty_like(values)
    if values.size:
        edges = table_on_device(np.array(bounds, np.int64))
        given = upload(np.ascontiguousarray(rows).view(form.keys))
        blocks = min(MOST_BLOCKS, in_tiles(values.size, THREADS))
        args = values.view(form.keys), edges, len(rows), given, form.mask
        launch("with_magnitudes", [form.keys], blocks, *args, signed.view(form.keys))
    return signed


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))
