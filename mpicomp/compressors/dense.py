"""Dense: send every entry. The baseline with the interface of a compressor."""

from collections.abc import Sequence

from mpicomp.arrays import Array
from mpicomp.compressors.base import SegmentedCompressor, Summands, write_sum
from mpicomp.compressors.common import finite_vector
from mpicomp.vector import SparseVector


class Dense(SegmentedCompressor):
    """Select every entry that is not zero: the baseline.

    >>> Dense().compress(gradient).values.tolist()
    [0.5, -3.0, 0.25, 2.0]
    """

    fraction = 1.0

    def select(
        self,
        corrected: Array,
        bounds: Sequence[int],
        summands: Summands | None = None,
    ) -> SparseVector:
        """Return all non-zero entries of `corrected`; see `Compressor.select`."""
        write_sum(summands, corrected)
        return SparseVector.from_dense(finite_vector(corrected))
