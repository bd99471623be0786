"""Sparse reduce and broadcast: the two halves of the server pattern.

Source: binomial trees as in R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005.

Rounds: ceil(lg P) that carry the vectors, up to the root or down from it, after ceil(lg P) of 64 bytes a rank in which
the terms are compared: the tree depends on the root, and most ranks hear of few others in it. Bytes sent by a rank: a
reduce sends the sum of its subtree once; a broadcast the vector once to each child, up to ceil(lg P) times at the root.

Differences from the paper: any root and any number of ranks; vectors of unequal size; a mismatch raises everywhere.
"""

from typing import Any

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin, sound
from collectives.patterns import add, hand_down, reduce_up
from collectives.progress import Request
from collectives.votes import counting, with_votes
from mpicomp.vector import SparseVector


def sparse_reduce(
    vector: SparseVector,
    comm: Any,
    root: int = 0,
    *,
    algorithm: str = "auto",
    codec: str = "auto",
    votes: bool = False,
) -> Any:
    """Sum the vectors of all ranks on the root, exactly.

    vector: of numbers or of rows, of one length, width and dtype on all ranks; any number of entries, also none.
    comm: an mpi4py intracommunicator.
    root: the same on all ranks. algorithm: "auto" or "tree".
    codec: how vectors are written in messages: "plain", "quick" (a range or a bitmap where that is smaller), "smallest"
    (all formats of `mpicomp.codec`, none of which loses a bit), or "auto": "quick" inside a node, else "smallest".
    votes: count the ranks that bring each entry as well; the same on all ranks.

    Returns the sum on the root, and None on the other ranks. With votes the root gets (sum, counts): int64, one for
    each entry.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when what must be the same differs. TypeError at once when `comm` is no intracommunicator.
    """
    return sparse_ireduce(vector, comm, root, algorithm=algorithm, codec=codec, votes=votes).wait()


def sparse_ireduce(
    vector: SparseVector,
    comm: Any,
    root: int = 0,
    *,
    algorithm: str = "auto",
    codec: str = "auto",
    votes: bool = False,
) -> Request[Any]:
    """Start `sparse_reduce` and return its Request; do not change the vector's arrays before it has ended."""
    terms: dict[str, Any] = {"root": root, "votes": votes}
    every, prepare = counting({"tree": reduce}), with_votes(sound)
    return begin("sparse_reduce", every, vector, comm, algorithm, codec=codec, prepare=prepare, **terms)


def sparse_bcast(
    vector: SparseVector | None, comm: Any, root: int = 0, *, algorithm: str = "auto", codec: str = "auto"
) -> SparseVector:
    """Hand the root's vector out to all ranks.

    vector: any on the root; what the other ranks give is not looked at (None will do;
    an exception says that the rank failed). comm, root, algorithm, codec,
    and what is raised: as for `sparse_reduce`; length and dtype are the root's.

    Returns the root's vector on every rank, the same bits; on the root it is `vector` itself.
    """
    return sparse_ibcast(vector, comm, root, algorithm=algorithm, codec=codec).wait()


def sparse_ibcast(
    vector: SparseVector | None, comm: Any, root: int = 0, *, algorithm: str = "auto", codec: str = "auto"
) -> Request[SparseVector]:
    """Start `sparse_bcast` and return its Request; do not change the vector's arrays before it has ended."""
    return begin("sparse_bcast", {"tree": bcast}, vector, comm, algorithm, codec=codec, root=root, follow=True)


def reduce(offer: Offer, channel: Channel) -> Steps[SparseVector | None]:
    """Compare the terms, and add up towards the root."""
    yield from channel.agree()
    total = yield from reduce_up(offer, channel, add, channel.root)
    return total.vector if channel.rank == channel.root else None


def bcast(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Compare the terms, and hand down what the root brings."""
    yield from channel.agree()
    return (yield from hand_down(offer, channel, channel.root)).vector
