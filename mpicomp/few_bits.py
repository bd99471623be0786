"""Consecutive values of a dense vector in few bits, and sums of them: what one rank does in `quantised_allreduce`."""

from collections.abc import Sequence
from dataclasses import dataclass
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

    def is_finite(self) -> bool:
        """Return whether all values were finite before they were rounded; waits for a device."""
        infinity = (
            np.array([np.inf], self.dtype).view(f"u{self.dtype.itemsize}")[0]
            >> 4 * self.dtype.itemsize
        )
        return not bool((self.scales == self.scales.dtype.type(infinity)).any())

    def write(self, out: Array) -> None:
        """Write the values to `out`, of their dtype."""
        if self.bits in BITS:
            kernels_for(out).dequantise(
                self.codes, self.scales, self.bits, self.block, out
            )
        else:
            out[...] = self.codes.view(self.dtype)


def sizes(bits: int, block: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes of the codes of a block, and the number of its scales."""
    return block * bits // 8, (2 if bits == 2 else 1) if bits in BITS else 0


def as_they_are(values: Array, block: int) -> FewBits:
    """Return contiguous values as they are, without a copy."""
    none = namespace(values).empty(0, SCALES[values.dtype])
    return FewBits(values.view(np.uint8), none, values.size, 8 * values.itemsize, block)


def quantise(
    own: Array,
    rejected: Array,
    into: FewBits,
    others: Sequence[FewBits] = (),
    *,
    short: bool = False,
) -> FewBits:
    """Write the sum of values and the others, in order, to `into`, and its errors to `rejected`; return `into`.

    own, rejected: float32 or float64, 1-d contiguous; they may be the same array. into:
    as `few_bits_message` of `mpicomp.codec` makes it. others: as many values each, in
    as many bits and blocks. short: the decoded values are float16 numbers. The error of
    a value in a block that is not finite is the value.
    """
    terms = [(each.codes, each.scales) for each in others]
    room = (into.codes, into.scales)
    kernels_for(own).quantise(
        own, terms, into.bits, into.block, *room, rejected, short=short
    )
    return into


def join(parts: Sequence[FewBits]) -> FewBits:
    """Return parts that follow each other as one; all sizes but the last are multiples of the block."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = (
        np.concatenate(each)
        for each in zip(*((part.codes, part.scales) for part in parts), strict=True)
    )
    return FewBits(
        codes, scales, sum(part.size for part in parts), parts[0].bits, parts[0].block
    )


def block_bounds(length: int, block: int, shares: int) -> tuple[int, ...]:
    """Return the bounds of consecutive shares of a vector: multiples of the block, and the length."""
    blocks = -(-length // block)
    return tuple(
        min(length, block * (blocks * share // shares)) for share in range(shares + 1)
    )
