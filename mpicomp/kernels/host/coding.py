"""Indices at the fewest bits: Elias-Fano coding.

Source: P. Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 21(2), 1974; R. M.
Fano, MIT memorandum 61, 1971. With N increasing numbers below U, each takes about 2 + log2(U / N) bits, half a bit
above the entropy of a random set: its low bits stand as they are, one number's behind the other's; its high bits are
the number of zeros before its one in a second string of bits.
"""

import numpy as np

from mpicomp.kernels.host.bits import Array, jit
from mpicomp.kernels.host.instructions import lowest


def to_elias_fano(indices: Array, first: int, low_bits: int, lows: Array, highs: Array) -> None:
    """Write increasing `indices`, counted from `first`, into `lows` and `highs`: uint64, zeros; low bits first.

    lows has one word more than the N * low_bits bits fill; highs one bit for each index and for each step of high bits.
    """
    _to_elias_fano(indices, first, low_bits, lows, highs)


def from_elias_fano(lows: Array, highs: Array, first: int, low_bits: int, indices: Array) -> int:
    """Fill `indices` with what `to_elias_fano` wrote; return how many stand there, one more where more bits are set.

    Whatever the words hold, nothing is read or written out of range; what comes out may then not increase.
    """
    return int(_from_elias_fano(lows, highs, first, low_bits, indices))


@jit
def _to_elias_fano(indices, first, low_bits, lows, highs):  # type: ignore[no-untyped-def]
    # The words that are being filled are kept in registers, and written each time: to read back what was just written
    # takes longer.
    one, six, last, none = np.uint64(1), np.uint64(6), np.uint64(63), np.uint64(0)
    width = np.uint64(low_bits)
    mask = (one << width) - one
    low, word, shift = none, none, none
    high, at = none, none
    for i in range(indices.size):
        number = np.uint64(indices[i] - first)
        place = (number >> width) + np.uint64(i)
        high = (high if place >> six == at else none) | one << (place & last)
        at = place >> six
        highs[at] = high
        bits = number & mask
        low |= bits << shift
        lows[word] = low
        low = (bits >> one) >> (last - shift) if shift + width > last else low  # two shifts: one by 64 is not defined
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
            place = (np.uint64(w) << six) + lowest(ones)
            word, shift = at >> six, at & last
            low = ((lows[word] >> shift) | ((lows[word + one] << one) << (last - shift))) & mask
            indices[i] = np.int64(((place - i) << width) | low) + first
            ones &= ones - one
            at += width
            i += one
    return i
