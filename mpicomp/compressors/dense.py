"""Dense: send every entry. The baseline with the interface of a compressor."""

from collections.abc import Sequence
from typing import Any

from mpicomp.arrays import Array
from mpicomp.compressors.base import Compressor, Summands, write_sum
from mpicomp.compressors.common import finite_vector
from mpicomp.vector import SparseVector


class Dense(Compressor):
    """Select every entry that is not zero.

    >>> Dense().compress(gradient).values.tolist()
    [0.5, -3.0, 0.25, 2.0]
    """

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return all non-zero entries of `corrected`; see `Compressor.compress`."""
        return self.reported(
            SparseVector.from_dense(finite_vector(corrected)), target=1.0
        )

    def compress_segments(
        self,
        corrected: Array,
        bounds: Sequence[int],
        *,
        summands: Summands | None = None,
    ) -> SparseVector:
        if summands is not None:
            write_sum(summands, corrected)
        return self.compress(corrected)
