"""Thresholds of fitted distributions: the last stage on the device, the others on a sample in host memory."""

from itertools import chain, pairwise
from typing import Any

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import Array, in_tiles, launch, zeros
from mpicomp.kernels.device.merging import add_parts
from mpicomp.kernels.device.segments import largest
from mpicomp.kernels.device.selection import (
    Found,
    compact,
    compacting,
    select,
    selecting,
)
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.fitting import keys_above
from mpicomp.kernels.host.segments import Summands

_BLOCK, _THREADS = 16384, 256
# words: how many exceed `start`, their total, the threshold; how many exceed that, and
# are equal to it
_REPORT = 5


def sample(
    values: Array, bounds: Any, counts: Any, *, summands: Summands | None = None
) -> np.ndarray[Any, Any]:
    """Return some values of each segment in host memory, as `mpicomp.kernels.host.sample` does."""
    wide = np.promote_types(values.dtype, np.float32)
    taken = cupy.empty(int(counts.sum()), wide)
    a, scale, parts = (values, 1.0, []) if summands is None else summands
    factor, end = int(np.array([scale], wide).view(FORMATS[wide].keys)[0]), 0
    for row, (first, close) in enumerate(pairwise(bounds)):
        count = int(counts[row])
        if count:
            given = (
                a[first:close],
                factor,
                parts[row] if parts else None,
                close - first,
                count,
                taken[end : end + count],
            )
            launch("take_sample", [values.dtype], in_tiles(count, _THREADS), *given)
        end += count
    return taken.get()  # type: ignore[no-any-return]


def end_fits(
    values: Array,
    bounds: Any,
    plans: Any,
    *,
    pareto: bool,
    summands: Summands | None = None,
    threads: int | None = None,
) -> Found:
    """Return what exceeds the last threshold of each segment, as `mpicomp.kernels.host.end_fits` does.

    threads: ignored. Three launches for each segment, and one wait for all of them.
    """
    together: tuple[Array, ...] = ()
    if summands is not None and summands[1] == 1 and len(summands[2]) == 1:
        together = summands[0], summands[2][0]
    elif summands is not None:
        add_parts(*summands, values)
    form = FORMATS[values.dtype]
    rooms = np.maximum(1, plans["room"]).tolist()
    bits = values.view(form.keys)
    summed = tuple(each.view(form.keys) for each in together)
    sizes = zip(plans["size"].tolist(), rooms, strict=True)
    needed = [
        (1, 2, *compacting(size, bits), *selecting(room, bits)) for size, room in sizes
    ]
    reports, *work = zeros(_REPORT * len(plans), *chain.from_iterable(needed))
    floors = keys_above(plans["start"], values.dtype).tolist()
    parts = []
    for row, (first, end) in enumerate(pairwise(bounds)):
        report = reports[_REPORT * row : _REPORT * (row + 1)]
        done, search, *rest = work[6 * row : 6 * (row + 1)]
        some, kept = (_empty(rooms[row], bits) for _ in range(2))
        parts.append(kept)
        if first < end:
            compact(
                bits[first:end],
                form,
                floors[row],
                None,
                *some,
                report[:1],
                rest[:2],
                summed,
            )
            fit = (
                np.array(plans[row][["start", "wanted", "share"]].item())
                .view(np.uint64)
                .tolist()
            )
            blocks = in_tiles(rooms[row], _BLOCK)
            out = cupy.empty(3 * blocks), done, report[1:3], search
            launch(
                "fit_excess",
                [values.dtype],
                blocks,
                some[1],
                rooms[row],
                report[:1],
                *fit,
                int(pareto),
                *out,
            )
            select(
                some[1],
                report[:1],
                form.mask,
                search,
                some[0],
                *kept,
                report[3:],
                rest[2:],
            )
    return _collected(values, bounds, plans, parts, reports.get().reshape(-1, _REPORT))


def _empty(room: int, bits: Array) -> Found:
    return cupy.empty(room, np.intp), cupy.empty(room, bits.dtype)


def _collected(
    values: Array,
    bounds: Any,
    plans: Any,
    parts: list[Found],
    reports: np.ndarray[Any, Any],
) -> Found:
    """Set the last fields of the plans; return the entries of all segments, of one without any the largest."""
    plans["above"], plans["kept"] = reports[:, 0], reports[:, 3]
    plans["total"], plans["threshold"] = reports[:, 1:3].T.copy().view(np.float64)
    # of an empty segment nothing was launched
    plans["threshold"][np.isnan(plans["start"])] = np.nan
    found = []
    for plan, (positions, kept), (first, end) in zip(
        plans, parts, pairwise(bounds), strict=True
    ):
        part = positions[: plan["kept"]], kept[: plan["kept"]].view(values.dtype)
        if not plan["kept"]:
            part = largest(values[first:end], 1)
            plan["kept"] = part[0].size
        found.append((part[0] + first if first else part[0], part[1]))
    return (
        found[0]
        if len(found) == 1
        else tuple(map(cupy.concatenate, zip(*found, strict=True)))
    )
