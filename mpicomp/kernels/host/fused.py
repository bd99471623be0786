"""The sum of two dense vectors, and in the same pass the entries of the sum that a selection needs.

An addition reads two vectors and writes one, bypassing the cache; a selection then
reads the sum back. In one pass the sum is compared while it is in registers, which
saves that read: a quarter of the memory traffic. The few candidates are added again
from both vectors, which are in the cache, while the sum is not.
"""

from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, Format, as_writable, empty_entries
from mpicomp.kernels.host.instructions import WORD
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
    add_and_compact,
    add_parts,
    is_streamed,
)
from mpicomp.kernels.host.transforms import add_reaching, hadamard
from mpicomp.threads import in_pieces

_SAMPLED = 1 << 18  # values of the chunks that are transformed for a sample
_GOLDEN = 0.6180339887498949


def add_largest(
    a: Array,
    b: Array,
    out: Array,
    k: int,
    *,
    scale: float = 1.0,
    chunk: int = 1,
    threads: int | None = None,
    long: int = LONG,
) -> Found:
    """Write ``scale * a + b`` to `out`, as `add_parts` does, and return ``largest(out, k)``, in one pass.

    a, b, out: 1-d, of one dtype and length; `out` shares no memory with the others. k:
    at least 1. scale: rounded to the dtype; so is the product. chunk: of the transform
    `hadamard` of `b`, which is added in its place; 1 for `b`. threads: the most threads;
    None for `threads.count`. long: the least bytes of `out` for a single pass over
    contiguous float32 or float64; others are added first.

    A sample of the sum, at positions that depend on its length and on `chunk` only, gives
    the threshold; if it misleads, `largest` reads the finished sum.
    """
    form, parts = FORMATS[out.dtype], None
    is_long = is_sampled(out.size) and out.size >= 16 * chunk
    if is_long and is_streamed(out, long, a, b):
        terms = as_writable(a), out.dtype.type(scale), as_writable(b)
        parts = _by_sample(*terms, out, k, chunk, threads)
    elif chunk > 1:
        hadamard(b, out, chunk, onto=(a, scale), threads=threads, long=long)
    else:
        add_parts(a, scale, [b], out, threads=threads, long=long)
    if parts is None:
        return largest(np.ascontiguousarray(out), k, threads=threads)
    positions, values = largest_of(parts, form, k)
    return positions, values.view(out.dtype)


def _by_sample(
    a: Array,
    factor: Any,
    b: Array,
    out: Array,
    k: int,
    chunk: int,
    threads: int | None,
) -> list[Found] | None:
    """Write the sum; return positions and bits of sums at or above a sampled threshold, None if the sample misled."""
    form = FORMATS[out.dtype]
    one, other = _sampled(a, b, form) if chunk == 1 else _transformed(a, b, chunk)
    with np.errstate(all="ignore"):
        some = (factor * one + other).view(form.signed) & form.mask
    floor, room = foresee(some, form, k, out.size)

    def compacted(start: int, end: int) -> tuple[Array, Array, bool]:
        piece = a[start:end], factor, b[start:end], out[start:end]
        positions, sums, rest = _add_compacted(*piece, form, floor, start, room)
        if rest:
            left = slice(end - rest, end)
            add_parts(a[left], factor, [b[left]], out[left], threads=1)
        return positions, sums, rest > 0

    if chunk == 1:
        parts = in_pieces(compacted, out.size, threads)
    else:
        limits = floor, room
        parts = add_reaching(a, factor, b, out, chunk, *limits, threads=threads)
    reached = [(positions, values.view(form.signed)) for positions, values, _ in parts]
    misled = any(is_missing for *_, is_missing in parts) or (
        floor > 1 and entries(reached) < k
    )
    return None if misled else reached


def _sampled(a: Array, b: Array, form: Format) -> list[Array]:
    """Return the values of two vectors at the same places."""
    every = form.signed.type(-1)
    return [
        take_sample(vector.view(form.signed), every).view(vector.dtype)
        for vector in (a, b)
    ]


def _transformed(a: Array, b: Array, chunk: int) -> list[Array]:
    """Return values of one vector, and of the transform of another, at the same places."""
    whole = b.size // chunk
    chunks = min(b.size >> 4, _SAMPLED) // chunk
    # Multiples of the golden ratio are evenly spread modulo 1, and follow no period of
    # the vector.
    places = (np.arange(chunks) * _GOLDEN % 1 * whole).astype(np.intp)
    one, other = (
        vector[: whole * chunk].reshape(whole, chunk)[places].reshape(-1)
        for vector in (a, b)
    )
    hadamard(other, other, chunk)
    # The step is odd, so that all coefficients of a chunk count alike.
    return [one[::17], other[::17]]


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
    positions, sums = empty_entries(room, out.dtype)
    kinds = out.view(form.signed), form.mask, form.signed.type(floor)
    count, done = add_and_compact(a, factor, b, out, *kinds, first, positions, sums)
    return positions[: int(count)], sums[: int(count)], out.size - int(done)
