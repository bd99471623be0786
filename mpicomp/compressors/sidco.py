"""SIDCo: select by a threshold that a fitted distribution gives in closed form; no sorting, and one read.

Source: A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini, M. Canini, "An efficient
statistical-based gradient compression technique for distributed training systems",
MLSys 2021 (arXiv 2101.10761).

The magnitudes are fitted by their moments. The first stage finds the threshold that a quarter of them is expected to
exceed; each further stage fits the magnitudes above the threshold before it, and so follows the tail. The last
threshold is reached in steps of one ratio. Few stages have long steps: with two stages the last step is from 25 % to
0.1 %. Gradients with error feedback end in a tail of another shape than the magnitudes a quarter of them exceeds, and a
long step then misses by factors that change from call to call; no controller can follow. Their scale does not matter:
thresholds scale with the vector.

Under the controller each stage asks for the share that is still missing, by the count
of the magnitudes above the threshold before it, so that an error of one stage does not
last. All stages but the last see a sample: a 64th of a segment, from 4096 to 32768
values; what decides in one stage, or without the counts, takes up to 2^20. One read
adds the residual and stores what exceeds the threshold before the last, a few times as
many entries as are sent; the last stage fits and selects from those. Where the sample
misled the selection is exact. Equal vectors give equal bits.

Differences from the paper: a controller of the density, and `stages` of 4, by default;
with `adaptation="published"` the number of stages starts at `stages`, where the authors
start at one; stages by the counts under the controller; all but the last on a sample;
exact zeros are excluded from the fit, whose target is adjusted to the fraction of
non-zeros; gamma's quantile is exact, where the paper approximates it; if the moments
show no spread, the exponential is fitted; the largest entry is always sent.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for, to_numpy
from mpicomp.arrays.values import check_finite
from mpicomp.compressors.base import (
    SegmentedCompressor,
    known,
)
from mpicomp.compressors.common import counts_of, to_density
from mpicomp.correction import Correction
from mpicomp.kernels import FIRST, PLAN, Selected
from mpicomp.settings import to_choice, to_integer
from mpicomp.vector import SparseVector

DISTRIBUTIONS = "exponential", "gamma", "pareto"
ADAPTATIONS = "control", "published", None

# Values of a sample: the least, the most, and the most where counts correct no error.
_SAMPLE = 1 << 12, 1 << 15, 1 << 20

# The exponent of the controller, and the bounds of its factor.
_GAIN = 0.25
_LIMITS = 0.02, 50.0
# Calls of a period of the published adaptation, and the relative error that it accepts.
_PERIOD = 5
_TOLERANCE = 0.2
# The published adaptation reaches no more stages at any density above 1e-19.
_MAX_STAGES = 64


class SIDCo(SegmentedCompressor):
    """Select by a threshold from a fitted distribution: about density n entries of n.

    Where a sample misled, and where sums overflow, no stage is fitted: the selection is
    exact.

    Args:
        density: the fraction of the entries to select, 0 < density <= 1.
        distribution: of the magnitudes: "exponential" (fastest), "gamma" (the stages after the
            first fit a Pareto) or "pareto" (generalised; for heavy tails).
        stages: 1 to 64; one is used if the density is 0.25 or more.
        adaptation: "control" adjusts the density that the fit is asked for after each call, so
            that the mean of the achieved densities approaches the target. "published" changes
            the number of stages every five calls, as the paper does; with the exponential fit
            it can stay at one stage that selects too much on independent draws of a heavy tail
            (6.6 times the target at 0.1 % of a generalised Pareto of shape 0.2). None does
            neither.

    Attributes:
        correction: the factor of the controller on the density, an array with a row a segment.
        current_stages: the number of stages in use, likewise.
        thresholds: of the last call, likewise; None before any.
        rounds: the stages fitted in the last call, likewise; None before any.

    Raises:
        ValueError: an argument is out of range.

    Source: A. M. Abdelmoniem et al., MLSys 2021 (arXiv 2101.10761).

    >>> long = np.random.default_rng(0).standard_normal(100_000)
    >>> 500 < SIDCo(density=0.01).compress(long).nnz < 2000
    True
    """

    state = {
        "correction": _LIMITS,
        "current_stages": (1, _MAX_STAGES),
        "_calls": (0, _PERIOD - 1),
        "_ratio": (0, np.inf),
    }
    varying = ("density",)
    density: float

    def __init__(
        self,
        density: float,
        distribution: str = "exponential",
        stages: int = 4,
        adaptation: str | None = "control",
    ) -> None:
        self.density = to_density(density)
        self.distribution = to_choice("distribution", distribution, DISTRIBUTIONS)
        self.stages = to_integer("stages", stages, 1, _MAX_STAGES)
        self.adaptation = to_choice("adaptation", adaptation, ADAPTATIONS)
        self.current_stages: Array = np.array([self.stages])
        self.correction: Array = np.ones(1)
        self.thresholds: Array | None = None
        self.rounds: Array | None = None
        # Calls since the last change of stages, and their sum of achieved over target.
        self._calls: Array = np.zeros(1, np.int64)
        self._ratio: Array = np.zeros(1)

    def counts(self, lengths: Array) -> Array:
        """Return the target number of entries of vectors of these lengths."""
        return counts_of(lengths, self.density, None)

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """Return the entries of each segment above its threshold, at least the largest; see `Compressor.select`."""
        corrected = correction.out
        summands = None
        if corrected.dtype == np.float16:  # Kernels do not add float16.
            correction.add()
        else:
            summands = correction.summands()
        plans = self._plans(np.diff(bounds))
        entries = kernels_for(corrected).select_by_fits(
            corrected,
            bounds,
            plans,
            distribution=self.distribution,
            by_count=self.adaptation == "control",
            summands=summands,
        )
        is_exact = ~np.isfinite(plans["threshold"] + plans["total"])
        is_exact |= plans["above"] > plans["room"]
        is_short = plans["above"] < np.floor(plans["wanted"])
        is_exact |= np.isnan(plans["share"]) & is_short
        if is_exact.any():
            entries = self._with_largest(corrected, bounds, plans, is_exact, entries)
        self._adapt(plans)
        return known(corrected.size, bounds, entries)

    def _plans(self, sizes: Array) -> Any:
        plans = np.zeros(sizes.size, PLAN)
        plans["size"] = sizes
        plans["wanted"] = sizes * (self.density * self.correction)
        plans["stages"] = self.current_stages
        least, most, alone = _SAMPLE
        some = np.minimum(sizes, alone)
        if self.adaptation == "control":
            is_staged = plans["wanted"] < FIRST * sizes
            is_staged &= plans["stages"] > 1
            few = np.clip(sizes // 1024 * 16, least, most)
            some = np.where(is_staged, np.minimum(sizes, few), some)
        plans["sample"] = some
        return plans

    def _with_largest(
        self,
        corrected: Array,
        bounds: Sequence[int],
        plans: Any,
        is_exact: Array,
        entries: Selected,
    ) -> Selected:
        """Replace entries of segments by the exact selection, and set the plans; raises if a value is not finite."""
        sizes = plans["size"]
        k = np.where(is_exact, np.minimum(self.counts(sizes), sizes), 0)
        largest_in_segments = kernels_for(corrected).largest_in_segments
        found = largest_in_segments(corrected, bounds, k, sizes.clip(1), k)
        magnitudes = np.abs(to_numpy(found.values))
        if not np.isfinite(magnitudes).all():
            check_finite(corrected)
        for row in np.flatnonzero(is_exact).tolist():
            kept = magnitudes[slice(*found.places[row : row + 2])]
            plan = plans[row]
            plan["kept"] = kept.size
            plan["stages"] = 0
            plan["threshold"] = kept.min() if kept.size else 0.0
        return entries.replaced(found, is_exact)

    def _adapt(self, plans: Any) -> None:
        """Adapt to the results of a call."""
        kept = plans["kept"]
        is_selected = kept > 0
        # No threshold selects more entries than there are non-zero values.
        most = np.maximum(np.maximum(plans["nonzeros"], plans["above"]), kept)
        target = np.minimum(most, self.counts(plans["size"]))
        ratio = kept / np.where(is_selected, target, 1)
        if self.adaptation == "control":
            self._control(ratio, is_selected)
        elif self.adaptation == "published":
            self._change_stages(ratio, is_selected)
        self.thresholds = plans["threshold"].copy()
        self.rounds = plans["stages"].copy()

    def _control(self, ratio: Array, is_selected: Array) -> None:
        """Correct the density of each segment from which entries were selected."""
        with np.errstate(divide="ignore"):
            corrected = self.correction * ratio**-_GAIN
        limited = np.clip(corrected, *_LIMITS)
        self.correction = np.where(is_selected, limited, self.correction)

    def _change_stages(self, ratio: Array, is_selected: Array) -> None:
        """Use one stage less where a period selected too many entries, and one more where it selected too few."""
        calls = self._calls + is_selected
        total = self._ratio + np.where(is_selected, ratio, 0)
        is_over = calls == _PERIOD
        mean = total / _PERIOD
        is_below = mean < 1 - _TOLERANCE
        is_above = mean > 1 + _TOLERANCE
        most = np.maximum(1, np.ceil(np.log2(1 / np.asarray(self.density))))
        stages = np.maximum(1, self.current_stages + is_below.astype(int) - is_above)
        stages = np.minimum(stages, most).astype(int)
        self.current_stages = np.where(is_over, stages, self.current_stages)
        self._calls = np.where(is_over, 0, calls)
        self._ratio = np.where(is_over, 0, total)
