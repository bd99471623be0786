"""Passes over dense vectors that are longer than the cache, with stores that bypass it.

An ordinary store first reads the cache line that it changes. A non-temporal one does
not: it saves a quarter of the memory traffic of a sum, and leaves the cache to data
that is read again soon. Where one of the vectors is many arrays, its parts, a kernel
gets their addresses: one call for all of them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.memory import addresses as list_addresses
from mpicomp.kernels.host.bits import as_writable
from mpicomp.kernels.host.compiled import inner, jit, single
from mpicomp.kernels.host.halves import add_halves, convert
from mpicomp.kernels.host.instructions import (
    LINE,
    WORD,
    array_at,
    larger,
    lowest,
    smaller,
    store_line,
    store_sum,
    store_sum_reaching,
    view,
)
from mpicomp.threads import in_pieces

# Bytes of a vector below which it may still be in the cache when it is read next.
LONG = 1 << 20


def add(
    a: Array, b: Array, out: Array, *, threads: int | None = None, long: int = LONG
) -> None:
    """Write ``a + b`` to `out`, bitwise as ``numpy.add`` does; 1-d, of one dtype and length.

    threads: the most threads; None for `threads.count`. long: the least bytes of `out`
    for stores that bypass the cache, if all three are contiguous and aligned. `out` may
    be `a`.
    """
    add_parts(a, 1, [b], out, threads=threads, long=long)


def add_parts(
    a: Array,
    scale: float,
    parts: Sequence[Array],
    out: Array,
    *,
    sign: int = 1,
    threads: int | None = None,
    long: int = LONG,
) -> None:
    """Write ``scale * a + sign * b`` to `out`, where b is the parts, one after the other. The product is rounded first.

    a, out: 1-d, of one length; parts: 1-d, of that length together, all of one dtype.
    scale: rounded to the dtype. sign: 1 or -1. threads, long, and `out` if it is `a`:
    as for `add`.
    """
    if out.nbytes < long:  # in one call
        added = parts[0] if len(parts) == 1 else np.concatenate(parts)
        add_scaled(a, scale, added, out, sign=sign)
        return
    end = 0
    if is_streamed(out, long, a, *parts):
        factor = out.dtype.type(scale)
        _stream_parts(as_writable(a), factor, parts, out.dtype.type(sign), out, threads)
        return
    for part in parts:
        place = slice(end, end := end + part.size)
        add_scaled(a[place], scale, part, out[place], sign=sign)


def add_scaled(a: Array, factor: float, b: Array, out: Array, *, sign: int = 1) -> None:
    """Write ``factor * a + sign * b`` to `out`; the dtypes may differ.

    a, b, out: float16, float32 or float64, of one shape; `out` may be `a` or `b`.
    factor: rounded to the dtype of `a`, and so is the product; the sum is computed in
    the wider of the dtypes of `a` and `b`, and rounded to that of `out`. sign: 1 or -1.
    """
    if add_halves(a, factor, b, out, sign=sign):
        return
    scaled = a
    if factor != 1:
        has_room = a.dtype == out.dtype and not np.may_share_memory(b, out)
        factor = a.dtype.type(factor)
        scaled = np.multiply(a, factor, out=out if has_room else None)
    operate = np.add if sign == 1 else np.subtract
    operate(scaled, b, out=out, casting="same_kind")


def multiply(a: Array, by: float, out: Array) -> None:
    """Write ``a * by`` to `out`, which may be `a`; `by` is a number of the dtype of `a`.

    With 1 it converts to the dtype of `out`.
    """
    if type(by) is int and by == 1 and convert(a, out):
        return
    np.multiply(a, by, out=out, casting="same_kind")


def quotient(a: Array, by: Array | float, out: Array) -> None:
    """Write ``a / by`` to `out`, which may be `a`; `by` is a number of the dtype of `a`, or an array of its shape."""
    np.divide(a, by, out=out, casting="same_kind")


def clear(out: Array) -> None:
    """Make all values of `out` zero; a contiguous array as bytes, which NumPy clears twice as fast.

    On one thread, which saturates the memory.
    """
    if out.nbytes >= LONG and out.flags.c_contiguous:
        out = out.reshape(-1).view(np.uint8)
    out[...] = 0


def is_streamed(vector: Array, long: int, *others: Array) -> bool:
    """Return whether a vector is long enough to bypass the cache, and it and others can be passed to a kernel."""
    return (
        vector.nbytes >= long
        and vector.dtype != np.float16
        and all(map(_in_order, (vector, *others)))
    )


def addresses(parts: Sequence[Array]) -> Array:
    """Return the addresses of arrays, for `array_at`."""
    return np.array(list_addresses(parts), np.int64)


def _stream_parts(
    a: Array,
    factor: Any,
    parts: Sequence[Array],
    sign: Any,
    out: Array,
    threads: int | None,
) -> None:
    edges, starts = (
        np.array([0, *accumulate(part.size for part in parts)]),
        addresses(parts),
    )

    def add_piece(start: int, end: int) -> None:
        _add_parts(start, end, a, factor, edges, starts, sign, out)

    in_pieces(add_piece, out.size, threads)


def _in_order(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


@single
def values_before_line(out):  # type: ignore[no-untyped-def]
    """Return the number of values before the first whole cache line of an array."""
    return smaller(out.size, -np.int64(out.ctypes.data) % LINE // out.itemsize)


@single
def put(values, out, past, rest):  # type: ignore[no-untyped-def]
    """Write values of a buffer to `out`, and return how many; `past` the cache whole lines.

    rest: 0 writes all; with another number a last line that is not whole is left out.
    """
    step, head, size = LINE // out.itemsize, values.size, values.size
    if past:
        head = smaller(head, values_before_line(out))
    end = head + (size - head) // step * step
    for j in range(head):
        out[j] = values[j]
    for j in range(head, end, step):
        store_line(values, j, out, j)
    if rest != 0:
        return end
    for j in range(end, size):
        out[j] = values[j]
    return size


@single
def put_after(kept, buffer, size, out, past, rest):  # type: ignore[no-untyped-def]
    """Write to `out` the kept values at the end of a buffer's first line, and `size` behind that; return how many.

    rest: as of `put`; what is left out moves to the end of the first line, for the next
    call: so what is computed into the buffer begins at a line, wherever `out` does.
    """
    line = LINE // out.itemsize
    values = view(buffer, line - kept, line + size)
    count = put(values, out, past, rest)
    left = values.size - count
    for j in range(left):
        buffer[line - left + j] = buffer[line + size - left + j]
    return count


@jit
def _add_parts(start, end, a, factor, edges, starts, sign, out):  # type: ignore[no-untyped-def]
    """Add from `start` to `end`."""
    for row in range(starts.size):
        origin, close = edges[row], edges[row + 1]
        low, high = larger(start, origin), smaller(end, close)
        if low < high:
            b = view(
                array_at(out, starts[row], close - origin), low - origin, high - origin
            )
            add_line_by_line(view(a, low, high), factor, b, sign, view(out, low, high))


@single
def add_line_by_line(a, factor, b, sign, out):  # type: ignore[no-untyped-def]
    """Add line by line of `out`."""
    step, head = LINE // out.itemsize, values_before_line(out)
    lines = (out.size - head) // step
    for i in range(head):
        out[i] = factor * a[i] + sign * b[i]
    for i in range(lines):
        store_sum(a, factor, b, sign, out, head + i * step)
    for i in range(head + lines * step, out.size):
        out[i] = factor * a[i] + sign * b[i]


@jit
def add_and_compact(a, factor, b, out, bits, mask, floor, first, positions, kept):  # type: ignore[no-untyped-def]
    """Write ``factor * a + b``; return how many sums are at or above `floor`, and how many were written.

    They are fewer than all if the buffer is full.
    bits: those of `out`. There is room for more than a line of values.
    """
    begin, head = np.int64(0), values_before_line(out)
    count, words, word = np.uint64(0), (out.size - head) // WORD, np.uint64(WORD)
    count = _add_one_by_one(
        a, factor, b, out, bits, begin, head, mask, floor, first, positions, kept, count
    )
    for start in range(head, head + words * WORD, WORD):
        if count + word > np.uint64(positions.size):
            return count, start
        reached = store_sum_reaching(a, factor, b, out, start, mask, floor)
        if reached != np.uint64(0):
            count = _store_sums(
                a, factor, b, out, first, start, reached, positions, kept, count
            )
    rest = head + words * WORD
    if count + np.uint64(out.size - rest) > np.uint64(positions.size):
        return count, rest
    return _add_one_by_one(
        a,
        factor,
        b,
        out,
        bits,
        rest,
        out.size,
        mask,
        floor,
        first,
        positions,
        kept,
        count,
    ), out.size


@inner
def _add_one_by_one(  # type: ignore[no-untyped-def]
    a, factor, b, out, bits, start, end, mask, floor, first, positions, kept, count
):
    """Add one by one, and append the sums at or above `floor`; return the new count."""
    for position in range(start, end):
        out[position] = factor * a[position] + b[position]
        if bits.dtype.type(bits[position] & mask) >= floor:
            positions[count], kept[count] = first + position, out[position]
            count += np.uint64(1)
    return count


@inner
def _store_sums(a, factor, b, out, first, start, reached, positions, kept, count):  # type: ignore[no-untyped-def]
    """Append the sums at the bits set in `reached`, counted from `start`; return the new count.

    If both values are NaN, the result depends on the processor, so the sum is read from
    `out`.
    """
    while reached != np.uint64(0):
        position = np.uint64(start) + lowest(reached)
        total = factor * a[position] + b[position]
        positions[count] = np.uint64(first) + position
        kept[count] = total if total == total else out[position]
        count += np.uint64(1)
        reached &= reached - np.uint64(1)
    return count
