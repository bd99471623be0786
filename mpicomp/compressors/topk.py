"""Exact top-k: select the k largest magnitudes.

Source: the selection of A. F. Aji and K. Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017
(arXiv 1704.05021), there with a sampled threshold.

Differences from the paper: the selection is exact, ties go to the lowest indices, and exact zeros are never sent.
"""

from typing import Any

from mpicomp.arrays import Array, kernels_for, to_vector
from mpicomp.compressors.common import Density, selected
from mpicomp.vector import SparseVector


class TopK(Density):
    """Select the k largest magnitudes of a vector, exactly.

    Give one of: density, the fraction of the entries to send, 0 < density <= 1, where k = max(1, round(density n)); k,
    their number, k >= 1.

    Raises ValueError if both or none are given, or if one is out of range.

    >>> TopK(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the k largest magnitudes of `corrected`; see `Compressor.compress`. Ties go to the lowest indices.

        corrected: an array of any shape, taken in C order; float16, float32 or float64.
        """
        dense = to_vector(corrected)
        return self.reported(selected(dense, *kernels_for(dense).largest(dense, self.count(dense.size))))

    def compress_sum(self, residual: Array, gradient: Array, out: Array) -> SparseVector:
        """See `Compressor.compress_sum`; adds and selects in one pass."""
        found = kernels_for(out).add_largest(residual, gradient, out, self.count(out.size))
        return self.reported(selected(out, *found))
