"""Sums of dense vectors in few bits, as `quantised_allreduce` receives them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpicomp.arrays import (
    Array,
    Dtype,
    converted,
    kernels_for,
    namespace,
)
from mpicomp.correction import in_parts
from mpicomp.few_bits import FewBits

# the upper half of an infinite float32 or float64, by its bytes
_INFINITY = {2: 0x7F80, 4: 0x7FF00000}


@dataclass(frozen=True)
class CodedSum:
    """A sum of vectors over ranks, in few bits, over a divisor.

    shares: consecutive blocks each. sizes: of the parts, in values; the last block of
    each may be padded.
    """

    shares: Sequence[FewBits]
    sizes: Sequence[int]
    divisor: float = 1.0

    @property
    def size(self) -> int:
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

    def writer(
        self,
        parts: Sequence[Array],
        onto: tuple[Sequence[Array], float] | None = None,
    ) -> Callable[[], None]:
        """Return a function that writes the values to vectors, once: it cannot fail, and allocates nothing.

        parts: 1-d contiguous, of the segments' sizes and the values' dtype. onto: other
        such vectors, and a factor: it adds the factor times the values to them, and
        writes the sums to the parts as well.
        """
        one = self.shares[0]
        writer: Callable[[], None] = kernels_for(parts[0]).decoder(
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
            self.writer(in_parts(out, self.sizes))()
        else:
            out[...] = converted(self.to_array(), out.dtype)

    def to_array(self) -> Array:
        """Return the values as a new vector."""
        xp = namespace(self.shares[0].codes)
        values: Array = xp.empty(self.size, self.dtype)
        self.write(values)
        return values
