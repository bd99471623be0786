"""Threshold: what is at least as large as a fixed number travels.

Source: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, there with
one magnitude for all that is sent.

Differences from the paper: the values travel as they are (`Quantised` with "sign" gives them one magnitude), and where
nothing reaches the threshold the largest entry travels: an empty message hung peers of published code.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import kernels_for
from mpicomp.compressors.base import Array, Compressor, Report
from mpicomp.compressors.common import at_or_above, entries_found, finite_vector
from mpicomp.vector import SparseVector


class Threshold(Compressor):
    """Select |x| >= threshold. threshold: a number above 0, else ValueError."""

    def __init__(self, threshold: float) -> None:
        if not (isinstance(threshold, int | float | np.number) and 0 < threshold < np.inf):
            raise ValueError(f"threshold is {threshold!r}: expected a number above 0")
        self.threshold = threshold

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries that reach the threshold, or the largest one; see `Compressor.compress`."""
        return self._reported(at_or_above(finite_vector(corrected), self.threshold))

    def compress_sum(self, residual: Array, gradient: Array, out: Array) -> SparseVector:
        """See `Compressor.compress_sum`; one pass adds and selects."""
        found = kernels_for(out).add_above(residual, gradient, out, self.threshold)
        return self._reported(entries_found(out, *found))

    def _reported(self, vector: SparseVector) -> SparseVector:
        self.report = Report(vector.density, vector.density, vector.nbytes, self.threshold)
        return vector
