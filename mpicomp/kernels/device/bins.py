"""The entries of bins that reach the bin's maximum after a part of each is added once more: a warp for each bin."""

from collections.abc import Iterable, Sequence

import cupy
import numpy as np

from mpicomp.arrays import addresses, index_dtype
from mpicomp.kernels import NOTHING, Selected
from mpicomp.kernels.device.compiling import (
    MOST_BLOCKS,
    THREADS,
    Array,
    in_tiles,
    launch,
    zeros,
)
from mpicomp.kernels.device.segments import Column, Vector, running_totals, table_of
from mpicomp.kernels.device.selection import raise_not_finite
from mpicomp.kernels.device.statistics import SUM_TILE, SUMS
from mpicomp.kernels.host.bits import FORMATS

_WARPS = THREADS // 32
_MARKED = 32  # values of a word


def entries_in_bins(
    values: Array,
    parts: Sequence[Array],
    bounds: Sequence[int],
    bins: Sequence[int],
    *,
    summand: tuple[Array, float] | None = None,
    threads: int | None = None,
) -> tuple[Selected, Column]:
    """Return the entries of bins, as `mpicomp.kernels.host.entries_in_bins` does; the magnitudes in host memory.

    threads: ignored. Four launches and one wait, whatever the number of segments.
    """
    form = FORMATS[values.dtype]
    edges = np.asarray(bounds, np.int64)
    sizes = np.diff(edges)
    some = np.flatnonzero(sizes)
    scales = np.zeros(sizes.size, values.dtype)
    index = index_dtype(values.size)
    if not some.size:
        nothing = cupy.empty(0, index), values[:0].copy()
        return Selected(*nothing, [0] * edges.size, NOTHING), scales
    table, (total, words, tiles) = _table(edges, some, np.asarray(bins), parts)
    count = some.size
    blocks = in_tiles(total, THREADS)
    # bad, the first position inverted, the last one, selected entries and magnitudes of each segment
    whole, work = zeros(3, count, count, tiles * SUMS, count, 1, 1, blocks)
    report, selected, magnitudes, added, arrived, *scanned = work
    largest = cupy.empty(total, form.keys)
    marked = cupy.empty(total, np.uint32), cupy.empty(words, np.uint32)
    vector = Vector.of(values, summand and (*summand, parts))
    sums = vector.source, vector.factor, vector.out
    mask = int(form.mask)
    marking = *sums, table, count, mask, int(form.infinity), largest, *marked, report
    warps = min(MOST_BLOCKS, in_tiles(total, _WARPS))
    launch("mark_in_bins", [form.keys], warps, *marking)
    meaning = values, table, count, mask, largest, *marked, added, arrived
    launch("mean_of_bins", [form.keys], tiles, *meaning, magnitudes, selected, report)
    said = whole[: 3 + 2 * count].get()
    if said[0]:
        for each in (values, *parts):
            raise_not_finite(each)
    scales[some] = said[3 + count :].view(values.dtype)[:count]
    ends = np.zeros(edges.size, np.int64)
    ends[some + 1] = said[3 : 3 + count]
    places = np.cumsum(ends).tolist()
    positions = cupy.empty(places[-1], index)
    found = cupy.empty(places[-1], values.dtype)
    facts = NOTHING
    if places[-1]:
        facts = -1, -1, int(~said[1]), int(said[2])
        writing = *marked, magnitudes, *scanned, blocks, positions, found
        dtypes = [index, form.keys]
        launch("entries_of_bins", dtypes, blocks, values, table, count, mask, *writing)
    return Selected(positions, found, places, facts), scales


def _table(
    edges: Column, some: Column, bins: Column, parts: Sequence[Array]
) -> tuple[Array, Iterable[int]]:
    """Return a row for each of some segments, which are not empty; the numbers of bins, words of marks, and tiles."""
    lengths = bins[some]
    words = in_tiles(lengths, _MARKED)
    numbers = in_tiles(edges[some + 1] - edges[some], lengths)
    before = running_totals(numbers)
    marked = running_totals(numbers * words)
    tiles = running_totals(in_tiles(numbers, SUM_TILE))
    addends = np.array(addresses(parts), np.int64)[some]
    rows = edges[some], edges[some + 1], before, marked, lengths, words, tiles, addends
    return table_of(*rows), (int(each[-1]) for each in (before, marked, tiles))
