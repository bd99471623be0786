"""Dense: everything travels. The baseline with the shape of a compressor."""

from typing import Any

from mpicomp.compressors.common import Report, finite_vector
from mpicomp.vector import SparseVector


class Dense:
    """Send every entry that is not zero."""

    report: Report | None = None

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return all non-zero entries of `corrected`; see `Compressor.compress`."""
        vector = SparseVector.from_dense(finite_vector(corrected))
        self.report = Report(1.0, vector.density, vector.nbytes)
        return vector

    def __repr__(self) -> str:
        return "Dense()"
