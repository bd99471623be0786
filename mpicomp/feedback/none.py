"""No feedback: entries that are not sent are dropped. The baseline for the methods with feedback.

Invariant: none; corrected - sent + rejected is lost.
"""

from mpicomp.arrays import Array, Dtype
from mpicomp.bases import Basis, coefficients_of
from mpicomp.compressors.base import Summands
from mpicomp.feedback.base import Dtypes, Feedback
from mpicomp.vector import SparseVector


class NoFeedback(Feedback):
    """Keep nothing: entries that are not sent are dropped.

    >>> NoFeedback().correct(gradient) is gradient
    True
    """

    def correct(self, *gradient: Array) -> Array:
        """Return `gradient` itself; its parts are copied."""
        self._stage(gradient)
        return self._joined(gradient)

    def summands(
        self, *gradient: Array, basis: Basis | None = None
    ) -> tuple[Array, Summands | None]:
        """Return the gradient, in the basis, and its parts."""
        parts = coefficients_of(gradient, basis)
        return self.correct(*parts), Summands(None, 1.0, parts)

    def prepare_residual(
        self, corrected: Array, sent: SparseVector, rejected: SparseVector | None = None
    ) -> None:
        """Keep nothing."""

    def prepare_rejected(self, corrected: Array, rejected: Array | None) -> None:
        """Keep nothing."""

    def dtypes(self, dtype: Dtype) -> Dtypes:
        return {}
