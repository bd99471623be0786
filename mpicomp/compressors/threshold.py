"""Threshold: select the magnitudes that reach a fixed number.

Source: N. Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015, there with
one magnitude for all entries that are sent.

Differences from the paper: the values are sent as they are (`Quantised` with "sign" gives them one magnitude), and if
no value reaches the threshold the largest entry is sent: in published code an empty message made the other ranks hang.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mpicomp.arrays import Array, kernels_for
from mpicomp.compressors.base import Compressor, Summands, write_sum
from mpicomp.compressors.common import all_at, at_or_above, entries_found, finite_vector
from mpicomp.settings import to_number
from mpicomp.vector import SparseVector, concatenate, split, without_zeros


class Threshold(Compressor):
    """Select |x| >= threshold. threshold: a number above 0, else ValueError.

    >>> Threshold(1.0).compress(gradient).values.tolist()
    [-3.0, 2.0]
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = to_number("threshold", threshold, above=0)

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries that reach the threshold, or the largest one; see `Compressor.compress`."""
        return self.reported(at_or_above(finite_vector(corrected), self.threshold), self.threshold)

    def compress_segments(
        self, corrected: Array, bounds: Sequence[int], *, summands: Summands | None = None
    ) -> SparseVector:
        """See `Compressor.compress_segments`; one pass, and another over segments without an entry."""
        if summands is not None and len(bounds) == 2:
            residual, scale, (gradient,) = summands
            found = kernels_for(corrected).add_above(residual, gradient, corrected, self.threshold, scale=scale)
            return self.reported(entries_found(corrected, *found), self.threshold)
        if summands is not None:
            write_sum(summands, corrected)
        dense = finite_vector(corrected)
        parts = split(without_zeros(all_at(dense, kernels_for(dense).above(dense, self.threshold))), bounds)
        for place, (first, end) in enumerate(pairwise(bounds)):
            if not parts[place].nnz:
                parts[place] = at_or_above(dense[first:end], self.threshold)
        return self.reported(concatenate(parts), self.threshold)
