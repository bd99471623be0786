"""Every value of a vector in 8, 4, 2 or 1 bits, in blocks, with the rounding error in the same pass.

Sources: levels up to the largest magnitude: D. Alistarh et al., "QSGD", NeurIPS 2017
(arXiv 1610.02132), here rounded to nearest. One magnitude: F. Seide et al., "1-bit
stochastic gradient descent", Interspeech 2014. Two magnitudes: S. P. Lloyd, "Least
squares quantization in PCM", IEEE Trans. Information Theory 28(2), 1982, two rounds of
it.

8 and 4 bits: a value is an integer of -m to m, m = 2^(bits - 1) - 1, times the scale of
its block, which is the largest magnitude over m. 2 bits: a sign, and one of two
magnitudes of the block. 1 bit: a sign, and the mean magnitude.

Scales have 8 significant bits (21 for float64): an integer times a scale is exact, and
so is the difference of a value and its rounded value. For 8 and 4 bits a scale is
rounded up. A block of zeros has the scale 0, and decodes to zeros. A block with a value
that is not finite has an infinite scale, and decodes to values that are not finite.

A kernel takes a group of values at a time, which stays in the first-level cache,
through its passes. The decoded values are written past the cache, from a buffer.

Layout: a block of B values has B bits / 8 bytes. Byte j contains value j in its lowest
bits, then the values j + w, j + 2 w, ... with w = B bits / 8, so that loops over a
block have no strides. A field of 8 or 4 bits is the integer + m + 1; of 2 or 1 bits:
bit 0 is set for negative values, bit 1 for the larger magnitude. The last block is
padded with zeros. A scale is the upper half of the bits of a float32, or of a float64.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array, address
from mpicomp.kernels.host.bits import FORMATS, as_writable, jit
from mpicomp.kernels.host.instructions import (
    LINE,
    array_at,
    bare,
    bits_of,
    number_of,
    store_line,
)
from mpicomp.kernels.host.streaming import (
    LONG,
    addresses,
    is_streamed,
    values_before_line,
)
from mpicomp.threads import in_pieces

_ROOM = 1 << 10  # values of a group, or one block: they stay in the first-level cache
_LANES = 128  # of a sum over a block
_HALF = np.finfo(np.float16)


class Rounding(NamedTuple):
    """How scales are rounded, for the values of a dtype.

    cut: low bits of a scale that are zero. step: scales are multiples of it, if they
    are below `coarse`. least: scales of 8 and 4 bits below it become 0, as their
    inverse may be out of range. most: the largest number of the values' dtype, which no
    decoded value exceeds if the block's largest magnitude does not.
    """

    cut: int
    step: float
    coarse: float
    least: float
    most: float


def rounding(dtype: np.dtype[Any], bits: int, *, short: bool) -> Rounding:
    """Return the rounding of scales. short: so that every decoded value is a float16 number."""
    stored, least = 4 * dtype.itemsize, float(np.finfo(dtype).tiny)
    if not short:
        return Rounding(stored, 0.0, 0.0, least, float(np.finfo(dtype).max))
    # significant bits of a scale
    digits = min(_HALF.nmant + 1 - (bits - 1 if bits > 2 else 0), 8)
    cut, step = np.finfo(dtype).nmant + 1 - digits, float(_HALF.smallest_subnormal)
    return Rounding(cut, step, step * 2 ** (digits - 1), least, float(_HALF.max))


def scales_per_block(bits: int) -> int:
    """Return the number of scales of a block."""
    return 2 if bits == 2 else 1


def quantise(
    values: Array,
    others: Sequence[tuple[Array, Array]],
    bits: int,
    block: int,
    codes: Array,
    scales: Array,
    rejected: Array,
    *,
    short: bool = False,
    threads: int | None = None,
) -> None:
    """Write the codes and scales of a sum, and to `rejected` what it differs by from the decoded ones.

    The sum is that of the values and then the others, in order. values, rejected: 1-d
    contiguous float32 or float64, of one dtype and length; may be the same. others:
    codes and scales of as many values, in as many bits. bits: 8, 4, 2 or 1. block: a
    power of two, at least 32. codes: uint8, block * bits / 8 for each block, the last
    one padded; scales: uint16 (uint32 for float64), one for each block, two for 2 bits.
    short: round scales so that decoded values are float16 numbers. threads: the most
    threads; None for `threads.count`.

    ``rejected + decoded`` is the sum, bitwise for 8 and 4 bits: their difference needs
    no rounding. If a block of the sum is not finite, `rejected` gets the values there.
    """
    form, how = FORMATS[values.dtype], rounding(values.dtype, bits, short=short)
    width, each, values = block * bits // 8, scales_per_block(bits), as_writable(values)
    terms = (
        np.stack([addresses(parts) for parts in zip(*others, strict=True)])
        if others
        else np.empty((2, 0), int)
    )
    numbers = (
        *(values.dtype.type(number) for number in how[1:]),
        offset_of(values.dtype, bits),
    )
    sizes = bits, block, how.cut, form.mask, 4 * values.itemsize

    def piece(start: int, end: int) -> None:
        first, last = start // block, -(-end // block)
        coded = codes[first * width : last * width], scales[first * each : last * each]
        there = terms + np.array([[first * width], [first * each * scales.itemsize]])
        _quantise(
            values[start:end],
            there,
            coded,
            rejected[start:end],
            _workspace(block, values.dtype),
            sizes,
            numbers,
        )

    in_pieces(piece, values.size, threads, step=block)


def dequantise(
    codes: Array,
    scales: Array,
    bits: int,
    block: int,
    out: Array,
    *,
    threads: int | None = None,
    long: int = LONG,
) -> None:
    """Write the values that `quantise` encoded to `out`; its dtype is that of the quantised values."""
    width, each, codes, scales = (
        block * bits // 8,
        scales_per_block(bits),
        as_writable(codes),
        as_writable(scales),
    )
    past = is_streamed(out, long)

    def piece(start: int, end: int) -> None:
        first, last = start // block, -(-end // block)
        coded = codes[first * width : last * width], scales[first * each : last * each]
        _dequantise(
            *coded,
            out[start:end],
            _workspace(block, out.dtype),
            bits,
            block,
            4 * out.itemsize,
            past,
        )

    in_pieces(piece, out.size, threads, step=block)


def offset_of(dtype: np.dtype[Any], bits: int) -> Any:
    """Return a number that rounds another one to an integer when they are added, with the field in the low bits.

    That is 1.5 times the power of two at which neighbours differ by 1, and the field of
    zero.
    """
    return dtype.type(1.5 * 2.0 ** np.finfo(dtype).nmant + (1 << bits - 1))


def _workspace(block: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
    """Return buffers: two of a group of blocks, one of a group and a line before it, of fields, and of scales."""
    group = max(block, _ROOM)
    room, spare, written = (
        _from_a_line(size, dtype)
        for size in (group, group, group + LINE // dtype.itemsize)
    )
    return (
        room,
        spare,
        written,
        np.empty(block, np.uint8),
        np.empty(group // block, dtype),
    )


def _from_a_line(size: int, dtype: np.dtype[Any]) -> Array:
    """Return an array that begins with a cache line: no vector of a processor crosses two."""
    whole = np.empty(size * dtype.itemsize + LINE, np.uint8)
    start = -address(whole) % LINE
    return whole[start : start + size * dtype.itemsize].view(dtype)


@jit
def _quantise(values, terms, coded, rejected, work, sizes, numbers):  # type: ignore[no-untyped-def]
    values, rejected, codes, scales = (
        bare(values),
        bare(rejected),
        bare(coded[0]),
        bare(coded[1]),
    )
    room, spare, errors, fields, steps = (
        bare(work[0]),
        bare(work[1]),
        bare(work[2]),
        bare(work[3]),
        bare(work[4]),
    )
    bits, block, _, _, stored = sizes
    each = 2 if bits == 2 else 1
    for first in range(0, values.size, room.size):
        c, at, size, number = (
            values,
            np.uint64(first),
            min(room.size, values.size - first),
            first // block,
        )
        if size < room.size:
            c, at = _padded(values[first:], spare), np.uint64(0)
        if terms.size:
            c, at = (
                _sum(
                    c,
                    at,
                    size,
                    terms,
                    codes,
                    scales,
                    number,
                    sizes,
                    fields,
                    room,
                    spare,
                ),
                np.uint64(0),
            )
        if bits > 2:
            _to_levels(
                c, at, size, codes, scales, number, errors, steps, sizes, numbers
            )
        else:
            _to_magnitudes(
                c, at, size, codes, scales, number, errors, fields, sizes, numbers
            )
        for start in range(0, size, block):
            if (
                not number_of(
                    np.int64(scales[each * (number + start // block)]) << stored, values
                )
                < np.inf
            ):
                for j in range(start, min(start + block, size)):
                    errors[j] = values[first + j]
        # in order of memory, which may be that of the values
        for j in range(np.uint64(size)):
            rejected[np.uint64(first) + j] = errors[j]


@jit
def _dequantise(codes, scales, out, work, bits, block, stored, past):  # type: ignore[no-untyped-def]
    codes, scales, out, nothing = bare(codes), bare(scales), bare(out), bare(work[0])
    values, fields, kept, done = bare(work[2]), bare(work[3]), 0, 0
    nothing[:block] = -0.0  # which changes no value that is added to it
    for first in range(0, out.size, nothing.size):
        for start in range(first, min(first + nothing.size, out.size), block):
            i, place = start // block, np.uint64(kept)
            _decode(
                codes,
                scales,
                i,
                bits,
                block,
                stored,
                fields,
                nothing,
                np.uint64(0),
                values,
                place,
            )
            kept += min(block, out.size - start)
        count = _put(values[:kept], out[done:], past)
        done, kept = done + count, kept - count
    _put(values[:kept], out[done:], False)


@jit
def _padded(values, room):  # type: ignore[no-untyped-def]
    """Write values to `room`, and zeros behind them; return it."""
    room[: values.size] = values
    room[values.size :] = 0
    return room


@jit
def _sum(c, at, size, terms, codes, scales, number, sizes, fields, room, spare):  # type: ignore[no-untyped-def]
    """Return the sum of `size` values from `at` on and the terms' blocks from `number` on, in one of two buffers.

    Each addition writes to the other one.
    """
    bits, block, _, _, stored = sizes
    for term in range(terms.shape[1]):
        some = array_at(codes, terms[0, term], codes.size)
        own = array_at(scales, terms[1, term], scales.size)
        for i in range((size + block - 1) // block):
            place = np.uint64(i * block)
            _decode(
                some,
                own,
                number + i,
                bits,
                block,
                stored,
                fields,
                c,
                at + place,
                room,
                place,
            )
        c, at, room, spare = room, np.uint64(0), spare, room
    c[size:] = 0
    return c


@jit
def _put(values, out, past):  # type: ignore[no-untyped-def]
    """Write values to `out`, and return how many; `past` the cache whole lines, and the others move to the front."""
    if not past:
        for j in range(values.size):
            out[j] = values[j]
        return values.size
    step, head = LINE // out.itemsize, min(values.size, values_before_line(out))
    for j in range(head):
        out[j] = values[j]
    end = head + (values.size - head) // step * step
    for j in range(head, end, step):
        store_line(values, j, out, j)
    for j in range(end, values.size):
        values[j - end] = values[j]
    return end


@jit
def _to_levels(c, at, size, codes, scales, first, errors, steps, sizes, numbers):  # type: ignore[no-untyped-def]
    """Write the blocks from `first` on, `size` values from `at` on, in 8 or 4 bits, their scales, and the errors.

    First the scales of all blocks: each is a chain of instructions, which a processor
    overlaps with others.
    """
    bits, block, cut, mask, stored = sizes
    number, offset, blocks, width = (
        c.dtype.type,
        numbers[4],
        (size + block - 1) // block,
        np.uint64(block * bits // 8),
    )
    top = number((1 << bits - 1) - 1)
    for i in range(blocks):
        largest = _largest(c, at + np.uint64(i * block), block, mask)
        steps[i] = _step_of(c, largest, top, cut, numbers)
        scales[first + i] = bits_of(steps[i]) >> stored
    for i in range(blocks):
        scale = steps[i]
        inverse = number(1) / scale if number(0) < scale < np.inf else number(0)
        # for scales that were rounded down, and NaN
        most = top if scale < np.inf else number(0)
        start, byte, limits = (
            np.uint64(i * block),
            np.uint64(first + i) * width,
            (offset - most, offset + most),
        )
        if bits == 8:
            _to_bytes(
                c,
                at + start,
                errors,
                start,
                codes,
                byte,
                width,
                inverse,
                scale,
                offset,
                limits,
            )
        else:
            _to_halves(
                c,
                at + start,
                errors,
                start,
                codes,
                byte,
                width,
                inverse,
                scale,
                offset,
                limits,
            )


@jit
def _to_bytes(c, at, errors, place, codes, byte, width, inverse, scale, offset, limits):  # type: ignore[no-untyped-def]
    for j in range(width):
        y = _level(c[at + j], inverse, offset, limits)
        errors[place + j] = c[at + j] - (y - offset) * scale
        codes[byte + j] = bits_of(y) & 255


@jit
def _to_halves(  # type: ignore[no-untyped-def]
    c, at, errors, place, codes, byte, width, inverse, scale, offset, limits
):
    ahead, behind = at + width, place + width
    for j in range(width):
        y, z = (
            _level(c[at + j], inverse, offset, limits),
            _level(c[ahead + j], inverse, offset, limits),
        )
        errors[place + j] = c[at + j] - (y - offset) * scale
        errors[behind + j] = c[ahead + j] - (z - offset) * scale
        codes[byte + j] = bits_of(y) & 15 | (bits_of(z) & 15) << 4


@jit
def _level(value, inverse, offset, limits):  # type: ignore[no-untyped-def]
    """Return a value over the scale plus `offset`, which rounds it to an integer; NaN is the least of the limits."""
    y = value * inverse + offset
    y = y if y >= limits[0] else limits[0]
    return y if y <= limits[1] else limits[1]


@jit
def _to_magnitudes(c, at, size, codes, scales, first, errors, fields, sizes, numbers):  # type: ignore[no-untyped-def]
    """Write the blocks from `first` on, `size` values from `at` on, in 2 or 1 bits, magnitudes, and the errors."""
    bits, block, cut, mask, stored = sizes
    number, width = c.dtype.type, block * bits // 8
    for i in range((size + block - 1) // block):
        start, some = np.uint64(i * block), (first + i) * width
        own, y = (
            c[at + start : at + start + np.uint64(block)],
            errors[start : start + np.uint64(block)],
        )
        low = high = largest = _largest(own, np.uint64(0), block, mask)
        if largest < np.inf:
            low, high = _magnitudes(own, min(block, size - i * block), bits, y)
        low, high = (
            _rounded(c, min(low, largest), cut, numbers),
            _rounded(c, min(high, largest), cut, numbers),
        )
        each = bits * (first + i)  # as many magnitudes as bits
        scales[each], scales[each + bits - 1] = (
            bits_of(low) >> stored,
            bits_of(high) >> stored,
        )
        _to_signs(
            own,
            number(0.5) * low + number(0.5) * high if bits == 2 else number(np.inf),
            fields,
        )
        _from_signs(fields, -low, -high, own, np.uint64(0), y, np.uint64(0))
        _pack(fields, bits, codes[some : some + width])


@jit
def _decode(codes, scales, i, bits, block, stored, fields, base, at, out, place):  # type: ignore[no-untyped-def]
    """Write the values of block i, added to those of `base` from `at` on, to `out` from `place` on."""
    width, each = block * bits // 8, 2 if bits == 2 else 1
    low = number_of(np.int64(scales[each * i]) << stored, out)
    if bits > 2:
        _from_levels(
            codes,
            np.uint64(i * width),
            bits,
            np.uint64(width),
            low,
            base,
            at,
            out,
            place,
        )
    else:
        high = number_of(np.int64(scales[each * i + each - 1]) << stored, out)
        _unpack(codes[i * width : (i + 1) * width], bits, fields)
        _from_signs(fields, low, high, base, at, out, place)


@jit
def _largest(c, at, block, mask):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of a block, by the order of the bits; NaN is above infinity."""
    largest = mask ^ mask
    for j in range(np.uint64(block)):
        largest = max(largest, bits_of(c[at + j]) & mask)
    return number_of(largest, c)


@jit
def _step_of(c, largest, top, cut, numbers):  # type: ignore[no-untyped-def]
    """Return the largest magnitude over `top`, rounded up; rounded down if `top` of it were out of range."""
    step, coarse, least, most, _ = numbers
    number = c.dtype.type
    if not largest < np.inf:
        return number(np.inf)
    scale = largest / top
    if scale < coarse:
        scale = np.ceil(scale / step) * step
    bits = (np.int64(bits_of(scale)) + (1 << cut) - 1) >> cut << cut
    scale = number_of(bits, c)
    if scale * top > most and largest <= most:
        scale = number_of(bits - (1 << cut), c)
    return scale if scale >= least else number(0)


@jit
def _rounded(c, magnitude, cut, numbers):  # type: ignore[no-untyped-def]
    """Return a magnitude of 2 or 1 bits, rounded to nearest."""
    step, coarse, _, most, _ = numbers
    if not magnitude < np.inf:
        return c.dtype.type(np.inf)
    if magnitude < coarse:
        magnitude = np.rint(magnitude / step) * step
    bits = (np.int64(bits_of(magnitude)) + (1 << cut - 1)) >> cut << cut
    rounded = number_of(bits, c)
    return (
        number_of(bits - (1 << cut), c)
        if rounded > most and magnitude <= most
        else rounded
    )


@jit
def _pack(fields, bits, codes):  # type: ignore[no-untyped-def]
    """Write the fields of a block into its bytes."""
    width = codes.size
    if bits == 2:
        for j in range(width):
            codes[j] = (fields[j] | fields[width + j] << 2) | (
                fields[2 * width + j] << 4 | fields[3 * width + j] << 6
            )
    else:
        codes[:] = 0
        for field in range(8):
            some = fields[field * width : (field + 1) * width]
            for j in range(width):
                codes[j] |= some[j] << field


@jit
def _unpack(codes, bits, fields):  # type: ignore[no-untyped-def]
    width, mask = codes.size, (1 << bits) - 1
    for field in range(8 // bits):
        some, shift = fields[field * width : (field + 1) * width], bits * field
        for j in range(width):
            some[j] = codes[j] >> shift & mask


@jit
def _from_levels(codes, byte, bits, width, scale, base, at, out, place):  # type: ignore[no-untyped-def]
    """Write the values of a block of 8 or 4 bits, see `_decode`; in order of memory, which processors read ahead."""
    number, ahead, behind = out.dtype.type, at + width, place + width
    if bits == 8:
        for j in range(width):
            out[place + j] = (
                base[at + j] + (number(codes[byte + j]) - number(128)) * scale
            )
    else:
        for j in range(width):
            out[place + j] = (
                base[at + j]
                + (number(np.uint8(codes[byte + j] & 15)) - number(8)) * scale
            )
        for j in range(width):
            out[behind + j] = (
                base[ahead + j]
                + (number(np.uint8(codes[byte + j] >> 4)) - number(8)) * scale
            )


@jit
def _to_signs(c, threshold, fields):  # type: ignore[no-untyped-def]
    for j in range(c.size):
        fields[j] = np.uint8(c[j] < 0) | np.uint8(abs(c[j]) > threshold) << 1


@jit
def _from_signs(fields, low, high, base, at, out, place):  # type: ignore[no-untyped-def]
    """Write the values of a block of 2 or 1 bits, see `_decode`."""
    for j in range(np.uint64(fields.size)):
        magnitude = high if fields[j] & 2 else low
        out[place + j] = base[at + j] + (-magnitude if fields[j] & 1 else magnitude)


@jit
def _magnitudes(c, size, bits, y):  # type: ignore[no-untyped-def]
    """Return the mean magnitude of the first `size` values of a block twice; for 2 bits two, by two rounds of Lloyd."""
    number = c.dtype.type
    share = number(1.0 / c.size)  # a power of two: sums of shares are in range
    total = _sum_up_to(c, number(np.inf), share, y)
    low = high = total / (number(size) * share)
    for _ in range(2 * (bits - 1)):
        threshold = number(0.5) * low + number(0.5) * high
        above = _count_above(c, threshold)
        if above == 0 or above == size:
            break
        below = _sum_up_to(c, threshold, share, y)
        # whatever rounding does to a mean
        low = min(below / (number(size - above) * share), threshold)
        high = max((total - below) / (number(above) * share), threshold)
    return low, high


@jit
def _sum_up_to(c, threshold, share, y):  # type: ignore[no-untyped-def]
    """Return the sum of shares of the magnitudes up to a threshold, in an order that serves vectors and warps.

    Lane j of 128 adds the values j, j + 128, ... in order; the lanes are folded by
    halves.
    """
    half = min(_LANES, c.size // 2)
    for j in range(half):
        y[j] = _part(c[j], threshold, share) + _part(c[half + j], threshold, share)
    for start in range(2 * half, c.size, half):
        for j in range(half):
            y[j] += _part(c[start + j], threshold, share)
    while half > 1:
        half //= 2
        for j in range(half):
            y[j] += y[half + j]
    return y[0]


@jit
def _part(value, threshold, share):  # type: ignore[no-untyped-def]
    magnitude = abs(value)
    return magnitude * share if magnitude <= threshold else 0 * share


@jit
def _count_above(c, threshold):  # type: ignore[no-untyped-def]
    above = np.int32(0)
    for j in range(c.size):
        above = np.int32(above + np.int32(abs(c[j]) > threshold))
    return above
