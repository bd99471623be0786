"""No feedback: entries that are not sent are dropped. The baseline for the methods with feedback.

Invariant: none; corrected - sent + rejected is lost.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array, read_only
from mpicomp.compressors import Compressor
from mpicomp.feedback.base import Dtypes, Feedback, Gradient
from mpicomp.vector import SparseVector


class NoFeedback(Feedback):
    """Keep nothing.

    >>> NoFeedback().correct(gradient) is gradient
    True
    """

    def correct(self, gradient: Gradient, bounds: Sequence[int] | None = None) -> Array:
        """Return `gradient` itself; its parts are copied."""
        self._stage(gradient, bounds)
        return self._joined(gradient)

    def compress(
        self,
        gradient: Gradient,
        compressor: Compressor,
        bounds: Sequence[int] | None = None,
    ) -> tuple[Array, SparseVector]:
        """Return the gradient, and the entries that a compressor selects of it."""
        corrected = self.correct(gradient, bounds)
        return corrected, compressor.compress(read_only(corrected), gradient=corrected)

    def settle(
        self, corrected: Array, sent: SparseVector, rejected: SparseVector | None = None
    ) -> None:
        """Keep nothing."""

    def settle_all(self, corrected: Array, rejected: Array | None) -> None:
        """Keep nothing."""

    def dtypes(self, dtype: np.dtype[Any]) -> Dtypes:
        return {}
