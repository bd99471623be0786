"""Votes: the number of ranks that contributed each entry of a sum, exact up to 2^24 ranks.

They are counted on a rank that has the vectors of all ranks: on every rank, or on the
owner of a share, which then sends them in a byte each, with their positions in its
share. In other schedules the ranks also send the indices, without values, to the
owners.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.planning.partition import Bounds, cut
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import Array, namespace
from mpicomp.vector import SparseVector, join, places_of


def gather_votes(
    total: SparseVector, counts: SparseVector, bounds: Bounds, group: Group
) -> Steps[Array]:
    """Return the votes for each entry of a sum that all ranks have, as int64, from the counts of the shares' owners.

    counts: of this rank's share, float32. An owner sends its most frequent count once,
    without indices.
    """
    supports = cut(total, bounds)
    own = namespace(total.values).zeros(supports[group.rank].nnz, np.int64)
    if own.size == counts.nnz:  # the same entries
        own[...] = counts.values
    else:
        own[np.searchsorted(supports[group.rank].indices, counts.indices)] = (
            counts.values
        )
    usual = int(np.bincount(own).argmax()) if own.size else 0
    others = np.flatnonzero(own != usual)
    sent = SparseVector(others, own[others].astype(np.float32), own.size)
    parts = []
    for support, (theirs, count) in zip(
        supports, (yield from group.gather(sent, usual)), strict=True
    ):
        votes = namespace(total.values).full(support.nnz, count, np.float32)
        # no entries: of the shape of the sum
        votes[theirs.indices] = theirs.values.reshape(-1)
        parts.append(SparseVector(support.indices, votes, support.length))
    return join(parts).values.astype(np.int64)


def contributors(
    total: SparseVector, votes: Any, ranks: int, dense_ranges: Sequence[tuple[int, int]]
) -> Array:
    """Return the number of contributors of each entry of a sum, in its dtype, at least 1.

    dense_ranges: ranges in which every rank contributes all values, including zeros. Raises
    TypeError without votes.
    """
    if votes is None:
        raise TypeError(
            "the collective returned no votes, by which average='contributors' divides: expected "
            "collectives.Sum(value, votes=votes)"
        )
    counts: Array = np.maximum(votes, 1).astype(total.dtype)
    for bounds in dense_ranges:
        first, end = places_of(total, bounds)
        counts[first:end] = ranks
    return counts
