"""Indices and values in few bits.

Indices: Elias-Fano coding. Source: P. Elias, "Efficient storage and retrieval by
content and address of static files", J. ACM 21(2), 1974; R. M. Fano, MIT memorandum 61,
1971. With N increasing numbers below U, each takes about 2 + log2(U / N) bits, half a
bit above the entropy of a random set: its low bits are stored as they are, number after
number; its high bits are the number of zeros before its one in a second bit string.

Values: magnitudes that were selected as the largest are close together, so a value is
stored as its sign and the difference of the bits of its magnitude from the least: fewer
bits than those of exponent and fraction. They are stored in planes of bytes and of
bits, which can be written and read many at a time.
"""

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, as_writable
from mpicomp.kernels.host.compiled import jit
from mpicomp.kernels.host.instructions import WORD, lowest, reaching


def to_elias_fano(
    indices: Array, first: int, low_bits: int, lows: Array, highs: Array
) -> None:
    """Write increasing `indices`, counted from `first`, into `lows` and `highs`: uint64, zeros; low bits first.

    lows has one word more than the N * low_bits bits fill; highs one bit for each index
    and for each step of high bits.
    """
    _to_elias_fano(as_writable(indices), first, low_bits, lows, highs)


def from_elias_fano(
    lows: Array, highs: Array, first: int, low_bits: int, indices: Array
) -> int:
    """Decode the output of `to_elias_fano` into `indices`; return their number, one more if more bits are set.

    For any content of the words, reads and writes are in range; the indices may then
    not increase.
    """
    return int(
        _from_elias_fano(
            as_writable(lows), as_writable(highs), first, low_bits, indices
        )
    )


def to_offsets(values: Array, least: int, width: int, planes: Array) -> None:
    """Write `values` into `planes` (uint8, zeros): `width` bits each, and a sign above them.

    The bits are the difference of those of the magnitude from `least`. There is a plane
    for each 8 of these bits, the lowest first, with a byte of each value, then one for
    each remaining bit, with a bit of each value, low bits first; every plane is a
    multiple of 8 bytes.
    """
    form = FORMATS[values.dtype]
    fields = np.zeros(-(-values.size // WORD) * WORD, form.keys)
    same = fields.view(form.signed)
    keys = as_writable(values).view(form.keys)
    _to_offsets(
        keys, form.mask, least, width, fields, same, planes, planes.view(np.uint64)
    )


def from_offsets(planes: Array, least: int, width: int, values: Array) -> None:
    """Decode the output of `to_offsets` into `values`; for any content of the planes all reads are in range."""
    form = FORMATS[values.dtype]
    planes = as_writable(planes)
    _from_offsets(
        planes, planes.view(np.uint64), form.mask, least, width, values.view(form.keys)
    )


@jit
def _to_elias_fano(indices, first, low_bits, lows, highs):  # type: ignore[no-untyped-def]
    # The words being filled are kept in registers and written each time: reading them
    # back takes longer.
    one, six, last, none = np.uint64(1), np.uint64(6), np.uint64(63), np.uint64(0)
    width = np.uint64(low_bits)
    mask = (one << width) - one
    low, word, shift = none, none, none
    high, at = none, none
    for i in range(indices.size):
        number = np.uint64(indices[i] - first)
        position = (number >> width) + np.uint64(i)
        high = (high if position >> six == at else none) | one << (position & last)
        at = position >> six
        highs[at] = high
        bits = number & mask
        low |= bits << shift
        lows[word] = low
        # Two shifts are needed, as a shift by 64 is undefined.
        low = (bits >> one) >> (last - shift) if shift + width > last else low
        word += (shift + width) >> six
        shift = (shift + width) & last
    lows[word] = low


@jit
def _from_elias_fano(lows, highs, first, low_bits, indices):  # type: ignore[no-untyped-def]
    one, six, last = np.uint64(1), np.uint64(6), np.uint64(63)
    width, size = np.uint64(low_bits), np.uint64(indices.size)
    mask = (one << width) - one
    i, at = np.uint64(0), np.uint64(0)
    for w in range(highs.size):
        ones = highs[w]
        while ones != np.uint64(0):
            if i == size:
                return i + one
            position = (np.uint64(w) << six) + lowest(ones)
            word, shift = at >> six, at & last
            low = (
                (lows[word] >> shift) | ((lows[word + one] << one) << (last - shift))
            ) & mask
            indices[i] = np.int64(((position - i) << width) | low) + first
            ones &= ones - one
            at += width
            i += one
    return i


@jit
def _to_offsets(bits, mask, least, width, fields, same, planes, words):  # type: ignore[no-untyped-def]
    """Write planes through `fields`: zeros, padded to whole words; `same` is a signed view of them."""
    size, sign = bits.size, np.uint64(8 * bits.itemsize - 1)
    for i in range(size):
        offset = (np.uint64(bits[i]) & np.uint64(mask)) - np.uint64(least)
        fields[i] = offset | np.uint64(bits[i]) >> sign << np.uint64(width)
    octets, room, row = (width + 1) // 8, (size + 7) // 8 * 8, (size + 63) // 64
    for j in range(octets):
        shift, plane = np.uint64(8 * j), planes[j * room : j * room + size]
        for i in range(size):
            plane[i] = np.uint64(fields[i]) >> shift & np.uint64(255)
    for bit in range(8 * octets, width + 1):
        one, at = (
            same.dtype.type(1 << bit),
            octets * room // 8 + (bit - 8 * octets) * row,
        )
        for w in range(row):
            words[at + w] = reaching(same, 64 * w, one, one)


@jit
def _from_offsets(planes, words, mask, least, width, bits):  # type: ignore[no-untyped-def]
    size, one, sign = bits.size, np.uint64(1), np.uint64(8 * bits.itemsize - 1)
    octets, room, row = (width + 1) // 8, (size + 7) // 8 * 8, (size + 63) // 64
    bits[:] = 0
    for j in range(octets):
        shift, plane = np.uint64(8 * j), planes[j * room : j * room + size]
        for i in range(size):
            bits[i] |= np.uint64(plane[i]) << shift
    for bit in range(8 * octets, width + 1):
        shift, at = np.uint64(bit), octets * room // 8 + (bit - 8 * octets) * row
        for w in range(size // 64):
            word, some = words[at + w], bits[64 * w : 64 * w + 64]
            for i in range(64):
                some[i] |= (word >> np.uint64(i) & one) << shift
        for i in range(size // 64 * 64, size):
            bits[i] |= (words[at + i // 64] >> np.uint64(i % 64) & one) << shift
    below = (one << np.uint64(width)) - one
    for i in range(size):
        field = np.uint64(bits[i])
        magnitude = ((field & below) + np.uint64(least)) & np.uint64(mask)
        bits[i] = magnitude | (field >> np.uint64(width) & one) << sign
