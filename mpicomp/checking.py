"""The debug mode, MPICOMP_CHECK=1: the mass of vectors, by which both packages check that a sum is complete.

The mass of entries is a triple: their sum in float64, their sum with weights by
position (within -1 and 1), which a misplaced entry changes too, and the sum of their
magnitudes, which bounds rounding errors.
"""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array, to_numpy
from mpicomp.vector import SparseVector

VARIABLE = "MPICOMP_CHECK"

# 2^64 over the golden ratio: multiplicative hashing
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


def is_enabled() -> bool:
    """Return whether the debug mode is enabled: MPICOMP_CHECK is set, and not to 0."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def mass(part: SparseVector | Array) -> list[float]:
    """Return the mass of a vector, of numbers or of rows, or of a dense array."""
    if isinstance(part, SparseVector):
        width = 1 if part.width is None else part.width
        firsts = to_numpy(part.indices).astype(np.uint64)[:, None] * np.uint64(width)
        values = part.values
        places: Array = (firsts + np.arange(width, dtype=np.uint64)).reshape(-1)
    else:
        places = np.arange(part.size, dtype=np.uint64)
        values = part
    doubles = to_numpy(values).reshape(-1).astype(np.float64)
    weights = ((places + np.uint64(1)) * _MIX >> np.uint64(11)) / 2.0**52 - 1
    # values that are not finite are reported separately
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            float(doubles.sum()),
            float(doubles @ weights),
            float(np.abs(doubles).sum()),
        ]


def total_mass(masses: Iterable[Sequence[float]]) -> list[float]:
    """Return the mass of several vectors together."""
    return [sum(terms) for terms in zip((0.0, 0.0, 0.0), *masses, strict=True)]


def scaled_mass(mass: Sequence[float], factor: float) -> list[float]:
    """Return the mass of a vector multiplied by a factor."""
    return [factor * mass[0], factor * mass[1], abs(factor) * mass[2]]


def is_same_mass(
    one: Sequence[float], other: Sequence[float], tolerance: float
) -> bool:
    """Return whether two masses differ by at most `tolerance` times the larger magnitude.

    True also if the sums leave the range of float64, where nothing can be checked.
    """
    # float64 rounds too, and subnormals most
    most = (tolerance + 1e-12) * max(one[2], other[2]) + 2.0**-1022
    same = abs(one[0] - other[0]) <= most and abs(one[1] - other[1]) <= most
    return same or not math.isfinite(most)


def tolerance(dtype: Any, size: int) -> float:
    """Return the relative error of sums over `size` ranks: each addition rounds once."""
    return float((size + 2) * np.finfo(dtype).eps)
