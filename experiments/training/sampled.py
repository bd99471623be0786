"""Sampled top-k, the selector of Deep Gradient Compression, with which papers compare; and its methods of training.

Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, "Deep gradient compression", ICLR
2018 (arXiv 1712.01887).

A strided sample of 1 % gives a threshold. If more than 1.3 k entries reach it, the
exact top-k of these are sent; if fewer than 0.8 k do, the threshold is lowered by a
fifth, up to ten times.

Differences from the paper's code: excess entries are dropped by magnitude, not by the
order of the indices; the random start of the sample is drawn from a seed and the number
of the step.
"""

import math
from typing import Any

import numpy as np

from mpicomp import SparseVector
from mpicomp.compressors.common import Density, at_positions, finite_vector
from mpicomp.vector import top_k
from mpicomp_bench.methods import add

STRIDE = 100
MOST, LEAST, LOWER, RETRIES = 1.3, 0.8, 0.8, 10


class SampledTopK(Density):
    """Select about the k largest magnitudes, by the threshold of a sample.

    density or k: see `Density`. seed: for the offsets of the samples; ranks may have
    different ones.
    """

    state = {"step": (0, 2**62)}

    def __init__(
        self, density: float | None = None, *, k: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(density, k=k)
        self.seed, self.step = seed, 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries that reach the threshold of a sample; see `Compressor.compress`."""
        dense = finite_vector(corrected)
        k = self.counts([dense.size])[0]
        stride = max(1, min(STRIDE, dense.size // 2))
        start, self.step = (
            int(np.random.default_rng([self.seed, self.step]).integers(stride)),
            self.step + 1,
        )
        if k >= dense.size:
            return SparseVector.from_dense(dense)
        magnitudes = np.abs(dense)
        sample = magnitudes[start::stride].astype(np.float64)
        rank = min(sample.size, math.ceil(sample.size * k / dense.size))
        threshold, rounds = (
            float(np.partition(sample, sample.size - rank)[sample.size - rank]),
            1,
        )
        found = np.flatnonzero(magnitudes >= threshold)
        while found.size < LEAST * k and threshold > 0 and rounds <= RETRIES:
            threshold, rounds = threshold * LOWER, rounds + 1
            found = np.flatnonzero(magnitudes >= threshold)
        vector = at_positions(dense, found)
        return top_k(vector, k)[0] if vector.nnz > MOST * k else vector


LINE = "GradientExchange(comm, SampledTopK(density=0.01), "
add(
    "sampled-topk",
    "entries above the threshold of a sample",
    LINE + "collective=sparse_allgather)",
    "density",
)
add(
    "dgc",
    "the same with momentum correction (Deep Gradient Compression, arXiv 1712.01887)",
    LINE + "MomentumCorrection(momentum), sparse_allgather)",
    "density",
)
