"""No feedback: what does not travel is gone. The baseline that shows what error feedback is for.

Invariant: none; corrected - sent + rejected is lost.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.feedback.common import Kept, Layout
from mpicomp.vector import SparseVector


class NoFeedback(Kept):
    """Keep nothing."""

    _in_gradient_units = ()

    @property
    def residual(self) -> None:
        """None: nothing is owed."""
        return

    def correct(self, gradient: NDArray[Any]) -> NDArray[Any]:
        """Return `gradient` itself."""
        return gradient

    def keep(self, corrected: NDArray[Any], sent: SparseVector, rejected: SparseVector | None) -> None:
        """Let go of everything."""

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        return {}
