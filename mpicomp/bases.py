"""Orthonormal bases: transforms of chunks of a flat vector, forward for a gradient and inverse for a mean.

Source: B. Peng, L. Lister, D. Kingma et al., "DeMo: decoupled momentum optimization",
arXiv 2411.19870, which sends the largest coefficients of a discrete cosine transform.
As a transform is linear and orthonormal, compressor, feedback and collective work on
coefficients as on values, and the residual stays in the basis.

Invariant: inverse(forward(x)) = x within rounding. The result has the same bits on the
host and on a device, and for any number of threads: additions have a fixed order, and
no product is fused with a sum.

Differences from the paper: chunks of the flat vector, not tiles of tensors; the basis
of Walsh and Hadamard, which needs no products, and loses as little
(experiments/every_step has the cosine transform).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for, on_device
from mpicomp.arrays.frameworks import to_vector, writable_vector
from mpicomp.arrays.memory import address, adjacent, concatenated, views_between
from mpicomp.settings import to_integer
from mpicomp.state import Configured
from mpicomp.vector import SparseVector, check_range

# Values of the longest chunk: they fit the shared memory of a block of threads on a
# GPU.
LONGEST = 4096


class Basis(Configured):
    """Base class of bases: transform every chunk of consecutive values of a vector.

    A basis implements `_forward` and `_inverse`, which write the result for a vector to an
    array of its length and dtype, which may be the vector. Constructor arguments are stored in
    attributes of the same name. Each basis says how it transforms the shorter chunk at the end.

    Args:
        chunk: values in a chunk, 1 to 4096.

    Raises:
        ValueError: `chunk` is out of range.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = to_integer("chunk", chunk, 1, LONGEST)

    def forward(self, vector: Any, out: Any) -> None:
        """Write the coefficients of a vector to `out`.

        float16 is computed in float32 and rounded once. A coefficient may be sqrt(chunk) times as
        large as a value, and is infinite beyond the range of its dtype; in `Hadamard` sums are up
        to chunk times as large. A value that is not finite makes all coefficients of its chunk not
        finite.

        Args:
            vector: of any shape, in C order; float16, float32 or float64.
            out: a contiguous array of its length and dtype, on its device; it may be `vector`.

        Raises:
            ValueError: `out` has another length, dtype or device, or overlaps without being the same.
        """
        self._forward(*_checked(vector, out))

    def inverse(self, coefficients: Any, out: Any) -> None:
        """Write the vector with these coefficients to `out`.

        Args:
            coefficients: as `vector` of `forward`.
            out: as in `forward`.

        Raises:
            ValueError: as in `forward`.
        """
        self._inverse(*_checked(coefficients, out))

    def add(self, a: Array, scale: float, parts: Sequence[Array], out: Array) -> None:
        """Write ``scale * a`` plus the coefficients of the parts to `out`, as `add_parts` of kernels does."""
        kernels_for(out).add_parts(a, scale, coefficients_of(parts, self), out)

    def writer(
        self, coefficients: SparseVector, out: Array, *, is_sign: bool = False
    ) -> Callable[[], None]:
        """Return a function that writes the vector with these coefficients to `out`, once; it cannot fail.

        is_sign: of its signs. Raises OverflowError for values out of range.
        """
        values = coefficients.to_dense()
        self.inverse(values, values)
        check_range(values, "mean out of the basis")
        if is_sign:
            kernels_for(values).signs(values)
        return partial(np.copyto, out, values)

    def _forward(self, vector: Array, out: Array) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no _forward(vector, out)")

    def _inverse(self, coefficients: Array, out: Array) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} has no _inverse(coefficients, out)"
        )


class Hadamard(Basis):
    """The Walsh-Hadamard basis: lg(chunk) additions a value, then one product with 1 / sqrt(chunk).

    Coefficients are in Sylvester's order (`scipy.linalg.hadamard`). The shorter chunk at the
    end is transformed in parts of descending powers of two: 100 values as 64, 32 and 4. Forward
    and inverse are the same.

    Args:
        chunk: values in a chunk, a power of two from 1 to 4096. For a power of four
            integer-valued floats are transformed exactly.

    Raises:
        ValueError: `chunk` is none of these.

    >>> basis = Hadamard(chunk=4)
    >>> vector = np.array([1.0, 2, 3, 6, 5])
    >>> basis.forward(vector, vector)
    >>> vector.tolist()
    [6.0, -2.0, -3.0, 1.0, 5.0]
    """

    def __init__(self, chunk: int = 256) -> None:
        super().__init__(chunk)
        if self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk is {chunk}: expected a power of two")

    def _forward(self, vector: Array, out: Array) -> None:
        kernels_for(vector).hadamard(vector, out, self.chunk)

    def _inverse(self, coefficients: Array, out: Array) -> None:
        self._forward(coefficients, out)

    def add(self, a: Array, scale: float, parts: Sequence[Array], out: Array) -> None:
        """Add in one pass on the host; see `Basis.add`."""
        if on_device(out):
            super().add(a, scale, parts, out)
            return
        end = 0
        for part in parts:
            place = slice(end, end := end + part.size)
            onto = a[place], scale
            kernels_for(out).hadamard(part, out[place], self.chunk, onto=onto)

    def writer(
        self, coefficients: SparseVector, out: Array, *, is_sign: bool = False
    ) -> Callable[[], None]:
        """Return a function that writes the vector with these coefficients, by chunks that stay in the cache."""
        values = coefficients.values
        most = np.abs(values).max(initial=0) if not on_device(values) else np.inf
        is_in_range = float(most) * self.chunk < np.finfo(out.dtype).max
        if not is_in_range or out.dtype == np.float16:
            return super().writer(coefficients, out, is_sign=is_sign)
        write: Callable[[], None] = kernels_for(out).hadamard_writer(
            coefficients.indices, values, out, self.chunk, is_sign=is_sign
        )
        return write


def coefficients_of(parts: Sequence[Array], basis: Basis | None) -> Sequence[Array]:
    """Return vectors in a basis, each by itself, as views of a new one; without a basis the vectors."""
    if basis is None:
        return parts
    edges = [0, *accumulate(part.size for part in parts)]
    values = adjacent(parts)
    if values is None:
        values = concatenated(parts)
    out = np.empty_like(values)
    for run in runs(edges, basis.chunk):
        basis.forward(values[run], out[run])
    return views_between(out, edges)


def runs(edges: Sequence[int], chunk: int) -> Iterator[slice]:
    """Yield runs of segments that one call transforms: all of a run but the last have whole chunks."""
    start = 0
    for first, end in pairwise(edges):
        if (end - first) % chunk or end == edges[-1]:
            yield slice(start, end)
            start = end


def _checked(vector: Any, out: Any) -> tuple[Array, Array]:
    vector = to_vector(vector)
    out = writable_vector(out)
    if on_device(vector) != on_device(out):
        raise ValueError(
            "vector and out are on different devices: move both to the host or both to the GPU"
        )
    if (vector.size, vector.dtype) != (out.size, out.dtype):
        raise ValueError(
            f"out has {out.size} values of {out.dtype}: expected {vector.size} of {vector.dtype}, as the vector has"
        )
    first = address(vector)
    second = address(out)
    if first != second and abs(first - second) < vector.nbytes:
        raise ValueError(
            "out overlaps the vector: expected an array apart from it, or the vector itself"
        )
    return vector, out
