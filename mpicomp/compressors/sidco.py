"""SIDCo: select by a threshold that a fitted distribution gives in closed form; no sorting, and few reads.

Source: A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini, M. Canini, "An efficient statistical-based gradient compression
technique for distributed training systems", MLSys 2021 (arXiv 2101.10761).

The magnitudes are fitted by their moments. The first stage finds the threshold that a quarter of them is expected to
exceed; each further stage fits the magnitudes above the threshold before it, and so follows the tail. The last
threshold is reached in steps of one ratio. Few stages have long steps: with two stages the last step is from 25 % to
0.1 %. Gradients with error feedback end in a tail of another shape than the magnitudes a quarter of them exceeds, and a
long step then misses by factors that change from call to call; no controller can follow. Their scale does not matter:
thresholds scale with the vector.

Under the controller each stage asks for the share that is still missing, by the count of the magnitudes above the
threshold before it, so that an error of one stage does not last. In long vectors a sample of a 64th gives all
thresholds but the last: the vector is read once, for the sums above the threshold before the last and for the few
values that may exceed the last one. If the sample misleads, in short vectors, and without the controller, the vector is
read once for each of the first two stages, and again for the selection. Equal vectors give equal bits.

Differences from the paper: a controller of the density, and `stages` of 4, by default; with `adaptation="published"`
the number of stages starts at `stages`, where the authors start at one; stages by the counts, and on a sample, under
the controller; exact zeros are excluded from the fit, whose target is adjusted to the fraction of non-zeros; gamma's
quantile is exact, where the paper approximates it; if the moments show no spread, the exponential is fitted; the
largest entry is always sent.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, namespace, to_vector
from mpicomp.compressors.base import Compressor, expect_integer, expect_number
from mpicomp.compressors.common import placed, to_density
from mpicomp.settings import to_choice, to_integer
from mpicomp.vector import SparseVector

Quantile = Callable[[float], float]  # the threshold that a share, 0 < share <= 1, is expected to exceed
Fit = Callable[[Any], Quantile]  # of the sums of a survey

DISTRIBUTIONS = "exponential", "gamma", "pareto"
ADAPTATIONS = "control", "published", None

_FIRST_SHARE = 0.25  # that exceeds the threshold of the first of several stages
_NO_SPREAD = 1e-5  # relative variance below which rounding errors of the sums would show in it

_SIGMAS = 3  # half the width of the predicted interval; if it is too narrow the vector is read again
_ROOM = 1 / 16  # fraction of the vector for whose values there is room during the read

_GAIN, _LIMITS = 0.25, (0.02, 50.0)  # of the controller
_PERIOD, _TOLERANCE = 5, 0.2  # of the published adaptation
_MAX_STAGES = 64  # more than the published adaptation reaches at any density above 1e-19


def _check_correction(compressor: "SIDCo", array: Array | None) -> float:
    return float(expect_number(*(_LIMITS if compressor.adaptation == "control" else (1, 1)))(compressor, array))


def _check_stages(compressor: "SIDCo", array: Array | None) -> int:
    least, most = compressor.stages, compressor.stages
    if compressor.adaptation == "published":
        least, most = 1, max(_MAX_STAGES, compressor.stages)
    return int(expect_integer(least, most)(compressor, array))


def _check_ratios(compressor: "SIDCo", array: Array | None) -> list[float]:
    most = _PERIOD - 1 if compressor.adaptation == "published" else 0
    if array is None or array.ndim != 1 or array.size > most or array.dtype != np.float64:
        raise ValueError(f"a list of at most {most} numbers (float64)")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError("finite numbers above 0")
    return [float(ratio) for ratio in array]


class SIDCo(Compressor):
    """Select by a threshold from a fitted distribution: about density n entries of n.

    density: 0 < density <= 1. distribution: of the magnitudes, "exponential" (fastest), "gamma" (needs SciPy; the
    stages after the first fit a Pareto) or "pareto" (generalised; for heavy tails). stages: at least 1; one is used
    if the density is 0.25 or more. adaptation: "control" adjusts the density that the fit is asked for after each call,
    so that the mean of the achieved densities approaches the target; "published" changes the number of stages every
    five calls, as the paper does; None does neither. The published adaptation with the exponential fit can stay at one
    stage that selects too much on independent draws of a heavy tail (6.6 times the target at 0.1 % of a generalised
    Pareto of shape 0.2); on a network in training, from one stage, it held the target on average.

    The state is that of one tensor: use one object for each. `correction` is the factor of the controller on the
    density, `current_stages` the number of stages in use, `report` the `Report` of the last call, None before any: its
    rounds are the stages fitted. None is fitted to a vector of zeros, nor to one whose squares overflow: there the
    selection is exact.

    Raises ValueError for a setting out of range.

    >>> long = np.random.default_rng(0).standard_normal(100_000)
    >>> 500 < SIDCo(density=0.01).compress(long).nnz < 2000
    True
    """

    state = {"correction": _check_correction, "current_stages": _check_stages, "_ratios": _check_ratios}
    density: float

    def __init__(
        self,
        density: float,
        distribution: str = "exponential",
        stages: int = 4,
        adaptation: str | None = "control",
    ) -> None:
        self.density, self.distribution = to_density(density), to_choice("distribution", distribution, DISTRIBUTIONS)
        self.stages, self.adaptation = to_integer("stages", stages), to_choice("adaptation", adaptation, ADAPTATIONS)
        self.current_stages, self.correction = self.stages, 1.0
        self._ratios: list[float] = []  # achieved over target, since the last change of stages

    def count(self, length: int) -> int:
        """Return the target number of entries of a vector of `length`."""
        return max(1, round(self.density * length))

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries of `corrected` above the threshold, at least the largest; see `Compressor.compress`.

        corrected: an array of any shape, taken in C order; float16, float32 or float64. Raises ImportError if the
        distribution is "gamma" and SciPy is missing.
        """
        dense = to_vector(corrected)
        positions, values, threshold, stages, nonzeros = self._select(dense)
        if values.size:
            self._adapt(values.size / min(nonzeros, self.count(dense.size)))  # no threshold selects more than nonzeros
        return self.reported(placed(positions, values, dense.size), threshold, stages, self.density)

    def _select(self, dense: Array) -> tuple[Array, Array, float, int, int]:
        """Return positions, values, the threshold, the number of stages that gave it, and how many are not zero."""
        kernels = kernels_for(dense)
        if self.adaptation == "control" and (found := self._select_in_one_read(dense)):
            return found
        sums = kernels.survey(dense).all()
        if not math.isfinite(sums.total):
            kernels.raise_not_finite(dense)
        if not sums.entries:
            return namespace(dense).empty(0, np.intp), dense[:0].copy(), 0.0, 0, 0
        if not math.isfinite(sums.squares):
            positions, values = kernels.largest(dense, self.count(dense.size))
            return positions, values, float(np.abs(values).min()), 0, int(sums.entries)
        threshold, stages = self._threshold(dense, sums, self._wanted(dense.size))
        return *_at_least_one(dense, kernels.exceeding(dense, threshold)), threshold, stages, int(sums.entries)

    def _select_in_one_read(self, dense: Array) -> tuple[Array, Array, float, int, int] | None:
        """Return what `_select` does; None if the vector is short, or if the sample misleads.

        The sample gives the threshold before the last. So the read is for the sums above that threshold, and stores the
        few values that may exceed the last one.
        """
        kernels, wanted = kernels_for(dense), self._wanted(dense.size)
        sample = kernels.sample(dense)
        bounds = None if sample is None else self._start(sample, wanted / dense.size)
        if bounds is None:
            return None
        start, cut = bounds
        survey = kernels.survey(dense, start, start, cut, _ROOM)
        sums, above = survey.all(), survey.beyond(start)
        misled = above is None or not wanted <= above.entries <= 2 * _FIRST_SHARE * sums.entries
        if misled or not math.isfinite(sums.squares):
            return None
        threshold = start + self._tail_fit()(above)(wanted / above.entries)
        selected = _at_least_one(dense, survey.exceeding(threshold) or kernels.exceeding(dense, threshold))
        return *selected, threshold, self.current_stages, int(sums.entries)

    def _start(self, sample: Array, share: float) -> tuple[float, float] | None:
        """Return the threshold before the last, and a lower bound of the last one; None if the sample gives none.

        share: of the values, which the last threshold is to select.
        """
        kernels, wanted = kernels_for(sample), share * sample.size
        sums = kernels.survey(sample).all()
        if not math.isfinite(sums.squares) or len(self._shares(wanted, sums.entries)) < 2:
            return None
        start, _ = self._threshold(sample, sums, wanted, before_the_last=True)
        survey = kernels.survey(sample, start, start)
        above = survey.beyond(start)
        if not math.isfinite(start) or above.entries < wanted:
            return None
        if share > _ROOM / 2:
            return start, math.inf
        least, excess = _interval(survey.groups(beyond=True), self._tail_fit(), wanted / above.entries)
        cut = start + least - (excess - least)  # a wide margin: in the tail it costs little
        return start, max(start, cut) if math.isfinite(cut) else math.inf

    def _threshold(self, dense: Array, sums: Any, wanted: float, *, before_the_last: bool = False) -> tuple[float, int]:
        """Return the threshold of the last stage, or of the one before it, and the number of stages.

        sums: of the survey of the vector. wanted: how many entries are to exceed the last threshold.
        """
        kernels, shares, tail = kernels_for(dense), self._shares(wanted, sums.entries), dense
        threshold = self._first_fit(dense)(sums)(shares[0])
        for stage in range(1, len(shares) - before_the_last):
            above = kernels.survey(tail, threshold, threshold).beyond(threshold)
            if not above.entries:
                break
            share = shares[stage]
            if self.adaptation == "control":  # by the count above the threshold: an error of a stage does not last
                share = min(1.0, wanted / above.entries) ** (1 / (len(shares) - stage))
            threshold += self._tail_fit()(above)(share)
            _, tail = kernels.exceeding(tail, threshold)
        return threshold, len(shares)

    def _first_fit(self, dense: Array) -> Fit:
        """Return the fit of the first stage; only that of the gamma distribution depends on the vector."""
        if self.distribution != "gamma":
            return _FITS[self.distribution]
        moments = kernels_for(dense).moments(dense)
        return partial(_gamma, mean_log=moments.logs / max(1, moments.nonzeros))

    def _tail_fit(self) -> Fit:
        """Return the fit of the further stages, to exceedances."""
        return _FITS["exponential" if self.distribution == "exponential" else "pareto"]

    def _wanted(self, length: int) -> float:
        """Return how many entries the threshold is to select from a vector of `length`."""
        return self.density * self.correction * length

    def _shares(self, wanted: float, nonzeros: float) -> list[float]:
        """Return for each stage the share of the magnitudes above the threshold before it that exceed its own."""
        share, further = wanted / max(1, nonzeros), self.current_stages - 1
        if not further or share >= _FIRST_SHARE:
            return [min(1.0, share)]
        return [_FIRST_SHARE] + [(share / _FIRST_SHARE) ** (1 / further)] * further

    def _adapt(self, ratio: float) -> None:
        """Adapt to the result of a call. ratio: entries selected over the target."""
        if self.adaptation == "control":
            lowest, highest = _LIMITS
            self.correction = min(max(self.correction * ratio**-_GAIN, lowest), highest)
        elif self.adaptation == "published":
            self._ratios = [*self._ratios, ratio]
            if len(self._ratios) == _PERIOD:  # one stage less if too many entries were selected, one more if too few
                mean, most = sum(self._ratios) / _PERIOD, max(1, math.ceil(math.log2(1 / self.density)))
                step = (mean < 1 - _TOLERANCE) - (mean > 1 + _TOLERANCE)
                self.current_stages = min(max(1, self.current_stages + step), most)
                self._ratios = []


def _at_least_one(dense: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the positions and values found in a vector; those of its largest entry if there are none."""
    return found if found[1].size else kernels_for(dense).largest(dense, 1)


def _interval(groups: list[Any], fit: Fit, share: float) -> tuple[float, float]:
    """Return the lower bound of the confidence interval of the mean threshold of several samples, and the mean."""
    if not all(sums.entries and math.isfinite(sums.squares) for sums in groups):
        return math.nan, math.nan
    found = np.array([fit(sums)(share) for sums in groups])
    middle, error = float(found.mean()), float(found.std(ddof=1)) / math.sqrt(found.size)
    return max(0.0, middle - _SIGMAS * error), middle


def _exponential(mean: float) -> Quantile:
    return lambda share: mean * abs(math.log(share))


def _pareto_fit(sums: Any) -> Quantile:
    """Return the quantiles of the generalised Pareto distribution with these sums of x and of its square."""
    mean = sums.total / sums.entries
    variance = sums.squares / sums.entries - mean * mean
    if variance <= _NO_SPREAD * mean * mean:
        return _exponential(mean)
    ratio = mean * mean / variance
    return _pareto((1 - ratio) / 2, mean * (ratio + 1) / 2)


def _pareto(shape: float, scale: float) -> Quantile:
    if not shape:
        return _exponential(scale)
    return lambda share: scale / shape * math.expm1(-shape * math.log(share))


def _gamma(sums: Any, mean_log: float) -> Quantile:
    """Return the quantiles of the gamma distribution with these means of x and of log x."""
    mean, inverse = sums.total / sums.entries, _inverse_gamma()
    s = math.log(mean) - mean_log
    if s <= _NO_SPREAD:
        return _exponential(mean)
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return lambda share: mean / shape * float(inverse(shape, share))


def _inverse_gamma() -> Any:
    """Return the inverse of the regularised upper incomplete gamma function, which is exact also for tiny shares."""
    try:
        from scipy.special import gammainccinv
    except ImportError as error:
        raise ImportError("distribution='gamma' needs SciPy: pip install scipy, or use 'pareto'") from error
    return gammainccinv


_FITS: dict[str, Fit] = {
    "exponential": lambda sums: _exponential(sums.total / sums.entries),
    "pareto": _pareto_fit,
}
