"""Thresholds of fitted distributions: fits to samples and to what exceeds their threshold, on the device."""

from functools import partial
from typing import Any

import cupy
import numpy as np

from mpicomp.arrays.values import index_dtype
from mpicomp.kernels import FIRST, NOTHING, Selected, Summands
from mpicomp.kernels.device.compiling import (
    Array,
    in_tiles,
    launch,
    zeros,
)
from mpicomp.kernels.device.segments import (
    Candidates,
    Vector,
    largest_in_segments,
    running_totals,
    table_of,
)
from mpicomp.kernels.device.selection import TILES
from mpicomp.kernels.device.statistics import SUM_TILE, SUMS

_SAID = 3  # words: of a selection
_FIT = slice(3, 10)  # fields of a plan that are computed on the device
_SAMPLE_TILE = 1024  # values of a sample that a block takes
# Values of a sample for which there is room above a threshold, beyond twice those
# expected.
_MORE = 64


def select_by_fits(
    values: Array,
    bounds: Any,
    plans: Any,
    *,
    distribution: str,
    by_count: bool,
    summands: Summands | None = None,
    threads: int | None = None,
) -> Selected:
    """Return what exceeds the last threshold of each segment, as `mpicomp.kernels.host.select_by_fits` does.

    threads: ignored. Five launches and one wait for all segments; again, with as much
    room as is needed, if more than twice as many candidates as expected exceed a
    threshold, and those of a selection if none exceeds it in some.
    """
    edges = np.asarray(bounds, np.int64)
    some = np.flatnonzero(np.diff(edges))
    index = index_dtype(values.size)
    if not some.size:
        places = [0] * edges.size
        return Selected(cupy.empty(0, index), values[:0].copy(), places, NOTHING)
    own = plans[some]
    vector = Vector.of(values, summands)
    addends = vector.addends_of(some, plans.size)
    given = vector, edges[some], edges[some + 1], addends, index
    candidates = Candidates.of(*given)
    model = distribution != "exponential", distribution == "gamma", by_count
    room = _room(own)
    found, report = _fitted(candidates, own, room, model)
    above = np.diff(report[_SAID : _SAID + some.size + 1])
    if (above > room).any():
        room = np.maximum(room, above)
        found, report = _fitted(candidates.without_sum(), own, room, model)
    count = some.size + 1
    starts, kept, fits = np.split(report[_SAID:], [count, 2 * count])
    own.view(np.int64).reshape(some.size, -1)[:, _FIT] = fits.reshape(some.size, -1)
    own["above"] = np.diff(starts)
    own["kept"] = np.diff(kept)
    # The fields of an empty segment are unknown.
    for name in ("start", "share", "threshold"):
        plans[name] = np.nan
    plans[some] = own
    ends = np.zeros(edges.size, np.int64)
    ends[some + 1] = own["kept"]
    places = np.cumsum(ends).tolist()
    entries = places[-1]
    is_finite = np.isfinite(own["total"]).all()
    facts = (-1, -1, int(report[1]), int(report[2])) if entries and is_finite else None
    kept_values = found[1][:entries].view(values.dtype)
    selected = Selected(found[0][:entries], kept_values, places, facts)
    selected = selected.filled(edges, partial(largest_in_segments, values))
    plans["kept"] = np.diff(selected.places)
    return selected


def _room(plans: Any) -> Any:
    """Return room for the magnitudes above the threshold before the last: more than twice as many as are expected."""
    share = np.minimum(1, plans["wanted"] / plans["size"])
    stages = np.maximum(2, plans["stages"])
    # All steps from the first threshold to the last have the same ratio.
    before = FIRST * (share / FIRST) ** ((stages - 2) / (stages - 1))
    share = np.where((plans["stages"] > 1) & (share < FIRST), before, share)
    room = plans["size"] * (2 * share + _MORE / plans["sample"])
    return np.minimum(plans["size"], room.astype(np.int64))


def _fitted(
    candidates: Candidates, plans: Any, room: Any, model: tuple[bool, ...]
) -> tuple[tuple[Array, Array], np.ndarray[Any, Any]]:
    """Return arrays that begin with the entries above the last thresholds, and the report of the kernels."""
    vector = candidates.vector
    form = vector.form
    count = plans.size
    most = int(room.sum())
    sampled = running_totals(plans["sample"])
    sampling = running_totals(in_tiles(plans["sample"], _SAMPLE_TILE))
    blocks = running_totals(in_tiles(room, SUM_TILE))
    tiles = running_totals(in_tiles(room, TILES[form.keys.itemsize]))
    numbers = sampled, sampling, blocks, tiles
    fields = candidates.addend, plans["stages"], plans["wanted"].view(np.int64)
    rows = table_of(candidates.first, candidates.end, *numbers, *fields)
    words = _FIT.stop - _FIT.start
    whole, (said, starts, kept_starts, fits, done, summed, ticket, states) = zeros(
        _SAID, count + 1, count + 1, words * count, count, count, 1, int(tiles[-1])
    )
    limits = cupy.empty(count, np.uint64)
    wide = np.promote_types(form.floating, np.float32)
    taken = cupy.empty(int(sampled[-1]), wide)
    table = rows, count
    sample = vector.source, vector.factor, *table, *model, int(form.infinity)
    number = int(sampling[-1])
    launch("fit_samples", [form.floating], number, *sample, taken, done, fits, limits)
    indices, keys = candidates.compacted(limits, most, starts)
    sums = cupy.empty(SUMS * int(blocks[-1]))
    excess = keys, most, *table, starts, model[0], sums, summed, fits, limits
    launch("fit_excess", [form.floating], int(blocks[-1]), *excess)
    found = cupy.empty(most, indices.dtype), cupy.empty(most, keys.dtype)
    given = indices, keys, most, *table, starts, form.mask, limits, ticket, states
    dtypes = [indices.dtype, keys.dtype]
    launch("exceeding", dtypes, int(tiles[-1]), *given, kept_starts, *found, said)
    return found, whole[: _SAID + 2 * (count + 1) + words * count].get()
