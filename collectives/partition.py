"""Who owns which indices: pure functions, the same on every rank."""

from itertools import pairwise

import numpy as np

from mpicomp.vector import SparseVector


def equal_ranges(length: int, size: int) -> list[int]:
    """Return the size + 1 bounds of `size` ranges of indices: rank r owns bounds[r] <= index < bounds[r + 1].

    Their lengths differ by one at most. Python integers: length * size may be beyond 64 bits.
    """
    return [length * rank // size for rank in range(size + 1)]


def cut(vector: SparseVector, bounds: list[int]) -> list[SparseVector]:
    """Return the parts of a vector that lie between successive bounds, as views; indices stay as they are."""
    places = np.searchsorted(vector.indices, np.array(bounds, vector.indices.dtype)).tolist()
    return [
        SparseVector(vector.indices[start:end], vector.values[start:end], vector.length)
        for start, end in pairwise(places)
    ]
