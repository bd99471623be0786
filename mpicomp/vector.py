"""SparseVector: what a compressed gradient is, and what the collectives do on it: merge, add up, join, select.

Invariant of the whole library: indices strictly increase. It makes merging a single pass, selection reproducible, and
two vectors with the same entries the same bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mpicomp.arrays import (
    VALUE_DTYPES,
    beside,
    contiguous,
    first_and_last,
    kernels_for,
    namespace,
    nonzero,
    on_device,
    set_to_zero,
    sparse_remedy,
    to_numpy,
    to_values,
    to_vector,
    writable_vector,
)

Array = NDArray[Any]

MAX_LENGTH = 2**63 - 1
WIDEST = 2**32 - 2  # values in a row: they are counted in 32 bits in a message
_SHORT, _LONG = np.dtype(np.int32), np.dtype(np.int64)


def index_dtype(length: int) -> np.dtype[Any]:
    """Return the dtype that indices of a vector of `length` have: int32, or int64 when length > 2^31 - 1."""
    return _SHORT if length <= 2**31 - 1 else _LONG


@dataclass(frozen=True, init=False, eq=False, repr=False, slots=True)
class SparseVector:
    """Hold the non-zero entries of a vector: `values[j]` stands at `indices[j]` of `length` positions.

    indices: 1-d integers that strictly increase, 0 <= index < length; kept as int32, or int64 when length > 2^31 - 1.
    values: float16, float32 or float64, of shape (entries,), or (entries, width) where an index stands for a row of
    `width` values: the gradient of an embedding, say. length: 0 to 2^63 - 1, in numbers or in rows.

    Both live in main memory (NumPy) or on one device (CuPy), and so does whatever is made of them. Arrays of the right
    dtype are kept as they are, without a copy: do not change them afterwards, nor those of a vector that comes from
    another one or from a collective, as they may be the same.

    Raises TypeError or ValueError for what is cheap to see (dtypes, shapes, the length, the first and last index, more
    entries than there are between these);
    `validate` looks at every entry, and every sparse collective calls it on what it is given.
    """

    indices: Array
    values: Array
    length: int
    _ends: tuple[int, int]

    def __init__(self, indices: ArrayLike, values: ArrayLike, length: int) -> None:
        given: tuple[Any, Any, Any] = indices, values, length
        places, numbers, end = given if _as_kept(*given) else _made(*given)
        if places.size != len(numbers):
            raise ValueError(f"got {places.size} indices and {len(numbers)} values: expected as many of each")
        keep = object.__setattr__
        keep(self, "indices", places)
        keep(self, "values", numbers)
        keep(self, "length", end)
        keep(self, "_ends", _checked_ends(places, end))

    @classmethod
    def empty(
        cls, length: int, dtype: DTypeLike = np.float32, width: int | None = None, *, beside: Any = None
    ) -> "SparseVector":
        """Return the vector of `length` positions without an entry; of rows when a width is given.

        beside: an array that lives where the vector is to live; None is main memory.
        """
        xp = namespace(beside)
        indices = xp.empty(0, index_dtype(_checked_length(length)))
        return cls(indices, xp.empty((0,) if width is None else (0, width), dtype), length)

    @classmethod
    def from_dense(cls, array: Any) -> "SparseVector":
        """Return the non-zero entries of a dense array of any shape, in C order; see `mpicomp.arrays` for the kinds."""
        dense = to_vector(array)
        positions = np.flatnonzero(nonzero(dense))
        return cls(positions.astype(index_dtype(dense.size)), dense[positions], dense.size)

    @classmethod
    def from_entries(cls, indices: ArrayLike, values: ArrayLike, length: int) -> "SparseVector":
        """Return the vector of entries in any order, repeated ones added up: of the tokens of a batch, say.

        indices, values, length: as for the constructor, but for the order. Repeated entries are added in the order in
        which they come, float16 in float32. In main memory; TypeError for what is on a device.
        """
        places, given = _unmasked(indices), _checked_values(_unmasked(values))
        if on_device(places) or on_device(given):
            raise TypeError("got entries on a device: add up repeated ones there (PyTorch: coalesce), or copy them")
        if places.ndim != 1 or len(places) != len(given):
            raise ValueError(f"got indices of shape {places.shape} and {len(given)} values: expected as many of each")
        union, where = np.unique(places, return_inverse=True)
        sums = np.zeros((union.size, *given.shape[1:]), np.promote_types(given.dtype, np.float32))
        np.add.at(sums, where, given)
        return cls(union if union.size else union.astype(np.int32), sums.astype(given.dtype), length)

    @classmethod
    def from_rows(cls, array: Any) -> "SparseVector":
        """Return the rows of an array of shape (length, width) that are not all zero, as a vector of rows."""
        dense = to_values(array)
        if dense.ndim != 2:
            raise ValueError(f"array has shape {dense.shape}: expected (length, width)")
        positions = np.flatnonzero(dense.any(axis=1))
        return cls(positions.astype(index_dtype(len(dense))), dense[positions], len(dense))

    def to_dense(self, out: Array | None = None) -> Array:
        """Return the dense vector, shape (length,) or (length, width).

        out: the array to use, overwritten; it has this shape and the dtype of the values, else ValueError. So for
        indices that are out of order or range.
        """
        shape = (self.length, *self.values.shape[1:])
        if out is None:
            out = namespace(self.values).zeros(shape, self.values.dtype)
        elif out.shape != shape or out.dtype != self.values.dtype:
            raise ValueError(f"out is {out.dtype} of shape {out.shape}: expected {self.values.dtype} of shape {shape}")
        else:
            set_to_zero(out)
        return self._written_to(out)

    def _written_to(self, out: Array, first: int = 0) -> Array:
        """Write the entries to an array that stands for the positions from `first` on, and return it."""
        self.check_order(len(out), first)
        kernels, places = kernels_for(self.values), self.indices - first if first else self.indices
        if self.width is None:
            kernels.scatter(out, places, self.values)
        else:
            out[places] = self.values
        return out

    def add_to(self, array: Any, scale: float = 1.0) -> None:
        """Add `scale` times the values to a dense array, in place, at the indices.

        array: of any shape with `length` values, taken in C order; for rows of shape (length, width). float16, float32
        or float64, also another than the values': each sum is rounded once, to the array's. C-contiguous and writable,
        and where the vector lives: NumPy, CuPy, or a kind that speaks DLPack, such as PyTorch's tensors.

        Raises TypeError for another dtype or kind of array, or one in other memory than the vector; ValueError for one
        of another size, for one that cannot be written to, for a scale that is not finite, and for indices that are out
        of order or range. Nothing is added then.
        """
        dense = writable_vector(array)
        if on_device(dense) != on_device(self.values):
            one, other = ("on a device" if on_device(each) else "in main memory" for each in (dense, self.values))
            raise TypeError(f"the array is {one} and the vector {other}: expected both in one memory; copy one")
        shape, wanted = tuple(array.shape), (self.length, *self.values.shape[1:])
        if dense.size != math.prod(wanted) or (self.width is not None and shape != wanted):
            expected = f"{self.length} values" if self.width is None else f"shape {wanted}"
            raise ValueError(f"the array has shape {shape}: expected {expected}")
        if not (isinstance(scale, int | float | np.number) and math.isfinite(scale)):
            raise ValueError(f"scale is {scale!r}: expected a finite number")
        self.check_order(self.length)
        _add_scaled(dense.reshape(wanted), self, scale)

    def check_order(self, length: int, first: int = 0) -> None:
        """Raise ValueError unless the indices increase, and are among first, ..., first + length - 1."""
        places = self.indices - first if first else self.indices
        position = kernels_for(self.values).first_disorder(places, length)
        if position >= 0:
            raise ValueError(_disorder(self.indices, position, self.length))

    def validate(self) -> None:
        """Raise ValueError naming the first entry that is out of order, repeated, out of range or not finite."""
        self.check_order(self.length)
        kernels_for(self.values).raise_not_finite(self.values)

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return int(self.indices.size)

    @property
    def first(self) -> int:
        """The index of the first entry; 0 where there is none."""
        return self._ends[0]

    @property
    def span(self) -> int:
        """How many positions the entries stretch over, from the first to the last."""
        return self._ends[1] - self._ends[0] + 1

    @property
    def density(self) -> float:
        """Entries over length; 0 for a vector of length 0."""
        return self.nnz / self.length if self.length else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the two arrays."""
        return int(self.indices.nbytes + self.values.nbytes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def width(self) -> int | None:
        """Values in a row; None when an index stands for one number."""
        return self.values.shape[1] if self.values.ndim == 2 else None

    @property
    def value_nbytes(self) -> int:
        """Bytes of the values of one entry."""
        return self.values.itemsize * (1 if self.width is None else self.width)

    def support(self) -> "SparseVector":
        """Return where the entries stand: the same indices with rows of width 0, which take no bytes."""
        return SparseVector(self.indices, namespace(self.values).empty((self.nnz, 0), np.float32), self.length)

    def every(self, step: int, start: int = 0) -> "SparseVector":
        """Return the entries start, start + step, ...: one of `step` disjoint shares that together are the vector."""
        return SparseVector(self.indices[start::step].copy(), self.values[start::step].copy(), self.length)

    def divide(self, positions: Array) -> tuple["SparseVector", "SparseVector"]:
        """Return the entries at `positions` (intp, increasing: counted among the entries), and the other entries."""
        kernels = kernels_for(self.values)
        indices, values, other_indices, other_values = kernels.divide(self.indices, self.values, positions)
        return SparseVector(indices, values, self.length), SparseVector(other_indices, other_values, self.length)

    def filled(self, first: int, end: int) -> "SparseVector":
        """Return the vector with an entry at each of first, ..., end - 1, which all its entries lie among."""
        zeros = namespace(self.values).zeros((end - first, *self.values.shape[1:]), self.values.dtype)
        values = self._written_to(zeros, first)
        indices = kernels_for(self.values).consecutive(first, end, self.indices.dtype)
        return SparseVector(indices, values, self.length)

    def __repr__(self) -> str:
        few = zip(to_numpy(self.indices[:4]), to_numpy(self.values[:4]), strict=True)
        shown = ", ".join(f"{i}: {v}" for i, v in few)
        more = ", ..." if self.nnz > 4 else ""
        rows = "" if self.width is None else f", width={self.width}"
        return f"SparseVector({{{shown}{more}}}, nnz={self.nnz}, length={self.length}{rows}, {self.values.dtype})"


def merge(a: SparseVector, b: SparseVector) -> SparseVector:
    """Return a + b over the union of the supports; commutative bit for bit. Both have one length, width and dtype."""
    if not a.nnz or not b.nnz:
        return a if a.nnz else b
    indices, values = kernels_for(a.values).merge(a.indices, a.values, b.indices, b.values)
    return SparseVector(indices, values, a.length)


def add_up(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the sum of one or more vectors of one length and dtype, over the union of their supports.

    At each index the entries are added in the order of the vectors, ((a0 + a1) + a2) + ...: what others have elsewhere
    does not change the bits. float16 is added in float32 and rounded once.
    """
    some = [each for each in vectors if each.nnz] or list(vectors[:1])
    if len(some) < 3:
        return merge(*some) if len(some) == 2 else some[0]
    parts = [each.indices for each in some], [each.values for each in some]
    indices, values = kernels_for(some[0].values).accumulate(*parts, some[0].length)
    return SparseVector(indices, values, some[0].length)


def join(parts: Sequence[SparseVector]) -> SparseVector:
    """Return one vector of parts whose entries follow each other: every index of a part is above those before it."""
    indices = np.concatenate([part.indices for part in parts])
    return SparseVector(indices, np.concatenate([part.values for part in parts]), parts[0].length)


def concatenate(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return one vector as long as all together, of vectors of one dtype side by side; `split` is the way back."""
    if len(vectors) == 1:
        return vectors[0]
    *starts, length = accumulate((vector.length for vector in vectors), initial=0)
    dtype = index_dtype(length)
    indices = [part.indices.astype(dtype) + dtype.type(start) for part, start in zip(vectors, starts, strict=True)]
    return SparseVector(np.concatenate(indices), np.concatenate([part.values for part in vectors]), length)


def split(vector: SparseVector, bounds: Sequence[int]) -> list[SparseVector]:
    """Return the parts of a vector between consecutive bounds, from 0 to its length, each with indices from 0 on."""
    if len(bounds) == 2:
        return [vector]
    edges = beside(np.array(bounds, vector.indices.dtype), vector.indices)
    places = np.searchsorted(vector.indices, edges).tolist()
    parts = zip(pairwise(bounds), pairwise(places), strict=True)
    return [
        SparseVector(vector.indices[low:high] - vector.indices.dtype.type(first), vector.values[low:high], end - first)
        for (first, end), (low, high) in parts
    ]


def top_k(vector: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Split a vector of numbers into its `k` largest magnitudes and the rest; ties go to the lowest indices.

    Returns (kept, dropped); together they are the vector, entry by entry.
    """
    if vector.nnz <= k:
        return vector, SparseVector.empty(vector.length, vector.dtype, beside=vector.values)
    if not k:
        return SparseVector.empty(vector.length, vector.dtype, beside=vector.values), vector
    divide_largest = kernels_for(vector.values).divide_largest
    indices, values, other_indices, other_values = divide_largest(vector.indices, vector.values, k)
    return SparseVector(indices, values, vector.length), SparseVector(other_indices, other_values, vector.length)


def without_zeros(vector: SparseVector) -> SparseVector:
    """Return the entries of a vector of numbers that are not zero: the vector itself, if none is."""
    kept = nonzero(vector.values)
    return vector if kept.all() else vector.divide(np.flatnonzero(kept))[0]


def within(vector: SparseVector, other: SparseVector) -> SparseVector:
    """Return the entries of `vector` at indices where `other`, of the same length, has one as well."""
    if not other.nnz:
        return SparseVector.empty(vector.length, vector.dtype, vector.width, beside=vector.values)
    places = np.minimum(np.searchsorted(other.indices, vector.indices), other.nnz - 1)
    return vector.divide(np.flatnonzero(other.indices[places] == vector.indices))[0]


def _add_scaled(dense: Array, vector: SparseVector, scale: float) -> None:
    """Add `scale` times a vector to a dense one of its shape, in float64 where the scale is not 1."""
    values = vector.values if scale == 1 else vector.values.astype(np.float64) * float(scale)
    if vector.width is None:
        kernels_for(values).scatter_add(dense, vector.indices, values)
        return
    rows = dense[vector.indices]
    wide = np.result_type(rows.dtype, values.dtype, np.float32)
    with np.errstate(over="ignore"):
        dense[vector.indices] = (rows.astype(wide, copy=False) + values).astype(dense.dtype, copy=False)


def _as_kept(indices: Any, values: Any, length: Any) -> bool:
    """Say whether these are what a vector of numbers keeps: the case that is everywhere, without further questions."""
    return (
        type(indices) is type(values) is np.ndarray
        and type(length) is int
        and 0 <= length <= MAX_LENGTH
        and indices.dtype is index_dtype(length)
        and values.dtype in VALUE_DTYPES
        and indices.ndim == values.ndim == 1
        and indices.flags.c_contiguous
        and values.flags.c_contiguous
    )


def _made(indices: Any, values: Any, length: Any) -> tuple[Array, Array, int]:
    """Return what a vector keeps of the caller's arrays and length; TypeError or ValueError where it cannot."""
    end, numbers = _checked_length(length), _checked_values(_unmasked(values))
    places = _checked_indices(_unmasked(indices), end)
    if on_device(places) != on_device(numbers):
        raise TypeError("got indices and values of which one is on a device: expected both there, or none")
    return places, numbers, end


def _checked_length(length: Any) -> int:
    if isinstance(length, bool) or not isinstance(length, int | np.integer):
        raise TypeError(f"length is {length!r}: expected an integer")
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"length is {length}: expected 0 to 2^63 - 1")
    return int(length)


def _checked_values(values: Array) -> Array:
    if values.ndim not in (1, 2):
        raise ValueError(f"values have shape {values.shape}: expected (entries,), or (entries, width) for rows")
    if values.ndim == 2 and values.shape[1] > WIDEST:
        raise ValueError(f"rows have {values.shape[1]} values: expected at most {WIDEST}")
    return contiguous(to_values(values))


def _unmasked(array: Any) -> Array:
    if type(array) is np.ndarray:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("got a masked array: fill it first (array.filled(0)), a mask does not travel")
    if remedy := sparse_remedy(array):
        raise TypeError(f"got {type(array).__name__}: expected a dense array; {remedy}")
    return array if on_device(array) else np.asarray(array)


def _checked_indices(indices: Array, length: int) -> Array:
    if indices.ndim != 1:
        raise ValueError(f"indices have shape {indices.shape}: expected one dimension")
    if indices.size and indices.dtype.kind not in "iu":
        raise TypeError(f"indices are {indices.dtype}: expected integers (float indices are wrong above 2^24)")
    wanted = index_dtype(length)
    if indices.dtype != wanted:
        # A conversion reads every index anyway, and one that wrapped round would hide itself: look at all of them.
        wide = indices.astype(np.int64)  # a large uint64 becomes negative; CuPy compares no int32 with 2^31
        for index in indices[(wide < 0) | (wide >= length)][:1]:
            raise _out_of_range(index, length)
        return indices.astype(wanted)
    return contiguous(indices)


def _checked_ends(indices: Array, length: int) -> tuple[int, int]:
    """Return the first and the last index; (0, -1) where there is none."""
    if not indices.size:
        return 0, -1
    first, last = first_and_last(indices)
    if not (0 <= first < length and 0 <= last < length):
        raise _out_of_range(last if 0 <= first < length else first, length)
    if last - first + 1 < indices.size:
        raise ValueError(
            f"got {indices.size} indices, the first {first} and the last {last}: expected strictly increasing indices; "
            "SparseVector.from_entries sorts entries and adds up repeated ones"
        )
    return first, last


def _out_of_range(index: Any, length: int) -> ValueError:
    return ValueError(f"index {index} is out of range: expected 0 <= index < length = {length}")


def _disorder(indices: Array, position: int, length: int) -> str:
    index = int(indices[position])
    if not 0 <= index < length:
        return f"indices[{position}] is {index}: expected 0 <= index < length = {length}"
    before = int(indices[position - 1])
    fault, remedy = ("repeats", "add up repeated entries") if index == before else ("follows", "sort the entries")
    return f"indices[{position}] is {index} and {fault} {before}: expected strictly increasing indices; {remedy} first"
