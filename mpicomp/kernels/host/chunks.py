"""The largest magnitudes of each chunk of consecutive values: exact, in one read of the data from memory.

A short chunk stays in the first-level cache while it is selected from. The magnitudes at or above a floor are
compacted, 64 values compared at a time, and the selection is among those. The floor is a little below the threshold of
the chunk before; if fewer values reach it than are wanted, the compaction is repeated with all values that are not
zero. The result does not depend on the floor.
"""

import numpy as np

from mpicomp.kernels.host.bits import FORMATS, Array, as_writable, jit
from mpicomp.kernels.host.instructions import WORD
from mpicomp.kernels.host.selection import Found, compact, joined, keep_at
from mpicomp.threads import in_pieces


def largest_in_chunks(values: Array, k: int, chunk: int, last: int, *, threads: int | None = None) -> Found:
    """Return the positions of the `k` largest magnitudes of each chunk, in increasing order, and the values there.

    values, ties, zeros, NaN and infinities, threads: as for `largest`. chunk: consecutive values, at least `k`, and few
    enough to fit the cache. last: how many are selected from a shorter chunk at the end, at least 1.
    """
    form = FORMATS[values.dtype]
    bits = as_writable(values).view(form.signed)
    slack = 1 << max(0, np.finfo(values.dtype).nmant - 2)  # of a floor: a quarter of a power of two

    def selected(start: int, end: int) -> Found:
        room = (end - start) // chunk * k + last + 1  # one more element, for `keep_at`
        positions, kept = np.empty(room, np.intp), np.empty(room, form.signed)
        places, candidates = np.empty(chunk + WORD, np.intp), np.empty((2, chunk + WORD), form.signed)
        limits, work = (k, chunk, last, slack), (places, *candidates)
        count = int(_largest_in_chunks(bits[start:end], form.mask, form.width, start, *limits, *work, positions, kept))
        return positions[:count], kept[:count]

    positions, found = joined(in_pieces(selected, bits.size, threads, step=chunk))
    return positions, found.view(values.dtype)


@jit
def _largest_in_chunks(  # type: ignore[no-untyped-def]
    bits, mask, width, first, k, chunk, last, slack, places, candidates, keys, positions, kept
):
    """Return how many entries were selected. places, candidates, keys: buffers for 64 values more than a chunk has."""
    integer = bits.dtype.type
    count, floor = np.uint64(0), integer(1)
    for start in range(0, bits.size, chunk):
        part = bits[start : start + chunk]
        wanted = k if part.size == chunk else last
        found = np.int64(compact(part, mask, floor, first + start, places, candidates)[0])
        if found < wanted and floor > 1:
            found = np.int64(compact(part, mask, integer(1), first + start, places, candidates)[0])
        threshold, ties = integer(0), 0
        if found > wanted:
            threshold, ties = _kth_largest(candidates[:found], mask, width, wanted, keys[:found])
        count, _ = keep_at(places[:found], candidates[:found], mask, threshold, ties, positions, kept, count)
        floor = integer(max(1, np.int64(threshold) - slack))
    return count


@jit
def _kth_largest(bits, mask, width, k, keys):  # type: ignore[no-untyped-def]
    """Return the k-th largest magnitude, and how many ties with it are among the `k` largest.

    One bit is found in each pass, the highest first: for few values in the cache, no branch is faster than few passes.
    """
    for i in range(bits.size):
        keys[i] = bits[i] & mask
    threshold, above = keys.dtype.type(0), 0
    for bit in range(width - 1, -1, -1):
        raised = keys.dtype.type(threshold | keys.dtype.type(1 << bit))
        reached = _count_reaching(keys, raised)
        if reached >= k:
            threshold = raised
        else:
            above = reached  # in the end: the keys above the threshold
    return threshold, k - above


@jit
def _count_reaching(keys, floor):  # type: ignore[no-untyped-def]
    count = np.int32(0)
    for i in range(keys.size):
        count = np.int32(count + np.int32(keys[i] >= floor))
    return count
