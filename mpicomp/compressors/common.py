"""Functions shared by compressors: the number of entries to select, and the entries of a dense vector at positions."""

from typing import Any, ClassVar

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for, to_device_of
from mpicomp.arrays.frameworks import to_vector
from mpicomp.arrays.values import check_finite, index_dtype, nonzero
from mpicomp.compressors.base import Compressor
from mpicomp.settings import to_integer, to_number
from mpicomp.vector import SparseVector


def to_density(density: Any, remedy: str = "") -> float:
    """Return a fraction of the entries as a float, 0 < density <= 1; the integer 1, perhaps meant as k, is refused."""
    if isinstance(density, int | np.integer | np.bool_) and density == 1:
        raise ValueError(
            f"density is {density!r} of type {type(density).__name__}: expected a float, 0 < density <= 1; write "
            "density=1.0 to send every entry, or k=1 to send one"
        )
    return to_number(
        "density",
        density,
        above=0,
        most=1,
        remedy=f" (0.001 sends about a thousandth{remedy})",
    )


class Density(Compressor):
    """Base class of compressors that select a fraction, or a number, of the entries.

    Args:
        density: the fraction of the entries, 0 < density <= 1: k = max(1, round(density n)) of n.
        k: the number of entries, at least 1.

    Raises:
        ValueError: both or none are given, or one is out of range.
    """

    varying: ClassVar[tuple[str, ...]] = ("density", "k")

    def __init__(self, density: float | None = None, *, k: int | None = None) -> None:
        if (density is None) == (k is None):
            raise ValueError(
                f"got density={density} and k={k}: expected exactly one of them"
            )
        self.density = None if density is None else to_density(density, "; or give k=")
        self.k = None if k is None else to_integer("k", k)

    def counts(self, lengths: Any) -> Array:
        """Return the number of entries to select from vectors of these lengths."""
        return counts_of(np.asarray(lengths), self.density, self.k)


def counts_of(lengths: Array, density: Any, k: Any) -> Array:
    """Return the number of entries for a density, a number or one for each length; for k if that is None."""
    if density is None:
        return np.broadcast_to(k, lengths.shape)
    wanted: Array = np.rint(np.multiply(density, lengths)).astype(np.int64)
    return wanted.clip(1)


def hashable(setting: Any) -> Any:
    """Return a number as it is, and a row of them as a tuple."""
    return tuple(setting.tolist()) if isinstance(setting, np.ndarray) else setting


def finite_vector(corrected: Any) -> Array:
    """Return a dense array as one vector, for a compressor of your own.

    Args:
        corrected: an array of any shape and library; float16, float32, float64 or bfloat16.

    Returns:
        Its values in C order, of NumPy or CuPy, shape (size,): a view where possible.

    Raises:
        TypeError: it is no such array.
        ValueError: a value is not finite; the text names the first one.

    >>> finite_vector(np.ones((2, 2))).shape
    (4,)
    """
    dense = to_vector(corrected)
    check_finite(dense)
    return dense


def at_positions(dense: Array, positions: Array) -> SparseVector:
    """Return the non-zero entries of a vector at positions, for a compressor of your own.

    If there is none, it returns the largest entry, so that a vector that is not zero is
    never sent empty.

    Args:
        dense: values, shape (size,), as `finite_vector` returns them.
        positions: increasing integers from 0 to size - 1, of NumPy, or on the device of `dense`.

    >>> at_positions(np.array([5.0, 0.0, 7.0]), np.array([0, 1])).values.tolist()
    [5.0]
    """
    positions = to_device_of(positions, dense)
    values = kernels_for(dense).gather(dense, positions)
    kept = nonzero(values)
    if not kept.all():
        positions = positions[kept]
        values = values[kept]
    if not positions.size:
        positions, values = kernels_for(dense).largest(dense, 1)
    indices = positions.astype(index_dtype(dense.size))
    return SparseVector.trusted(indices, values, dense.size)
