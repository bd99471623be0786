"""Orthonormal bases: transforms of chunks of a flat vector, forward for a gradient and inverse for a mean.

Source: B. Peng, L. Lister, D. Kingma et al., "DeMo: decoupled momentum optimization", arXiv 2411.19870, which sends the
largest coefficients of a discrete cosine transform. As a transform is linear and orthonormal, compressor, feedback and
collective work on coefficients as on values, and the residual stays in the basis.

Invariant: inverse(forward(x)) = x within rounding. The result has the same bits on the host and on a device, and for
any number of threads: additions have a fixed order, and no product is fused with a sum.

Differences from the paper: chunks are of consecutive values of the flat vector; the paper cuts tensors into tiles of up
to 64 x 64. The Walsh-Hadamard basis, which needs no products, is ours.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import Array, address, kernels_for, namespace, on_device, to_vector, writable_vector
from mpicomp.settings import Configured, to_integer

LONGEST = 4096  # values of a chunk, which fit the memory that a block of threads shares on a GPU


class Basis(Configured):
    """Base class of bases: transform every chunk of consecutive values of a vector.

    A basis implements `_forward` and `_inverse`, which write the result for a vector to an array of its length and
    dtype, which may be the vector. Constructor arguments are stored in attributes of the same name: `repr` shows them.

    chunk: values, 1 to 4096, else ValueError. A vector of any length is transformed; each basis says how it transforms
    the shorter chunk at the end.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = to_integer("chunk", chunk, 1, LONGEST)

    def forward(self, vector: Any, out: Any) -> None:
        """Write the coefficients of a vector to `out`.

        vector, out: arrays of one length and dtype (float16, float32 or float64) on one device, of any shape, in C
        order; `out` is contiguous, and may be `vector`. float16 is computed in float32 and rounded once. A coefficient
        may be sqrt(chunk) times as large as a value, and is infinite beyond the range of its dtype; in `Hadamard` the
        sums before the last product, chunk times as large, have to be in range. A value that is not finite makes all
        coefficients of its chunk not finite.

        Raises ValueError for another length, dtype or device of `out`, and if the two overlap without being the same.
        """
        self._forward(*_checked(vector, out))

    def inverse(self, coefficients: Any, out: Any) -> None:
        """Write the vector with these coefficients to `out`. coefficients, out: as of `forward`."""
        self._inverse(*_checked(coefficients, out))

    def _forward(self, vector: Array, out: Array) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no _forward(vector, out)")

    def _inverse(self, coefficients: Array, out: Array) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no _inverse(coefficients, out)")


class Hadamard(Basis):
    """The Walsh-Hadamard basis: lg(chunk) additions a value, then one product with 1 / sqrt(chunk).

    chunk: a power of two from 1 to 4096, else ValueError. Of a power of four the scale is a power of two, so that
    integer-valued floats are transformed exactly. Coefficients are in the order of the Hadamard matrix of Sylvester
    (`scipy.linalg.hadamard`). The shorter chunk at the end is transformed in parts of descending powers of two: 100
    values as 64, 32 and 4.

    Forward and inverse are the same. A transform of float32 takes about as long as copying the vector.

    >>> basis = Hadamard(chunk=4)
    >>> vector = np.array([1.0, 2, 3, 6, 5])
    >>> basis.forward(vector, vector)
    >>> vector.tolist()
    [6.0, -2.0, -3.0, 1.0, 5.0]
    """

    def __init__(self, chunk: int = 256) -> None:
        super().__init__(chunk)
        if self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk is {chunk}: expected a power of two; Cosine takes any chunk")

    def _forward(self, vector: Array, out: Array) -> None:
        kernels_for(vector).hadamard(vector, out, self.chunk)

    def _inverse(self, coefficients: Array, out: Array) -> None:
        self._forward(coefficients, out)


class Cosine(Basis):
    """The basis of the discrete cosine transform (DCT-II, orthonormal), as in DeMo.

    chunk: values, 1 to 4096, else ValueError. The shorter chunk at the end has a transform of its own length. A
    transform is a product with a matrix, of 2 * chunk operations a value, in a fixed order; `Hadamard` takes less.

    >>> basis = Cosine(chunk=2)
    >>> vector = np.array([3.0, 1, 7])
    >>> basis.forward(vector, vector)
    >>> vector.round(3).tolist()
    [2.828, 1.414, 7.0]
    """

    def __init__(self, chunk: int = 256) -> None:
        super().__init__(chunk)
        self._matrices: dict[Any, Array] = {}

    def _forward(self, vector: Array, out: Array) -> None:
        self._multiply(vector, out, forward=True)

    def _inverse(self, coefficients: Array, out: Array) -> None:
        self._multiply(coefficients, out, forward=False)

    def _multiply(self, vector: Array, out: Array, *, forward: bool) -> None:
        whole = vector.size // self.chunk * self.chunk
        for start, end in (0, whole), (whole, vector.size):
            if start < end:
                matrix = self._matrix(min(self.chunk, end - start), vector, forward)
                kernels_for(vector).multiply_chunks(vector[start:end], matrix, out[start:end])

    def _matrix(self, size: int, vector: Array, forward: bool) -> Array:
        """Return the matrix that rows of values, or of coefficients, are multiplied by, on the device of a vector."""
        xp, dtype = namespace(vector), np.promote_types(vector.dtype, np.float32)
        key = size, dtype, xp.__name__, forward
        if key not in self._matrices:
            matrix = cosines(size)
            self._matrices[key] = xp.asarray(np.ascontiguousarray(matrix.T if forward else matrix, dtype))
        return self._matrices[key]


def cosines(size: int) -> NDArray[np.float64]:
    """Return the matrix of the orthonormal DCT-II, shape (size, size); the same bits on every host.

    Row k is sqrt(2 / size) cos(pi k (2 j + 1) / (2 size)), and sqrt(1 / size) for k = 0. The cosines are sums of
    products in a fixed order: those of C libraries differ in the last bit.
    """
    quarter = _cosines_of_a_quarter(size)  # of 0, 1, ... size steps of pi / (2 size)
    half = np.concatenate([quarter, -quarter[-2::-1]])
    circle = np.concatenate([half, half[-2:0:-1]])
    order = np.arange(size)
    matrix: NDArray[np.float64] = circle[np.outer(order, 2 * order + 1) % (4 * size)] * np.sqrt(2 / size)
    matrix[0] = np.sqrt(1 / size)
    return matrix


def _cosines_of_a_quarter(steps: int) -> NDArray[np.float64]:
    """Return cos(pi i / (2 steps)) for i = 0 .. steps, by Taylor series up to pi / 4."""
    places = np.arange(steps + 1)
    near = 2 * places <= steps  # of 0; the others are sines of what is left to pi / 2
    angles = np.where(near, places, steps - places) * (np.pi / 2 / steps)
    squares, cosine, sine = angles * angles, np.zeros_like(angles), np.zeros_like(angles)
    for order in range(20, 0, -2):
        cosine = 1 - squares * cosine / ((order - 1) * order) if order < 20 else np.ones_like(angles)
        sine = 1 - squares * sine / (order * (order + 1)) if order < 20 else np.ones_like(angles)
    return np.where(near, cosine, angles * sine)


def _checked(vector: Any, out: Any) -> tuple[Array, Array]:
    """Return both arrays as vectors."""
    vector, out = to_vector(vector), writable_vector(out)
    if on_device(vector) != on_device(out):
        raise ValueError("vector and out are on different devices: move both to the host or both to the GPU")
    if (vector.size, vector.dtype) != (out.size, out.dtype):
        raise ValueError(
            f"out has {out.size} values of {out.dtype}: expected {vector.size} of {vector.dtype}, as the vector has"
        )
    first, second = address(vector), address(out)
    if first != second and abs(first - second) < vector.nbytes:
        raise ValueError("out overlaps the vector: expected an array apart from it, or the vector itself")
    return vector, out
