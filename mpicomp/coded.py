"""Dense vectors to be coded in few bits, and sums of them: what one rank does in `quantised_allreduce`.

All values are passed over twice. `Uncoded.coder` adds them to the residual, codes them,
and writes the errors; `CodedSum.writer` decodes the sum, divides it, and writes it to
where it is wanted. What is kept between the two are codes.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from mpicomp.arrays import (
    Array,
    Dtype,
    check_finite,
    concatenated,
    converted,
    kernels_for,
    namespace,
    sizes_of,
    views_between,
)
from mpicomp.few_bits import FewBits, first_blocks

# the upper half of an infinite float32 or float64, by its bytes
_INFINITY = {2: 0x7F80, 4: 0x7FF00000}


def shares(first: int, end: int, count: int) -> list[tuple[int, int]]:
    """Divide the blocks from `first` to before `end` into consecutive ranges, each given by its first and its end."""
    bounds = [first + (end - first) * share // count for share in range(count + 1)]
    return [*pairwise(bounds)]


def in_parts(vector: Array, sizes: Sequence[int]) -> list[Array]:
    """Return consecutive parts of a vector, of these sizes, as views."""
    return views_between(vector, [0, *accumulate(sizes)])


class Uncoded(NamedTuple):
    """Values to be coded, ``decay * residual + parts``, and where their errors are written.

    parts: 1-d contiguous, one for each vector in which a block begins anew. errors:
    1-d, as long as the parts together, of their dtype. residual: likewise, or None; it
    may be `errors`, and so may the parts' own memory without a residual. check: raises
    ValueError for values that are not finite.
    """

    parts: Sequence[Array]
    errors: Array
    residual: Array | None = None
    decay: float = 1.0
    check: Callable[[Array], None] = check_finite

    @property
    def dtype(self) -> Dtype:
        """The dtype of the values."""
        return self.errors.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of values of each part."""
        return sizes_of(self.parts)

    def blocks(self, block: int) -> int:
        """Return the number of blocks, of so many values each: a block begins anew at each part."""
        return first_blocks(self.sizes, block)[-1]

    def position(self, number: int, block: int) -> int:
        """Return the position of the first value of a block; the number of values for the block after the last."""
        starts = first_blocks(self.sizes, block)
        part = bisect_right(starts, number) - 1
        return sum(self.sizes[:part]) + (number - starts[part]) * block

    def widened(self) -> "Uncoded":
        """Return itself; for values in float16, copies in float32, as kernels take them."""
        if self.dtype != np.float16:
            return self
        values = converted(self.values(), np.float32)
        parts = in_parts(values, self.sizes)
        return Uncoded(parts, np.empty_like(values), check=self.check)

    def values(self) -> Array:
        """Return the values as a new vector."""
        values = concatenated(self.parts)
        if self.residual is not None:
            kernels_for(values).add_parts(
                self.residual, self.decay, [values.copy()], values
            )
        return values

    def coder(
        self, bits: int, block: int, *, short: bool = False
    ) -> Callable[..., FewBits]:
        """Return a function that writes the values in few bits, and their errors.

        Its arguments: `into`, which it returns, as `few_bits_message` of
        `mpicomp.codec` makes it; others, which it adds in order to the values: as many,
        in as many bits and blocks; and blocks, the first, and the one after the last,
        by default all. short: the decoded values are float16 numbers. The error of a
        value in a block that is not finite is the value.
        """
        encode = kernels_for(self.errors).encoder(
            self.parts,
            self.residual,
            bits,
            block,
            self.errors,
            decay=self.decay,
            short=short,
        )

        def code(
            into: FewBits,
            others: Sequence[FewBits] = (),
            blocks: tuple[int, int] | None = None,
        ) -> FewBits:
            terms = [(other.codes, other.scales) for other in others]
            encode(into.codes, into.scales, terms, blocks)
            return into

        return code


@dataclass(frozen=True)
class CodedSum:
    """A sum of `Uncoded` values over ranks, in few bits, over a divisor.

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
