"""No feedback: what is not sent is gone. The baseline that shows what error feedback is for.

Invariant: none; corrected - sent + rejected is lost.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.feedback.base import Feedback, Layout
from mpicomp.vector import SparseVector


class NoFeedback(Feedback):
    """Keep nothing."""

    _in_gradient_units = ()

    @property
    def residual(self) -> None:
        """None: nothing is kept."""
        return

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return `gradient` itself."""
        return gradient

    def settle(
        self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None, mean: SparseVector
    ) -> tuple[SparseVector, ...]:
        """Keep nothing."""
        return ()

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        return {}
