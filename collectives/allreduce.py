"""Sparse allreduce: the exact sum of all ranks' vectors on every rank.

Sources: SparCML (C. Renggli et al., SC 2019, arXiv 1802.08021) for recursive doubling, split + allgather and split +
dense allgather; R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005, for halving and doubling.

Rounds and bytes: README.md beside this file. Invariant: each algorithm adds in an order that depends on the number
of ranks alone, and an entry is added up in one place or, bit for bit alike, in several: all ranks hold the same bits.

Differences from the papers: any number of ranks; parts of unequal size; a piece travels as a bitmap or a dense range as
soon as its own count makes that smaller.
"""

from functools import partial
from typing import Any

from collectives import tuning
from collectives.channel import Channel, Offer
from collectives.operation import Algorithm, begin
from collectives.partition import cut, equal_ranges
from collectives.patterns import add, doubling, folded
from collectives.progress import Request
from collectives.reduce_scatter import split
from collectives.schedule import halving
from collectives.transport import Steps
from mpicomp.vector import SparseVector, add_up, join


def sparse_allreduce(vector: SparseVector, comm: Any, *, algorithm: str = "auto") -> SparseVector:
    """Sum the vectors of all ranks on all ranks, exactly: no entry of the union is dropped.

    vector: of one length and dtype on all ranks; any number of entries, also none. comm: an mpi4py intracommunicator.
    algorithm: "allgather", "recursive_doubling", "split_allgather", "recursive_halving", "dense", or "auto", which
    takes one by `collectives.tuning.choose_allreduce` after telling each other the counts (ceil(lg P) small messages).

    A named algorithm is compared with what the other ranks named before it starts, which takes as many small messages.

    Returns the sum, the same bits on every rank, and in every run of one algorithm. Entries whose sum is zero stay in
    it; "dense" has every position as an entry. It may share memory with `vector`.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when length, dtype or algorithm differ. TypeError at once when `comm` is no intracommunicator.
    """
    return sparse_iallreduce(vector, comm, algorithm=algorithm).wait()


def sparse_iallreduce(vector: SparseVector, comm: Any, *, algorithm: str = "auto") -> Request[SparseVector]:
    """Start `sparse_allreduce` and return its Request; do not change the vector's arrays before it has ended."""
    named = {name: partial(confirmed, steps) for name, steps in ALGORITHMS.items()}
    return begin("sparse_allreduce", {"auto": auto, **named}, vector, comm, algorithm)


def auto(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Tell each other the counts, and run what they suggest."""
    if channel.size <= 2:
        return (yield from recursive_doubling(offer, channel))
    counts = [theirs.k for theirs in (yield from channel.gather(Offer(channel.nothing(), offer.vector.nnz)))]
    if channel.broken:
        return offer.vector
    return (yield from ALGORITHMS[tuning.choose_allreduce(offer.vector.length, counts)](offer, channel))


def confirmed(steps: Algorithm[SparseVector], offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Run a named algorithm once it is clear that all ranks named it: the schedules of two would not meet."""
    if not (yield from channel.agree()):
        return offer.vector
    return (yield from steps(offer, channel))


def allgather(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Gather all vectors everywhere, and add them up on every rank."""
    offers = yield from channel.gather(offer)
    return add_up([theirs.vector for theirs in offers])


def recursive_doubling(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Add the partner's sum over doubling distances."""
    return (yield from folded(offer, channel, add, partial(doubling, channel=channel, combine=add))).vector


def split_allgather(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Let every rank add up its share, and gather the shares."""
    share = yield from split(offer, channel)
    shares = yield from channel.gather(share)
    return join([theirs.vector for theirs in shares])


def dense(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Let every rank add up its share, and gather the shares as dense pieces."""
    share = (yield from split(offer, channel)).vector
    first, end = equal_ranges(share.length, channel.size)[channel.rank : channel.rank + 2]
    pieces = yield from channel.gather(Offer(share.filled(first, end)))
    return join([theirs.vector for theirs in pieces])


def recursive_halving(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Halve the range that is held with a partner over halving distances, adding; then double it back."""

    def core(offer: Offer) -> Steps[Offer]:
        low, high = 0, channel.core  # in shares of the index space
        bounds = equal_ranges(offer.vector.length, channel.core)
        for partner in halving(channel.rank, channel.core):
            middle = (low + high) // 2
            lower, upper = cut(offer.vector, [bounds[low], bounds[middle], bounds[high]])
            keep, give = (lower, upper) if channel.rank < partner else (upper, lower)
            low, high = (low, middle) if channel.rank < partner else (middle, high)
            offer = add(Offer(keep), (yield from channel.exchange(Offer(give), partner)))
        return (yield from doubling(offer, channel, add))  # disjoint ranges: to add is to put together

    return (yield from folded(offer, channel, add, core)).vector


ALGORITHMS = {
    "allgather": allgather,
    "recursive_doubling": recursive_doubling,
    "split_allgather": split_allgather,
    "recursive_halving": recursive_halving,
    "dense": dense,
}
