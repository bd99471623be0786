"""Exact top-k: select the k largest magnitudes.

Source: the selection of A. F. Aji and K. Heafield, "Sparse communication for
distributed gradient descent", EMNLP 2017 (arXiv 1704.05021), there with a sampled
threshold.

Differences from the paper: the selection is exact, ties go to the lowest indices, and
exact zeros are never sent.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mpicomp.arrays import Array, kernels_for
from mpicomp.compressors.base import SegmentedCompressor, Summands
from mpicomp.compressors.common import Density, selected
from mpicomp.vector import SparseVector

# values: from here on a pass for each segment is as fast as one for all
_LONG = 1 << 20


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
        gradient: Sequence[Array] | None = None,
    ) -> SparseVector:
        """See `Compressor.select`; long segments are selected from one after the other."""
        if len(bounds) == 2:
            found = _largest(corrected, self.count(corrected.size), summands, 0)
            return self.reported(selected(corrected, *found))
        sizes = np.diff(bounds)
        counts = self.counts(sizes)
        if sizes.max() >= _LONG:
            found = _by_segment(corrected, bounds, counts.tolist(), summands)
        else:
            k = np.minimum(counts, sizes)
            found = kernels_for(corrected).largest_in_segments(
                corrected, bounds, k, sizes.clip(1), k, summands=summands
            )
        target = int(counts.sum()) / max(1, corrected.size)
        return self.reported(selected(corrected, *found), target=target)


def _largest(
    values: Array, count: int, summands: Summands | None, segment: int
) -> tuple[Array, Array]:
    """Return positions and values of the largest magnitudes of a segment, which summands overwrite first."""
    kernels = kernels_for(values)
    if summands is None:
        return kernels.largest(values, count)  # type: ignore[no-any-return]
    residual, scale, parts = summands
    return kernels.add_largest(  # type: ignore[no-any-return]
        residual, parts[segment], values, count, scale=scale
    )


def _by_segment(
    corrected: Array,
    bounds: Sequence[int],
    counts: Sequence[int],
    summands: Summands | None,
) -> tuple[Array, Array]:
    """Return positions and values of the largest magnitudes of one segment after the other."""
    all_positions = []
    all_values = []
    for segment, (first, end) in enumerate(pairwise(bounds)):
        own = summands
        if summands is not None:
            own = summands[0][first:end], summands[1], summands[2]
        positions, values = _largest(
            corrected[first:end], counts[segment], own, segment
        )
        all_positions.append(positions + first)
        all_values.append(values)
    return np.concatenate(all_positions), np.concatenate(all_values)
