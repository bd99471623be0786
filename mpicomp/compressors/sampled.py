"""Sampled top-k: Deep Gradient Compression's selector, and its schedule of densities.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression", ICLR 2018 (arXiv 1712.01887).

A strided sample of 1 % gives a threshold; where over 1.3 k came through, the exact top-k of those; where under 0.8 k,
the threshold is lowered by a fifth, up to ten times.

Differences from the paper's code: what is too much is trimmed by magnitude, not by the order of the indices; the random
start of the sample comes from a generator of the object's own.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.compressors.common import Density, at_or_above, check_density, check_number, finite_vector, trimmed
from mpicomp.vector import SparseVector

_STRIDE = 100
_MOST, _LEAST, _LOWER, _RETRIES = 1.3, 0.8, 0.8, 10


class SampledTopK(Density):
    """Select about the k largest magnitudes, by the threshold of a sample.

    density or k: see `Density`. seed: of the places where the samples start; ranks may have different ones.
    """

    remembers = ("step",)

    def __init__(self, density: float | None = None, *, k: int | None = None, seed: int = 0) -> None:
        super().__init__(density, k=k)
        self.seed, self.step = seed, 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return what reaches the threshold of a sample; see `Compressor.compress`."""
        dense = finite_vector(corrected)
        k = self.count(dense.size)
        if k >= dense.size:
            return self.reported(SparseVector.from_dense(dense))
        stride = max(1, min(_STRIDE, dense.size // 2))
        start = int(np.random.default_rng([self.seed, self.step]).integers(stride))
        sample = np.abs(dense[start::stride]).astype(np.float64)
        rank = min(sample.size, math.ceil(sample.size * self.share(dense.size)))
        threshold = float(np.partition(sample, sample.size - rank)[sample.size - rank])
        rounds, vector = 1, at_or_above(dense, threshold)
        while vector.nnz < _LEAST * k and threshold > 0 and rounds <= _RETRIES:
            threshold *= _LOWER
            rounds, vector = rounds + 1, at_or_above(dense, threshold)
        self.step += 1
        return self.reported(trimmed(vector, k) if vector.nnz > _MOST * k else vector, threshold, rounds)


class WarmUp:
    """Step a compressor through a list of densities: the paper's warm-up.

    compressor: any with a `density`. densities: one for each stage; the last one stays. calls: of each stage. Raises
    ValueError when the list is empty, a number is out of range, or the compressor was made with k. To quantise as well,
    quantise what this returns: `Quantised(WarmUp(...), "float16")`.
    """

    remembers = ("step",)

    def __init__(
        self, compressor: Any, densities: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004, 0.001), *, calls: int = 1
    ) -> None:
        if not len(densities) or getattr(compressor, "density", None) is None:
            raise ValueError(
                f"got densities={list(densities)}, compressor={compressor!r}: expected at least one density, and a "
                "compressor made with density="
            )
        check_number("calls", calls)
        for density in densities:
            check_density(density)
        self.compressor, self.densities, self.calls, self.step = compressor, list(densities), calls, 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Compress at the density of this step; see `Compressor.compress`."""
        stage = min(self.step // self.calls, len(self.densities) - 1)
        self.compressor.density = self.densities[stage]
        vector: SparseVector = self.compressor.compress(corrected, gradient=gradient)
        self.step += 1
        return vector

    def __repr__(self) -> str:
        return f"WarmUp({self.compressor!r}, {self.densities}, calls={self.calls})"
