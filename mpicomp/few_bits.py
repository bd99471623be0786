"""Consecutive values of a dense vector in few bits: what a message of `quantised_allreduce` has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mpicomp.arrays import Array, Dtype, namespace

BITS = (8, 4, 2, 1)
BLOCKS = tuple(1 << power for power in range(5, 17))  # values that share a scale
SCALES: dict[Dtype, Dtype] = {
    np.dtype(np.float32): np.dtype(np.uint16),
    np.dtype(np.float64): np.dtype(np.uint32),
}


@dataclass(frozen=True)
class FewBits:
    """Hold `size` consecutive values in `bits` bits each, or as they are.

    codes: uint8. scales: the upper halves of floats. bits, block: see
    `mpicomp.kernels.host.few_bits`; all bits of the dtype if codes contains the values
    as they are, without scales. message: what codes and scales are parts of, if they
    need not be copied to send them (`mpicomp.codec.few_bits_message`).
    """

    codes: Array
    scales: Array
    size: int
    bits: int
    block: int
    message: Array | None = None

    @property
    def dtype(self) -> Dtype:
        """The dtype of the decoded values."""
        return np.dtype(np.float32 if self.scales.itemsize == 2 else np.float64)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.size // self.block)


def first_blocks(sizes: Iterable[int], block: int) -> list[int]:
    """Return the number of the first block of each segment, and at last the number of blocks."""
    return [0, *accumulate([-(-size // block) for size in sizes])]


def as_they_are(values: Array, block: int) -> FewBits:
    """Return contiguous values as they are, without a copy."""
    none = namespace(values).empty(0, SCALES[values.dtype])
    return FewBits(values.view(np.uint8), none, values.size, 8 * values.itemsize, block)


def join(parts: Sequence[FewBits]) -> FewBits:
    """Return parts that follow each other as one; all sizes but the last are multiples of the block."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = (
        np.concatenate(parts_of)
        for parts_of in zip(*((part.codes, part.scales) for part in parts), strict=True)
    )
    return FewBits(
        codes, scales, sum(part.size for part in parts), parts[0].bits, parts[0].block
    )
