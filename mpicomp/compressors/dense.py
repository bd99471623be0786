"""Dense: send every entry. The baseline with the interface of a compressor."""

from collections.abc import Sequence

from mpicomp.compressors.base import SegmentedCompressor
from mpicomp.compressors.common import finite_vector
from mpicomp.correction import Correction
from mpicomp.vector import SparseVector


class Dense(SegmentedCompressor):
    """Select every entry that is not zero: the baseline.

    >>> Dense().compress(gradient).values.tolist()
    [0.5, -3.0, 0.25, 2.0]
    """

    fraction = 1.0

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """Return all non-zero entries; see `Compressor.select`."""
        return SparseVector.from_dense(finite_vector(correction.add()))
