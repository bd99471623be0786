"""No feedback: entries that are not sent are dropped. The baseline for the methods with feedback.

Invariant: none; corrected - sent + rejected is lost.
"""

from mpicomp.arrays import Array, Dtype, Write
from mpicomp.bases import Basis
from mpicomp.correction import Correction
from mpicomp.feedback.base import Dtypes, Feedback
from mpicomp.vector import SparseVector


class NoFeedback(Feedback):
    """Keep nothing: entries that are not sent are dropped.

    >>> NoFeedback().correct(gradient).add() is gradient
    True
    """

    def correct(self, *gradient: Array, basis: Basis | None = None) -> Correction:
        """Return the gradient itself; parts that are not adjacent in memory are copied."""
        parts = self._stage(gradient, basis)
        return Correction(parts, self._joined(parts), shows_gradient=True)

    def prepare_residual(
        self,
        correction: Correction,
        sent: SparseVector,
        rejected: SparseVector | None = None,
    ) -> Write:
        """Keep nothing."""
        return self._swap()

    def prepare_rejected(self, correction: Correction, rejected: Array | None) -> Write:
        """Keep nothing."""
        return self._swap()

    def dtypes(self, dtype: Dtype) -> Dtypes:
        return {}
