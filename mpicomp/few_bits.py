"""Consecutive values of a dense vector in few bits: what a message of `quantised_allreduce` has."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from mpicomp.arrays import Array, Dtype

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
        return np.dtype(np.float32 if self.scales.itemsize == 2 else np.float64)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.size // self.block)


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
