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

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, to_numpy, to_vector
from mpicomp.compressors.base import (
    Compressor,
    Report,
    Summands,
    expect_integer,
    expect_number,
    write_sum,
)
from mpicomp.compressors.common import placed, to_density
from mpicomp.settings import to_choice, to_integer
from mpicomp.vector import SparseVector

DISTRIBUTIONS = "exponential", "gamma", "pareto"
ADAPTATIONS = "control", "published", None

_FIRST_SHARE = 0.25  # that exceeds the threshold of the first of several stages
_NO_SPREAD = 1e-5  # of the logarithms, below which rounding errors would show in it
# values: at least, at most, and at most where counts correct no error
_SAMPLE = 1 << 12, 1 << 15, 1 << 20

_GAIN, _LIMITS = 0.25, (0.02, 50.0)  # of the controller
_PERIOD, _TOLERANCE = 5, 0.2  # of the published adaptation
_RESULTS = ["size", "stages", "nonzeros", "above", "threshold", "kept"]
# more than the published adaptation reaches at any density above 1e-19
_MAX_STAGES = 64


def _check_correction(compressor: "SIDCo", array: Array | None) -> float:
    return float(
        expect_number(*(_LIMITS if compressor.adaptation == "control" else (1, 1)))(
            compressor, array
        )
    )


def _check_stages(compressor: "SIDCo", array: Array | None) -> int:
    least, most = compressor.stages, compressor.stages
    if compressor.adaptation == "published":
        least, most = 1, max(_MAX_STAGES, compressor.stages)
    return int(expect_integer(least, most)(compressor, array))


def _check_ratios(compressor: "SIDCo", array: Array | None) -> list[float]:
    most = _PERIOD - 1 if compressor.adaptation == "published" else 0
    if (
        array is None
        or array.ndim != 1
        or array.size > most
        or array.dtype != np.float64
    ):
        raise ValueError(f"a list of at most {most} numbers (float64)")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError("finite numbers above 0")
    return [float(ratio) for ratio in array]


class SIDCo(Compressor):
    """Select by a threshold from a fitted distribution: about density n entries of n.

    density: 0 < density <= 1. distribution: of the magnitudes, "exponential" (fastest),
    "gamma" (needs SciPy; the stages after the first fit a Pareto) or "pareto"
    (generalised; for heavy tails). stages: at least 1; one is used if the density is
    0.25 or more. adaptation: "control" adjusts the density that the fit is asked for
    after each call, so that the mean of the achieved densities approaches the target;
    "published" changes the number of stages every five calls, as the paper does; None
    does neither. The published adaptation with the exponential fit can stay at one
    stage that selects too much on independent draws of a heavy tail (6.6 times the
    target at 0.1 % of a generalised Pareto of shape 0.2); on a network in training,
    from one stage, it held the target on average.

    The state is that of one tensor: use one object for each. `correction` is the factor
    of the controller on the density, `current_stages` the number of stages in use,
    `report` the `Report` of the last call, None before any: its rounds are the stages
    fitted. Where a sample misled, and where sums overflow, none is: the selection is
    exact.

    Raises ValueError for a setting out of range.

    >>> long = np.random.default_rng(0).standard_normal(100_000)
    >>> 500 < SIDCo(density=0.01).compress(long).nnz < 2000
    True
    """

    state = {
        "correction": _check_correction,
        "current_stages": _check_stages,
        "_ratios": _check_ratios,
    }
    density: float

    def __init__(
        self,
        density: float,
        distribution: str = "exponential",
        stages: int = 4,
        adaptation: str | None = "control",
    ) -> None:
        self.density, self.distribution = (
            to_density(density),
            to_choice("distribution", distribution, DISTRIBUTIONS),
        )
        self.stages, self.adaptation = (
            to_integer("stages", stages),
            to_choice("adaptation", adaptation, ADAPTATIONS),
        )
        self.current_stages, self.correction = self.stages, 1.0
        # achieved over target, since the last change of stages
        self._ratios: list[float] = []

    def count(self, length: int) -> int:
        """Return the target number of entries of a vector of `length`."""
        return max(1, round(self.density * length))

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries of `corrected` above the threshold, at least the largest; see `Compressor.compress`.

        corrected: an array of any shape, taken in C order; float16, float32 or float64.
        Raises ImportError if the distribution is "gamma" and SciPy is missing.
        """
        dense = to_vector(corrected)
        return self.compress_each([self], dense, [0, dense.size])

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_segments`; one object is for one segment, several take `compress_each`."""
        if len(bounds) != 2:
            return super().compress_segments(corrected, bounds, summands=summands)
        return self.compress_each([self], corrected, bounds, summands=summands)

    @staticmethod
    def compress_each(
        compressors: Sequence[Any],
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_each`: one pass over all segments."""
        kernels, one = kernels_for(corrected), compressors[0]
        pareto, by_count = (
            one.distribution != "exponential",
            one.adaptation == "control",
        )
        # which kernels do not add
        if summands is not None and corrected.dtype == np.float16:
            write_sum(summands, corrected)
            summands = None
        plans = np.zeros(len(compressors), kernels.PLAN)
        plans["size"], plans["first"] = np.diff(bounds), np.nan
        plans["wanted"] = plans["size"] * [
            each.density * each.correction for each in compressors
        ]
        plans["stages"] = [each.current_stages for each in compressors]
        counts = _samples(plans, by_count)
        some = kernels.sample(corrected, bounds, counts, summands=summands)
        if one.distribution == "gamma":
            plans["first"] = [
                _first_of_gamma(*each)
                for each in zip(_parts(some, counts), plans, strict=True)
            ]
        kernels.begin_fits(some, counts, plans, pareto=pareto, by_count=by_count)
        found = kernels.end_fits(
            corrected, bounds, plans, pareto=pareto, summands=summands
        )
        is_exact = ~np.isfinite(plans["threshold"] + plans["total"]) | (
            plans["above"] > plans["room"]
        )
        is_exact |= (plans["share"] == 0) & (plans["above"] < np.floor(plans["wanted"]))
        if is_exact.any():
            found = _with_largest(
                compressors, corrected, bounds, plans, is_exact, *found
            )
        vector = placed(found[0], found[1], corrected.size)
        for each, plan in zip(compressors, plans[_RESULTS].tolist(), strict=True):
            each._settle(*plan, vector.indices.itemsize + vector.values.itemsize)
        return vector

    def _settle(
        self,
        size: int,
        stages: int,
        nonzeros: float,
        above: float,
        threshold: float,
        kept: int,
        nbytes: int,
    ) -> None:
        """Adapt to the result of a call, and report it. nbytes: of an entry. The others: see `PLAN`."""
        if kept:  # no threshold selects more than nonzeros
            self._adapt(kept / min(max(nonzeros, above, kept), self.count(size)))
        self.report = Report(
            self.density, kept / max(1, size), kept * nbytes, threshold, stages
        )

    def _adapt(self, ratio: float) -> None:
        """Adapt to the result of a call. ratio: entries selected over the target."""
        if self.adaptation == "control":
            lowest, highest = _LIMITS
            self.correction = min(max(self.correction * ratio**-_GAIN, lowest), highest)
        elif self.adaptation == "published":
            self._ratios = [*self._ratios, ratio]
            # one stage less if too many entries were selected, one more if too few
            if len(self._ratios) == _PERIOD:
                mean, most = (
                    sum(self._ratios) / _PERIOD,
                    max(1, math.ceil(math.log2(1 / self.density))),
                )
                step = (mean < 1 - _TOLERANCE) - (mean > 1 + _TOLERANCE)
                self.current_stages = min(max(1, self.current_stages + step), most)
                self._ratios = []


def _samples(plans: Any, by_count: bool) -> Array:
    """Return how many values of each segment all stages but the last see."""
    least, most, alone = _SAMPLE
    size = plans["size"]
    is_corrected = (
        (plans["stages"] > 1) & (plans["wanted"] < _FIRST_SHARE * size) & by_count
    )
    counts: Array = np.minimum(
        size, np.where(is_corrected, np.clip(size // 1024 * 16, least, most), alone)
    )
    return counts


def _parts(array: Array, counts: Array) -> list[Array]:
    """Return consecutive parts of an array of these lengths."""
    return [
        array[end - count : end]
        for count, end in zip(counts.tolist(), np.cumsum(counts).tolist(), strict=True)
    ]


def _with_largest(
    compressors: Sequence[SIDCo],
    corrected: Array,
    bounds: Sequence[int],
    plans: Any,
    is_exact: Array,
    positions: Array,
    values: Array,
) -> tuple[Array, Array]:
    """Return the entries of all segments, of some of them the largest, and set their plans; raises if not finite."""
    parts = [
        *zip(
            _parts(positions, plans["kept"]), _parts(values, plans["kept"]), strict=True
        )
    ]
    for place in np.flatnonzero(is_exact).tolist():
        dense, plan = corrected[bounds[place] : bounds[place + 1]], plans[place]
        kernels = kernels_for(dense)
        kernels.raise_not_finite(dense)
        found = (
            kernels.largest(dense, compressors[place].count(dense.size))
            if dense.size
            else parts[place]
        )
        parts[place] = found[0] + bounds[place], found[1]
        plan["kept"], plan["stages"] = found[1].size, 0
        kept = np.abs(to_numpy(found[1]))
        plan["threshold"] = kept.min() if kept.size else 0.0
    positions, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    return positions, values


def _first_of_gamma(some: Array, plan: Any) -> float:
    """Return the threshold of the first stage by the gamma distribution; NaN if the sample shows no spread."""
    try:
        from scipy.special import gammainccinv
    except ImportError as error:
        raise ImportError(
            "distribution='gamma' needs SciPy: pip install scipy, or use 'pareto'"
        ) from error
    magnitudes = np.abs(some).astype(np.float64)
    magnitudes = magnitudes[(magnitudes > 0) & (magnitudes < math.inf)]
    if not magnitudes.size:
        return math.nan
    with np.errstate(over="ignore"):
        mean = float(magnitudes.mean())
    s = math.log(mean) - float(np.log(magnitudes).mean())
    if not _NO_SPREAD < s < math.inf:
        return math.nan
    share = min(1.0, float(plan["wanted"] / plan["size"]) * some.size / magnitudes.size)
    if plan["stages"] > 1 and share < _FIRST_SHARE:
        share = _FIRST_SHARE
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return mean / shape * float(gammainccinv(shape, share))
