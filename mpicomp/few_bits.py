"""Consecutive values of a dense vector in few bits: what a message of `quantised_allreduce` has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, namespace

BITS = (8, 4, 2, 1)
BLOCKS = tuple(1 << power for power in range(5, 17))  # values that share a scale
SCALES: dict[np.dtype[Any], np.dtype[Any]] = {
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
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the decoded values."""
        return np.dtype(np.float32 if self.scales.itemsize == 2 else np.float64)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.size // self.block)

    def part(self, first: int, size: int) -> "FewBits":
        """Return `size` of the values, from those of block `first` on, as views."""
        width, scales = sizes(self.bits, self.block, self.dtype)
        end = first + -(-size // self.block)
        return FewBits(
            self.codes[first * width : end * width],
            self.scales[first * scales : end * scales],
            size,
            self.bits,
            self.block,
        )

    def write(self, out: Array, divisor: float = 1.0) -> None:
        """Write the values over a divisor to `out`, of their dtype; values as they are, without a divisor."""
        if self.bits in BITS:
            coded = self.codes, self.scales, self.bits, self.block
            kernels_for(out).decoder(*coded, [out], divisor=divisor)()
        else:
            out[...] = self.codes.view(self.dtype)


def first_blocks(sizes: Iterable[int], block: int) -> list[int]:
    """Return the number of the first block of each segment, and at last the number of blocks."""
    return [0, *accumulate([-(-size // block) for size in sizes])]


def sizes(bits: int, block: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes of the codes of a block, and the number of its scales."""
    return block * bits // 8, (2 if bits == 2 else 1) if bits in BITS else 0


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
