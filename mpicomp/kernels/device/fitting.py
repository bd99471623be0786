"""Thresholds of fitted distributions: the last stage on the device, the others on a sample in host memory."""

from typing import Any

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
    upload,
    zeros,
)
from mpicomp.kernels.device.segments import (
    TILES,
    Candidates,
    Vector,
    largest_in_segments,
    running_totals,
    table_of,
)
from mpicomp.kernels.device.statistics import SUM_TILE, SUMS
from mpicomp.kernels.host.fitting import keys_above
from mpicomp.kernels.host.segments import Summands

_SAID = 3  # words: of a selection


def sample(
    values: Array, bounds: Any, counts: Any, *, summands: Summands | None = None
) -> np.ndarray[Any, Any]:
    """Return some values of each segment in host memory, as `mpicomp.kernels.host.sample` does."""
    wide = np.promote_types(values.dtype, np.float32)
    taken = cupy.empty(int(counts.sum()), wide)
    if not taken.size:
        return taken.get()  # type: ignore[no-any-return]
    a, scale, parts = (values, 1.0, []) if summands is None else summands
    edges = np.asarray(bounds, np.int64)
    some = np.flatnonzero(counts)
    addends = np.zeros(edges.size - 1, np.int64)
    addends[: len(parts)] = addresses(parts)
    before = running_totals(counts[some])
    rows = table_of(edges[some], edges[some + 1], before, addends[some])
    factor = int(np.float64(wide.type(scale)).view(np.uint64))
    blocks = min(MOST_BLOCKS, in_tiles(taken.size, THREADS))
    launch("take_samples", [values.dtype], blocks, a, factor, rows, some.size, taken)
    return taken.get()  # type: ignore[no-any-return]


def end_fits(
    values: Array,
    bounds: Any,
    plans: Any,
    *,
    pareto: bool,
    summands: Summands | None = None,
    threads: int | None = None,
) -> Selected:
    """Return what exceeds the last threshold of each segment, as `mpicomp.kernels.host.end_fits` does.

    threads: ignored. Five launches and one wait for all segments, and those of a
    selection if none exceeds the threshold in some.
    """
    edges = np.asarray(bounds, np.int64)
    some = np.flatnonzero(np.diff(edges))
    places = [0] * edges.size
    index = index_dtype(values.size)
    if not some.size:
        return Selected(cupy.empty(0, index), values[:0].copy(), places, NOTHING)
    own = plans[some]
    vector = Vector.of(values, summands)
    room = np.maximum(1, own["room"])
    candidates = Candidates.of(
        vector, edges[some], edges[some + 1], vector.addends_of(some, plans.size), index
    )
    found, report = _fitted(candidates, own, room, int(room.sum()), pareto)
    count = some.size
    reached = int(report[_SAID + count])
    if (
        reached > room.sum()
    ):  # a sample misled: what the segments behind it have was cut
        candidates = candidates.without_sum()
        found, report = _fitted(candidates, own, room, reached, pareto)
    starts, kept, fits = np.split(report[_SAID:], [count + 1, 2 * (count + 1)])
    own["above"] = np.diff(starts)
    own["kept"] = np.diff(kept)
    own["total"], own["threshold"] = fits.view(np.float64).reshape(-1, 2).T
    own["threshold"][np.isnan(own["start"])] = np.nan
    plans[some] = own
    # of an empty segment nothing is known
    plans["threshold"][plans["size"] == 0] = np.nan
    ends = np.zeros(edges.size, np.int64)
    ends[some + 1] = own["kept"]
    places = np.cumsum(ends).tolist()
    entries = places[-1]
    is_finite = np.isfinite(own["total"]).all()
    facts = (-1, -1, int(report[1]), int(report[2])) if entries and is_finite else None
    kept_values = found[1][:entries].view(values.dtype)
    selected = Selected(found[0][:entries], kept_values, places, facts)
    is_empty = (plans["kept"] == 0) & (plans["size"] > 0)
    if is_empty.any():
        k = is_empty.astype(np.int64)
        sizes = plans["size"].clip(1)
        largest = largest_in_segments(values, bounds, k, sizes, k)
        selected = selected.replaced(largest, is_empty)
        plans["kept"] = np.diff(selected.places)
    return selected


def _fitted(
    candidates: Candidates, plans: Any, room: Any, most: int, pareto: bool
) -> tuple[tuple[Array, Array], np.ndarray[Any, Any]]:
    """Return room with the entries that exceed the last thresholds, and the report of the kernels."""
    count = plans.size
    form = candidates.vector.form
    blocks = running_totals(in_tiles(room, SUM_TILE))
    tiles = running_totals(in_tiles(room, TILES[form.keys.itemsize]))
    fields = (plans[name].view(np.int64) for name in ("start", "wanted", "share"))
    rows = table_of(blocks, tiles, *fields)
    whole, (said, starts, kept_starts, fits, done, ticket, states) = zeros(
        _SAID, count + 1, count + 1, 2 * count, count, 1, int(tiles[-1])
    )
    floors = keys_above(plans["start"], form.floating).astype(np.uint64)
    indices, keys = candidates.compacted(upload(floors), most, starts)
    sums = cupy.empty(SUMS * int(blocks[-1]))
    limits = cupy.empty(count, np.uint64)
    fitting = rows, count, starts, int(pareto), sums, done, fits
    number = int(blocks[-1])
    launch("fit_excess", [form.floating], number, keys, most, *fitting, limits)
    found = cupy.empty(most, indices.dtype), cupy.empty(most, keys.dtype)
    given = indices, keys, most, rows, count, starts, form.mask, limits, ticket, states
    dtypes = [indices.dtype, keys.dtype]
    launch("exceeding", dtypes, int(tiles[-1]), *given, kept_starts, *found, said)
    return found, whole[: _SAID + 4 * count + 2].get()
