"""The hot loops: arrays in, arrays out, under the same names on the host and on a device.

``host`` (Numba) serves arrays in host memory, ``device`` (CUDA) those on a GPU.
:func:`mpicomp.arrays.device.kernels_for` returns the module for an array.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpicomp.arrays import Array

Facts = tuple[int, int, int, int]
"""What `inspect` returns."""

# The facts of a vector without entries.
NOTHING: Facts = -1, -1, 0, -1


# Share of the magnitudes that exceeds the threshold of the first of several stages.
FIRST = 0.25

PLAN = np.dtype(
    [
        ("size", np.int64),  # of the segment
        ("sample", np.int64),  # values: `size`, or a multiple of 16 below it
        ("wanted", np.float64),  # entries that are to exceed the last threshold
        ("stages", np.int64),  # in: at most; out: in use
        # Out: the threshold before the last one; NaN if the sample gives none.
        ("start", np.float64),
        # Share of the magnitudes above the first threshold that exceed the last one; 1
        # for one stage. NaN stands for wanted / above of the threshold before the last.
        ("share", np.float64),
        ("nonzeros", np.float64),  # values that are not zero, by the sample
        # Room for the values above `start`, enough unless the sample misleads.
        ("room", np.int64),
        ("total", np.float64),  # of the excess over `start`
        ("threshold", np.float64),  # the last one
        ("above", np.int64),  # magnitudes above `start`
        ("kept", np.int64),  # entries above `threshold`
    ]
)
"""What is known of a segment: the first four fields before it is fitted."""


class Summands(NamedTuple):
    """What a kernel adds before it selects, ``decay * residual + parts``: the fields of a `Correction`.

    residual, parts: 1-d contiguous, of the dtype of the sum, the parts one after the
    other, one for each segment. The product is rounded before it is added. chunk: by
    which `hadamard` transforms the parts first; 1 transforms nothing.
    """

    residual: Array
    decay: float
    parts: Sequence[Array]
    chunk: int = 1


class Selected(NamedTuple):
    """Entries that were selected from the segments of a vector.

    indices: increasing, int32 unless the vector is longer than 2^31 - 1. places: the
    number of entries before each bound of the segments. facts: what `inspect` returns
    of the entries, the place of a value that is not finite is any; None if it is not
    known.
    """

    indices: Array
    values: Array
    places: list[int]
    facts: Facts | None = None

    def filled(self, bounds: Array, select: Callable[..., "Selected"]) -> "Selected":
        """Return the entries, and the largest value of each segment that has none; select: by `largest_in_segments`."""
        sizes = np.diff(bounds)
        is_empty = (np.diff(self.places) == 0) & (sizes > 0)
        if not is_empty.any():
            return self
        k = is_empty.astype(int).tolist()
        found = select(bounds.tolist(), k, sizes.clip(1).tolist(), k)
        return self.replaced(found, is_empty)

    def replaced(self, other: "Selected", rows: Array) -> "Selected":
        """Return the entries, in the segments where `rows` (bool) is true those of another selection."""
        changes = np.flatnonzero(np.diff(rows)) + 1
        parts = []
        for first, end in pairwise([0, *changes.tolist(), rows.size]):
            part = other if rows[first] else self
            span = slice(part.places[first], part.places[end])
            parts.append((part.indices[span], part.values[span]))
        indices, values = zip(*parts, strict=True)
        counts = np.where(rows, np.diff(other.places), np.diff(self.places))
        places = [0, *np.cumsum(counts).tolist()]
        return Selected(np.concatenate(indices), np.concatenate(values), places)
