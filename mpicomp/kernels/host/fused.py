"""The sum of two dense vectors, and in the same pass the entries of the sum that a selection needs.

An addition reads two vectors and writes one, bypassing the cache; a selection then
reads the sum back. In one pass the sum is compared while it is in registers, which
saves that read: a quarter of the memory traffic. The few candidates are added again
from both vectors, which are in the cache, while the sum is not.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, Format, as_writable, empty_together
from mpicomp.kernels.host.compiled import inner, jit
from mpicomp.kernels.host.instructions import WORD, lowest, store_sum_reaching
from mpicomp.kernels.host.selection import (
    Found,
    entries,
    foresee,
    is_sampled,
    largest,
    largest_of,
    take_sample,
)
from mpicomp.kernels.host.streaming import (
    LONG,
    add_parts,
    is_streamed,
    values_before_line,
)
from mpicomp.threads import in_pieces


def add_largest(
    a: Array,
    b: Array,
    out: Array,
    k: int,
    *,
    scale: float = 1.0,
    threads: int | None = None,
    long: int = LONG,
) -> Found:
    """Write ``scale * a + b`` to `out`, as `add_parts` does, and return ``largest(out, k)``, in one pass.

    a, b, out: 1-d, of one dtype and length; `out` shares no memory with the others. k:
    at least 1. scale: rounded to the dtype; so is the product. threads: the most
    threads; None for `threads.count`. long: the least bytes of `out` for a single pass
    over contiguous float32 or float64; others are added first.

    A sample of the sum, at the positions of the sample of `largest`, gives the
    threshold; if it misleads, `largest` reads the finished sum.
    """
    form, parts = FORMATS[out.dtype], None
    if is_sampled(out.size) and is_streamed(out, long, a, b):
        parts = _by_sample(
            as_writable(a), out.dtype.type(scale), as_writable(b), out, k, threads
        )
    else:
        add_parts(a, scale, [b], out, threads=threads, long=long)
    if parts is None:
        return largest(np.ascontiguousarray(out), k, threads=threads)
    positions, values = largest_of(parts, form, k)
    return positions, values.view(out.dtype)


def _by_sample(
    a: Array, factor: Any, b: Array, out: Array, k: int, threads: int | None
) -> list[Found] | None:
    """Write the sum; return positions and bits of those at or above a threshold from a sample, None if it misled."""
    form = FORMATS[out.dtype]
    floor, room = foresee(_sampled(a, factor, b, form), form, k, out.size)

    def compacted(start: int, end: int) -> tuple[Array, Array, int]:
        piece = a[start:end], factor, b[start:end], out[start:end]
        positions, sums, rest = _add_compacted(*piece, form, floor, start, room)
        if rest:
            left = slice(end - rest, end)
            add_parts(a[left], factor, [b[left]], out[left], threads=1)
        return positions, sums, rest

    parts = in_pieces(compacted, out.size, threads)
    reached = [(positions, values.view(form.signed)) for positions, values, _ in parts]
    misled = any(rest for *_, rest in parts) or (floor > 1 and entries(reached) < k)
    return None if misled else reached


def _sampled(a: Array, factor: Any, b: Array, form: Format) -> Array:
    """Return the magnitudes of a sample of the sum, as signed integers."""
    every = form.signed.type(-1)
    one, other = (
        take_sample(vector.view(form.signed), every).view(vector.dtype)
        for vector in (a, b)
    )
    with np.errstate(all="ignore"):
        sums = factor * one + other
    return sums.view(form.signed) & form.mask  # type: ignore[no-any-return]


def _add_compacted(
    a: Array,
    factor: Any,
    b: Array,
    out: Array,
    form: Format,
    floor: int,
    first: int,
    room: int,
) -> tuple[Array, Array, int]:
    """Write sums; return positions (from `first` on) and values of those at or above `floor`, and how many are left.

    Some sums are left, and not written, if more than `room` were found.
    """
    room = min(room, out.size) + WORD
    positions, sums = empty_together(room, np.dtype(np.intp), out.dtype)
    kinds = out.view(form.signed), form.mask, form.signed.type(floor)
    count, done = _add_and_compact(a, factor, b, out, *kinds, first, positions, sums)
    return positions[: int(count)], sums[: int(count)], out.size - int(done)


@jit
def _add_and_compact(a, factor, b, out, bits, mask, floor, first, positions, kept):  # type: ignore[no-untyped-def]
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
