"""The entries of bins that reach the bin's maximum after a part of each is added once more: a warp for each bin."""

from collections.abc import Sequence

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import (
    MOST_BLOCKS,
    THREADS,
    Array,
    in_tiles,
    launch,
    zeros,
)
from mpicomp.kernels.device.merging import add_parts
from mpicomp.kernels.device.selection import raise_not_finite
from mpicomp.kernels.host.bins import Magnitudes
from mpicomp.kernels.host.bits import FORMATS

_WARPS = THREADS // 32


def entries_in_bins(
    values: Array,
    parts: Sequence[Array],
    bounds: Sequence[int],
    bins: Sequence[int],
    magnitudes: Magnitudes,
    *,
    summand: tuple[Array, float] | None = None,
    threads: int | None = None,
) -> tuple[Array, Array, np.ndarray]:
    """Return the entries of bins, as `mpicomp.kernels.host.entries_in_bins` does; the last array in host memory.

    magnitudes: called with the maxima on the device, and places in host memory, where
    it returns the magnitudes. threads: ignored. Two launches, whatever the number of
    segments, and those of the sum.
    """
    if summand is not None:
        add_parts(*summand, parts, values)
    form, edges = FORMATS[values.dtype], np.asarray(bounds, np.int64)
    places = np.append(0, np.cumsum(-(-np.diff(edges) // bins)))
    if not values.size:
        return cupy.empty(0, np.int32), values[:0].copy(), places
    addends, count = (
        parts[0] if len(parts) == 1 else cupy.concatenate(list(parts)),
        int(places[-1]),
    )
    table = cupy.asarray(np.concatenate([edges, places, np.asarray(bins, np.int64)]))
    there = (
        table[: edges.size],
        table[edges.size : 2 * edges.size],
        table[2 * edges.size :],
        edges.size - 1,
        count,
    )
    keys, largest = (
        (values.view(form.keys), addends.view(form.keys)),
        cupy.empty(count, values.dtype),
    )
    whole = zeros(count + 1)[0].view(np.int64)
    counts, blocks = whole[1:], min(MOST_BLOCKS, in_tiles(count, _WARPS))
    bad = cupy.zeros(1, np.uint64)
    args = (
        *keys,
        *there,
        form.mask,
        int(form.infinity),
        largest.view(form.keys),
        counts,
        bad,
    )
    launch("bin_maxima", [form.keys], blocks, *args)
    ends = cupy.cumsum(whole)
    *before, failed = (
        cupy.concatenate([ends[there[1]], bad.view(np.int64)]).get().tolist()
    )
    if failed:
        for each in (values, *parts):
            raise_not_finite(each)
    signs = cupy.asarray(magnitudes(largest, places))
    positions, found = (
        cupy.empty(before[-1], np.int64),
        cupy.empty(before[-1], values.dtype),
    )
    written = counts, ends[1:], signs.view(form.keys), positions, found.view(form.keys)
    launch(
        "bin_entries",
        [form.keys],
        blocks,
        *keys,
        *there,
        form.mask,
        largest.view(form.keys),
        *written,
    )
    short = positions.astype(np.int32) if values.size < 1 << 31 else positions
    return short, found, np.array(before)
