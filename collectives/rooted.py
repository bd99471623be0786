"""Sparse reduce and broadcast: the two halves of the server pattern.

Source: binomial trees as in R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005.

Rounds: ceil(lg P) that carry the vectors, up to the root or down from it, after ceil(lg P) of 64 bytes a rank in which
the call signatures are compared: the tree depends on the root, and most ranks communicate with few others in it. Bytes
sent by a rank: a reduce sends the sum of its subtree once; a broadcast the vector once to each child, up to ceil(lg P)
times at the root.

Differences from the paper: any root and any number of ranks; vectors of unequal size; a mismatch raises everywhere.
"""

from typing import Any

import numpy as np

from collectives.collective import Call, collective
from collectives.patterns import add, hand_down, reduce_up
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.vector import SparseVector, count_up


def sum_at_the_root(outcome: Any) -> tuple[list[Any], list[Any]]:
    """Promise the sum on the root, with or without votes, and nothing on the other ranks."""
    return [], [] if outcome is None else [outcome[0] if isinstance(outcome, tuple) else outcome]


@collective(sum_at_the_root)
def sparse_reduce(
    vector: SparseVector,
    comm: Any,
    root: int = 0,
    *,
    algorithm: str = "auto",
    codec: str = "auto",
    votes: bool = False,
) -> Call[Any]:
    """Sum the vectors of all ranks on the root, exactly.

    vector: of numbers or of rows, of one length, width and dtype on all ranks; any number of entries, also none. root:
    the same on all ranks. algorithm: "auto" or "tree". votes: count the ranks that contribute each entry as well; the
    same on all ranks.

    Returns the sum on the root, and None on the other ranks. With votes the root gets (sum, counts): int64, one for
    each entry.
    """
    return Call(vector, comm, algorithm, codec, {"root": root, "votes": votes})


sparse_ireduce = sparse_reduce.nonblocking


@collective()
def sparse_bcast(
    vector: SparseVector | None, comm: Any, root: int = 0, *, algorithm: str = "auto", codec: str = "auto"
) -> Call[SparseVector]:
    """Broadcast the root's vector to all ranks.

    vector: any on the root; length and dtype are the root's. Other ranks' `vector` is ignored, except for its device,
    where the result is placed (None will do; an exception says that the rank failed). root: the same on all ranks.
    algorithm: "auto" or "tree".

    Returns the root's vector on every rank, the same bits; on the root it is `vector` itself.
    """
    return Call(vector, comm, algorithm, codec, {"root": root}, follow=True)


sparse_ibcast = sparse_bcast.nonblocking


@sparse_reduce.algorithm
def tree(vector: SparseVector, group: Group, root: int, votes: bool = False) -> Steps[Any]:
    """Add up towards the root: the vectors, and with votes a one for each entry."""
    total, _ = yield from reduce_up((vector, 0), group, add, root)
    if not votes:
        return total if group.rank == root else None
    counts, _ = yield from reduce_up((count_up([vector]), 0), group, add, root)
    return (total, counts.values.reshape(-1).astype(np.int64)) if group.rank == root else None


def bcast(vector: SparseVector, group: Group, root: int) -> Steps[SparseVector]:
    """Hand the root's vector down."""
    return (yield from hand_down(vector, group, root))


sparse_bcast.algorithm(bcast, name="tree")
