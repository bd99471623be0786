"""Sums over a gradient in one read, in float64 and in the order of the host's; and a checksum of an array."""

from collections.abc import Sequence
from functools import lru_cache
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
    zeros,
)
from mpicomp.kernels.device.segments import running_totals
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.statistics import HALF, LLOYD_ROUNDS, LOW, STEP

SUM_TILE = 16384  # values that a block of threads adds up
SUMS = 4  # of a tile
_LEVELS = 5
# Words, at most, that `checksum` copies at a time.
_WORDS = 1 << 24
# Words of a segment, the struct `Lloyd` in statistics.cu; the levels follow two other
# words.
_FOUND = 10


def checksum(words: Array) -> int:
    """Return 64 bits that depend on the values and the order of words, as `mpicomp.kernels.host.checksum` does."""
    total = cupy.zeros(1, np.uint64)
    for first in range(0, words.size, _WORDS):
        piece = words[first : first + _WORDS]
        mixed = cupy.arange(first + 1, first + 1 + piece.size, dtype=np.uint64)
        mixed *= STEP
        mixed += piece
        total += ((mixed & LOW) * (mixed >> HALF)).sum(dtype=np.uint64)
    return int(total.get()[0])


def with_magnitudes(
    values: Array, bounds: Sequence[int], *, two: bool
) -> tuple[Array, np.ndarray[Any, Any]]:
    """Return what `mpicomp.kernels.host.with_magnitudes` does, the rows of segments in host memory.

    Two launches and one wait, whatever the number and the lengths of the segments.
    """
    form = FORMATS[values.dtype]
    signed = cupy.empty_like(values)
    rounds = LLOYD_ROUNDS if two else 0
    parts, tiles, several = _parts(tuple(bounds))
    count = len(parts) - 1
    found, (rows,) = zeros(len(parts) * _FOUND)
    if tiles:
        table = table_on_device(parts)
        sums = cupy.empty((tiles, SUMS))
        jobs = tiles + rounds * several
        args = values, table, rows, count, rounds, sums
        launch("magnitudes", [form.keys], jobs, *args)
        blocks = min(MOST_BLOCKS, in_tiles(values.size, THREADS))
        given = values, table, rows, count, form.mask, signed
        launch("with_magnitudes", [form.keys], blocks, *given)
    words = found.get().reshape(-1, _FOUND)[:-1, 2 : 2 + _LEVELS]
    return signed, words.view(np.float64)


# Most steps select as many entries of each segment as the step before.
@lru_cache(maxsize=64)
def _parts(bounds: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return the rows of `Tiled` in statistics.cu, the number of tiles, and how many are in segments of several."""
    edges = np.array(bounds, np.int64)
    tiles = in_tiles(np.diff(edges), SUM_TILE)
    before = running_totals(tiles)
    several = running_totals(np.where(tiles > 1, tiles, 0))
    rows = np.stack([edges, np.append(edges[1:], 0), before, several], axis=1)
    return rows, int(before[-1]), int(several[-1])
