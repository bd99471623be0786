"""Every value of a vector in 8, 4, 2 or 1 bits, in blocks, with the rounding error in the same pass.

Sources: levels up to the largest magnitude: D. Alistarh et al., "QSGD", NeurIPS 2017 (arXiv 1610.02132), here rounded
to nearest. One magnitude: F. Seide et al., "1-bit stochastic gradient descent", Interspeech 2014. Two magnitudes: S. P.
Lloyd, "Least squares quantization in PCM", IEEE Trans. Information Theory 28(2), 1982, two rounds of it.

8 and 4 bits: a value is an integer of -m to m, m = 2^(bits - 1) - 1, times the scale of its block, which is the largest
magnitude over m. 2 bits: a sign, and one of two magnitudes of the block. 1 bit: a sign, and the mean magnitude.

Scales have 8 significant bits (21 for float64): an integer times a scale is exact, and so is the difference of a value
and its rounded value. For 8 and 4 bits a scale is rounded up. A block of zeros has the scale 0, and decodes to zeros. A
block with a value that is not finite has an infinite scale, and decodes to values that are not finite.

Layout: a block of B values has B bits / 8 bytes. Byte j contains value j in its lowest bits, then the values j + w, j +
2 w, ... with w = B bits / 8, so that loops over a block have no strides. A field of 8 or 4 bits is the integer + m + 1;
of 2 or 1 bits: bit 0 is set for negative values, bit 1 for the larger magnitude. The last block is padded with zeros.
A scale is the upper half of the bits of a float32, or of a float64.
"""

from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, as_writable, jit
from mpicomp.kernels.host.instructions import bare
from mpicomp.threads import in_pieces

_ROOM = 1 << 10  # values that are copied at a time: they stay in the first-level cache
_LANES = 128  # of a sum over a block
_HALF = np.finfo(np.float16)


class Rounding(NamedTuple):
    """How scales are rounded, for the values of a dtype.

    cut: low bits of a scale that are zero. step: scales are multiples of it, if they are below `coarse`. least: scales
    of 8 and 4 bits below it become 0, as their inverse may be out of range. most: the largest number of the values'
    dtype, which no decoded value exceeds if the block's largest magnitude does not.
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
    digits = min(_HALF.nmant + 1 - (bits - 1 if bits > 2 else 0), 8)  # significant bits of a scale
    cut, step = np.finfo(dtype).nmant + 1 - digits, float(_HALF.smallest_subnormal)
    return Rounding(cut, step, step * 2 ** (digits - 1), least, float(_HALF.max))


def scales_per_block(bits: int) -> int:
    """Return the number of scales of a block."""
    return 2 if bits == 2 else 1


def quantise(
    values: Array,
    residual: Array | None,
    bits: int,
    block: int,
    codes: Array,
    scales: Array,
    rejected: Array,
    *,
    short: bool = False,
    threads: int | None = None,
) -> None:
    """Write the codes and scales of ``values + residual``, and to `rejected` what they differ by from the decoded ones.

    values, residual, rejected: 1-d contiguous float32 or float64, of one dtype and length; `rejected` may be `residual`
    itself. bits: 8, 4, 2 or 1. block: a power of two, at least 32. codes: uint8, block * bits / 8 for each block, the
    last one padded; scales: uint16 (uint32 for float64), one for each block, two for 2 bits. short: round scales so
    that decoded values are float16 numbers. threads: the most threads; None for `threads.count`.

    ``rejected + decoded`` is ``values + residual``, bitwise for 8 and 4 bits: their difference needs no rounding.
    """
    form, how = FORMATS[values.dtype], rounding(values.dtype, bits, short=short)
    width, each = block * bits // 8, scales_per_block(bits)
    values, more = as_writable(values), None if residual is None else as_writable(residual)
    kernel = _quantise_to_levels if bits > 2 else _quantise_to_magnitudes
    numbers = tuple(values.dtype.type(number) for number in how[1:])

    def piece(start: int, end: int) -> None:
        first, last = start // block, -(-end // block)
        part = values[start:end]
        kernel(
            (part, part.view(form.signed), part[:0] if more is None else more[start:end], rejected[start:end]),
            (codes[first * width : last * width], scales[first * each : last * each]),
            _workspace(block, values.dtype, max(block, _ROOM) if bits > 2 else block),
            (bits, 4 * values.itemsize, how.cut, form.mask, offset_of(values.dtype, bits)),
            numbers,
        )

    in_pieces(piece, values.size, threads, step=block)


def dequantise(codes: Array, scales: Array, bits: int, block: int, out: Array, *, threads: int | None = None) -> None:
    """Write the values that `quantise` encoded to `out`; its dtype is that of the quantised values."""
    _decode_pieces(codes, scales, bits, block, out, threads, add=False)


def add_quantised(
    codes: Array, scales: Array, bits: int, block: int, total: Array, *, threads: int | None = None
) -> None:
    """Add the values that `quantise` encoded to `total`; its dtype is that of the quantised values."""
    _decode_pieces(codes, scales, bits, block, total, threads, add=True)


def _decode_pieces(
    codes: Array, scales: Array, bits: int, block: int, out: Array, threads: int | None, *, add: bool
) -> None:
    width, each, codes, scales = block * bits // 8, scales_per_block(bits), as_writable(codes), as_writable(scales)
    kernel = _decode_levels if bits > 2 else _decode_magnitudes

    def piece(start: int, end: int) -> None:
        first, last = start // block, -(-end // block)
        coded = codes[first * width : last * width], scales[first * each : last * each]
        kernel(*coded, out[start:end], _workspace(block, out.dtype), bits, 4 * out.itemsize, add)

    in_pieces(piece, out.size, threads, step=block)


def offset_of(dtype: np.dtype[Any], bits: int) -> Any:
    """Return a number that rounds another one to an integer when they are added, with the field in the low bits.

    That is 1.5 times the power of two at which neighbours differ by 1, and the field of zero.
    """
    return dtype.type(1.5 * 2.0 ** np.finfo(dtype).nmant + (1 << bits - 1))


def _workspace(block: int, dtype: np.dtype[Any], room: int = 0) -> tuple[Array, ...]:
    """Return buffers of `room` numbers, of a block of rounded ones, of one, each also as integers; of fields."""
    keys = FORMATS[dtype].signed
    one, two, cell = np.empty(room, dtype), np.empty(block, dtype), np.empty(1, dtype)
    return one, one.view(keys), two, two.view(keys), cell, cell.view(keys), np.empty(block, np.uint8)


@jit
def _quantise_to_levels(given, coded, work, sizes, numbers):  # type: ignore[no-untyped-def]
    values, values_bits, residual, rejected = given
    codes, scales = coded
    room, room_bits, y, y_bits, cell, cell_bits, _ = work
    bits, stored, cut, mask, offset = sizes
    block, number = y.size, values.dtype.type
    width, top, group = block * bits // 8, number((1 << bits - 1) - 1), room.size // block
    for first in range(0, scales.size, group):
        c, c_bits, at = values, values_bits, np.uint64(first * block)
        left = values.size - first * block
        if residual.size or left < room.size:
            _load(values, residual, at, np.uint64(min(room.size, left)), room)
            c, c_bits, at = room, room_bits, np.uint64(0)
        for i in range(first, min(first + group, scales.size)):
            start, size = np.uint64(i * block), np.uint64(min(block, values.size - i * block))
            largest = _largest(c_bits, at, block, mask, cell, cell_bits)
            scale = _step_of(largest, top, cut, numbers, cell, cell_bits)
            scales[i] = cell_bits[0] >> stored
            inverse = number(1) / scale if number(0) < scale < np.inf else number(0)
            if scale < np.inf:
                _round(c, at, inverse, offset, y)
            else:
                y[:] = offset
            if largest * inverse > top:  # the scale was rounded down
                _limit(y, offset, top)
            _subtract_levels(c, at, scale, offset, y, rejected, start, size)
            _pack_levels(y_bits, bits, codes, np.uint64(i * width), np.uint64(width))
            at += np.uint64(block)


@jit
def _quantise_to_magnitudes(given, coded, work, sizes, numbers):  # type: ignore[no-untyped-def]
    values, _, residual, rejected = given
    codes, scales = coded
    c, c_bits, y, _, cell, cell_bits, fields = work
    codes, c, y, fields = bare(codes), bare(c), bare(y), bare(fields)
    bits, stored, cut, mask, _ = sizes
    block = c.size
    width = block * bits // 8
    for i in range(scales.size // bits):  # as many scales as bits
        start, size = np.uint64(i * block), np.uint64(min(block, values.size - i * block))
        _load(values, residual, start, size, c)
        largest = _largest(c_bits, np.uint64(0), block, mask, cell, cell_bits)
        low = high = largest
        if largest < np.inf:
            low, high = _magnitudes(c, int(size), bits, y)
        low = _rounded(min(low, largest), cut, numbers, cell, cell_bits)
        scales[bits * i] = cell_bits[0] >> stored
        high = _rounded(min(high, largest), cut, numbers, cell, cell_bits)
        scales[bits * i + bits - 1] = cell_bits[0] >> stored
        half = values.dtype.type(0.5)
        _to_signs(c, half * low + half * high if bits == 2 else values.dtype.type(np.inf), fields)
        _from_signs(fields, low, high, y)
        _subtract_each(c, y, rejected, start, size)
        _pack(fields, bits, codes[i * width : (i + 1) * width])


@jit
def _decode_levels(codes, scales, out, work, bits, stored, add):  # type: ignore[no-untyped-def]
    codes, out, y, cell, cell_bits = bare(codes), bare(out), bare(work[2]), work[4], work[5]
    block = y.size
    width = block * bits // 8
    for i in range(scales.size):
        start = i * block
        end = min(start + block, out.size)
        cell_bits[0] = np.int64(scales[i]) << stored
        some = codes[i * width : (i + 1) * width]
        if end - start < block:
            _levels(some, bits, cell[0], y)
            _put(y, out[start:end], add)
        elif add:
            _add_levels(some, bits, cell[0], out[start:end])
        else:
            _levels(some, bits, cell[0], out[start:end])


@jit
def _decode_magnitudes(codes, scales, out, work, bits, stored, add):  # type: ignore[no-untyped-def]
    codes, out, y, fields, cell, cell_bits = bare(codes), bare(out), bare(work[2]), bare(work[6]), work[4], work[5]
    block = y.size
    width = block * bits // 8
    for i in range(scales.size // bits):
        start = i * block
        end = min(start + block, out.size)
        cell_bits[0] = np.int64(scales[bits * i]) << stored
        low = cell[0]
        cell_bits[0] = np.int64(scales[bits * i + bits - 1]) << stored
        _unpack(codes[i * width : (i + 1) * width], bits, fields)
        _from_signs(fields, low, cell[0], y)
        _put(y, out[start:end], add)


@jit
def _load(values, residual, start, size, room):  # type: ignore[no-untyped-def]
    """Write the values of a block, with the residual unless it is empty, and zeros behind them."""
    if residual.size:
        for j in range(size):
            room[j] = values[start + j] + residual[start + j]
    else:
        for j in range(size):
            room[j] = values[start + j]
    for j in range(size, np.uint64(room.size)):
        room[j] = 0


@jit
def _largest(bits, at, block, mask, cell, cell_bits):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of a block, by the order of the bits; NaN is above infinity."""
    largest = mask ^ mask
    for j in range(np.uint64(block)):
        largest = max(largest, bits[at + j] & mask)
    cell_bits[0] = largest
    return cell[0]


@jit
def _step_of(largest, top, cut, numbers, cell, cell_bits):  # type: ignore[no-untyped-def]
    """Return the largest magnitude over `top`, rounded up; rounded down if `top` of it were out of range."""
    step, coarse, least, most = numbers
    if not largest < np.inf:
        cell[0] = np.inf
        return cell[0]
    scale = largest / top
    if scale < coarse:
        scale = np.ceil(scale / step) * step
    cell[0] = scale
    bits = (np.int64(cell_bits[0]) + (1 << cut) - 1) >> cut << cut
    cell_bits[0] = bits
    if cell[0] * top > most and largest <= most:
        cell_bits[0] = bits - (1 << cut)
    if cell[0] < least:
        cell[0] = 0
    return cell[0]


@jit
def _rounded(magnitude, cut, numbers, cell, cell_bits):  # type: ignore[no-untyped-def]
    """Return a magnitude of 2 or 1 bits, rounded to nearest; leave its bits in `cell_bits`."""
    step, coarse, _, most = numbers
    if magnitude < coarse:
        magnitude = np.rint(magnitude / step) * step
    cell[0] = magnitude
    if magnitude < np.inf:
        bits = (np.int64(cell_bits[0]) + (1 << cut - 1)) >> cut << cut
        cell_bits[0] = bits
        if cell[0] > most and magnitude <= most:
            cell_bits[0] = bits - (1 << cut)
    else:
        cell[0] = np.inf
    return cell[0]


@jit
def _round(c, at, inverse, offset, y):  # type: ignore[no-untyped-def]
    """Write the values over the scale plus `offset`, which rounds them to integers."""
    for j in range(np.uint64(y.size)):
        y[j] = c[at + j] * inverse + offset


@jit
def _limit(y, offset, top):  # type: ignore[no-untyped-def]
    for j in range(y.size):
        y[j] = min(max(y[j], offset - top), offset + top)


@jit
def _subtract_levels(c, at, scale, offset, y, rejected, start, size):  # type: ignore[no-untyped-def]
    for j in range(size):
        rejected[start + j] = c[at + j] - (y[j] - offset) * scale


@jit
def _subtract_each(c, y, rejected, start, size):  # type: ignore[no-untyped-def]
    for j in range(size):
        rejected[start + j] = c[j] - y[j]


@jit
def _pack_levels(y_bits, bits, codes, start, width):  # type: ignore[no-untyped-def]
    """Write the fields of a block, the low bits of its rounded values, into its bytes."""
    if bits == 8:
        for j in range(width):
            codes[start + j] = y_bits[j] & 255
    else:
        for j in range(width):
            codes[start + j] = y_bits[j] & 15 | (y_bits[width + j] & 15) << 4


@jit
def _pack(fields, bits, codes):  # type: ignore[no-untyped-def]
    """Write the fields of a block into its bytes."""
    width = codes.size
    if bits == 2:
        for j in range(width):
            codes[j] = (fields[j] | fields[width + j] << 2) | (fields[2 * width + j] << 4 | fields[3 * width + j] << 6)
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
def _levels(codes, bits, scale, out):  # type: ignore[no-untyped-def]
    """Write the values of a block."""
    number, width = out.dtype.type, codes.size
    if bits == 8:
        for j in range(width):
            out[j] = number(np.int32(codes[j]) - 128) * scale
    else:
        low, high = out[:width], out[width:]
        for j in range(width):
            low[j] = number((np.int32(codes[j]) & 15) - 8) * scale
        for j in range(width):
            high[j] = number((np.int32(codes[j]) >> 4) - 8) * scale


@jit
def _add_levels(codes, bits, scale, total):  # type: ignore[no-untyped-def]
    """Add the values of a block."""
    number, width = total.dtype.type, codes.size
    if bits == 8:
        for j in range(width):
            total[j] += number(np.int32(codes[j]) - 128) * scale
    else:
        low, high = total[:width], total[width:]
        for j in range(width):
            low[j] += number((np.int32(codes[j]) & 15) - 8) * scale
        for j in range(width):
            high[j] += number((np.int32(codes[j]) >> 4) - 8) * scale


@jit
def _put(y, out, add):  # type: ignore[no-untyped-def]
    if add:
        for j in range(out.size):
            out[j] += y[j]
    else:
        for j in range(out.size):
            out[j] = y[j]


@jit
def _to_signs(c, threshold, fields):  # type: ignore[no-untyped-def]
    for j in range(c.size):
        fields[j] = np.uint8(c[j] < 0) | np.uint8(abs(c[j]) > threshold) << 1


@jit
def _from_signs(fields, low, high, y):  # type: ignore[no-untyped-def]
    for j in range(y.size):
        magnitude = high if fields[j] & 2 else low
        y[j] = -magnitude if fields[j] & 1 else magnitude


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
        low = min(below / (number(size - above) * share), threshold)  # whatever rounding does to a mean
        high = max((total - below) / (number(above) * share), threshold)
    return low, high


@jit
def _sum_up_to(c, threshold, share, y):  # type: ignore[no-untyped-def]
    """Return the sum of shares of the magnitudes up to a threshold, in an order that serves vectors and warps.

    Lane j of 128 adds the values j, j + 128, ... in order; the lanes are folded by halves.
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
