"""Error feedback: what a rank keeps of its gradient until it travels. One file a method, one small protocol.

A method works in two steps so that nothing is lost when a call fails in between: `correct` changes nothing, and `keep`
is called only once the collective has succeeded.
"""

from typing import Any, Protocol

from numpy.typing import NDArray

from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.feedback.none import NoFeedback
from mpicomp.vector import SparseVector

__all__ = ["ErrorFeedback", "Feedback", "NoFeedback"]


class Feedback(Protocol):
    """Keep what does not travel."""

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return what is to be compressed: `gradient` (1-d) with what was kept; changes no state that `keep` needs."""
        ...

    def keep(self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None) -> None:
        """Keep `corrected` less `sent`, the values that receivers decode, plus `rejected`, what came back.

        corrected: the array that `correct` returned; it belongs to the feedback from now on.
        """
        ...

    def result(self, mean: SparseVector) -> NDArray[Any]:
        """Return the dense vector that the exchange hands back, from the mean over the ranks of what arrived.

        Called once after each `keep`. The array is the caller's: the feedback keeps no reference to it.
        """
        ...
