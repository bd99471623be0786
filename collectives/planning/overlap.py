"""How alike the supports of the ranks are, from their entries in a few windows of the index space.

The windows are the same on all ranks, so they show which entries are in several vectors: the
union of all entries, over their number, is that of those in the windows. Pure functions of what
all ranks know.
"""

import math
from collections.abc import Sequence

import numpy as np

from mpicomp.arrays import Array

WINDOWS = 32
# Expected entries of a rank in all windows: with those of 8 ranks the union is known
# within 3 %.
SHOWN = 128
# With fewer entries of a rank, the windows are too large a part of what is sent.
LEAST_ENTRIES = 4096


def windows(length: int, entries: int) -> Array:
    """Return first position and end of each window, in order, for ranks with so many entries.

    The windows of a rank with more entries are parts of those of one with fewer.

    Args:
        length: positions of the index space.
        entries: at least `LEAST_ENTRIES`.
    """
    stripe = length // WINDOWS
    halvings = max(0, math.ceil(math.log2(entries / SHOWN)))
    span = max(1, stripe >> halvings)
    # Multiples of the golden ratio have no period, as patterns of the index space may
    # have.
    starts = [
        stripe * window + int(0.9 * stripe * (0.618 * window % 1))
        for window in range(WINDOWS)
    ]
    return np.array([edge for start in starts for edge in (start, start + span)])


def inside(indices: Array, edges: Array) -> Array:
    """Return the indices in the windows with these edges."""
    places = np.searchsorted(indices, edges.astype(indices.dtype)).tolist()
    pairs = zip(places[::2], places[1::2], strict=True)
    return np.concatenate([indices[first:end] for first, end in pairs])


def outside(indices: Array, edges: Array) -> Array:
    """Return the other indices."""
    others: Array = indices[np.searchsorted(edges, indices, side="right") % 2 == 0]
    return others


def likely_union(
    length: int, counts: Sequence[int], indices: Sequence[Array]
) -> float | None:
    """Return the likely number of entries of the sum of all ranks' vectors; None if too little is shown of it.

    It is that of independent supports unless what is shown differs from it by more than
    chance, so that sums that are alike, such as the buckets of a step, are chosen alike.

    Args:
        length: positions of the index space.
        counts: entries of each rank.
        indices: of each rank, with all that it has in its windows.
    """
    edges = windows(length, max(counts))
    shown = [inside(each, edges) for each in indices]
    if not all(each.size for each in shown):
        return None
    every = np.concatenate(shown)
    distinct = np.unique(every).size / every.size
    total = sum(counts)
    absent = sum(math.log1p(-min(count, length - 0.5) / length) for count in counts)
    independent = min(1.0, -length * math.expm1(absent) / total)
    noise = math.sqrt(independent * (1 - independent) / every.size)
    if abs(distinct - independent) < 3 * noise:
        distinct = independent
    return total * distinct
