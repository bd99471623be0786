"""What one rank may send in a step: ``decay * residual + parts``, not yet added.

Compressors and coders add in the pass in which they select or code, so that all values
are read from memory once. `Feedback.correct` returns a `Correction`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for, on_device
from mpicomp.arrays.memory import concatenated, sizes_of, views_between
from mpicomp.arrays.values import check_finite, widened_values
from mpicomp.bases import Basis, Hadamard, coefficients_of
from mpicomp.kernels import Summands


class Correction(NamedTuple):
    """The vector that a step may send: ``decay * residual + parts``, which is still to be added.

    parts: consecutive vectors, 1-d and contiguous, one for each segment. out: 1-d, of
    their length and dtype: the buffer of the sum, or, where all values are coded in few
    bits, of the errors. Without a residual it is made with the sum in it, and may be the
    memory of the parts. residual: likewise, or None; it may be `out` where values are
    coded. decay: its factor. basis: in which the parts are added; None for none.
    shows_gradient: whether the parts are the gradient of this step, with nothing that
    was kept. check: raises ValueError for a value of a vector that is not finite.
    """

    parts: Sequence[Array]
    out: Array
    residual: Array | None = None
    decay: float = 1.0
    basis: Basis | None = None
    shows_gradient: bool = False
    check: Callable[[Array], None] = check_finite

    def add(self) -> Array:
        """Write the sum to `out`, unless it is there, and return it."""
        out = self.out
        if self.residual is not None:
            add_parts = kernels_for(out).add_parts
            if self.basis is not None:
                add_parts = self.basis.add
            add_parts(self.residual, self.decay, self.parts, out)
        return out

    def summands(self, *, in_walsh: bool = False) -> Summands | None:
        """Return what a kernel adds as it selects; None if `out` has the sum.

        In a basis the sum is written here; unless the kernel itself transforms by
        `hadamard` (`in_walsh`), and that is the basis.
        """
        if self.residual is None:
            return None
        chunk = 1
        basis = self.basis
        if basis is not None:
            is_walsh = type(basis) is Hadamard and not on_device(self.out)
            if not (in_walsh and is_walsh):
                self.add()
                return None
            chunk = basis.chunk
        return Summands(self.residual, self.decay, self.parts, chunk)

    @property
    def gradient(self) -> Sequence[Array] | None:
        """The parts in the basis, computed anew; None if they are not the gradient of this step."""
        if not self.shows_gradient:
            return None
        return coefficients_of(self.parts, self.basis)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of values of each part."""
        return sizes_of(self.parts)

    def values(self) -> Array:
        """Return the values of a correction without a basis as a new vector."""
        if self.residual is None:
            return concatenated(self.parts)
        return self._replace(out=np.empty_like(self.residual)).add()

    def widened(self) -> "Correction":
        """Return itself; for values in float16, copies in float32, as coders take them."""
        if self.out.dtype != np.float16:
            return self
        values = widened_values(self.values())
        parts = in_parts(values, self.sizes)
        return Correction(parts, np.empty_like(values), check=self.check)

    def between(self, first: int, end: int, span: slice) -> "Correction":
        """Return the part of the segments from `first` to before `end`. span: of their values."""
        residual = self.residual
        if residual is not None:
            residual = residual[span]
        parts = self.parts[first:end]
        return self._replace(parts=parts, out=self.out[span], residual=residual)


def in_parts(vector: Array, sizes: Sequence[int]) -> list[Array]:
    """Return consecutive parts of a vector, of these sizes, as views."""
    return views_between(vector, [0, *accumulate(sizes)])
