"""The largest magnitudes of each segment of a vector, or of chunks of it: exact, a block of threads for each chunk."""

from collections.abc import Sequence
from itertools import pairwise

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import Array, in_tiles, launch, zeros
from mpicomp.kernels.device.merging import add_parts
from mpicomp.kernels.device.selection import Found, largest
from mpicomp.kernels.host.bits import FORMATS

# values; a block of threads would take too long to select from more of them
_LONG = 1 << 16


def largest_in_segments(
    values: Array,
    bounds: Sequence[int],
    k: Sequence[int],
    chunk: Sequence[int],
    last: Sequence[int],
    *,
    summands: tuple[Array, float, Sequence[Array]] | None = None,
    threads: int | None = None,
) -> Found:
    """Return the largest of each chunk of each segment, as `mpicomp.kernels.host.largest_in_segments` does.

    threads: ignored. A launch or a few for each segment, and for each long chunk.
    """
    if summands is not None:
        add_parts(*summands, values)
    found = []
    for row, (first, end) in enumerate(pairwise(bounds)):
        size = min(chunk[row], end - first)
        if size and size <= _LONG and size < end - first:
            positions, kept = _largest_in_chunks(
                values[first:end], k[row], size, last[row]
            )
            found.append((positions + first if first else positions, kept))
            continue
        for start in range(first, end, max(1, size)):
            part = values[start : min(start + size, end)]
            positions, kept = largest(
                part, k[row] if part.size == chunk[row] else last[row]
            )
            found.append((positions + start if start else positions, kept))
    if len(found) == 1:
        return found[0]
    if not found:
        return cupy.empty(0, np.intp), values[:0].copy()
    return (
        cupy.concatenate([each[0] for each in found]),
        cupy.concatenate([each[1] for each in found]),
    )


def _largest_in_chunks(values: Array, k: int, chunk: int, last: int) -> Found:
    """Return the `k` largest of each chunk, `last` of a shorter one; chunks of up to 4096 values are read once."""
    form = FORMATS[values.dtype]
    bits, room = values.view(form.keys), values.size // chunk * k + last
    positions, kept = cupy.empty(room, np.intp), cupy.empty(room, form.keys)
    if not values.size:
        return positions[:0], kept[:0].view(values.dtype)
    chunks = in_tiles(values.size, chunk)
    total, ticket, states = zeros(1, 1, chunks)
    limits, work = (
        (form.mask, form.width, k, chunk, last),
        (total, ticket, states, chunks),
    )
    launch(
        "largest_in_chunks",
        [bits.dtype],
        chunks,
        bits,
        bits.size,
        *limits,
        positions,
        kept,
        room,
        *work,
    )
    found = int(total.get()[0])
    return positions[:found], kept[:found].view(values.dtype)
