"""SparseVector, a compressed gradient, and the operations of the collectives on it: merge, add, join, split, select.

Invariant: indices strictly increase. So merging is a single pass, selection is
reproducible, and two vectors with the same entries are bitwise equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from mpicomp.arrays import Array, Dtype
from mpicomp.arrays.device import (
    kernels_for,
    namespace,
    on_device,
    to_device_of,
    to_numpy,
)
from mpicomp.arrays.frameworks import (
    is_array,
    sparse_remedy,
    to_array,
    to_values,
    to_vector,
    writable_vector,
)
from mpicomp.arrays.memory import check_apart, contiguous
from mpicomp.arrays.values import (
    check_finite,
    converted,
    index_dtype,
    nonzero,
    widened_values,
)
from mpicomp.kernels import Facts
from mpicomp.settings import to_integer, to_number

MAX_LENGTH = 2**63 - 1
# Entries up to which merging a few vectors in pairs takes less time than preparing to
# add all of them at once.
_FEW = 4096
_CACHED = 1 << 16  # values of rows that are added at a time
# A message counts the values of a row in 32 bits.
_MAX_WIDTH = 2**32 - 2
_ORDER = "expected strictly increasing indices; SparseVector.from_entries sorts entries and adds repeated ones"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class SparseVector:
    """Hold the non-zero entries of a vector: entry j has the value `values[j]` at the position `indices[j]`.

    Both arrays are in host memory (NumPy) or on one device (CuPy). Arrays of the right dtype
    are stored without a copy. Results of collectives have arrays of their own. `validate`
    checks every entry; so does every sparse collective.

    Args:
        indices: 1-d integers that strictly increase, 0 <= index < length; stored as int32, or
            int64 when length > 2^31 - 1.
        values: float16, float32 or float64, of shape (entries,), or (entries, width) if an
            index stands for a row of `width` values, as in the gradient of an embedding.
        length: 0 to 2^63 - 1, in values or in rows.

    Raises:
        TypeError: a dtype is wrong, or the arrays are on different devices.
        ValueError: shapes, the length, the first or the last index are wrong, or there are
            more entries than positions between these; found without a pass over the entries.

    >>> SparseVector([1, 4], [0.5, -2.0], length=6).to_dense()
    array([ 0. ,  0.5,  0. ,  0. , -2. ,  0. ])
    """

    indices: Array
    values: Array
    length: int

    def __init__(self, indices: ArrayLike, values: ArrayLike, length: int) -> None:
        length = to_integer("length", length, 0)
        numbers = _checked_values(values)
        places = _checked_indices(indices, length)
        if on_device(places) != on_device(numbers):
            raise TypeError(
                "indices and values are on different devices; move both to the host or both to the GPU"
            )
        if places.size != len(numbers):
            raise ValueError(
                f"got {places.size} indices and {len(numbers)} values: expected as many of each"
            )
        vars(self).update(indices=places, values=numbers, length=length)
        self.check_ends()

    @classmethod
    def trusted(cls, indices: Array, values: Array, length: int) -> "SparseVector":
        """Return the vector of arrays filled by a kernel of the library, unchecked, as checks synchronise a device.

        indices: of the dtype for the length, increasing, in range. Both are contiguous.
        """
        vector = object.__new__(cls)
        fields = vars(vector)  # This takes half the time of `update`.
        fields["indices"] = indices
        fields["values"] = values
        fields["length"] = length
        return vector

    def with_values(self, values: Array, *, is_finite: bool = False) -> "SparseVector":
        """Return the vector with other values, contiguous and of shape (entries, ...), at the same indices.

        is_finite: the values are finite if those of this vector are.
        """
        vector = SparseVector.trusted(self.indices, values, self.length)
        known = ["_device_ends", "_known_places"]
        if is_finite:
            known.append("facts")
        for name in known:
            if name in vars(self):
                vars(vector)[name] = vars(self)[name]
        return vector

    def remember(
        self, facts: Facts, bounds: Sequence[int] = (), places: Sequence[int] = ()
    ) -> None:
        """Store what the kernel that filled arrays on a device knows: the results of `inspect` and of `places_of`."""
        fields = vars(self)
        fields["_known_places"] = list(bounds), list(places)
        fields["facts"] = facts
        fields["_device_ends"] = facts[2:]

    @classmethod
    def empty(
        cls,
        length: int,
        dtype: DTypeLike = np.float32,
        width: int | None = None,
        *,
        like: Any = None,
    ) -> "SparseVector":
        """Return a vector without entries.

        Args:
            length: positions, 0 to 2^63 - 1.
            dtype: of the values, float32 by default.
            width: of rows; None for numbers.
            like: an array on the device of the vector; None is host memory.
        """
        kind = np.dtype(dtype)
        if on_device(like):
            return _new_empty(length, kind, width, like)
        return _empty_on_host(length, kind, width)

    @classmethod
    def from_dense(cls, array: Any) -> "SparseVector":
        """Return the non-zero values of a dense array, in C order: each has an index, also in a matrix.

        Args:
            array: of any shape; float16, float32, float64 or bfloat16; of NumPy, CuPy or a kind
                that supports DLPack.
        """
        dense = to_vector(array)
        positions = np.flatnonzero(nonzero(dense))
        return cls(
            positions.astype(index_dtype(dense.size)), dense[positions], dense.size
        )

    @classmethod
    def from_entries(
        cls, indices: ArrayLike, values: ArrayLike, length: int
    ) -> "SparseVector":
        """Return the vector of entries in any order, such as the tokens of a batch; repeated entries are added.

        Args:
            indices: 1-d integers in any order, 0 <= index < length, in host memory.
            values: as in the constructor. Repeated entries are added in float64, and the sum is
                rounded once.
            length: as in the constructor.

        Raises:
            TypeError: the arrays are on a device.
            ValueError: an index is out of range, or the numbers of indices and values differ.
        """
        places = _array(indices)
        checked = _checked_values(values)
        if on_device(places) or on_device(checked):
            raise TypeError(
                "got entries on a device: add repeated ones there (PyTorch: coalesce), or copy to the host"
            )
        if places.ndim != 1 or len(places) != len(checked):
            raise ValueError(
                f"got indices of shape {places.shape} and {len(checked)} values: expected as many of each"
            )
        if not places.size:
            return cls(places, checked, length)
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        is_first = np.append(True, ordered[1:] != ordered[:-1])
        starts = np.flatnonzero(is_first)
        return cls(ordered[starts], _sums_of_runs(checked, order, starts), length)

    def to_dense(self, out: Array | None = None) -> Array:
        """Return the dense vector.

        Args:
            out: the output buffer, overwritten; a new array by default.

        Returns:
            An array of shape (length,), or (length, width) for rows; `out` where given.

        Raises:
            TypeError: `out` is no array of NumPy, or of CuPy as the values are.
            ValueError: `out` has another shape or dtype, or is contiguous and shares the memory of
                the vector, or an index is out of order or range. Nothing is written then.
        """
        shape = (self.length, *self.values.shape[1:])
        dtype = self.values.dtype
        xp = namespace(self.values)
        self.check_order()
        is_new = out is None
        if out is None:
            out = xp.zeros(shape, dtype)
        elif not isinstance(out, xp.ndarray):
            raise TypeError(f"out is {type(out)}: expected {xp.ndarray}")
        elif out.shape != shape or out.dtype != dtype:
            raise ValueError(
                f"out is {out.dtype} of shape {out.shape}: expected {dtype} of shape {shape}"
            )
        elif not out.flags.c_contiguous:
            # It may share the memory of the vector.
            out[...] = self.to_dense()
            return out  # type: ignore[no-any-return]
        else:
            check_apart([out, self.indices, self.values])
        if self.width is None:
            self.writer([out], are_zero=is_new)()
            return out
        if not is_new:
            kernels_for(out).clear(out)
        out[self.indices] = self.values
        return out

    def add_to(self, array: Any, scale: float = 1.0) -> None:
        """Add `scale` times the values to a dense array, in place, at the indices.

        Each sum is rounded once, to the dtype of the array.

        Args:
            array: of any shape with `length` values, taken in C order; for rows of shape
                (length, width). float16, float32 or float64, C-contiguous, writable, and on the
                device of the vector; of NumPy, CuPy, or a kind that supports DLPack.
            scale: a finite factor.

        Raises:
            TypeError: the array has another dtype, kind or device.
            ValueError: the array has another size or is read-only, the scale is not finite, or an
                index is out of order or range. Nothing is added then.
        """
        dense = writable_vector(array)
        if on_device(dense) != on_device(self.values):
            raise TypeError(
                f"the array is {type(dense)}, the values {type(self.values)}: expected both on one device; copy one"
            )
        shape = (dense.size,) if self.width is None else tuple(array.shape)
        wanted = (self.length, *self.values.shape[1:])
        if shape != wanted:
            raise ValueError(f"the array has shape {shape}: expected {wanted}")
        scale = to_number("scale", scale)
        self.check_order()
        values = self.values
        if scale != 1:
            values = converted(values, np.float64) * scale
        kernels = kernels_for(values)
        if self.width is None:
            kernels.scatter_add(dense, self.indices, values)
            return
        dense = dense.reshape(wanted)
        rows = dense[self.indices]
        with np.errstate(over="ignore"):
            kernels.add_scaled(values, 1, rows, rows)
        dense[self.indices] = rows

    def writer(
        self, parts: Sequence[Array], *, are_zero: bool = False
    ) -> Callable[[], None]:
        """Return a function that writes the dense vector to arrays of its parts, once: it cannot fail.

        parts: C-contiguous, one after the other. are_zero: they are zeros, such as new
        memory, of which only pages with entries are written.
        """
        write: Callable[[], None] = kernels_for(parts[0]).sparse_writer(
            self.indices, self.values, parts, are_zero=are_zero
        )
        return write

    def check_ends(self) -> None:
        """Raise ValueError unless first and last index are in range, with room for the entries between them."""
        entries = self.indices.size
        length = self.length
        if not entries:
            return
        first, last = self._ends
        for end in (first, last):
            if not 0 <= end < length:
                raise _out_of_range(end, length)
        if last - first + 1 < entries:
            raise ValueError(
                f"got {entries} indices, the first {first} and the last {last}: {_ORDER}"
            )

    def check_order(self) -> None:
        """Raise ValueError unless the indices increase, and are in range."""
        if on_device(self.indices):
            position = self.facts[0]
        else:
            position = kernels_for(self.indices).first_disorder(
                self.indices, self.length
            )
        if position < 0:
            return
        index = int(self.indices[position])
        if not 0 <= index < self.length:
            raise ValueError(
                f"indices[{position}] is {index}: expected 0 <= index < length = {self.length}"
            )
        before = int(self.indices[position - 1])
        fault = "repeats" if index == before else "follows"
        raise ValueError(
            f"indices[{position}] is {index} and {fault} {before}: {_ORDER}"
        )

    def validate(self) -> None:
        """Raise ValueError naming the first entry that is out of order, repeated, out of range or not finite."""
        disorder, not_finite, _, _ = self._inspected()
        if disorder >= 0:
            self.check_order()
        if not_finite >= 0:
            check_finite(self.values)

    def has_finite_values(self) -> bool:
        """Return whether all values are finite."""
        return self._inspected()[1] < 0

    def forget(self) -> "SparseVector":
        """Return the vector, which its owner may change: in host memory `validate` looks at all entries again."""
        if not on_device(self.values):
            vars(self).pop("facts", None)
        return self

    def _inspected(self) -> Facts:
        """Return what `kernels.inspect` does; anew for arrays in host memory, which the owner may have changed."""
        if "facts" in vars(self) or on_device(self.values):
            return self.facts
        return kernels_for(self.values).inspect(self.indices, self.values, self.length)  # type: ignore[no-any-return]

    @cached_property
    def facts(self) -> Facts:
        """What `kernels.inspect` returns, kept until `forget`: on a device it takes a launch and a copy to the host."""
        return kernels_for(self.values).inspect(self.indices, self.values, self.length)  # type: ignore[no-any-return]

    @property
    def _ends(self) -> tuple[int, int]:
        """The first and the last index; (0, -1) if there is none."""
        if on_device(self.indices):
            return self._device_ends
        if not self.indices.size:
            return 0, -1
        return self.indices.item(0), self.indices.item(-1)

    @cached_property
    def _device_ends(self) -> tuple[int, int]:
        return self.facts[2:]

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return self.indices.size

    @property
    def first(self) -> int:
        """Index of the first entry; 0 without entries."""
        return self._ends[0]

    @property
    def span(self) -> int:
        """Number of positions from the first entry to the last."""
        return self._ends[1] - self._ends[0] + 1

    @property
    def density(self) -> float:
        """Entries over length; 0 for a vector of length 0."""
        return self.nnz / self.length if self.length else 0.0

    @property
    def nbytes(self) -> int:
        """The bytes of the two arrays."""
        return int(self.indices.nbytes + self.values.nbytes)

    @property
    def dtype(self) -> Dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def width(self) -> int | None:
        """The number of values in a row; None if an index stands for one value."""
        return self.values.shape[1] if self.values.ndim == 2 else None

    @property
    def value_nbytes(self) -> int:
        """Bytes of the values of one entry."""
        numbers = 1 if self.width is None else self.width
        return self.values.itemsize * numbers

    def support(self) -> "SparseVector":
        """Return the same indices with rows of width 0, which take no bytes."""
        return self.with_values(namespace(self.values).empty((self.nnz, 0), np.float32))

    def copy(self) -> "SparseVector":
        """Return the vector with arrays of its own; without entries itself."""
        indices = self.indices
        if not indices.size:
            return self
        vector = SparseVector.trusted(indices.copy(), self.values.copy(), self.length)
        # The copy keeps the facts of arrays on a device.
        if type(indices) is not np.ndarray:
            vars(vector).update(vars(self) | vars(vector))
        return vector

    def every(self, step: int, start: int = 0) -> "SparseVector":
        """Return a copy of the entries start, start + step, ...: one of `step` disjoint shares of the vector."""
        return SparseVector.trusted(
            self.indices[start::step].copy(),
            self.values[start::step].copy(),
            self.length,
        )

    def divide(self, positions: Array) -> tuple["SparseVector", "SparseVector"]:
        """Return the entries at `positions` (intp, increasing: numbers of entries), and the other entries."""
        divide = kernels_for(self.values).divide
        return _pair(divide(self.indices, self.values, positions), self.length)

    def __repr__(self) -> str:
        few = zip(to_numpy(self.indices[:4]), to_numpy(self.values[:4]), strict=True)
        with np.printoptions(threshold=4, edgeitems=2):  # of rows
            shown = ", ".join(f"{i}: {v}" for i, v in few)
        more = ", ..." if self.nnz > 4 else ""
        rows = "" if self.width is None else f", width={self.width}"
        return f"SparseVector({{{shown}{more}}}, nnz={self.nnz}, length={self.length}{rows}, {self.values.dtype})"


def _sums_of_runs(values: Array, order: Array, starts: Array) -> Array:
    """Return the sums of runs of values, taken in an order: each added in float64, and rounded once.

    Args:
        values: of shape (entries,) or (entries, width).
        order: of the entries.
        starts: the place in `order` at which each run begins.
    """
    ends = np.append(starts[1:], order.size)
    sums = np.empty((starts.size, *values.shape[1:]), values.dtype)
    # Rows that are added at a time: their sums in float64 stay in the cache.
    step = max(1, _CACHED // max(1, values[:1].size))
    first = 0
    while first < starts.size:
        start = starts[first]
        end = max(first + 1, int(np.searchsorted(ends, start + step, "right")))
        rows = values[order[start : ends[end - 1]]]
        runs = starts[first:end] - start
        sums[first:end] = np.add.reduceat(rows, runs, axis=0, dtype=np.float64)
        first = end
    return sums


def merge(a: SparseVector, b: SparseVector) -> SparseVector:
    """Return a + b over the union of the supports, in new arrays; bitwise commutative.

    Both have one length, width and dtype.
    """
    if not b.indices.size:
        return a.copy()
    if not a.indices.size:
        return b.copy()
    indices, values, facts = kernels_for(a.values).merge(
        a.indices, a.values, b.indices, b.values
    )
    vector = SparseVector.trusted(indices, values, a.length)
    if facts is not None:
        vector.remember(facts)
    return vector


def add_up(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the sum of one or more vectors of one length and dtype, over the union of their supports.

    At each index the entries are added in the order of the vectors, ((a0 + a1) + a2) +
    ..., float16 in float32, rounded once. The arrays are new ones.
    """
    some = [vector for vector in vectors if vector.nnz] or list(vectors[:1])
    if len(some) == 1:
        return some[0].copy()
    # Several merges would each round float16, so it is added at once from three vectors
    # on.
    if len(some) < 3 or (
        len(some) < 5
        and sum(vector.nnz for vector in some) <= _FEW
        and some[0].dtype != np.float16
    ):
        return reduce(merge, some)
    parts = [vector.indices for vector in some], [vector.values for vector in some]
    indices, values = kernels_for(some[0].values).accumulate(*parts, some[0].length)
    return SparseVector.trusted(indices, values, some[0].length)


def count_up(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return how many of one or more vectors have each entry of the union of their supports; exact up to 2^24."""
    ones = namespace(vectors[0].values).ones
    return add_up(
        [vector.with_values(ones(vector.nnz, np.float32)) for vector in vectors]
    )


def join(parts: Sequence[SparseVector]) -> SparseVector:
    """Return one vector of consecutive parts: every index of a part is above those of the parts before it."""
    indices = np.concatenate([part.indices for part in parts])
    return SparseVector.trusted(
        indices, np.concatenate([part.values for part in parts]), parts[0].length
    )


def concatenate(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return vectors of one dtype one after the other as one vector of the summed length; the inverse of `split`.

    The arrays are new ones.
    """
    if len(vectors) == 1:
        return vectors[0].copy()
    *starts, length = accumulate((vector.length for vector in vectors), initial=0)
    dtype = index_dtype(length)
    indices = [
        part.indices.astype(dtype) + dtype.type(start)
        for part, start in zip(vectors, starts, strict=True)
    ]
    return SparseVector.trusted(
        np.concatenate(indices),
        np.concatenate([part.values for part in vectors]),
        length,
    )


def from_all_values(array: Array) -> SparseVector:
    """Return the vector with an entry for each value of a dense one, zero or not."""
    indices = kernels_for(array).consecutive(0, array.size, index_dtype(array.size))
    return SparseVector.trusted(indices, array, array.size)


def widened(part: Any) -> Any:
    """Return a vector or an array with values of at least float32; anything else as it is."""
    if isinstance(part, SparseVector):
        values = widened_values(part.values)
        return part if values is part.values else part.with_values(values)
    is_dense = isinstance(part, np.ndarray) or on_device(part)
    return widened_values(part) if is_dense else part


def entries(part: Any) -> int:
    """Return the number of entries of a vector, or of values of an array; 0 for None."""
    if isinstance(part, SparseVector):
        return part.nnz
    return 0 if part is None else int(part.size)


def places_of(vector: SparseVector, bounds: Sequence[int]) -> list[int]:
    """Return the number of entries before each of increasing positions, from 0 to the length of the vector."""
    if [*bounds] == [0, vector.length]:
        return [0, vector.nnz]
    known, places = vars(vector).get("_known_places", ([], []))
    if [*bounds] == known:
        return places  # type: ignore[no-any-return]
    edges = to_device_of(np.array(bounds, vector.indices.dtype), vector.indices)
    return np.searchsorted(vector.indices, edges).tolist()  # type: ignore[no-any-return]


def split(vector: SparseVector, bounds: Sequence[int]) -> list[SparseVector]:
    """Return the parts of a vector between consecutive bounds, from 0 to its length, each with indices from 0 on.

    Their arrays may be views of those of the vector.
    """
    if len(bounds) == 2:
        return [vector]
    places = places_of(vector, bounds)
    sizes = np.diff(bounds).tolist()
    starts = np.repeat(np.array(bounds[:-1], vector.indices.dtype), np.diff(places))
    indices = vector.indices - to_device_of(starts, vector.indices)
    values = vector.values
    return [
        SparseVector.trusted(
            indices[low:high].astype(index_dtype(size), copy=False),
            values[low:high],
            size,
        )
        for (low, high), size in zip(pairwise(places), sizes, strict=True)
    ]


def top_k(vector: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Split a vector of numbers into (its `k` largest magnitudes, the rest); ties go to the lowest indices.

    The arrays are new ones.
    """
    if vector.nnz <= k or not k:
        nothing = SparseVector.empty(vector.length, vector.dtype, like=vector.values)
        return (vector.copy(), nothing) if k else (nothing, vector.copy())
    divide_largest = kernels_for(vector.values).divide_largest
    return _pair(divide_largest(vector.indices, vector.values, k), vector.length)


def _pair(arrays: Sequence[Array], length: int) -> tuple[SparseVector, SparseVector]:
    """Return two vectors of indices, values, other indices and other values."""
    indices, values, other_indices, other_values = arrays
    trusted = SparseVector.trusted
    return trusted(indices, values, length), trusted(
        other_indices, other_values, length
    )


def without_zeros(vector: SparseVector) -> SparseVector:
    """Return the non-zero entries of a vector of numbers, in new arrays."""
    kept = nonzero(vector.values)
    return vector.copy() if kept.all() else vector.divide(np.flatnonzero(kept))[0]


def intersection(vector: SparseVector, other: SparseVector) -> SparseVector:
    """Return the entries of `vector` at the indices of `other`, which has the same length."""
    return partition(vector, other)[0]


def partition(
    vector: SparseVector, other: SparseVector
) -> tuple[SparseVector, SparseVector]:
    """Split a vector into its entries at the indices of `other`, which has the same length, and the rest.

    The arrays are new ones.
    """
    if not other.nnz:
        return SparseVector.empty(
            vector.length, vector.dtype, vector.width, like=vector.values
        ), vector.copy()
    places = np.minimum(np.searchsorted(other.indices, vector.indices), other.nnz - 1)
    return vector.divide(np.flatnonzero(other.indices[places] == vector.indices))


def _new_empty(
    length: int, dtype: Dtype, width: int | None, like: Any = None
) -> SparseVector:
    xp = namespace(like)
    length = to_integer("length", length, 0)
    shape = (0,) if width is None else (0, width)
    values = xp.empty(shape, dtype)
    return SparseVector.trusted(
        xp.empty(0, index_dtype(length)), _checked_values(values), length
    )


# The cache is typed: 1 is a length and True is not, but they are equal.
_empty_on_host = lru_cache(maxsize=256, typed=True)(_new_empty)


def _array(array_like: Any) -> Array:
    """Return an array from an input of `to_array`, a list or a number."""
    if not (is_array(array_like) or sparse_remedy(array_like)):
        array_like = np.asarray(array_like)
    return to_array(array_like)


def _checked_values(array_like: Any) -> Array:
    values = _array(array_like)
    if values.ndim not in (1, 2):
        raise ValueError(
            f"values have shape {values.shape}: expected (entries,), or (entries, width) for rows"
        )
    if values.ndim == 2 and values.shape[1] > _MAX_WIDTH:
        raise ValueError(
            f"rows have {values.shape[1]} values: expected at most {_MAX_WIDTH}"
        )
    return contiguous(to_values(values))


def _checked_indices(array_like: Any, length: int) -> Array:
    indices = _array(array_like)
    if indices.ndim != 1:
        raise ValueError(f"indices have shape {indices.shape}: expected one dimension")
    if indices.size and indices.dtype.kind not in "iu":
        remedy = "floats are wrong above 2^24; words need a number each, the same on all ranks"
        raise TypeError(f"indices are {indices.dtype}: expected integers ({remedy})")
    wanted = index_dtype(length)
    if indices.dtype == wanted:
        return contiguous(indices)
    # The conversion would hide an index that wraps around, so all are checked as int64:
    # there a large uint64 is negative, and CuPy can compare them with 2^31.
    wrapped = indices.astype(np.int64)
    for index in indices[(wrapped < 0) | (wrapped >= length)][:1]:
        raise _out_of_range(index, length)
    return indices.astype(wanted)


def _out_of_range(index: Any, length: int) -> ValueError:
    return ValueError(
        f"index {index} is out of range: expected 0 <= index < length = {length}"
    )


def check_range(values: Array, what: str) -> None:
    """Raise OverflowError if a value is not finite. what: of the values, in the error."""
    try:
        check_finite(values)
    except ValueError:
        raise out_of_range(what, values.dtype) from None


def out_of_range(what: str, dtype: Dtype) -> OverflowError:
    """Return the error for values that are not finite. what: they are."""
    remedy = "scale the gradients down"
    if dtype.itemsize < 8:
        remedy += f", or use float{16 * dtype.itemsize}"
    return OverflowError(f"the {what} leaves the range of {dtype}: {remedy}")
