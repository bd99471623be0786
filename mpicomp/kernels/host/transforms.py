"""Orthonormal transforms of chunks of consecutive values, and signs.

A Walsh-Hadamard transform of m values is lg m stages of m/2 butterflies (a + b, a - b),
of the strides 1, 2, 4, ..., m/2, and one product with 1/sqrt(m): every value is the
root of a fixed tree of additions, so the bits do not depend on the processor or on the
number of threads. The stages below 64 are done in registers; of the others two
together, so that a chunk of 256 in the first-level cache is passed over twice. What
is written past the cache goes out while the next chunk is computed.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from mpicomp.arrays import Array, Dtype
from mpicomp.arrays.memory import address
from mpicomp.kernels.host.bits import FORMATS, as_writable, empty_entries
from mpicomp.kernels.host.compiled import inner, jit, loop, single
from mpicomp.kernels.host.instructions import (
    LINE,
    WORD,
    butterflies,
    larger,
    nonzero,
    prefetch,
    smaller,
    view,
)
from mpicomp.kernels.host.streaming import (
    LONG,
    add_and_compact,
    add_parts,
    is_streamed,
    put,
    values_before_line,
)
from mpicomp.threads import in_pieces, number_of_pieces

_ROOM = 1 << 8  # values that are transformed together, unless a chunk is longer
# Groups in a buffer. With several of them, few incomplete words are copied.
_GROUPS = 8
# Values by which prefetching is ahead of the computation.
_AHEAD = 1 << 10


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
    vector of the length and dtype, and a factor, rounded to it: the
    transform is added to their product, in `out` apart from both. threads: the most
    threads; None for `threads.count`. long: the least bytes of `out` for stores that
    bypass the cache, and for a sum in a single pass.
    """
    if onto is not None and not is_streamed(out, long, onto[0], values):
        hadamard(values, out, chunk, threads=threads)
        add_parts(*onto, [out], out)
        return
    if onto is not None:
        # No sum is kept: the floor is the largest one, and there is no room.
        floor = int(FORMATS[out.dtype].mask)
        add_reaching(*onto, values, out, chunk, floor, 0, threads=threads)
        return
    is_wide = values.dtype != np.float16
    given = as_writable(values) if is_wide else values.astype(np.float32)
    result = out if is_wide else given
    dense = np.empty(0, np.int32), given
    past = result.nbytes >= long and result is not given
    how = _how(chunk, 1.0, result, past)
    kept = _room(result, 0, 0)

    def transform(start: int, end: int) -> None:
        place = result, start, end, _buffer(chunk, result)
        _hadamard(dense, 0, result[:0], *place, how, kept)

    in_pieces(transform, values.size, threads, step=max(chunk, WORD))
    if not is_wide:
        # Values beyond the range of float16 become infinite.
        with np.errstate(over="ignore"):
            out[...] = result


def add_reaching(
    a: Array,
    factor: float,
    values: Array,
    out: Array,
    chunk: int,
    floor: int,
    most: int,
    *,
    threads: int | None = None,
) -> list[tuple[Array, Array, bool]]:
    """Write ``factor * a`` plus the transform of `values` to `out`, and return the sums at or above a floor.

    a, values, out, chunk, threads: as of `hadamard` with `onto`. floor: the bits of a
    magnitude. Returns for each piece of `out` positions and sums, and whether there
    were more than `most`, of which some are missing.
    """
    dense = np.empty(0, np.int32), as_writable(values)
    base = as_writable(a)
    how = _how(chunk, factor, out, True)

    def add(start: int, end: int) -> tuple[Array, Array, bool]:
        kept = _room(out, floor, min(most, end - start))
        place = out, start, end, _buffer(chunk, out)
        number, last = _hadamard(dense, 0, base, *place, how, kept)
        count = int(number)
        return kept[-2][:count], kept[-1][:count], last != floor

    return in_pieces(add, out.size, threads, step=max(chunk, WORD))


def hadamard_writer(
    indices: Array,
    values: Array,
    out: Array,
    chunk: int,
    *,
    is_sign: bool = False,
    threads: int | None = None,
    long: int = LONG,
) -> Callable[[], None]:
    """Return a function that writes what `hadamard` makes of a sparse vector to `out`, once, and allocates nothing.

    indices: sorted; values: float32 or float64; out: 1-d contiguous, of the vector's
    length and the values' dtype. is_sign: it writes the signs of that, as `signs` does.
    long: the least bytes of `out` for stores that bypass the cache. chunk, threads: as
    for `hadamard`.
    """
    how = _how(chunk, 1.0, out, out.nbytes >= long, is_sign=is_sign)
    sparse = as_writable(indices), as_writable(values)
    nothing = out[:0]
    kept = _room(out, 0, 0)
    pieces = range(number_of_pieces(out.size, threads))
    buffers = [_buffer(chunk, out) for _ in pieces]

    def transform(start: int, end: int) -> None:
        first = np.searchsorted(indices, start)
        place = out, start, end, buffers.pop()
        _hadamard(sparse, first, nothing, *place, how, kept)

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


def _how(
    chunk: int, factor: float, out: Array, past: bool, *, is_sign: bool = False
) -> tuple[Any, ...]:
    """Return the chunk, the scales by log2 of a chunk, the factor of `a`, and whether stores bypass the cache.

    is_sign: whether the signs are written.
    """
    return chunk, _scales(out.dtype), out.dtype.type(factor), past, is_sign


@cache
def _scales(dtype: Dtype) -> Array:
    """Return 1 / sqrt(2**power), exact for even powers."""
    powers = np.arange(64)
    scales = 0.5 ** (powers // 2) * np.where(powers % 2, np.sqrt(0.5), 1)
    return scales.astype(dtype)


def _room(out: Array, floor: int, most: int) -> tuple[Any, ...]:
    """Return a floor and the mask of magnitudes, the bits of `out`, and room for positions and values of `most`."""
    form = FORMATS[out.dtype]
    room = empty_entries(most + WORD, out.dtype)
    return form.signed.type(floor), form.mask, out.view(form.signed), *room


def _buffer(chunk: int, out: Array) -> Array:
    """Return room for groups of chunks and for an incomplete word, which begins at a cache line."""
    buffer = np.empty(2 * WORD + max(chunk, _GROUPS * _ROOM), out.dtype)
    return buffer[-address(buffer) % LINE // out.itemsize :]


@jit
def _hadamard(vector, entry, a, out, start, end, buffer, how, kept):  # type: ignore[no-untyped-def]
    """Transform chunks from `start` to `end`, as many together as stay in the nearest cache.

    They are written, or added to others, by whole words of `out`: what is left of one is
    written with the next chunks. One that is not added, and stays in the cache, is
    transformed in `out`. vector: indices and values; no indices for a dense one.
    entry: of a sparse one the first at or after `start`. a: the others, or empty.

    Returns the number of sums that are kept, and the floor: the mask once there were more
    than there is room for.
    """
    indices, values = vector
    chunk, scales, factor, past, is_sign = how
    floor, count = kept[0], np.uint64(0)
    is_dense, most, place = values.size > indices.size, larger(chunk, _ROOM), 0
    is_written = is_dense and a.size == 0 and not past
    while 1 << place < chunk:
        place += 1
    close, left = WORD, np.int64(0)
    while start < end:
        while chunk > end - start:
            chunk, place = chunk >> 1, place - 1
        size = smaller(most, end - start) // chunk * chunk
        if close + size > buffer.size:
            for i in range(WORD - left, WORD):
                buffer[i] = buffer[close - WORD + i]
            close = WORD
        group = view(buffer, close, close + size)
        if is_written:
            group = view(out, start, start + size)
        given = group
        if is_dense:
            given = view(values, start, end)
            for i in range(start + _AHEAD, start + _AHEAD + size, LINE // out.itemsize):
                prefetch(values, i)
                if a.size > 0:
                    prefetch(a, i)
        else:
            entry = _spread(indices, values, entry, start, group)
        _transform(given, group, is_dense, chunk, scales[place])
        if is_sign:
            _replace_by_signs(group)
        if is_written:
            start += size
            continue
        first, low = start - left, close - left
        start, close = start + size, close + size
        ready = start - first
        if start < end:
            head = values_before_line(view(out, first, start))
            ready = head + (ready - head) // WORD * WORD
        left = start - first - ready
        group = view(buffer, low, low + ready)
        if a.size > 0:
            count, floor = _add(a, factor, group, out, first, floor, kept, count)
        else:
            put(group, view(out, first, first + ready), past, 0)
    return count, floor


@single
def _spread(indices, values, entry, start, out):  # type: ignore[no-untyped-def]
    """Write the values of a sparse vector from `start` on to `out`; return the number of the next entry."""
    for i in range(out.size):
        out[i] = 0
    while entry < indices.size and indices[entry] < start + out.size:
        out[indices[entry] - start] = values[entry]
        entry += 1
    return entry


@single
def _add(a, factor, group, out, first, floor, kept, count):  # type: ignore[no-untyped-def]
    """Write sums from `first` on, and keep those at or above the floor; return their number, and the next floor."""
    _, mask, bits, positions, sums = kept
    start, end = first, first + group.size
    while first < end:
        b, here = view(group, first - start, group.size), np.int64(count)
        summed = view(a, first, end), factor, b, view(out, first, end)
        kinds = view(bits, first, end), mask, floor, first
        places = view(positions, here, positions.size)
        more, done = add_and_compact(
            *summed, *kinds, places, view(sums, here, sums.size)
        )
        count += more
        first += np.int64(done)
        if first < end:
            # Once the room is full, no sum is kept.
            floor, count = mask, np.uint64(0)
    return count, floor


@single
def _transform(values, out, is_dense, chunk, scale):  # type: ignore[no-untyped-def]
    """Transform the chunks of `out`; unless it is dense, words of zeros are left as they are.

    The scale is a factor of the last stage of a chunk, 1 of the others.
    """
    one = out.dtype.type(1)
    for begin in range(0, out.size, chunk):
        stride = 1
        if chunk >= WORD:
            stride = WORD
            for first in range(begin, begin + chunk, WORD):
                if is_dense or nonzero(values, first) != np.uint64(0):
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


@loop
def _replace_by_signs(values):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        value = values[i]
        values[i] = values.dtype.type(value > 0) - values.dtype.type(value < 0)


@jit
def _signs(bits, mask, one):  # type: ignore[no-untyped-def]
    zero = mask ^ mask
    for i in range(bits.size):
        bits[i] = bits[i] & ~mask | one if bits[i] & mask else zero
