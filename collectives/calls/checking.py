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

from collectives.faults.errors import CheckError
from mpicomp.arrays import Array
from mpicomp.arrays.device import to_numpy
from mpicomp.vector import SparseVector

VARIABLE = "MPICOMP_CHECK"

# Multiplier of multiplicative hashing: 2^64 over the golden ratio.
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)


def is_enabled() -> bool:
    """Return whether the debug mode is enabled: MPICOMP_CHECK is set, and not to 0."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def mass(vector: SparseVector) -> list[float]:
    """Return the mass of a vector, of numbers or of rows."""
    width = 1 if vector.width is None else vector.width
    firsts = to_numpy(vector.indices).astype(np.uint64)[:, None] * np.uint64(width)
    places: Array = (firsts + np.arange(width, dtype=np.uint64)).reshape(-1)
    doubles = to_numpy(vector.values).reshape(-1).astype(np.float64)
    weights = ((places + np.uint64(1)) * _MIX >> np.uint64(11)) / 2.0**52 - 1
    # Values that are not finite are reported separately.
    with np.errstate(invalid="ignore", over="ignore"):
        return [
            float(doubles.sum()),
            float(doubles @ weights),
            float(np.abs(doubles).sum()),
        ]


def total_mass(masses: Iterable[Sequence[float]]) -> list[float]:
    """Return the mass of several vectors together."""
    return [sum(terms) for terms in zip((0.0, 0.0, 0.0), *masses, strict=True)]


def check_conserved(
    sent: Sequence[float], received: Sequence[float], dtype: Any, ranks: int, where: str
) -> None:
    """Raise CheckError unless two masses, of values of a dtype, differ by no more than sums over the ranks round.

    Nothing is checked where the sums leave the range of float64.
    """
    # Each addition rounds once. The sums in float64 round too, and subnormals round the
    # most.
    error = (ranks + 2) * np.finfo(dtype).eps + 1e-12
    most = float(error) * max(sent[2], received[2]) + 2.0**-1022
    is_same = all(
        abs(one - other) <= most
        for one, other in zip(sent[:2], received[:2], strict=True)
    )
    if not is_same and math.isfinite(most):
        raise CheckError(
            f"{where}mass is not conserved: the ranks contributed {sent[0]!r} in all (weighted by position "
            f"{sent[1]!r}), and {received[0]!r} ({received[1]!r}) was received"
        )
