"""SIDCo: keep what exceeds a threshold that a fitted distribution gives in closed form; no sorting, few reads.

Source: A. M. Abdelmoniem, A. Elzanaty, M.-S. Alouini, M. Canini, "An efficient statistical-based gradient compression
technique for distributed training systems", MLSys 2021 (arXiv 2101.10761).

The magnitudes x are fitted by their moments. The first stage finds the threshold that a quarter of them is expected to
exceed; each further one fits what exceeds the threshold before it, and so follows the tail. The vector is read once,
for the sums of two stages and the selection: a sample foretells about where the first threshold will lie, and what the
next will exceed; the read adds up what is above that, and writes down the few values that it leaves open. Where the
sample misled, and in short vectors, the vector is read again, for the second fit and to select; the sample decides
about nothing else, and a threshold differs by roundings alone: 1e-6 of it at most. Further stages fit what exceeds the
second threshold. Equal vectors give equal bits.

Differences from the paper: the controller of the density, which unlike the published adaptation of the stages does not
stick at one stage; exact zeros are left out of the fit, which is asked for a share of the non-zeros instead; gamma's
quantile is exact, where the paper approximates it; where the moments show no spread, the exponential is fitted; the
largest entry always travels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for, namespace, to_vector
from mpicomp.compressors.base import Compressor, Report, expect_integer, expect_number
from mpicomp.compressors.common import check_density, check_number, placed
from mpicomp.vector import SparseVector

Array = NDArray[Any]
Quantile = Callable[[float], float]  # the threshold that a share, 0 < share <= 1, is expected to exceed
Fit = Callable[[Any], Quantile]  # of the sums of a survey

DISTRIBUTIONS = "exponential", "gamma", "pareto"
ADAPTATIONS = "control", "published", None

_FIRST_SHARE = 0.25  # what the first of several stages lets through
_NO_SPREAD = 1e-5  # relative variance below which roundings of the sums would show in it

_UNFORESEEN = 0.0, 0.0, math.inf
_SIGMAS = 3  # of what a sample says: where that is too few, the vector is read again
_ROOM = 1 / 32  # share of the vector that may be written down while it is read

_GAIN, _LIMITS = 0.25, (0.02, 50.0)  # of the controller
_PERIOD, _TOLERANCE = 5, 0.2  # of the published adaptation


_MOST_STAGES = 64  # more than the published adaptation takes at any density above 1e-19


def _check_correction(compressor: "SIDCo", array: Array | None) -> float:
    """Return a loaded factor of the controller; see `mpicomp.compressors.base.Check`."""
    return float(expect_number(*(_LIMITS if compressor.adaptation == "control" else (1, 1)))(compressor, array))


def _check_stages(compressor: "SIDCo", array: Array | None) -> int:
    """Return a loaded number of stages; see `mpicomp.compressors.base.Check`."""
    limits = 1, max(_MOST_STAGES, compressor.stages)
    own = compressor.stages, compressor.stages
    return int(expect_integer(*(limits if compressor.adaptation == "published" else own))(compressor, array))


def _check_ratios(compressor: "SIDCo", array: Array | None) -> list[float]:
    """Return the loaded ratios of achieved to target; see `mpicomp.compressors.base.Check`."""
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
    where the density is 0.25 or more. adaptation: "control" steers the density that the fit is asked for, after each
    call, so that the mean of what is achieved comes to the target; "published" changes the number of stages every five
    calls, as the paper does, and sticks at one stage on heavy tails; None leaves the fit alone.

    The state is that of one tensor: use one object for each. `correction` is what the controller multiplies the density
    by, `current_stages` the number of stages in use, `report` the `Report` of the last call, None before any: its
    rounds are the stages fitted. None is fitted to a vector of zeros, nor to one whose squares overflow: there the
    selection is exact.

    Raises ValueError for a setting out of range.
    """

    state = {"correction": _check_correction, "current_stages": _check_stages, "_ratios": _check_ratios}
    density: float

    def __init__(
        self,
        density: float,
        distribution: str = "exponential",
        stages: int = 2,
        adaptation: str | None = "control",
    ) -> None:
        check_density(density)
        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution is {distribution!r}: expected one of {DISTRIBUTIONS}")
        check_number("stages", stages)
        if adaptation not in ADAPTATIONS:
            raise ValueError(f"adaptation is {adaptation!r}: expected one of {ADAPTATIONS}")
        self.density, self.distribution = float(density), distribution
        self.stages, self.adaptation = int(stages), adaptation
        self.current_stages, self.correction = self.stages, 1.0
        self._ratios: list[float] = []  # achieved over target, since the stages were last looked at

    def count(self, length: int) -> int:
        """Return how many entries of a vector of `length` are meant to travel."""
        return max(1, round(self.density * length))

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries of `corrected` above the threshold, at least the largest; see `Compressor.compress`.

        corrected: an array of any shape, taken in C order; float16, float32 or float64. Raises
        ImportError when the distribution is "gamma" and SciPy is missing.
        """
        dense = to_vector(corrected)
        positions, values, threshold, stages, nonzeros = self._select(dense)
        vector = placed(positions, values, dense.size)
        self.report = Report(self.density, vector.density, vector.nbytes, threshold, stages)
        if values.size:
            wanted = min(nonzeros, self.count(dense.size))  # there are no more, whatever the threshold
            self._adapt(values.size / wanted)
        return vector

    def _select(self, dense: Array) -> tuple[Array, Array, float, int, int]:
        """Return positions, values, the threshold, the number of stages that gave it, and how many are not zero."""
        kernels, fit = kernels_for(dense), self._first_fit(dense)
        survey = kernels.survey(dense, *self._foreseen(dense, fit), _ROOM)
        sums = survey.all()
        if not math.isfinite(sums.total):
            kernels.raise_not_finite(dense)
        if not sums.entries:
            return namespace(dense).empty(0, np.intp), dense[:0].copy(), 0.0, 0, 0
        if not math.isfinite(sums.squares):
            positions, values = kernels.largest(dense, self.count(dense.size))
            return positions, values, float(np.abs(values).min()), 0, int(sums.entries)
        shares = self._shares(dense.size, sums.entries)
        positions, values, threshold = _peaks(dense, survey, fit(sums)(shares[0]), shares[1:], self.distribution)
        if not values.size:
            positions, values = kernels.largest(dense, 1)
        return positions, values, threshold, len(shares), int(sums.entries)

    def _first_fit(self, dense: Array) -> Fit:
        """Return how the first stage is fitted to sums; only the gamma distribution has to look at the vector."""
        if self.distribution != "gamma":
            return _FITS[self.distribution]
        _inverse_gamma()
        moments = kernels_for(dense).moments(dense)
        return partial(_gamma, mean_log=moments.logs / max(1, moments.nonzeros))

    def _foreseen(self, dense: Array, fit: Fit) -> tuple[float, float, float]:
        """Return, from a sample, between which thresholds the first one will lie, and what the next one will exceed.

        They decide what one read of the vector is enough for, and nothing else.
        """
        sample = kernels_for(dense).sample(dense)
        if sample is None:
            return _UNFORESEEN
        survey = kernels_for(sample).survey(sample)
        shares = self._shares(sample.size, survey.all().entries)
        low, middle, high = _interval(survey.groups(), fit, shares[0])
        if not math.isfinite(high) or math.prod(shares[:2]) > _ROOM / 2:
            return _UNFORESEEN
        if not shares[1:]:
            return low, low, low
        groups = kernels_for(sample).survey(sample, middle, middle).groups(beyond=True)
        least, excess, _ = _interval(groups, _FITS[_after(self.distribution)], shares[1])
        cut = low + least - (excess - least)  # further off than the others: at the tail that costs little
        return low, high, max(high, cut) if math.isfinite(cut) else math.inf

    def _shares(self, length: int, nonzeros: float) -> list[float]:
        """Return the share that each stage lets through of what the stage before it did."""
        return _shares(self.density * self.correction * length / max(1, nonzeros), self.current_stages)

    def _adapt(self, ratio: float) -> None:
        """Learn from the last call. ratio: entries selected over entries wanted."""
        if self.adaptation == "control":
            lowest, highest = _LIMITS
            self.correction = min(max(self.correction * ratio**-_GAIN, lowest), highest)
        elif self.adaptation == "published":
            self._ratios = [*self._ratios, ratio]
            if len(self._ratios) == _PERIOD:
                self._change_stages(sum(self._ratios) / _PERIOD)
                self._ratios = []

    def _change_stages(self, ratio: float) -> None:
        """Drop a stage where too many entries were selected, add one where too few."""
        step = (ratio < 1 - _TOLERANCE) - (ratio > 1 + _TOLERANCE)
        most = max(1, math.ceil(math.log2(1 / self.density)))
        self.current_stages = min(max(1, self.current_stages + step), most)


def _shares(share: float, stages: int) -> list[float]:
    """Return the share that each stage lets through of what the stage before it did; their product is `share`."""
    if stages == 1 or share >= _FIRST_SHARE:
        return [min(1.0, share)]
    return [_FIRST_SHARE] + [(share / _FIRST_SHARE) ** (1 / (stages - 1))] * (stages - 1)


def _interval(groups: list[Any], fit: Fit, share: float) -> tuple[float, float, float]:
    """Return the mean of the thresholds of several samples, between the bounds of where that of them all will lie."""
    if not all(sums.entries and math.isfinite(sums.squares) for sums in groups):
        return math.nan, math.nan, math.nan
    found = np.array([fit(sums)(share) for sums in groups])
    middle, error = float(found.mean()), float(found.std(ddof=1)) / math.sqrt(found.size)
    return max(0.0, middle - _SIGMAS * error), middle, middle + _SIGMAS * error


def _peaks(
    dense: Array, survey: Any, threshold: float, shares: list[float], distribution: str
) -> tuple[Array, Array, float]:
    """Return positions and values above the last threshold, and that threshold: one more stage for each share.

    The vector is read again for what its survey did not foresee.
    """
    kernels = kernels_for(dense)
    if shares:
        sums = survey.beyond(threshold) or kernels.survey(dense, threshold, threshold).beyond(threshold)
        threshold = _raised(sums, threshold, shares[0], distribution)
    positions, values = survey.exceeding(threshold) or kernels.exceeding(dense, threshold)
    for share in shares[1:]:
        threshold = _raised(
            kernels.survey(values, threshold, threshold).beyond(threshold), threshold, share, distribution
        )
    if shares[1:]:
        chosen, values = kernels.exceeding(values, threshold)
        positions = positions[chosen]
    return positions, values, threshold


def _raised(sums: Any, threshold: float, share: float, distribution: str) -> float:
    """Return the threshold that a share of the magnitudes above `threshold`, whose sums these are, will exceed."""
    return threshold + _FITS[_after(distribution)](sums)(share) if sums.entries else threshold


def _after(distribution: str) -> str:
    """Return what the exceedances are fitted by."""
    return "exponential" if distribution == "exponential" else "pareto"


def _exponential_fit(sums: Any) -> Quantile:
    return _exponential(sums.total / sums.entries)


def _pareto_fit(sums: Any) -> Quantile:
    """Return the quantiles of the distribution that has these sums: of x and of its square."""
    mean = sums.total / sums.entries
    variance = sums.squares / sums.entries - mean * mean
    if variance <= _NO_SPREAD * mean * mean:
        return _exponential(mean)
    ratio = mean * mean / variance
    return lambda share: _pareto_quantile((1 - ratio) / 2, mean * (ratio + 1) / 2, share)


def _exponential(mean: float) -> Quantile:
    return lambda share: mean * abs(math.log(share))


def _pareto_quantile(shape: float, scale: float, share: float) -> float:
    if not shape:
        return _exponential(scale)(share)
    return scale / shape * math.expm1(-shape * math.log(share))


def _gamma(sums: Any, mean_log: float) -> Quantile:
    """Return the quantiles of the gamma distribution with these means of x and of log x."""
    mean = sums.total / sums.entries
    s = math.log(mean) - mean_log
    if s <= _NO_SPREAD:
        return _exponential(mean)
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    inverse = _inverse_gamma()
    return lambda share: mean / shape * float(inverse(shape, share))


def _inverse_gamma() -> Any:
    """Return the inverse of the regularised upper incomplete gamma function: exact where 1 - share would round to 1."""
    try:
        from scipy.special import gammainccinv
    except ImportError as error:
        raise ImportError("distribution='gamma' needs SciPy: pip install scipy, or choose 'pareto'") from error
    return gammainccinv


_FITS: dict[str, Fit] = {"exponential": _exponential_fit, "pareto": _pareto_fit}
