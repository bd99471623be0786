"""Exact top-k: select the k largest magnitudes.

Source: the selection of A. F. Aji and K. Heafield, "Sparse communication for
distributed gradient descent", EMNLP 2017 (arXiv 1704.05021), there with a sampled
threshold.

Differences from the paper: the selection is exact, ties go to the lowest indices, and
exact zeros are never sent.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpicomp.arrays.device import kernels_for
from mpicomp.arrays.values import check_finite
from mpicomp.compressors.base import SegmentedCompressor, known
from mpicomp.compressors.common import Density, counts_of, hashable
from mpicomp.correction import Correction
from mpicomp.vector import SparseVector

Rows = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""For each segment the entries to select of a chunk, its length, at least 1, and those of the last chunk."""


class TopK(Density, SegmentedCompressor):
    """Select the k largest magnitudes of a vector, exactly; ties go to the lowest indices.

    Args:
        density: the fraction of the entries to select, 0 < density <= 1:
            k = max(1, round(density n)) of n. Give this or `k`.
        k: the number of entries, at least 1.

    Raises:
        ValueError: both or none are given, or one is out of range.

    Source: A. F. Aji and K. Heafield, EMNLP 2017 (arXiv 1704.05021).

    >>> TopK(k=2).compress(gradient).indices.tolist()
    [1, 3]
    """

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """See `Compressor.select`."""
        settings = [hashable(vars(self)[name]) for name in self.varying]
        rows = self.rows(tuple(bounds), *settings)
        corrected = correction.out
        entries = kernels_for(corrected).largest_in_segments(
            corrected, bounds, *rows, summands=correction.summands(in_walsh=True)
        )
        vector = known(corrected.size, bounds, entries)
        # A value that is not finite is among the largest. The facts stay until `forget`.
        if vector.facts[1] >= 0:
            check_finite(corrected)
        return vector

    @staticmethod
    @lru_cache(maxsize=256)
    def rows(bounds: tuple[int, ...], density: Any, k: Any) -> Rows:
        """Return a chunk of each segment, all of it; settings are those of `varying`."""
        sizes = np.diff(bounds)
        wanted = tuple(np.minimum(counts_of(sizes, density, k), sizes).tolist())
        return wanted, tuple(sizes.clip(1).tolist()), wanted
