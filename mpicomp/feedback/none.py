"""No feedback: entries that are not sent are dropped. The baseline for the methods with feedback.

Invariant: none; corrected - sent + rejected is lost.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.feedback.base import Added, Feedback, Layout
from mpicomp.vector import SparseVector


class NoFeedback(Feedback):
    """Keep nothing.

    >>> NoFeedback().correct(gradient) is gradient
    True
    """

    def correct(self, gradient: Array) -> Array:
        """Return `gradient` itself."""
        return gradient

    def settle(self, corrected: Array, sent: SparseVector, rejected: SparseVector | None, mean: SparseVector) -> Added:
        """Keep nothing."""
        return ()

    def _layout(self, dtype: np.dtype[Any]) -> Layout:
        return {}
