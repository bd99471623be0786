"""The largest magnitudes of each chunk of consecutive values: exact, a block of threads for each chunk."""

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import Array, in_tiles, launch, zeros
from mpicomp.kernels.device.selection import Found
from mpicomp.kernels.host.bits import FORMATS


def largest_in_chunks(values: Array, k: int, chunk: int, last: int, *, threads: int | None = None) -> Found:
    """Return the `k` largest of each chunk, `last` of a shorter one, as `mpicomp.kernels.host.largest_in_chunks` does.

    threads: ignored. Chunks of up to 4096 values, 2048 of float64, are read once.
    """
    form = FORMATS[values.dtype]
    bits, room = values.view(form.keys), values.size // chunk * k + last
    positions, kept = cupy.empty(room, np.intp), cupy.empty(room, form.keys)
    if not values.size:
        return positions[:0], kept[:0].view(values.dtype)
    chunks = in_tiles(values.size, chunk)
    total, ticket, states = zeros(1, 1, chunks)
    limits, work = (form.mask, form.width, k, chunk, last), (total, ticket, states, chunks)
    launch("largest_in_chunks", [bits.dtype], chunks, bits, bits.size, *limits, positions, kept, room, *work)
    found = int(total.get()[0])
    return positions[:found], kept[:found].view(values.dtype)
