"""Sparse allgather: every rank gets every rank's vector.

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE TPDS 8(11), 1997: the dissemination allgather, for any number of ranks.

Rounds: ceil(lg P). Bytes sent by a rank: (P-1) k s on average, when each brings k entries of s bytes.
Invariant: before round j a rank holds the blocks of the 2^j ranks from its own on.

Differences from the paper: parts may differ in size and be empty; a block says itself how long it is, and a message
carries several blocks behind each other, so that no round is spent on sizes.
"""

from typing import Any

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin
from collectives.progress import Request
from mpicomp.vector import SparseVector


def sparse_allgather(
    vector: SparseVector, comm: Any, *, algorithm: str = "auto", codec: str = "auto"
) -> list[SparseVector]:
    """Gather the vectors of all ranks on all ranks.

    vector: of numbers or of rows, of one length, width and dtype on all ranks; any number of entries, also none.
    comm: an mpi4py intracommunicator.
    algorithm: "auto" or "dissemination".
    codec: how vectors are written in messages: "plain", "quick" (a range or a bitmap where that is smaller), "smallest"
    (all formats of `mpicomp.codec`, none of which loses a bit), or "auto": "quick" inside a node, else "smallest".

    Returns one SparseVector a rank, in rank order, the same bits on every rank.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when what must be the same differs. TypeError at once when `comm` is no intracommunicator.
    """
    return sparse_iallgather(vector, comm, algorithm=algorithm, codec=codec).wait()


def sparse_iallgather(
    vector: SparseVector, comm: Any, *, algorithm: str = "auto", codec: str = "auto"
) -> Request[list[SparseVector]]:
    """Start `sparse_allgather` and return its Request; do not change the vector's arrays before it has ended."""
    return begin("sparse_allgather", {"dissemination": dissemination}, vector, comm, algorithm, codec=codec)


def dissemination(offer: Offer, channel: Channel) -> Steps[list[SparseVector]]:
    """Pass on what is held over doubling distances; see the head of this file."""
    offers = yield from channel.gather(offer)
    return [theirs.vector for theirs in offers]
