"""Compressors that search for a threshold: RedSync, GaussianK and MSTopK.

Sources: J. Fang, H. Fu, G. Yang, C.-J. Hsieh, RedSync, JPDC 133, 2019 (arXiv 1808.04357); S. Shi, X. Chu, K. C. Cheung,
S. See, "Understanding top-k sparsification in distributed deep learning", 2019 (arXiv 1911.08772) for GaussianK; S. Shi
et al., "Towards scalable distributed training of deep learning on public cloud clusters", MLSys 2021, for MSTopK.

Differences from the papers: the entries above the mean are compacted once, and the search counts among these alone;
excess entries are dropped by magnitude, ties go to the lowest index.
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, to_vector
from mpicomp.compressors.common import (
    Density,
    at_or_above,
    at_positions,
    finite_vector,
    mean_and_largest,
    placed,
)
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector, top_k

_ROUNDS = 30  # halvings: then the bracket is narrower than the spacing of float32


class RedSync(Density):
    """Select the k largest magnitudes by a binary search for a threshold that k to 2 k magnitudes reach.

    density or k: see `Density`. The threshold is mean + t (max - mean) of the magnitudes, 0 <= t <= 1.

    >>> RedSync(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the k largest magnitudes; see `Compressor.compress`."""
        dense = to_vector(corrected)
        k, (mean, largest) = self.count(dense.size), mean_and_largest(dense)
        if not dense.size:
            return self.reported(SparseVector.from_dense(dense))
        candidates = at_or_above(dense, mean)
        if candidates.nnz <= k:  # the search begins at the mean: below it, an exact selection
            positions, values = kernels_for(dense).largest(dense, k)
            return self.reported(placed(positions, values, dense.size))
        low, high, magnitudes = 0.0, 1.0, np.abs(candidates.values).astype(np.float64)
        threshold, rounds = mean, 0
        while rounds < _ROUNDS:
            rounds += 1
            middle = (low + high) / 2
            count = int(np.count_nonzero(magnitudes >= mean + middle * (largest - mean)))
            if count >= k:
                low, threshold = middle, mean + middle * (largest - mean)
            else:
                high = middle
            if k <= count < 2 * k:
                break
        chosen = candidates.divide(np.flatnonzero(magnitudes >= threshold))[0]
        return self.reported(top_k(chosen, k)[0], threshold, rounds)


class MSTopK(Density):
    """Select exactly k entries by two thresholds, which a bisection makes converge.

    density or k: see `Density`. All entries that reach the upper threshold are sent, and as many of those between the
    two thresholds as make k, with the lowest indices. rounds: halvings of the bisection, at least 1, else ValueError.

    >>> MSTopK(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    def __init__(self, density: float | None = None, *, k: int | None = None, rounds: int = 25) -> None:
        super().__init__(density, k=k)
        self.rounds = to_integer("rounds", rounds)

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return k entries, or all non-zero ones if there are fewer; see `Compressor.compress`."""
        dense = to_vector(corrected)
        k, (mean, largest) = self.count(dense.size), mean_and_largest(dense)
        if not largest:
            return self.reported(SparseVector.from_dense(dense))
        candidates = at_or_above(dense, mean)
        if candidates.nnz < k:
            candidates, mean = SparseVector.from_dense(dense), 0.0
        magnitudes = np.abs(candidates.values).astype(np.float64)
        low, high = mean, np.nextafter(largest, np.inf)
        for _ in range(self.rounds):
            middle = low / 2 + high / 2  # the sum of both may leave the range
            if np.count_nonzero(magnitudes >= middle) >= k:
                low = middle
            else:
                high = middle
        above = magnitudes >= high
        between = np.flatnonzero((magnitudes >= low) & ~above)[: max(0, k - int(above.sum()))]
        chosen = np.sort(np.concatenate([np.flatnonzero(above), between]))
        return self.reported(candidates.divide(chosen)[0], low, self.rounds)


class GaussianK(Density):
    """Select by the quantile of a normal distribution, corrected up to three times.

    density or k: see `Density`. An entry is selected if its distance from the mean exceeds Phi^-1(1 - density / 2)
    standard deviations; that distance is halved while under 2/3 k entries are selected, and multiplied by 1.5 while
    over 4/3 k are; then the k largest are kept.

    >>> long = np.random.default_rng(0).standard_normal(100_000)
    >>> 500 < GaussianK(density=0.01).compress(long).nnz <= 1000
    True
    """

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return about the k largest magnitudes; see `Compressor.compress`."""
        dense = finite_vector(corrected)
        k, share = self.count(dense.size), self.share(dense.size)
        if not dense.size or share == 1:
            return self.reported(SparseVector.from_dense(dense))
        kernels = kernels_for(dense)  # whose sums have the same bits on the host and on a device
        above, below = kernels.moments(np.maximum(dense, 0)).absolute, kernels.moments(np.minimum(dense, 0)).absolute
        mean = (above - below) / dense.size
        deviation = math.sqrt(kernels.moments(dense.astype(np.float64) - mean).squares / dense.size)
        distance = NormalDist().inv_cdf(1 - share / 2) * deviation
        rounds, chosen = 1, self._beyond(dense, mean, distance)
        while rounds <= 3 and not 2 * k <= 3 * chosen.size <= 4 * k:
            distance *= 0.5 if 3 * chosen.size < 2 * k else 1.5
            rounds, chosen = rounds + 1, self._beyond(dense, mean, distance)
        return self.reported(top_k(at_positions(dense, chosen), k)[0], distance, rounds)

    @staticmethod
    def _beyond(dense: Array, mean: float, distance: float) -> Array:
        with np.errstate(over="ignore"):  # no value of the dtype is beyond such a threshold
            return np.flatnonzero((dense > mean + distance) | (dense < mean - distance))
