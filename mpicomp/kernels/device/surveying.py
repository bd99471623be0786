"""A survey of a gradient: sums in one read, and the few values that the next steps are expected to need."""

import math
from typing import Any

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import Array, in_tiles, launch, zeros
from mpicomp.kernels.device.selection import Found, exceeding, largest_magnitude
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.surveying import Sums, in_range, limits_of, unscaled
from mpicomp.kernels.host.surveying import Survey as HostSurvey

__all__ = ["Sums", "Survey", "sample", "survey"]

_COLUMNS, _TILE = 32, 1024
_GROUP, _WARPS = 16 * _TILE, 8  # values that a warp adds up; warps of a block
_SUMS, _FOLDED = 6 * _COLUMNS, 4  # sums of a group; those that one block folds
_LINE, _STRIDE = 16, 1024


class Survey(HostSurvey):
    """The result of one read of a vector on a device: the sums are on the host, the stored values on the device."""

    def beyond(self, threshold: float) -> Sums | None:
        """Return the sums over the magnitudes above a threshold; None unless it lies between `low` and `high`."""
        if not (self.complete and self.low <= threshold <= self.high):
            return None
        between: Any = self.between
        return HostSurvey(*self._replace(between=between.get().astype(np.float64))).beyond(threshold)

    def exceeding(self, threshold: float) -> Found | None:
        """Return the result of `exceeding` for the whole vector; None if the threshold is below the cut."""
        if not (self.complete and self.cut <= threshold):
            return None
        chosen, found = exceeding(self.values, threshold)
        return self.positions[chosen], found


def survey(values: Array, low: float = 0.0, high: float = 0.0, cut: float = math.inf, share: float = 0.01) -> Survey:
    """Survey `values` as `mpicomp.kernels.host.survey` does: the same bits in all sums, positions in order."""
    thresholds = low, high, max(high, cut)
    found = in_range(
        lambda scaled_by: _surveyed(values, thresholds, share, scaled_by),
        largest_magnitude(values, max(1, values.size >> 10)),
        lambda: largest_magnitude(values),
    )
    assert isinstance(found, Survey)
    return found


def sample(values: Array) -> Array | None:
    """Return one of 64 values, as `mpicomp.kernels.host.sample` does. None of a short vector."""
    tiles = values.size // (_STRIDE * _COLUMNS)
    if tiles < _LINE:
        return None
    places = values[: tiles * _STRIDE * _COLUMNS].reshape(tiles, _COLUMNS, _STRIDE)[:, :, :_LINE]
    return cupy.ascontiguousarray(places.transpose(0, 2, 1)).reshape(-1)


def _surveyed(values: Array, thresholds: tuple[float, float, float], share: float, scaled_by: float) -> Survey:
    wide, keys, shift, scale = limits_of(values.dtype, thresholds, scaled_by)
    scaling = np.array([scale, shift * scale], wide).view(FORMATS[wide].keys)
    blocks = in_tiles(values.size // _TILE + 1, _WARPS * _GROUP // _TILE)
    groups, room = blocks * _WARPS, int(share * values.size) + 2 * _TILE
    sums = cupy.empty(groups * _SUMS)
    positions, found, between = cupy.empty(room, np.intp), cupy.empty(room, values.dtype), cupy.empty(room, wide)
    report, ticket, states = zeros(_SUMS + 3, 1, 2 * blocks)  # its two parts are copied at once
    totals, filled = report[:_SUMS].view(np.float64), report[_SUMS:]
    limits = (int(each) for each in (*keys[1:], *scaling))
    out = sums, positions, found, between, room, filled, ticket, states, blocks
    launch("survey", [values.dtype], blocks, values, values.size, *limits, *out)
    launch("fold_groups", [], _SUMS // _FOLDED, sums, groups, totals)
    together = report.get()
    count, held, full = together[_SUMS:].tolist()
    columns = unscaled(together[:_SUMS].view(np.float64), groups * _GROUP, float(scale))
    return Survey(columns, *thresholds, float(shift), between[:held], positions[:count], found[:count], not full)
