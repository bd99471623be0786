"""Consecutive values of a dense vector in few bits, and sums of them: what one rank does in `quantised_allreduce`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, namespace, on_device
from mpicomp.threads import in_pieces

BITS = (8, 4, 2, 1)
BLOCKS = tuple(1 << power for power in range(5, 17))  # values that share a scale
SCALES: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.uint16),
    np.dtype(np.float64): np.dtype(np.uint32),
}

_CHUNK = 1 << 18  # values of a sum that stay in the cache, from the first addition to the codes


@dataclass(frozen=True)
class FewBits:
    """Hold `size` consecutive values in `bits` bits each, or as they are.

    codes: uint8. scales: the upper halves of floats. bits, block: see `mpicomp.kernels.host.few_bits`; all bits of the
    dtype if codes contains the values as they are, without scales.
    """

    codes: Array
    scales: Array
    size: int
    bits: int
    block: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the decoded values."""
        return np.dtype(np.float32 if self.scales.itemsize == 2 else np.float64)

    def is_finite(self) -> bool:
        """Return whether all values were finite before they were rounded; waits for a device."""
        infinity = np.array([np.inf], self.dtype).view(f"u{self.dtype.itemsize}")[0] >> 4 * self.dtype.itemsize
        return not bool((self.scales == self.scales.dtype.type(infinity)).any())

    def write(self, out: Array) -> None:
        """Write the values to `out`, of their dtype."""
        if self.bits in BITS:
            kernels_for(out).dequantise(self.codes, self.scales, self.bits, self.block, out)
        else:
            out[...] = self.codes.view(self.dtype)

    def add_to(self, total: Array) -> None:
        """Add the values to `total`, of their dtype."""
        if self.bits in BITS:
            kernels_for(total).add_quantised(self.codes, self.scales, self.bits, self.block, total)
        else:
            kernels_for(total).add(total, self.codes.view(self.dtype), total)

    def part(self, start: int, end: int) -> "FewBits":
        """Return the values from `start`, a multiple of the block, to `end`, another one or the size; as views."""
        width, scales = sizes(self.bits, self.block, self.dtype)
        first, last = start // self.block, -(-end // self.block)
        codes = self.codes[first * width : last * width]
        return FewBits(codes, self.scales[first * scales : last * scales], end - start, self.bits, self.block)


def sizes(bits: int, block: int, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes of the codes of a block, and the number of its scales."""
    return block * bits // 8, (2 if bits == 2 else 1) if bits in BITS else 0


def as_they_are(values: Array, block: int) -> FewBits:
    """Return contiguous values as they are, without a copy."""
    none = namespace(values).empty(0, SCALES[values.dtype])
    return FewBits(values.view(np.uint8), none, values.size, 8 * values.itemsize, block)


def quantise(
    own: Array, rejected: Array, bits: int, block: int, others: Sequence[FewBits] = (), *, short: bool = False
) -> FewBits:
    """Return values, added to the sum of the others in order, in few bits, and write the error of each to `rejected`.

    own, rejected: float32 or float64, 1-d contiguous; with others they may be the same array. short: the decoded values
    are float16 numbers. In host memory the sum is computed in chunks that stay in the cache.
    """
    (width, scales), blocks, empty = sizes(bits, block, own.dtype), -(-own.size // block), namespace(own).empty
    codes, room_of_scales = empty(blocks * width, np.uint8), empty(blocks * scales, SCALES[own.dtype])
    coded, kernels = FewBits(codes, room_of_scales, own.size, bits, block), kernels_for(own)
    if not others:
        kernels.quantise(own, None, bits, block, coded.codes, coded.scales, rejected, short=short)
        return coded
    longest = max(own.size, 1) if on_device(own) else max(_CHUNK, block)

    def piece(start: int, end: int) -> None:
        room = empty(min(longest, end - start), own.dtype)
        for low, high in pairwise([*range(start, end, longest), end]):
            total, part = room[: high - low], coded.part(low, high)
            first, *more = [each.part(low, high) for each in others]
            first.write(total)
            for term in more:
                term.add_to(total)
            into = part.codes, part.scales, rejected[low:high]
            kernels.quantise(total, own[low:high], bits, block, *into, short=short)

    if on_device(own):
        piece(0, own.size)
    else:
        in_pieces(piece, own.size, step=longest)
    return coded


def join(parts: Sequence[FewBits]) -> FewBits:
    """Return parts that follow each other as one; all sizes but the last are multiples of the block."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = (np.concatenate(each) for each in zip(*((part.codes, part.scales) for part in parts), strict=True))
    return FewBits(codes, scales, sum(part.size for part in parts), parts[0].bits, parts[0].block)


def block_bounds(length: int, block: int, shares: int) -> tuple[int, ...]:
    """Return the bounds of consecutive shares of a vector: multiples of the block, and the length."""
    blocks = -(-length // block)
    return tuple(min(length, block * (blocks * share // shares)) for share in range(shares + 1))
