"""What came back from a sum over the ranks: one class for each kind of it, with what a step does to a mean.

`over` divides, `narrowed` converts to the dtype of the gradients, and raises where a
value is out of range. `writer` prepares what a commit does: to decode, divide, transform
and write is one pass over all values, after the ranks have agreed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mpicomp.arrays import Array, Dtype, Write
from mpicomp.arrays.device import kernels_for, namespace
from mpicomp.arrays.memory import address, flat, sizes_of, views_between
from mpicomp.arrays.values import converted
from mpicomp.bases import Basis, runs
from mpicomp.correction import in_parts
from mpicomp.few_bits import FewBits
from mpicomp.vector import (
    SparseVector,
    check_range,
    from_all_values,
    out_of_range,
    split,
)

# The upper half of an infinity of float32 or float64, by its bytes.
_INFINITY = {2: 0x7F80, 4: 0x7FF00000}
_SUM = "sum over the ranks"
# Values for which memory is allocated at once after the ranks have agreed, at most.
_PIECE = 2**18


class _Mean:
    """Base class of the kinds of means."""

    def memory(self) -> Array:
        """Return a new vector for the values; or the values, if they are one."""
        raise NotImplementedError

    def parts_of(self, memory: Array) -> Sequence[Array]:
        """Return the parts of such a vector that `writer` takes."""
        return [memory]

    def writer(self, parts: Sequence[Array]) -> Write:
        """Return a function that writes the values to vectors, once: it cannot fail, and allocates nothing.

        parts: C-contiguous, one after the other, one for each tensor of the vector.
        """
        raise NotImplementedError

    def filler(self, memory: Array, parts: Sequence[Array]) -> Write:
        """Return a function that writes the values to what `memory` returned, as `writer` does to its parts."""
        return self.writer(parts)

    def values(self) -> Array:
        """Return all values as an array."""
        memory = self.memory()
        self.filler(memory, self.parts_of(memory))()
        return memory

    def entries(self) -> SparseVector:
        """Return the values with their indices; of a sparse mean those that were sent."""
        return from_all_values(self.values())

    def signs(self) -> "Written":
        """Return the signs of the values, 1, -1 or 0; of an array in its place."""
        values = self.values()
        kernels_for(values).signs(values)
        return DenseMean(values)

    def out_of(self, basis: Basis, edges: Sequence[int], dtype: Dtype) -> "Written":
        """Return a mean of coefficients as one of values, of an array in its place.

        edges: of the segments, each of which was transformed by itself. Raises
        OverflowError for values out of range.
        """
        values = self.values()
        for run in runs(edges, basis.chunk):
            basis.inverse(values[run], values[run])
        values = converted(values, dtype)
        check_range(values, "mean out of the basis")
        return DenseMean(values)


@dataclass(frozen=True)
class DenseMean(_Mean):
    """All values, as an array."""

    array: Array

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.array.size

    def over(self, divisor: Any) -> "Mean":
        """Return the values over a number of ranks, in their place."""
        kernels_for(self.array).quotient(self.array, divisor, self.array)
        return self

    def narrowed(self, dtype: Dtype, *, clips: bool = False) -> "Mean":
        """Return the values in a dtype; raises OverflowError if one is not finite.

        clips: sums beyond the range become its limits, as only their signs are wanted.
        """
        narrowed = _narrowed(self.array, dtype, clips=clips)
        check_range(narrowed, _SUM)
        return DenseMean(narrowed)

    def memory(self) -> Array:
        return self.array

    def filler(self, memory: Array, parts: Sequence[Array]) -> Write:
        return _nothing  # The values are in `memory` already.

    def writer(self, parts: Sequence[Array]) -> Write:
        own = in_parts(self.array, sizes_of(parts))
        pairs = [
            (flat(part), values)
            for part, values in zip(parts, own, strict=True)
            if address(part) != address(values)
        ]

        def write() -> None:
            for part, values in pairs:
                np.copyto(part, values, casting="same_kind")

        return write

    def pieces(self, buffer: Array) -> "Pieces":
        """Yield means of parts of the vector that stay in the cache, and where they are. buffer: for all values."""
        for piece in pieces_of(self.count):
            yield DenseMean(self.array[piece]), piece

    def add_to(self, array: Array, scale: float) -> None:
        """Add `scale` times the values to an array; allocates little memory."""
        for piece in pieces_of(self.count):
            part = array[piece]
            kernels_for(part).add_scaled(self.array[piece], scale, part, part)


@dataclass(frozen=True)
class SparseMean(_Mean):
    """Some values, by index; the others are zero. Methods: as of `DenseMean`."""

    vector: SparseVector

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.vector.nnz

    def over(self, divisor: Any) -> "Mean":
        """Return the values over a number, or over one for each entry."""
        values = self.vector.values
        quotient = np.empty_like(values)
        kernels_for(values).quotient(values, divisor, quotient)
        return SparseMean(self.vector.with_values(quotient, is_finite=True))

    def narrowed(self, dtype: Dtype, *, clips: bool = False) -> "Mean":
        """Return the values in a dtype; raises OverflowError if one is not finite."""
        vector = self.vector
        narrowed = _narrowed(vector.values, dtype, clips=clips)
        if narrowed is not vector.values:
            vector = vector.with_values(narrowed)
        if not vector.has_finite_values():
            raise out_of_range(_SUM, dtype)
        return SparseMean(vector)

    def memory(self) -> Array:
        values = self.vector.values
        # New pages of the system are zeros already, so this writes nothing.
        return namespace(values).zeros(self.vector.length, values.dtype)  # type: ignore[no-any-return]

    def writer(self, parts: Sequence[Array]) -> Write:
        return self.vector.writer(parts)

    def filler(self, memory: Array, parts: Sequence[Array]) -> Write:
        return self.vector.writer([memory], are_zero=True)

    def entries(self) -> SparseVector:
        return self.vector

    def signs(self) -> "Written":
        values = self.vector.values.copy()
        kernels_for(values).signs(values)
        return SparseMean(self.vector.with_values(values))

    def out_of(self, basis: Basis, edges: Sequence[int], dtype: Dtype) -> "Written":
        if self.vector.dtype != dtype:
            return super().out_of(basis, edges, dtype)
        return TransformedMean(self.vector, basis, edges)

    def pieces(self, buffer: Array) -> "Pieces":
        """Yield this mean, as a whole."""
        yield self, slice(None)

    def add_to(self, array: Array, scale: float) -> None:
        """Add `scale` times the values to an array; allocates little memory."""
        vector = self.vector
        for piece in pieces_of(vector.nnz):
            indices = vector.indices[piece]
            values = vector.values[piece]
            if abs(scale) == 1:  # A scale of 1 or -1 needs no product.
                kernels_for(array).scatter_add(array, indices, values, sign=int(scale))
            else:
                SparseVector(indices, values, vector.length).add_to(array, scale)


@dataclass(frozen=True)
class CodedMean(_Mean):
    """All values in few bits, over a divisor; they are decoded where they are written. Methods: as of `DenseMean`.

    shares: consecutive blocks each. sizes: of the parts, in values; the last block of
    each may be padded.
    """

    shares: Sequence[FewBits]
    sizes: Sequence[int]
    divisor: float = 1.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.sizes)

    @property
    def dtype(self) -> Dtype:
        """The dtype of the decoded values."""
        return self.shares[0].dtype

    @cached_property
    def is_finite(self) -> bool:
        """Whether all values are finite: that tell the scales. The first look waits for a device."""
        scales = self.shares[0].scales
        if len(self.shares) > 1:
            scales = np.concatenate([share.scales for share in self.shares])
        limit = _INFINITY[scales.dtype.itemsize]
        is_finite: bool = kernels_for(scales).all_below(scales, limit)
        return is_finite

    def over(self, divisor: Any) -> "Mean":
        """Return the values over a number of ranks, by which they are divided as they are decoded."""
        return CodedMean(self.shares, self.sizes, divisor)

    def narrowed(self, dtype: Dtype, *, clips: bool = False) -> "Mean":
        """Return the values in a dtype; raises OverflowError if one is not finite."""
        if not self.is_finite:
            raise out_of_range(_SUM, self.dtype)
        if self.dtype == dtype:
            return self
        # A mean that becomes float16 is decoded now, as values may be out of range.
        return DenseMean(self.values()).narrowed(dtype, clips=clips)

    def memory(self) -> Array:
        return namespace(self.shares[0].codes).empty(self.count, self.dtype)  # type: ignore[no-any-return]

    def parts_of(self, memory: Array) -> Sequence[Array]:
        return in_parts(memory, self.sizes)

    def writer(
        self,
        parts: Sequence[Array],
        onto: tuple[Sequence[Array], float] | None = None,
    ) -> Write:
        """Return a function that writes the values to vectors of the sizes, once; see `_Mean.writer`.

        onto: other such vectors, and a factor: it adds the factor times the values to
        them, and writes the sums to the parts as well.
        """
        one = self.shares[0]
        writer: Write = kernels_for(parts[0]).decoder(
            [(share.codes, share.scales) for share in self.shares],
            one.bits,
            one.block,
            parts,
            divisor=self.divisor,
            onto=onto,
        )
        return writer

    def write(self, out: Array) -> None:
        """Write the values to a vector, rounded to its dtype."""
        if out.dtype == self.dtype:
            self.writer(self.parts_of(out))()
        else:
            out[...] = converted(self.values(), out.dtype)

    def pieces(self, buffer: Array) -> "Pieces":
        """Decode all values into the buffer, and yield its pieces."""
        self.write(buffer)
        return DenseMean(buffer).pieces(buffer)


@dataclass(frozen=True)
class TransformedMean(_Mean):
    """A sparse mean of coefficients in a basis, transformed where it is written.

    edges: of the segments. is_sign: the values are replaced by their signs.
    """

    vector: SparseVector
    basis: Basis
    edges: Sequence[int]
    is_sign: bool = False

    def memory(self) -> Array:
        return np.empty_like(self.vector.values, shape=self.vector.length)

    def parts_of(self, memory: Array) -> Sequence[Array]:
        return views_between(memory, self.edges)

    def signs(self) -> "Written":
        return replace(self, is_sign=True)

    def writer(self, parts: Sequence[Array]) -> Write:
        """Return a function that writes the values to the segments; raises OverflowError for values out of range."""
        pairs = zip(split(self.vector, self.edges), parts, strict=True)
        writers = [
            self.basis.writer(own, flat(part), is_sign=self.is_sign)
            for own, part in pairs
        ]

        def write() -> None:
            for writer in writers:
                writer()

        return write


Mean = DenseMean | SparseMean | CodedMean
Written = Mean | TransformedMean
Pieces = Iterator[tuple[DenseMean | SparseMean, slice]]


def _nothing() -> None:
    pass


def _narrowed(values: Array, dtype: Dtype, *, clips: bool) -> Array:
    if clips and values.dtype != dtype:
        limit = np.finfo(dtype).max
        values = np.clip(values, -limit, limit)
    return converted(values, dtype)


def pieces_of(size: int) -> Iterator[slice]:
    """Yield consecutive parts of a vector of this size that stay in the cache."""
    return (slice(first, first + _PIECE) for first in range(0, size, _PIECE))
