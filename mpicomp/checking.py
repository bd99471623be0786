"""The debug mode, MPICOMP_CHECK=1: what both packages need for it.

What is promised of a sum is checked by its mass: the plain sum in float64, and one with a weight for each position,
which an entry that went astray changes too. `collectives.checking` checks operations, `collectives.ledger`
steps.
"""

import math
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import to_numpy
from mpicomp.vector import SparseVector

VARIABLE = "MPICOMP_CHECK"

_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2^64 over the golden ratio: multiplicative hashing


def asked() -> bool:
    """Return whether the environment asks for the debug mode: MPICOMP_CHECK is set, and not to 0."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


class Mass(NamedTuple):
    """What entries add up to: their sum, the sum with weights by position (within -1 and 1), that of magnitudes."""

    plain: float = 0.0
    weighted: float = 0.0
    magnitude: float = 0.0

    def plus(self, other: "Mass", times: float = 1.0) -> "Mass":
        """Return self + times * other; magnitudes only grow."""
        plain, weighted = self.plain + times * other.plain, self.weighted + times * other.weighted
        return Mass(plain, weighted, self.magnitude + abs(times) * other.magnitude)

    def equals(self, other: "Mass", tolerance: float, floor: float = 0.0) -> bool:
        """Say whether both are the same within `tolerance` times the larger magnitude, and `floor`.

        Where sums leave the range of float64 nothing can be said against it.
        """
        within = (tolerance + 1e-12) * max(self.magnitude, other.magnitude) + floor  # 1e-12: float64 rounds too
        same = abs(self.plain - other.plain) <= within and abs(self.weighted - other.weighted) <= within
        return same or not math.isfinite(within)


def mass(vector: SparseVector) -> Mass:
    """Return the mass of a vector, of numbers or of rows."""
    width = 1 if vector.width is None else vector.width
    firsts = to_numpy(vector.indices).astype(np.uint64)[:, None] * np.uint64(width)
    places = firsts + np.arange(width, dtype=np.uint64)
    return _mass(places.astype(np.uint64).reshape(-1), to_numpy(vector.values).reshape(-1))


def dense_mass(array: NDArray[Any]) -> Mass:
    """Return the mass of a dense array."""
    return _mass(np.arange(array.size, dtype=np.uint64), to_numpy(array).reshape(-1))


def tolerance(dtype: Any, size: int) -> float:
    """Return by how much sums over `size` ranks may be off, relative to the magnitudes: each addition rounds once."""
    return float((size + 2) * np.finfo(dtype).eps)


def _mass(places: NDArray[np.uint64], values: NDArray[Any]) -> Mass:
    wide = values.astype(np.float64)
    weights = ((places + np.uint64(1)) * _MIX >> np.uint64(11)) / 2.0**52 - 1
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is told apart
        return Mass(float(wide.sum()), float(wide @ weights), float(np.abs(wide).sum()))
