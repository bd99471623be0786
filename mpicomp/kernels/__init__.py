"""The hot loops: arrays in, arrays out, under the same names on the host and on a device.

``host`` (Numba) serves arrays in host memory, ``device`` (CUDA) those on a GPU.
:func:`mpicomp.arrays.device.kernels_for` returns the module for an array.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpicomp.arrays import Array

Facts = tuple[int, int, int, int]
"""What `inspect` returns."""

# The facts of a vector without entries.
NOTHING: Facts = -1, -1, 0, -1


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
