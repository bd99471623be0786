"""Indices and values at the fewest bits.

Indices: Elias-Fano coding. Source: P. Elias, "Efficient storage and retrieval by content and address of static files",
J. ACM 21(2), 1974; R. M. Fano, MIT memorandum 61, 1971. With N increasing numbers below U, each takes about
2 + log2(U / N) bits, half a bit above the entropy of a random set: its low bits stand as they are, one number's behind
the other's; its high bits are the number of zeros before its one in a second string of bits.

Values: what is selected for its magnitude lies close together, so a value is its sign and how far the bits of its
magnitude are above the least: fewer bits than those of the exponent and the fraction.
"""

import numpy as np

from mpicomp.kernels.host.bits import FORMATS, Array, jit
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


def to_offsets(values: Array, least: int, width: int, words: Array) -> None:
    """Write `values` into `words` (uint64, zeros; low bits first) as fields of `width` bits and a sign.

    The bits are how far those of the magnitude are above `least`. words has one more than the fields fill.
    """
    form = FORMATS[values.dtype]
    _to_offsets(values.view(form.keys), form.keys.type(form.mask), form.width, least, width, words)


def from_offsets(words: Array, least: int, width: int, values: Array) -> None:
    """Fill `values` with what `to_offsets` wrote; whatever the words hold, nothing is read out of range."""
    form = FORMATS[values.dtype]
    _from_offsets(words, form.keys.type(form.mask), form.width, least, width, values.view(form.keys))


@jit
def _to_elias_fano(indices, first, low_bits, lows, highs):  # type: ignore[no-untyped-def]
    # The words that are being filled are kept in registers, and written each time: to read back what was just written
    # takes longer.
    one, six, last, none = np.uint64(1), np.uint64(6), np.uint64(63), np.uint64(0)
    width = np.uint64(low_bits)
    mask = (one << width) - one
    low, place_of_low = none, none
    high, at = none, none
    for i in range(indices.size):
        number = np.uint64(indices[i] - first)
        place = (number >> width) + np.uint64(i)
        high = (high if place >> six == at else none) | one << (place & last)
        at = place >> six
        highs[at] = high
        low = _put(number & mask, width, place_of_low, low, lows)
        place_of_low += width
    lows[place_of_low >> six] = low


@jit
def _from_elias_fano(lows, highs, first, low_bits, indices):  # type: ignore[no-untyped-def]
    one, six = np.uint64(1), np.uint64(6)
    width, size = np.uint64(low_bits), np.uint64(indices.size)
    mask = (one << width) - one
    i, at = np.uint64(0), np.uint64(0)
    for w in range(highs.size):
        ones = highs[w]
        while ones != np.uint64(0):
            if i == size:
                return i + one
            place = (np.uint64(w) << six) + lowest(ones)
            low = _taken(lows, at) & mask
            indices[i] = np.int64(((place - i) << width) | low) + first
            ones &= ones - one
            at += width
            i += one
    return i


@jit
def _to_offsets(bits, mask, sign, least, width, words):  # type: ignore[no-untyped-def]
    none, bits_of_one = np.uint64(0), np.uint64(width) + np.uint64(1)
    word, place = none, none
    for i in range(bits.size):
        offset = np.uint64(bits[i] & mask) - np.uint64(least)
        negative = np.uint64(bits[i]) >> np.uint64(sign)
        word = _put(offset | negative << np.uint64(width), bits_of_one, place, word, words)
        place += bits_of_one
    words[place >> np.uint64(6)] = word


@jit
def _from_offsets(words, mask, sign, least, width, bits):  # type: ignore[no-untyped-def]
    one, place = np.uint64(1), np.uint64(0)
    for i in range(bits.size):
        field = _taken(words, place)
        offset, negative = field & ((one << np.uint64(width)) - one), (field >> np.uint64(width)) & one
        magnitude = (offset + np.uint64(least)) & np.uint64(mask)
        bits[i] = magnitude | negative << np.uint64(sign)
        place += np.uint64(width) + one


@jit
def _put(field, width, place, word, words):  # type: ignore[no-untyped-def]
    """Write a field of `width` bits at a place in words of which `word` is the last so far; return what is it now."""
    one, six, last = np.uint64(1), np.uint64(6), np.uint64(63)
    shift = place & last
    word |= field << shift
    words[place >> six] = word
    after = (field >> one) >> (last - shift)  # two shifts: one by 64 is not defined
    return after if shift + width > last else word


@jit
def _taken(words, place):  # type: ignore[no-untyped-def]
    """Return the 64 bits at a place in words; there is one word more behind the last field."""
    one, six, last = np.uint64(1), np.uint64(6), np.uint64(63)
    at, shift = place >> six, place & last
    return (words[at] >> shift) | ((words[at + one] << one) << (last - shift))
