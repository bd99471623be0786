"""No feedback: what does not travel is gone. The baseline that shows what error feedback is for."""

from typing import Any

from numpy.typing import NDArray

from mpicomp.vector import SparseVector


class NoFeedback:
    """Keep nothing."""

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return `gradient` itself."""
        return gradient

    def keep(self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None) -> None:
        """Let go of everything."""

    def result(self, mean: SparseVector) -> NDArray[Any]:
        """Return the mean as a dense vector, shape (n,)."""
        return mean.to_dense()
