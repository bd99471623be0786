"""Sampled top-k: Deep Gradient Compression's selector, and its schedule of densities.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression", ICLR 2018 (arXiv 1712.01887).

A strided sample of 1 % gives a threshold. If more than 1.3 k entries reach it, the exact top-k of these are sent; if
fewer than 0.8 k do, the threshold is lowered by a fifth, up to ten times.

Differences from the paper's code: excess entries are dropped by magnitude, not by the order of the indices; the random
start of the sample is drawn from a seed and the number of the step.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for
from mpicomp.compressors.base import Compressor, Summands, Wrapper, expect_integer
from mpicomp.compressors.common import Density, at_or_above, entries_found, finite_vector, to_density
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector, concatenate, top_k

_STRIDE = 100
_MOST, _LEAST, _LOWER, _RETRIES = 1.3, 0.8, 0.8, 10


class SampledTopK(Density):
    """Select about the k largest magnitudes, by the threshold of a sample.

    density or k: see `Density`. seed: for the offsets of the samples; ranks may have different ones.

    >>> long = np.random.default_rng(0).standard_normal(100_000)
    >>> 500 < SampledTopK(density=0.01).compress(long).nnz < 2000
    True
    """

    state = {"step": expect_integer(0)}

    def __init__(self, density: float | None = None, *, k: int | None = None, seed: int = 0) -> None:
        super().__init__(density, k=k)
        self.seed, self.step = to_integer("seed", seed, 0), 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries that reach the threshold of a sample; see `Compressor.compress`."""
        dense = finite_vector(corrected)
        if self.count(dense.size) >= dense.size:
            self.step += 1
            return self.reported(SparseVector.from_dense(dense))
        threshold = self._threshold(dense[self._places(dense.size)], dense.size)
        return self._enough(dense, at_or_above(dense, threshold), threshold)

    def compress_segments(
        self, corrected: Array, bounds: Sequence[int], *, summands: Summands | None = None
    ) -> SparseVector:
        """See `Compressor.compress_segments`; a segment takes a pass, and another for each lower threshold."""
        if len(bounds) > 2:
            return self._in_segments(corrected, bounds, summands)
        size = corrected.size
        if summands is None or self.count(size) >= size:
            return super().compress_segments(corrected, bounds, summands=summands)
        residual, scale, (gradient,) = summands
        places = self._places(size)
        with np.errstate(all="ignore"):
            sample = corrected.dtype.type(scale) * residual[places] + gradient[places]
        if not np.isfinite(sample).all():
            return super().compress_segments(corrected, bounds, summands=summands)
        threshold = self._threshold(sample, size)
        found = kernels_for(corrected).add_above(residual, gradient, corrected, threshold, scale=scale)
        return self._enough(corrected, entries_found(corrected, *found), threshold)

    def _in_segments(self, corrected: Array, bounds: Sequence[int], summands: Summands | None) -> SparseVector:
        """Select in each of several segments, whose samples are those of one step."""
        step, selected = self.step, []
        for place, (first, end) in enumerate(pairwise(bounds)):
            self.step = step
            own = None if summands is None else (summands[0][first:end], summands[1], [summands[2][place]])
            selected.append(self.compress_segments(corrected[first:end], [0, end - first], summands=own))
        return concatenate(selected)

    def _places(self, length: int) -> slice:
        """Return the positions of this step's sample of a vector of `length`."""
        stride = max(1, min(_STRIDE, length // 2))
        return slice(int(np.random.default_rng([self.seed, self.step]).integers(stride)), None, stride)

    def _threshold(self, sample: Array, length: int) -> float:
        """Return the magnitude that a fraction of the sample reaches: the target density of a vector of `length`."""
        magnitudes = np.abs(sample).astype(np.float64)
        rank = min(magnitudes.size, math.ceil(magnitudes.size * self.share(length)))
        return float(np.partition(magnitudes, magnitudes.size - rank)[magnitudes.size - rank])

    def _enough(self, dense: Array, vector: SparseVector, threshold: float) -> SparseVector:
        """Return the entries above the threshold, or above a lower one if those are too few; count the step."""
        rounds, k = 1, self.count(dense.size)
        while vector.nnz < _LEAST * k and threshold > 0 and rounds <= _RETRIES:
            threshold *= _LOWER
            rounds, vector = rounds + 1, at_or_above(dense, threshold)
        self.step += 1
        return self.reported(top_k(vector, k)[0] if vector.nnz > _MOST * k else vector, threshold, rounds)


class WarmUp(Wrapper):
    """Run a compressor with a schedule of densities: the paper's warm-up.

    compressor: any with a `density`. densities: one for each stage; the last one is kept. calls: number of calls in a
    stage. Raises ValueError if the list is empty, a number is out of range, or the compressor was made with k. To
    quantise as well, wrap this one: `Quantised(WarmUp(...), "float16")`.

    >>> compressor = WarmUp(TopK(0.25), [1.0, 0.5, 0.25])
    >>> [compressor.compress(gradient).nnz for step in range(4)]
    [4, 2, 1, 1]
    """

    state = {"step": expect_integer(0)}

    def __init__(
        self,
        compressor: Compressor,
        densities: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004, 0.001),
        *,
        calls: int = 1,
    ) -> None:
        super().__init__(compressor)
        if not len(densities) or compressor.density is None:
            raise ValueError(
                f"got densities={list(densities)}, compressor={compressor!r}: expected at least one density, and a "
                "compressor made with density="
            )
        self.densities, self.calls, self.step = list(map(to_density, densities)), to_integer("calls", calls), 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Compress at the density of this step; see `Compressor.compress`."""
        with self._stage():
            return self.compressor.compress(corrected, gradient=gradient)

    def compress_segments(
        self, corrected: Array, bounds: Sequence[int], *, summands: Summands | None = None
    ) -> SparseVector:
        """See `Compressor.compress_segments`; calls that of the inner compressor at the density of this step."""
        with self._stage():
            return self.compressor.compress_segments(corrected, bounds, summands=summands)

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Set the inner compressor to the density of this step for one call, and count the call if it succeeds."""
        asked = self.compressor.density
        self.compressor.density = self.densities[min(self.step // self.calls, len(self.densities) - 1)]
        try:
            yield
        finally:
            self.compressor.density = asked
        self.step, self.report = self.step + 1, self.compressor.report
