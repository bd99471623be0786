#!/usr/bin/env python3
"""`mpicomp bench compressors` with those that papers compare with: DGC's, RedSync, GaussianK, MSTopK, torch.topk.

    python experiments/papers/compared.py --length 1e6 --densities 0.001 --compressors TopK RedSync torch.topk

They derive from `mpicomp.Compressor` alone, as a compressor outside the library does,
and take NumPy's arrays.

Sources: J. Fang, H. Fu, G. Yang, C.-J. Hsieh, RedSync, JPDC 133, 2019 (arXiv
1808.04357); S. Shi, X. Chu, K. C. Cheung, S. See, "Understanding top-k sparsification
in distributed deep learning", 2019 (arXiv 1911.08772) for GaussianK; S. Shi et al.,
"Towards scalable distributed training of deep learning on public cloud clusters", MLSys
2021, for MSTopK.

Differences from the papers: the entries above the mean are compacted once, and the
search counts among these alone; excess entries are dropped by magnitude, ties go to the
lowest index.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import Compressor, SparseVector
from mpicomp.vector import top_k
from mpicomp_bench import main
from mpicomp_bench.bench.compressors import COMPRESSORS

sys.path.append(str(Path(__file__).resolve().parent.parent / "training"))

from sampled import SampledTopK

HALVINGS = 30  # of RedSync: then the bracket is narrower than the spacing of float32
BISECTIONS = 25  # of MSTopK

Vector = NDArray[Any]


class Compared(Compressor):
    """Base class: select a fraction of the entries, 0 < density <= 1."""

    def __init__(self, density: float) -> None:
        self.density = density
        self.threshold = 0.0  # of the last call, and the rounds of its search
        self.rounds = 0

    def count(self, length: int) -> int:
        """Return the number of entries to select from a vector of `length`."""
        return min(length, max(1, round(self.density * length)))

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries; raises ValueError naming the first value that is not finite."""
        dense = np.reshape(corrected, -1)
        if not np.isfinite(dense).all():
            SparseVector(np.arange(dense.size), dense, dense.size).validate()
        if not dense.any():
            return SparseVector.empty(dense.size, dense.dtype)
        count = self.count(dense.size)
        vector, self.threshold, self.rounds = self.selected(dense, count)
        return vector

    def selected(self, dense: Vector, k: int) -> tuple[SparseVector, float, int]:
        """Return about k entries of a vector that is not zero, the threshold, and the rounds of the search."""
        raise NotImplementedError


class RedSync(Compared):
    """Select the k largest magnitudes by a binary search for a threshold that k to 2 k magnitudes reach.

    The threshold is mean + t (max - mean) of the magnitudes, 0 <= t <= 1.
    """

    def selected(self, dense: Vector, k: int) -> tuple[SparseVector, float, int]:
        """Return the k largest magnitudes."""
        mean, largest = mean_and_largest(dense)
        candidates = entries(dense, np.abs(dense) >= mean)
        # the search begins at the mean: below it, an exact selection
        if candidates.nnz <= k:
            return top_k(SparseVector.from_dense(dense), k)[0], mean, 1
        low, high, magnitudes = 0.0, 1.0, np.abs(candidates.values).astype(np.float64)
        threshold, rounds, count = mean, 0, candidates.nnz
        while rounds < HALVINGS and not (rounds and k <= count < 2 * k):
            rounds, middle = rounds + 1, (low + high) / 2
            count = np.count_nonzero(magnitudes >= mean + middle * (largest - mean))
            if count >= k:
                low, threshold = middle, mean + middle * (largest - mean)
            else:
                high = middle
        return (
            top_k(candidates.divide(np.flatnonzero(magnitudes >= threshold))[0], k)[0],
            threshold,
            rounds,
        )


class MSTopK(Compared):
    """Select exactly k entries by two thresholds, which a bisection makes converge.

    All entries that reach the upper threshold are sent, and as many of those between
    the two thresholds as make k, with the lowest indices.
    """

    def selected(self, dense: Vector, k: int) -> tuple[SparseVector, float, int]:
        """Return k entries, or all non-zero ones if there are fewer."""
        low, largest = mean_and_largest(dense)
        candidates = entries(dense, np.abs(dense) >= low)
        if candidates.nnz < k:
            candidates, low = SparseVector.from_dense(dense), 0.0
        high, magnitudes = (
            np.nextafter(largest, np.inf),
            np.abs(candidates.values).astype(np.float64),
        )
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if np.count_nonzero(magnitudes >= middle) >= k:
                low = middle
            else:
                high = middle
        above = magnitudes >= high
        between = np.flatnonzero((magnitudes >= low) & ~above)[
            : max(0, k - np.count_nonzero(above))
        ]
        chosen = np.sort(np.concatenate([np.flatnonzero(above), between]))
        return candidates.divide(chosen)[0], low, BISECTIONS


class GaussianK(Compared):
    """Select by the quantile of a normal distribution, corrected up to three times.

    An entry is selected if its distance from the mean exceeds Phi^-1(1 - density / 2)
    standard deviations; that distance is halved while under 2/3 k entries are selected,
    and multiplied by 1.5 while over 4/3 k are; then the k largest are kept.
    """

    def selected(self, dense: Vector, k: int) -> tuple[SparseVector, float, int]:
        """Return at most k entries."""
        if k == dense.size:
            return SparseVector.from_dense(dense), 0.0, 1
        mean, deviation = dense.mean(dtype=np.float64), dense.std(dtype=np.float64)
        distance, rounds = (
            float(NormalDist().inv_cdf(1 - k / dense.size / 2) * deviation),
            1,
        )
        while True:
            chosen = (dense > mean + distance) | (dense < mean - distance)
            count = np.count_nonzero(chosen)
            if rounds > 3 or 2 * k <= 3 * count <= 4 * k:
                return top_k(entries(dense, chosen), k)[0], distance, rounds
            distance *= 0.5 if 3 * count < 2 * k else 1.5
            rounds += 1


class TorchTopK(Compared):
    """PyTorch's topk of the magnitudes, on the CPU; needs PyTorch."""

    def selected(self, dense: Vector, k: int) -> tuple[SparseVector, float, int]:
        """Return the k largest magnitudes."""
        import torch

        indices = np.sort(
            torch.topk(torch.from_numpy(dense).abs(), k, sorted=False).indices.numpy()
        )
        return (
            SparseVector(indices, dense[indices], dense.size),
            float(np.abs(dense[indices]).min()),
            1,
        )


def mean_and_largest(dense: Vector) -> tuple[float, float]:
    """Return the mean of the magnitudes, at most the largest whatever rounding does, and the largest."""
    magnitudes = np.abs(dense)
    largest = float(magnitudes.max())
    return min(float(magnitudes.mean(dtype=np.float64)), largest), largest


def entries(dense: Vector, chosen: NDArray[np.bool_]) -> SparseVector:
    """Return the non-zero entries of those chosen; the largest entry if there is none."""
    indices = np.flatnonzero(chosen & (dense != 0))
    if not indices.size:
        return top_k(SparseVector.from_dense(dense), 1)[0]
    return SparseVector(indices, dense[indices], dense.size)


COMPARED: dict[str, Callable[[float], Compressor]] = {
    "SampledTopK": SampledTopK,
    "RedSync": RedSync,
    "GaussianK": GaussianK,
    "MSTopK": MSTopK,
    "torch.topk": TorchTopK,
}

if __name__ == "__main__":
    COMPRESSORS.update(COMPARED)
    sys.exit(main(["bench", "compressors", *sys.argv[1:]]))
