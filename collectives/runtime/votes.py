"""Votes: the number of ranks that contributed each entry of a sum, exact up to 2^24 ranks.

They are counted on a rank that has the vectors of all ranks: on every rank, or on the
owner of a share, which then sends them in a byte each, with their positions in its
share. In other schedules the ranks also send the indices, without values, to the
owners.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from collectives.planning.partition import Bounds
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import Array
from mpicomp.arrays.device import namespace
from mpicomp.vector import SparseVector, places_of


def gather_votes(
    total: SparseVector, counts: SparseVector, bounds: Bounds, group: Group
) -> Steps[Array]:
    """Return the votes for each entry of a sum that all ranks have, as int64, from the counts of the shares' owners.

    counts: of this rank's share, float32. An owner sends its most frequent count once,
    without indices.
    """
    shares = [slice(*ends) for ends in pairwise(places_of(total, bounds))]
    votes: Array = namespace(total.values).zeros(total.nnz, np.int64)
    own = votes[shares[group.rank]]
    own[np.searchsorted(total.indices[shares[group.rank]], counts.indices)] = (
        counts.values
    )
    usual = int(np.bincount(own).argmax()) if own.size else 0
    others = np.flatnonzero(own != usual)
    sent = SparseVector(others, own[others].astype(np.float32), own.size)
    gathered = yield from group.gather(sent, usual)
    for share, (differing, count) in zip(shares, gathered, strict=True):
        votes[share] = count
        # A vector without entries has values of the width of the sum.
        votes[share][differing.indices] = differing.values.reshape(-1)
    return votes


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
