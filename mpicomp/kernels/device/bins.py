"""The entries of bins that reach the bin's maximum after a part of each is added once more; a warp takes many bins."""

from collections.abc import Iterable, Sequence

import cupy
import numpy as np

from mpicomp.arrays.memory import addresses
from mpicomp.arrays.values import index_dtype
from mpicomp.kernels import NOTHING, Selected
from mpicomp.kernels.device.compiling import (
    MOST_BLOCKS,
    THREADS,
    Array,
    bits_of,
    in_tiles,
    launch,
    zeros,
)
from mpicomp.kernels.device.segments import Column, running_totals, table_of
from mpicomp.kernels.device.selection import raise_not_finite
from mpicomp.kernels.device.statistics import SUM_TILE, SUMS
from mpicomp.kernels.host.bits import FORMATS

_WARPS = THREADS // 32
_MARKED = 64  # values of two words
# Bins of two words that a warp takes in a turn; it holds 2 or 4 of them at a time.
_TURN = 8


def entries_in_bins(
    values: Array,
    parts: Sequence[Array],
    bounds: Sequence[int],
    bins: Sequence[int],
    *,
    residual: Array | None = None,
    decay: float = 1.0,
    threads: int | None = None,
) -> Selected:
    """Return the entries of bins, as `mpicomp.kernels.host.entries_in_bins` does.

    threads: ignored. Four launches and one wait, whatever the number of segments.
    """
    form = FORMATS[values.dtype]
    edges = np.asarray(bounds, np.int64)
    some = np.flatnonzero(np.diff(edges))
    index = index_dtype(values.size)
    if not some.size:
        nothing = cupy.empty(0, index), values[:0].copy()
        return Selected(*nothing, [0] * edges.size, NOTHING)
    table, (total, words, tiles) = _table(edges, some, np.asarray(bins), parts)
    count = some.size
    turn = _TURN if max(bins) <= _MARKED else 1
    share = turn * in_tiles(total, turn * _WARPS * MOST_BLOCKS)  # bins of a warp
    blocks = in_tiles(total, share * _WARPS)
    # Three words (whether a sum is bad, the complement of the first position, the last
    # position), the selected entries and the magnitude of each segment, and room for
    # means.
    whole, work = zeros(3, count, count, tiles * SUMS, count)
    report, selected, magnitudes, *mean = work
    largest = cupy.empty(total, form.keys)
    marks = cupy.empty(words, np.uint64)
    shares = cupy.empty(blocks * _WARPS, np.uint32)
    sums = values, 0, None
    if residual is not None:
        sums = residual, bits_of(decay, values.dtype), values
    marking = table, count, share, largest, marks, shares, selected, report
    launch("mark_in_bins", [form.keys], blocks, *sums, *marking)
    mask = int(form.mask)
    averaging = values, table, count, mask, largest, marks, share, shares, *mean
    launch("mean_of_bins", [form.keys], tiles, *averaging, magnitudes, selected, report)
    said = whole[: 3 + count].get()
    if said[0]:
        for each in (values, *parts):
            raise_not_finite(each)
    ends = np.zeros(edges.size, np.int64)
    ends[some + 1] = said[3:]
    places = np.cumsum(ends).tolist()
    positions = cupy.empty(places[-1], index)
    found = cupy.empty(places[-1], values.dtype)
    facts = NOTHING
    if places[-1]:
        facts = -1, -1, int(~said[1]), int(said[2])
        writing = table, count, share, marks, shares, magnitudes, positions, found
        launch("entries_of_bins", [index, form.keys], blocks, *writing)
    return Selected(positions, found, places, facts)


def _table(
    edges: Column, some: Column, bins: Column, parts: Sequence[Array]
) -> tuple[Array, Iterable[int]]:
    """Return the rows of the segments `some`, which are not empty; the numbers of bins, mark words, and tiles."""
    lengths = bins[some]
    words = 2 * in_tiles(lengths, _MARKED)
    numbers = in_tiles(edges[some + 1] - edges[some], lengths)
    before = running_totals(numbers)
    marked = running_totals(numbers * words)
    tiles = running_totals(in_tiles(numbers, SUM_TILE))
    addends = np.array(addresses(parts), np.int64)[some]
    rows = edges[some], edges[some + 1], before, marked, lengths, words, tiles, addends
    return table_of(*rows), (int(each[-1]) for each in (before, marked, tiles))
