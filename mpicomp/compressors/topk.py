"""Exact top-k: select the k largest magnitudes.

Source: the selection of A. F. Aji and K. Heafield, "Sparse communication for
distributed gradient descent", EMNLP 2017 (arXiv 1704.05021), there with a sampled
threshold.

Differences from the paper: the selection is exact, ties go to the lowest indices, and
exact zeros are never sent.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, to_vector
from mpicomp.compressors.base import Summands
from mpicomp.compressors.common import Density, selected
from mpicomp.vector import SparseVector

# values: from here on a pass for each segment is as fast as one for all
_LONG = 1 << 20


class TopK(Density):
    """Select the k largest magnitudes of a vector, exactly; ties go to the lowest indices.

    Give one of: density, the fraction of the entries to send, 0 < density <= 1, where k
    = max(1, round(density n)); k, their number, k >= 1. Raises ValueError if both or
    none are given, or if one is out of range.

    >>> TopK(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the k largest magnitudes of `corrected`; see `Compressor.compress`."""
        dense = to_vector(corrected)
        return self.reported(
            selected(dense, *kernels_for(dense).largest(dense, self.count(dense.size)))
        )

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        """See `Compressor.compress_segments`; long segments are selected from one after the other."""
        if summands is not None and len(bounds) == 2:
            residual, scale, (gradient,) = summands
            add, count = kernels_for(corrected).add_largest, self.count(corrected.size)
            found = add(residual, gradient, corrected, count, scale=scale)
            return self.reported(selected(corrected, *found))
        sizes = np.diff(bounds)
        if sizes.max() >= _LONG:
            return super().compress_segments(corrected, bounds, summands=summands)
        counts = self.counts(sizes)
        kernels, k = kernels_for(corrected), np.minimum(counts, sizes)
        found = kernels.largest_in_segments(
            corrected, bounds, k, sizes.clip(1), k, summands=summands
        )
        return self.reported(
            selected(corrected, *found),
            target=int(counts.sum()) / max(1, corrected.size),
        )
