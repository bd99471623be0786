"""What the ranks bring to a benchmark: sparse vectors whose supports overlap in a known way, and dense gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import SparseVector
from mpicomp.vector import index_dtype

Positions = NDArray[Any]


def independent(rank: int, size: int, length: int, k: int) -> Positions:
    """Return k positions that have nothing to do with those of the other ranks."""
    return _some(rank + 1, length, k)


def shared(rank: int, size: int, length: int, k: int) -> Positions:
    """Return k positions, the same on all ranks."""
    return _some(0, length, k)


def disjoint(rank: int, size: int, length: int, k: int) -> Positions:
    """Return k positions that no other rank has, spread over the whole length."""
    return rank + size * _some(rank + 1, length // size, k)


def hot(rank: int, size: int, length: int, k: int) -> Positions:
    """Return k positions, about 9 of 10 in a twentieth of the length, from a third of it on; independent else."""
    first, width = length // 3, length // 20
    many = min(9 * k // 10, width)
    cold = _some(rank + 1, length - width, min(k - many, length - width))
    return np.concatenate([first + _some(rank + 1, width, many), cold + width * (cold >= first)])


PATTERNS: dict[str, Callable[[int, int, int, int], Positions]] = {
    pattern.__name__: pattern for pattern in (independent, shared, disjoint, hot)
}


def most(pattern: str, size: int, length: int) -> int:
    """Return how many entries each of `size` ranks can bring: disjoint supports have to share the length."""
    return length // size if pattern == "disjoint" else length


def draw(pattern: str, rank: int, size: int, length: int, k: int, dtype: str) -> SparseVector:
    """Return a rank's vector: normal values at k positions of a pattern; the same one in every run."""
    positions = np.sort(PATTERNS[pattern](rank, size, length, k)).astype(index_dtype(length))
    values = np.random.default_rng([3, rank]).standard_normal(k, np.float32)
    return SparseVector(positions, _no_zeros(values).astype(dtype), length)


def gradient_above(vector: SparseVector, rank: int) -> NDArray[Any]:
    """Return normal values whose largest magnitudes, as many as the vector has entries, stand where those do.

    In random order: a partition leaves them nearly sorted, and one end of the sum would have most of its largest.
    """
    rng = np.random.default_rng([4, rank])
    values = rng.standard_normal(vector.length, np.float32).astype(vector.dtype)
    largest = np.argpartition(np.abs(values), vector.length - vector.nnz)[vector.length - vector.nnz :]
    magnitudes = rng.permutation(values[largest])
    values[largest] = 0
    values[vector.indices] = magnitudes
    return values


def _some(seed: int, length: int, k: int) -> Positions:
    chosen: Positions = np.random.default_rng([2, seed]).choice(length, k, replace=False, shuffle=False)
    return chosen


def _no_zeros(values: NDArray[Any]) -> NDArray[Any]:
    """Return values that are no zeros in float16 either."""
    return np.where(np.abs(values) < 1e-4, np.float32(1e-4), values)
