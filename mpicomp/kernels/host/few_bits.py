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

A kernel takes a group of blocks at a time, which stays in the first-level cache, through
its passes: all values are read and written once, and what comes next is loaded meanwhile.
The decoded values are written past the cache, from a buffer.

Vectors are divided into segments, such as the tensors of a model. A block begins anew at
each, so what lies beside a tensor has no influence on its scales.

Layout: a block of B values has B bits / 8 bytes. Byte j contains value j in its lowest
bits, then the values j + w, j + 2 w, ... with w = B bits / 8, so that loops over a
block have no strides. A field of 8 or 4 bits is the integer + m + 1; of 2 or 1 bits:
bit 0 is set for negative values, bit 1 for the larger magnitude. The last block of
a segment is padded with zeros. A scale is the upper half of the bits of a float32, or of a float64.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.memory import sizes_of
from mpicomp.few_bits import places
from mpicomp.kernels.host.bits import as_writable
from mpicomp.kernels.host.compiled import inner, jit, single
from mpicomp.kernels.host.instructions import (
    LINE,
    SUMMED,
    array_at,
    bits_of,
    larger,
    number_of,
    prefetch,
    smaller,
    sum_up_to,
    view,
)
from mpicomp.kernels.host.lanes import (
    lanewise,
    lowest_byte,
    magnitude,
    magnitude_bits,
    number_of_byte,
    to_bits,
    where,
)
from mpicomp.kernels.host.streaming import (
    LONG,
    addresses,
    put_after,
    values_before_line,
)
from mpicomp.threads import in_pieces, number_of_pieces

# Values of a group, unless its one block is longer: they stay in the first-level cache.
_ROOM = 1 << 8
# Values by which prefetching is ahead of the computation.
_AHEAD = 1 << 9
# Values between two prefetches: a core can wait for few cache lines at a time.
_TURN = 64
_HALF = np.finfo(np.float16)
# Kernel, dtype and bits of each decoder that was compiled.
_compiled: set[tuple[Any, ...]] = set()


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


@lru_cache(maxsize=64)
def rounding(dtype: np.dtype[Any], bits: int, *, short: bool) -> Rounding:
    """Return the rounding of scales. short: so that every decoded value is a float16 number."""
    stored, least = 4 * dtype.itemsize, float(np.finfo(dtype).tiny)
    if not short:
        return Rounding(stored, 0.0, 0.0, least, float(np.finfo(dtype).max))
    # Significant bits of a scale.
    digits = min(_HALF.nmant + 1 - (bits - 1 if bits > 2 else 0), 8)
    cut, step = np.finfo(dtype).nmant + 1 - digits, float(_HALF.smallest_subnormal)
    return Rounding(cut, step, step * 2 ** (digits - 1), least, float(_HALF.max))


def encoder(
    parts: Sequence[Array],
    residual: Array | None,
    bits: int,
    block: int,
    rejected: Array,
    *,
    decay: float = 1.0,
    short: bool = False,
    threads: int | None = None,
    long: int = LONG,
) -> Callable[..., None]:
    """Return a function that codes ``decay * residual + parts`` and others, in one pass.

    Its arguments: codes and scales, which it writes; others, codes and scales of as
    many values, in as many bits, which it adds in order; and the first of the blocks,
    and the one after the last, in the numbering of `first_blocks`, by default all. To
    `rejected` it writes what the sum differs by from the decoded one.

    parts: 1-d contiguous float32 or float64, one for each segment. residual, rejected:
    1-d contiguous, as long as the parts together, of one dtype with them; they may be
    the same, and without a residual `rejected` may be the memory of the parts. bits: 8,
    4, 2 or 1. block: a power of two, at least 32. codes: uint8, block * bits / 8 for
    each block, the last one of a segment padded; scales: uint16 (uint32 for float64),
    one for each block, two for 2 bits. decay: rounded to the dtype; the product is
    rounded before it is added. short: round scales so that decoded values are
    float16 numbers. threads: the most threads; None for `threads.count`. long: the
    least bytes of `rejected` for stores that bypass the cache.

    ``rejected + decoded`` is the sum, bitwise for 8 and 4 bits: their difference needs
    no rounding. If a block of the sum is not finite, `rejected` gets the values there.
    """
    dtype, form = rejected.dtype, rounding(rejected.dtype, bits, short=short)
    layout = _layout(parts, block)
    own = (
        np.full(block, -0.0, dtype) if residual is None else as_writable(residual),
        np.int64(residual is not None),
        dtype.type(decay),
    )
    numbers = tuple(dtype.type(number) for number in form[1:])
    # If `rejected` overwrites an input, its memory was just read and is in the cache:
    # stores do not bypass it.
    past = rejected.nbytes >= long and not any(
        [np.may_share_memory(rejected, read) for read in (own[0], parts[0])]
    )
    coding = numbers, offset_of(dtype, bits), past, _rounds(bits)

    def encode(
        codes: Array,
        scales: Array,
        others: Sequence[tuple[Array, Array]] = (),
        blocks: tuple[int, int] | None = None,
    ) -> None:
        first, last = blocks or (0, int(layout[1][-1]))
        terms = np.array([addresses(each) for each in others], np.int64).reshape(-1, 2)
        sizes = bits, block, form.cut, 4 * dtype.itemsize, first

        def piece(start: int, end: int) -> None:
            some = first + start // block, first + end // block
            into = rejected, terms, codes, scales, _workspace(block, dtype)
            _quantise(layout, *some, own, *into, sizes, *coding)

        in_pieces(piece, (last - first) * block, threads, step=block)

    return encode


def decoder(
    shares: Sequence[tuple[Array, Array]],
    bits: int,
    block: int,
    parts: Sequence[Array],
    *,
    divisor: float = 1.0,
    onto: tuple[Sequence[Array], float] | None = None,
    first: int = 0,
    threads: int | None = None,
    long: int = LONG,
) -> Callable[[], Any]:
    """Return a function that writes what an `encoder` encoded, over a divisor, to the parts, once.

    It takes one pass, and allocates no memory. shares: codes and scales of consecutive
    blocks, from `first` on in the numbering of `first_blocks`; the others' values are
    left alone. parts: 1-d contiguous, one for each segment, of the dtype of the
    quantised values. long: the least bytes of the parts together for stores that
    bypass the cache. onto: vectors like the parts, and a factor: it adds the factor
    times the values to them, and writes the sums to the parts as well.
    """
    dtype = np.dtype(np.float32 if shares[0][1].itemsize == 2 else np.float64)
    layout = _layout(parts, block)
    past = int(layout[0][-1]) * dtype.itemsize >= long
    # Multiplication by the inverse of a power of two is bitwise the quotient.
    factor = 1 / divisor if math.frexp(divisor)[0] == 0.5 else 0.0
    over = dtype.type(divisor), dtype.type(factor)
    bases, rate = ((), 0.0) if onto is None else onto
    moved = addresses(bases), dtype.type(rate)
    how = over, moved, past, _rounds(bits)

    def write(low: int, coded: Sequence[Array], start: int, end: int) -> None:
        some = low + start // block, low + end // block
        sizes = bits, block, 0, 4 * dtype.itemsize, low
        work = workspaces.pop()
        _dequantise(layout, *some, *coded, work, sizes, *how)
        workspaces.append(work)

    passes = []
    for share in shares:
        size = share[1].size // (2 if bits == 2 else 1) * block
        coded = [as_writable(array) for array in share]
        passes.append((partial(write, first, coded), size))
        first += size // block
    most = max(number_of_pieces(size, threads) for _, size in passes)
    workspaces = [_workspace(block, dtype) for _ in range(most)]
    kind = _dequantise, dtype, bits
    if kind not in _compiled:
        # A call for no values compiles the kernel, as the function that is returned
        # must not fail.
        passes[0][0](0, 0)
        _compiled.add(kind)

    # The default argument keeps the arrays alive, which are read and written by
    # address.
    def decode(kept: object = (parts, bases)) -> None:
        for piece, size in passes:
            in_pieces(piece, size, threads, step=block)

    return decode


@lru_cache(maxsize=64)
def offset_of(dtype: np.dtype[Any], bits: int) -> Any:
    """Return a number that rounds another one to an integer when they are added, with the field in the low bits.

    That is 1.5 times the power of two at which neighbours differ by 1, and the field of
    zero.
    """
    return dtype.type(1.5 * 2.0 ** np.finfo(dtype).nmant + (1 << bits - 1))


def _layout(parts: Sequence[Array], block: int) -> tuple[Array, Array, Array]:
    """Return the first value and the first block of each segment, each with the end of the last, and its address."""
    blocks, edges = places(sizes_of(parts), block)
    return edges, blocks, addresses(parts)


def _rounds(bits: int) -> int | None:
    """Return the rounds of Lloyd's algorithm, None for integer codes: Numba compiles a kernel for each type."""
    return None if bits > 2 else 2 * (bits - 1)


def _workspace(block: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return room for what `_buffers` returns, and for the fields of a group."""
    group = max(block, _ROOM)
    line = LINE // dtype.itemsize
    size = 2 * (line + group) + block + 4 * (group // block)
    # If a buffer begins at a cache line, no SIMD vector crosses two lines.
    return np.empty(line + size, dtype), np.empty(group, np.uint8)


@single
def _buffers(work, block):  # type: ignore[no-untyped-def]
    """Return buffers: values of a group and a line; errors of a line and a group; values of a block; fields of a group.

    And four arrays with a number for each block of a group: the largest magnitude, the
    two scales, the sum of magnitudes.
    """
    room, fields = work
    line, group = LINE // room.itemsize, fields.size
    count = group // block
    errors = values_before_line(room) + group + line
    one = errors + line + group
    numbers = one + block
    return (
        view(room, values_before_line(room), errors),
        view(room, errors, one),
        view(room, one, numbers),
        fields,
        view(room, numbers, numbers + count),
        view(room, numbers + count, numbers + 2 * count),
        view(room, numbers + 2 * count, numbers + 3 * count),
        view(room, numbers + 3 * count, numbers + 4 * count),
    )


@lanewise(2, 1, reduce=True)
def _add_scaled(a, b, factor):  # type: ignore[no-untyped-def]
    total = factor * a + b
    return total, magnitude_bits(total)


@lanewise(1, 2)
def _to_levels(values, inverse, scale, offset, least, most):  # type: ignore[no-untyped-def]
    """Return errors and fields; adding `offset` rounds to an integer, and NaN becomes the least level."""
    level = values * inverse + offset
    level = where(level > least, level, least)
    level = where(level < most, level, most)
    return values - (level - offset) * scale, lowest_byte(to_bits(level))


@lanewise(2, 1, reduce=True)
def _add_levels(base, fields, middle, scale):  # type: ignore[no-untyped-def]
    total = base + (number_of_byte(fields, base) - middle) * scale
    return total, magnitude_bits(total)


@lanewise(1, 2)
def _to_signs(values, threshold, low, high):  # type: ignore[no-untyped-def]
    """Return errors and fields."""
    is_large, is_negative = magnitude(values) > threshold, values < 0
    size = where(is_large, high, low)
    fields = lowest_byte(is_negative) | lowest_byte(is_large) << 1
    return values + where(is_negative, size, -size), fields


@lanewise(2, 1, reduce=True)
def _add_signs(base, fields, low, high):  # type: ignore[no-untyped-def]
    size = where((fields & 2) > 0, high, low)
    total = base + where((fields & 1) > 0, -size, size)
    return total, magnitude_bits(total)


@lanewise(1, 1)
def _over(values, divisor):  # type: ignore[no-untyped-def]
    return (values / divisor,)


@lanewise(2, 2)
def _move(values, base, factor):  # type: ignore[no-untyped-def]
    total = factor * values + base
    return total, total


@lanewise(1, 1)
def _scaled(values, factor):  # type: ignore[no-untyped-def]
    return (values * factor,)


@lanewise(2, 1)
def _insert(codes, fields, shift):  # type: ignore[no-untyped-def]
    return (codes | fields << shift,)


@lanewise(1, 1)
def _extract(codes, shift, mask):  # type: ignore[no-untyped-def]
    return (codes >> shift & mask,)


@jit
def _quantise(  # type: ignore[no-untyped-def]
    layout,
    first,
    last,
    own,
    rejected,
    terms,
    codes,
    scales,
    room,
    sizes,
    numbers,
    offset,
    past,
    rounds,
):
    """Quantise the blocks from `first` to `last` - 1."""
    edges, blocks, parts = layout
    block, work = sizes[1], _buffers(room, sizes[1])
    group, errors = work[4].size, work[1]
    line = LINE // errors.itemsize
    for row in range(parts.size):
        length = edges[row + 1] - edges[row]
        low, high = larger(first, blocks[row]), smaller(last, blocks[row + 1])
        # Number of errors in a cache line that the next group completes.
        kept = np.int64(0)
        for number in range(low, high, group):
            begin = (number - blocks[row]) * block
            size = smaller(
                smaller(length - begin, (high - number) * block), group * block
            )
            part = array_at(rejected, parts[row], length)
            at = edges[row] + begin
            coded = number - sizes[4]
            _load(own, at, part, begin, size, block, work)
            if terms.size > 0:
                _add_terms(terms, coded, size, codes, scales, work, sizes, rounds)
            _to_scales(coded, size, scales, work, sizes, numbers, rounds)
            into, place = (errors, line) if past else (rejected, at)
            _to_codes(
                own,
                at,
                part,
                begin,
                size,
                into,
                place,
                coded,
                codes,
                work,
                sizes,
                offset,
                rounds,
            )
            if past:
                written = view(rejected, at - kept, at + size)
                rest = number + group < high
                count = put_after(kept, errors, size, written, past, rest)
                kept = written.size - count


@single
def _add_own(own, at, part, begin, size, out, place):  # type: ignore[no-untyped-def]
    """Write the sums of own values and residuals to `out`, and return the bits of the largest magnitude."""
    a, step, decay = own
    return _add_scaled(size, a, at * step, part, begin, out, place, decay)


@single
def _load(own, at, part, begin, size, block, work):  # type: ignore[no-untyped-def]
    """Write values, padded with zeros, to the buffer, and the largest magnitude of each block."""
    room, largest = work[0], work[4]
    for i in range((size + block - 1) // block):
        start = i * block
        some = smaller(block, size - start)
        key = _add_own(own, at + start, part, begin + start, some, room, start)
        largest[i] = number_of(key, room)
        for j in range(start + some, start + block):
            room[j] = 0


@single
def _add_terms(terms, number, size, codes, scales, work, sizes, rounds):  # type: ignore[no-untyped-def]
    """Add the terms' blocks from `number` on to the buffer."""
    room, largest, block = work[0], work[4], sizes[1]
    for i in range((size + block - 1) // block):
        start, key = i * block, np.int64(0)
        place = room, start, smaller(block, size - start)
        for term in range(len(terms)):
            some = array_at(codes, terms[term, 0], codes.size)
            steps = array_at(scales, terms[term, 1], scales.size)
            own = room, start
            key = np.int64(
                _decode(some, steps, number + i, own, place, work, sizes, rounds)
            )
        largest[i] = number_of(key, room)


@single
def _to_scales(number, size, scales, work, sizes, numbers, rounds):  # type: ignore[no-untyped-def]
    """Write the scales of the blocks in the buffer.

    All before the codes: each is a chain of instructions, which a processor overlaps
    with others.
    """
    bits, block, cut, stored, _ = sizes
    room, largest, low, high = work[0], work[4], work[5], work[6]
    real = room.dtype.type
    if rounds is not None:
        _to_magnitudes(size, block, work, rounds)
    for i in range((size + block - 1) // block):
        if rounds is None:
            low[i] = _step_of(room, largest[i], real((1 << bits - 1) - 1), cut, numbers)
            scales[number + i] = bits_of(low[i]) >> stored
        else:
            low[i] = _rounded(room, smaller(low[i], largest[i]), cut, numbers)
            high[i] = _rounded(room, smaller(high[i], largest[i]), cut, numbers)
            place = bits * (number + i)  # as many magnitudes as bits
            scales[place] = bits_of(low[i]) >> stored
            scales[place + bits - 1] = bits_of(high[i]) >> stored


@single
def _to_codes(  # type: ignore[no-untyped-def]
    own,
    at,
    part,
    begin,
    size,
    into,
    place,
    number,
    codes,
    work,
    sizes,
    offset,
    rounds,
):
    """Write the codes of the blocks in the buffer, and to `into` the errors; of a block that is not finite the values.

    These are computed again from what `into` may be the memory of.
    """
    bits, block = sizes[0], sizes[1]
    room, errors, _, fields, _, low, high, _ = work
    real = room.dtype.type
    a, step = own[0], own[1]
    line = LINE // room.itemsize
    for i in range((size + block - 1) // block):
        start = i * block
        some = smaller(block, size - start)
        is_finite = low[i] < np.inf
        to, there = (into, place) if is_finite else (errors, line)
        if rounds is None:
            is_normal = real(0) < low[i] < np.inf
            inverse = real(1) / low[i] if is_normal else real(0)
            # The largest code: values above it exist where the scale was rounded down.
            # For NaN it is 0.
            top = real((1 << bits - 1) - 1 if is_finite else 0)
        else:
            middle = real(0.5) * low[i] + real(0.5) * high[i]
            threshold = middle if bits == 2 else real(np.inf)
        for field in range(0, some, _TURN):
            first, count = start + field, smaller(_TURN, some - field)
            for j in range(first + _AHEAD, first + _AHEAD + _TURN, line):
                prefetch(part, begin + j)
                prefetch(a, (at + j) * step)
            if rounds is None:
                _to_levels(
                    count,
                    room,
                    first,
                    to,
                    there + first,
                    fields,
                    field,
                    inverse,
                    low[i],
                    offset,
                    offset - top,
                    offset + top,
                )
            else:
                _to_signs(
                    count,
                    room,
                    first,
                    to,
                    there + first,
                    fields,
                    field,
                    threshold,
                    low[i],
                    high[i],
                )
        for field in range(some, block):
            fields[field] = 1 << bits - 1 if rounds is None else 0
        _pack(fields, bits, codes, (number + i) * (block * bits // 8), block)
        if not is_finite:
            _add_own(own, at + start, part, begin + start, some, into, place + start)


@single
def _pack(fields, bits, codes, byte, block):  # type: ignore[no-untyped-def]
    """Write the fields of a block into its bytes."""
    width = block * bits // 8
    _extract(width, fields, 0, codes, byte, np.uint8(0), np.uint8(255))
    for field in range(1, 8 // bits):
        shift = np.uint8(bits * field)
        _insert(width, codes, byte, fields, field * width, codes, byte, shift)


@single
def _decode(codes, scales, i, base, out, work, sizes, rounds):  # type: ignore[no-untyped-def]
    """Write the values of block i, added to others, and return the bits of the largest magnitude.

    base: the others' array, and the first; out: likewise, and how many.
    """
    (given, at), (written, place, size) = base, out
    bits, block, _, stored, _ = sizes
    fields, real = work[3], written.dtype.type
    width, mask = block * bits // 8, np.uint8((1 << bits) - 1)
    for field in range(8 // bits):
        shift = np.uint8(bits * field)
        _extract(width, codes, i * width, fields, field * width, shift, mask)
    if rounds is None:
        scale = number_of(np.int64(scales[i]) << stored, written)
        middle = real(1 << bits - 1)
        return _add_levels(size, given, at, fields, 0, written, place, middle, scale)
    low = number_of(np.int64(scales[bits * i]) << stored, written)
    high = number_of(np.int64(scales[bits * i + bits - 1]) << stored, written)
    return _add_signs(size, given, at, fields, 0, written, place, low, high)


@jit
def _dequantise(  # type: ignore[no-untyped-def]
    layout, first, last, codes, scales, room, sizes, over, moved, past, rounds
):
    """Decode the blocks from `first` to `last` - 1.

    over: the divisor, and its inverse, or 0 if that has other bits. moved: addresses of
    vectors to which the values are added, or none, and the values' factor.
    """
    edges, blocks, parts = layout
    block, work = sizes[1], _buffers(room, sizes[1])
    values, nothing = work[0], work[2]
    line = LINE // values.itemsize
    # Adding a value to -0.0 leaves the value as it is.
    for i in range(block):
        nothing[i] = -0.0
    divisor, factor = over
    for row in range(parts.size):
        length = edges[row + 1] - edges[row]
        low, high = larger(first, blocks[row]), smaller(last, blocks[row + 1])
        if low >= high:
            continue
        out = array_at(values, parts[row], length)
        done, kept, start = (low - blocks[row]) * block, np.int64(0), np.int64(0)
        place = line
        for number in range(low, high):
            i = number - sizes[4]
            base, out_of = (nothing, start), (values, place, block)
            _decode(codes, scales, i, base, out_of, work, sizes, rounds)
            if factor == 0:
                _over(block, values, place, values, place, divisor)
            elif factor != 1:
                _scaled(block, values, place, values, place, factor)
            at = done + kept + place - line
            some = smaller(block, length - at)
            if moved[0].size > 0:
                base = array_at(values, moved[0][row], length)
                _move(some, values, place, base, at, base, at, values, place, moved[1])
            place += some
            is_last = number == high - 1
            if is_last or place + block > values.size:
                into = view(out, done, at + some)
                count = put_after(kept, values, place - line, into, past, not is_last)
                done += count
                kept = into.size - count
                place = line


@single
def _step_of(c, largest, top, cut, numbers):  # type: ignore[no-untyped-def]
    """Return `largest` / `top` rounded up, or rounded down if `top` times the result would be out of range."""
    step, coarse, least, most = numbers
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


@single
def _rounded(c, magnitude, cut, numbers):  # type: ignore[no-untyped-def]
    """Return the magnitude of codes of 2 bits or 1 bit, rounded to nearest."""
    step, coarse, _, most = numbers
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


@single
def _to_magnitudes(size, block, work, rounds):  # type: ignore[no-untyped-def]
    """Write the mean magnitude of each block in the buffer twice; for 2 bits two, by rounds of Lloyd's algorithm.

    A round does all blocks, for the reason of `_to_scales`.
    """
    largest, low, high, totals = work[4:]
    real = largest.dtype.type
    # The share is a power of two, and sums of shares stay in range.
    share = real(1.0 / block)
    count = (size + block - 1) // block
    for i in range(count):
        totals[i], _ = _sum_up_to(i, block, work, real(np.inf), share)
        mean = totals[i] / (real(smaller(block, size - i * block)) * share)
        low[i] = high[i] = mean if largest[i] < np.inf else largest[i]
    for _ in range(rounds):
        for i in range(count):
            some = smaller(block, size - i * block)
            threshold = real(0.5) * low[i] + real(0.5) * high[i]
            below, above = _sum_up_to(i, block, work, threshold, share)
            if 0 < above < some and largest[i] < np.inf:
                # Rounding could move a mean to the wrong side of the threshold.
                low[i] = smaller(below / (real(some - above) * share), threshold)
                high[i] = larger((totals[i] - below) / (real(above) * share), threshold)


@inner
def _sum_up_to(i, block, work, threshold, share):  # type: ignore[no-untyped-def]
    """Return the result of `instructions.sum_up_to` for a block of any size in the buffer."""
    room, errors = work[0], work[1]
    first = i * block
    line = LINE // room.itemsize
    if block < SUMMED:
        for j in range(SUMMED):
            errors[line + j] = room[first + j] if j < block else 0
        return sum_up_to(errors, line, SUMMED, threshold, share)
    return sum_up_to(room, first, block, threshold, share)
