"""The entries of bins that reach the bin's maximum after a part of each is added once more: a warp for each bin."""

from collections.abc import Sequence

import cupy
import numpy as np

from mpicomp.arrays import address, index_dtype
from mpicomp.kernels import NOTHING, Selected
from mpicomp.kernels.device.compiling import (
    MOST_BLOCKS,
    THREADS,
    Array,
    in_tiles,
    launch,
    zeros,
)
from mpicomp.kernels.device.segments import Column, running_totals, table_of
from mpicomp.kernels.device.selection import raise_not_finite
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
    keys = values.view(form.keys)
    edges = np.asarray(bounds, np.int64)
    sizes = np.diff(edges)
    some = np.flatnonzero(sizes)
    scales = np.zeros(sizes.size, values.dtype)
    places = [0] * edges.size
    index = index_dtype(values.size)
    if not some.size:
        return Selected(
            cupy.empty(0, index), values[:0].copy(), places, NOTHING
        ), scales
    lengths = np.asarray(bins)[some]
    words = in_tiles(lengths, _MARKED)
    numbers = in_tiles(sizes[some], lengths)
    before = running_totals(numbers)
    marked = running_totals(numbers * words)
    addends = np.array([address(part) for part in parts], np.int64)[some]
    table = edges[some], edges[some + 1], before, marked, lengths, words, addends
    rows = table_of(*table)
    count = some.size
    total = int(before[-1])
    blocks = in_tiles(total, THREADS)
    # bad, the first position inverted, the last one, selected entries and magnitudes of each segment
    report, sum_of_all, ticket, states = zeros(3 + 2 * count, 1, 1, blocks)
    magnitudes = report[3 + count :].view(form.keys)
    largest = cupy.empty(total, form.keys)
    counts = cupy.empty(total, np.uint32)
    marks = cupy.empty(int(marked[-1]), np.uint32)
    a, factor, out = keys, 0, None
    if summand is not None:
        a = summand[0].view(form.keys)
        number = np.float64(values.dtype.type(summand[1]))
        factor = int(number.view(np.uint64))
        out = keys
    limits = int(form.mask), int(form.infinity)
    launch(
        "mark_in_bins",
        [form.keys],
        min(MOST_BLOCKS, in_tiles(total, _WARPS)),
        a,
        factor,
        out,
        rows,
        count,
        *limits,
        largest,
        counts,
        marks,
        report,
    )
    launch(
        "mean_of_bins",
        [form.keys],
        count,
        keys,
        rows,
        limits[0],
        largest,
        counts,
        marks,
        magnitudes,
        report[3:],
        report,
    )
    said = report.get()
    if said[0]:
        for each in (values, *parts):
            raise_not_finite(each)
    scales[some] = said[3 + count :].view(values.dtype)[:count]
    ends = np.zeros(edges.size, np.int64)
    ends[some + 1] = said[3 : 3 + count]
    places = np.cumsum(ends).tolist()
    entries = places[-1]
    positions = cupy.empty(entries, index)
    found = cupy.empty(entries, form.keys)
    if not entries:
        return Selected(positions, found.view(values.dtype), places, NOTHING), scales
    launch(
        "entries_of_bins",
        [index, form.keys],
        blocks,
        keys,
        rows,
        count,
        limits[0],
        counts,
        marks,
        magnitudes,
        sum_of_all,
        ticket,
        states,
        blocks,
        positions,
        found,
    )
    facts = -1, -1, int(~said[1]), int(said[2])
    return Selected(positions, found.view(values.dtype), places, facts), scales
