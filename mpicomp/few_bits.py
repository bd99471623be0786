"""All values of a vector in few bits: their payload, how blocks divide a vector, and how a correction is coded.

A block begins anew at each part of a vector, such as a tensor. Codes and scales:
`mpicomp.kernels.host.few_bits`; the message: `mpicomp.codec`.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from mpicomp.arrays import Array, Dtype
from mpicomp.arrays.device import kernels_for
from mpicomp.correction import Correction

BITS = (8, 4, 2, 1)
BLOCKS = tuple(1 << power for power in range(5, 17))  # values that share a scale
SCALES: dict[Dtype, Dtype] = {
    np.dtype(np.float32): np.dtype(np.uint16),
    np.dtype(np.float64): np.dtype(np.uint32),
}


@dataclass(frozen=True)
class FewBits:
    """Hold `size` consecutive values in `bits` bits each.

    codes: uint8. scales: the upper halves of floats. bits, block: see
    `mpicomp.kernels.host.few_bits`. message: what codes and scales are parts of, as
    `mpicomp.codec.few_bits_message` makes it.
    """

    codes: Array
    scales: Array
    size: int
    bits: int
    block: int
    message: Array

    @property
    def dtype(self) -> Dtype:
        """The dtype of the decoded values."""
        if self.scales.itemsize == 2:
            return np.dtype(np.float32)
        return np.dtype(np.float64)


def coder(
    correction: Correction, bits: int, block: int, *, short: bool = False
) -> Callable[..., FewBits]:
    """Return a function that writes the values of a correction in few bits, and their errors to its buffer.

    Its arguments: `into`, which it returns, as `few_bits_message` of `mpicomp.codec`
    makes it; others, which it adds in order to the values: as many, in as many bits and
    blocks; and blocks, the first, and the one after the last, by default all. short:
    the decoded values are float16 numbers. The error of a value in a block that is not
    finite is the value.
    """
    encode = kernels_for(correction.out).encoder(
        correction.parts,
        correction.residual,
        bits,
        block,
        correction.out,
        decay=correction.decay,
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


def shares(first: int, end: int, count: int) -> list[tuple[int, int]]:
    """Divide the blocks from `first` to before `end` into consecutive ranges, each given by its first and its end."""
    bounds = [first + (end - first) * share // count for share in range(count + 1)]
    return [*pairwise(bounds)]


def position(number: int, sizes: tuple[int, ...], block: int) -> int:
    """Return the position of the first value of a block; the number of values for the block after the last."""
    starts = first_blocks(sizes, block)
    part = bisect_right(starts, number) - 1
    return sum(sizes[:part]) + (number - starts[part]) * block


@lru_cache(maxsize=256)
def first_blocks(sizes: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return the number of the first block of each segment, and at last the number of blocks."""
    return 0, *accumulate([-(-size // block) for size in sizes])


@lru_cache(maxsize=256)
def places(sizes: tuple[int, ...], block: int) -> tuple[Array, Array]:
    """Return the first block and the first value of each segment, each with the number of all."""
    firsts = first_blocks(sizes, block)
    edges = [*accumulate(sizes, initial=0)]
    return np.array(firsts, np.int64), np.array(edges, np.int64)
