"""Exact top-k: select the k largest magnitudes.

Source: the selection of A. F. Aji and K. Heafield, "Sparse communication for
distributed gradient descent", EMNLP 2017 (arXiv 1704.05021), there with a sampled
threshold.

Differences from the paper: the selection is exact, ties go to the lowest indices, and
exact zeros are never sent.
"""

from collections.abc import Sequence
from itertools import pairwise

from mpicomp.arrays import Array, kernels_for
from mpicomp.compressors.base import SegmentedCompressor, Summands, to_add
from mpicomp.compressors.common import Density, selected
from mpicomp.vector import SparseVector


class TopK(Density, SegmentedCompressor):
    """Select the k largest magnitudes of a vector, exactly; ties go to the lowest indices.

    Give one of: density, the fraction of the entries to send, 0 < density <= 1, where k
    = max(1, round(density n)); k, their number, k >= 1. Raises ValueError if both or
    none are given, or if one is out of range.

    >>> TopK(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    def select(
        self,
        corrected: Array,
        bounds: Sequence[int],
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.select`."""
        sizes = [end - first for first, end in pairwise(bounds)]
        k = [*map(min, self.counts(sizes), sizes)]
        chunk = [max(1, size) for size in sizes]
        entries = kernels_for(corrected).largest_in_segments(
            corrected, bounds, k, chunk, k, summands=to_add(summands)
        )
        return selected(corrected, bounds, entries)
