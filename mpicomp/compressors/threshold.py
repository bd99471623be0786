"""Threshold: what is at least as large as a fixed number travels.

Source: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, there with
one magnitude for all that is sent.

Differences from the paper: the values travel as they are (`Quantised` with "sign" gives them one magnitude), and where
nothing reaches the threshold the largest entry travels: an empty message hung peers of published code.
"""

from typing import Any

import numpy as np

from mpicomp.compressors.common import Report, at_or_above, finite_vector
from mpicomp.vector import SparseVector


class Threshold:
    """Select |x| >= threshold. threshold: a number above 0, else ValueError."""

    def __init__(self, threshold: float) -> None:
        if not (isinstance(threshold, int | float | np.number) and 0 < threshold < np.inf):
            raise ValueError(f"threshold is {threshold!r}: expected a number above 0")
        self.threshold = threshold
        self.report: Report | None = None

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries that reach the threshold, or the largest one; see `Compressor.compress`."""
        vector = at_or_above(finite_vector(corrected), self.threshold)
        self.report = Report(vector.density, vector.density, vector.nbytes, self.threshold)
        return vector

    def __repr__(self) -> str:
        return f"Threshold({self.threshold})"
