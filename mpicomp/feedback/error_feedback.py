"""Error feedback (EF-SGD): p = g + e, send D = C(p), keep e = p - D.

Source: S. P. Karimireddy, Q. Rebjock, S. Stich, M. Jaggi, "Error feedback fixes SignSGD and other gradient compression
schemes", ICML 2019 (arXiv 1901.09847).

Differences from the paper: the residual is kept in gradient units (the paper scales by the learning rate first), and it
also takes up what the collective rejects.

Invariant: residual after + sent - rejected = residual before + gradient, exactly where the additions are exact.
"""

from typing import Any

from numpy.typing import NDArray

from mpicomp.arrays import kernels_for
from mpicomp.feedback.common import Kept
from mpicomp.vector import SparseVector


class ErrorFeedback(Kept):
    """Add to each gradient what earlier ones left behind.

    The residual has the dtype and size of the gradients and starts at zero with the first of them. It is in gradient
    units: `rescale` scales it.
    """

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return gradient + residual in a buffer of its own; the residual stays as it is.

        Raises ValueError when the gradient has another size or dtype than the residual: use one object a tensor.
        """
        self._stage(gradient)
        corrected = self._spare("residual")
        kernels_for(corrected).add(self._arrays["residual"], gradient, corrected)
        return corrected

    def keep(self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None) -> None:
        """Make corrected - sent + rejected the new residual; see `Feedback.keep`."""
        self._settle(corrected, sent, rejected)
        self._swap("residual", corrected)
