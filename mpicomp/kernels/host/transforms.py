"""Orthonormal transforms of chunks of consecutive values, and signs.

A Walsh-Hadamard transform of m values is lg m stages of m/2 butterflies (a + b, a - b),
of the strides 1, 2, 4, ..., m/2, and one product with 1/sqrt(m): every value is the
root of a fixed tree of additions, so the bits do not depend on the processor or on the
number of threads. The stages below 64 are done in registers; of the others two
together, so that a chunk of 256 in the first-level cache is passed over twice.
"""

from collections.abc import Callable

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, as_writable
from mpicomp.kernels.host.compiled import inner, jit, loop, single
from mpicomp.kernels.host.instructions import (
    LINE,
    WORD,
    butterflies,
    prefetch,
    smaller,
    view,
)
from mpicomp.kernels.host.streaming import LONG, add_line_by_line, add_parts, put
from mpicomp.threads import in_pieces, number_of_pieces

_ROOM = 1 << 11  # values that stay in the first-level cache


def hadamard(
    values: Array,
    out: Array,
    chunk: int,
    *,
    onto: tuple[Array, float] | None = None,
    threads: int | None = None,
    long: int = LONG,
) -> None:
    """Write the orthonormal Walsh-Hadamard transform of each chunk of `values` to `out`; it is its own inverse.

    values, out: 1-d, contiguous, of one length and dtype, the same array or apart;
    float16 is computed in float32 and rounded at the end. chunk: a power of two. What
    is left at the end is transformed in parts of descending powers of two. onto: a
    vector of the length and dtype, float32 or float64, and a factor, rounded to it: the
    transform is added to their product, in `out` apart from both. threads: the most
    threads; None for `threads.count`. long: the least bytes of a sum for a single pass.
    """
    if onto is not None and out.nbytes < long:
        hadamard(values, out, chunk, threads=threads)
        add_parts(*onto, [out], out)
        return
    is_wide = values.dtype != np.float16
    given = as_writable(values) if is_wide else values.astype(np.float32)
    result = out if is_wide else given
    scales = np.array(
        [_scale(power) for power in range(chunk.bit_length())], result.dtype
    )

    no_indices, nothing = np.empty(0, np.int32), np.empty(0, result.dtype)
    base, factor = (nothing, 1.0) if onto is None else onto
    base = as_writable(base)
    how = chunk, scales, result.dtype.type(factor)
    size = 0 if onto is None else max(chunk, _ROOM // 4)

    def transform(start: int, end: int) -> None:
        room = np.empty(size, result.dtype)
        _hadamard(no_indices, given, 0, base, result, start, end, how, room, True)

    in_pieces(transform, values.size, threads, step=max(chunk, WORD))
    if not is_wide:
        with np.errstate(over="ignore"):  # beyond the range of float16: infinity
            out[...] = result


def hadamard_writer(
    indices: Array,
    values: Array,
    out: Array,
    chunk: int,
    *,
    threads: int | None = None,
    long: int = LONG,
) -> Callable[[], None]:
    """Return a function that writes what `hadamard` makes of a sparse vector to `out`, once, and allocates nothing.

    indices: sorted; values: float32 or float64; out: 1-d contiguous, of the vector's
    length and the values' dtype. long: the least bytes of `out` for stores that bypass
    the cache. chunk, threads: as for `hadamard`.
    """
    powers = range(chunk.bit_length())
    scales = np.array([_scale(power) for power in powers], out.dtype)
    how = chunk, scales, out.dtype.type(1)
    entries = as_writable(indices), as_writable(values)
    nothing = np.empty(0, out.dtype)
    past = out.nbytes >= long
    rooms = [
        np.empty(max(chunk, _ROOM), out.dtype)
        for _ in range(number_of_pieces(out.size, threads))
    ]

    def transform(start: int, end: int) -> None:
        first = np.searchsorted(indices, start)
        room = rooms.pop()
        _hadamard(*entries, first, nothing, out, start, end, how, room, past)

    def write() -> None:
        in_pieces(transform, out.size, threads, step=max(chunk, WORD))

    return write


def signs(values: Array, *, threads: int | None = None) -> None:
    """Replace each value by its sign: 1, -1, or 0 for a zero of either sign; NaN by that of its bits.

    values: 1-d, contiguous. threads: as for `hadamard`.
    """
    form = FORMATS[values.dtype]
    bits, one = values.view(form.signed), np.ones(1, values.dtype).view(form.signed)[0]
    in_pieces(
        lambda start, end: _signs(bits[start:end], form.mask, one), values.size, threads
    )


def _scale(power: int) -> float:
    """Return 1 / sqrt(2**power), which is exact for even powers."""
    return float(0.5 ** (power // 2) * (np.sqrt(0.5) if power % 2 else 1.0))


@jit
def _hadamard(indices, values, entry, a, out, start, end, how, room, past):  # type: ignore[no-untyped-def]
    """Transform chunks from `start` to `end`, as many together as a buffer holds.

    room: the buffer, empty for a dense vector that is not added to others. a: those,
    or empty. entry: of a sparse vector the first one at or after `start`.
    """
    chunk, scales, factor = how
    is_buffered, is_sum, place = room.size > 0, a.size > 0, 0
    while 1 << place < chunk:
        place += 1
    while start < end:
        while chunk > end - start:
            chunk, place = chunk >> 1, place - 1
        most = smaller(room.size, end - start) if is_buffered else end - start
        size = most // chunk * chunk
        given, into, first = values, out, start
        if is_sum:
            # of the group after the next, while this one is computed
            ahead = start + 2 * room.size
            for j in range(ahead, ahead + size, LINE // out.itemsize):
                prefetch(values, j)
                prefetch(a, j)
            given, into, first = view(values, start, end), room, np.int64(0)
        elif is_buffered:
            given, into, first = room, room, np.int64(0)
            for i in range(size):
                room[i] = 0
            while entry < indices.size and indices[entry] < start + size:
                room[indices[entry] - start] = values[entry]
                entry += 1
        _transform(given, into, first, first + size, chunk, scales[place])
        written = view(out, start, start + size)
        if is_sum:
            summed = view(a, start, start + size), factor, view(room, 0, size)
            add_line_by_line(*summed, out.dtype.type(1), written)
        elif is_buffered:
            put(view(room, 0, size), written, past, 0)
        start += size


@single
def _transform(values, out, start, end, chunk, scale):  # type: ignore[no-untyped-def]
    """Transform chunks from `start` to `end`. The scale is a factor of the last stage of a chunk, 1 of the others."""
    one = out.dtype.type(1)
    for begin in range(start, end, chunk):
        stride = 1
        if chunk >= WORD:
            stride = WORD
            for first in range(begin, begin + chunk, WORD):
                butterflies(values, out, first, scale if stride == chunk else one)
        else:
            for i in range(begin, begin + chunk):
                out[i] = values[i]
        while 4 * stride <= chunk:
            for first in range(begin, begin + chunk, 4 * stride):
                _two_stages(
                    out,
                    np.uint64(first),
                    np.uint64(stride),
                    scale if 4 * stride == chunk else one,
                )
            stride *= 4
        if stride < chunk:
            _stage(out, np.uint64(begin), np.uint64(stride), scale)


@loop
def _two_stages(out, first, stride, scale):  # type: ignore[no-untyped-def]
    """Do the butterflies of a stride and of twice the stride, in four times as many values from `first` on."""
    for i in range(stride):
        a = first + np.uint64(i)
        b, c, d = a + stride, a + np.uint64(2) * stride, a + np.uint64(3) * stride
        left, right = out[a] + out[b], out[c] + out[d]
        other, another = out[a] - out[b], out[c] - out[d]
        out[a], out[c] = (left + right) * scale, (left - right) * scale
        out[b], out[d] = (other + another) * scale, (other - another) * scale


@inner
def _stage(out, first, stride, scale):  # type: ignore[no-untyped-def]
    """Do the butterflies of a stride, in twice as many values from `first` on."""
    for i in range(stride):
        a = first + np.uint64(i)
        b = a + stride
        out[a], out[b] = (out[a] + out[b]) * scale, (out[a] - out[b]) * scale


@jit
def _signs(bits, mask, one):  # type: ignore[no-untyped-def]
    zero = mask ^ mask
    for i in range(bits.size):
        bits[i] = bits[i] & ~mask | one if bits[i] & mask else zero
