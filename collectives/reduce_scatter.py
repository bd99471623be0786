"""Sparse reduce-scatter: every rank gets the sum on its share of the index space.

Source: the split phase of SparCML (C. Renggli et al., SC 2019, arXiv 1802.08021).

Rounds: one step of P - 1 messages a rank. Bytes sent by a rank: (P-1)/P k s, when its k entries are spread evenly.
Invariant: an owner adds what the ranks hold of its share in rank order: the same bits in every run.

Differences from the paper: the parts are sent to their owners directly in one step, and each says how long it is; the
owners of an uneven gradient get uneven work (the ranges are of equal length).
"""

from typing import Any

from collectives.channel import Channel, Offer
from collectives.operation import begin
from collectives.partition import cut, equal_ranges
from collectives.progress import Request
from collectives.transport import Steps
from mpicomp.vector import SparseVector, add_up


def sparse_reduce_scatter(vector: SparseVector, comm: Any, *, algorithm: str = "auto") -> SparseVector:
    """Sum the vectors of all ranks, and return on each rank the part of the sum that it owns.

    vector: of one length and dtype on all ranks; any number of entries, also none. comm: an mpi4py intracommunicator.
    algorithm: "auto" or "split".

    Returns a vector of the same length with the entries of this rank's range only, at their own indices: rank r of P
    owns n r // P <= index < n (r + 1) // P.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when length, dtype or algorithm differ. TypeError at once when `comm` is no intracommunicator.
    """
    return sparse_ireduce_scatter(vector, comm, algorithm=algorithm).wait()


def sparse_ireduce_scatter(vector: SparseVector, comm: Any, *, algorithm: str = "auto") -> Request[SparseVector]:
    """Start `sparse_reduce_scatter` and return its Request; leave the vector's arrays alone before it has ended."""

    def steps(offer: Offer, channel: Channel) -> Steps[SparseVector]:
        return (yield from split(offer, channel)).vector

    return begin("sparse_reduce_scatter", {"split": steps}, vector, comm, algorithm)


def split(offer: Offer, channel: Channel) -> Steps[Offer]:
    """Send every owner its part, and add up what the ranks hold of this rank's; the largest k comes with it."""
    parts = cut(offer.vector, equal_ranges(offer.vector.length, channel.size))
    offers = yield from channel.all_to_all([Offer(part, offer.k) for part in parts])
    return Offer(add_up([theirs.vector for theirs in offers]), max(theirs.k for theirs in offers))
