"""gTop-k: the k largest entries of a sum, without making the sum.

Source: S. Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359). There a tree reduces to one rank and a broadcast follows; here the ranks
double recursively, which halves the rounds and leaves no rank idle.

Rounds: floor(lg P), and 2 more when P is no power of two. Bytes sent by a rank: at most k s a round.
The published tree is here as the baseline. `exact` is a reduce-scatter, a radix search for the k-th largest magnitude,
with an Allreduce of 256 counts a digit (4 for float32), and an allgather; two where ties at the k-th are split.

Invariant: after round j the 2^(j+1) ranks of a block hold the same vector, bit for bit, because merge() is commutative
and top_k() breaks ties by index; so they drop the same entries, and each keeps its share of those as `rejected`.

Differences from the paper: any P; unequal k; nothing is lost. But for `exact`, the result is an approximation of the k
largest of the sum, as in the paper: an entry that is small in every block is dropped though its sum may be large.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin, sound
from collectives.partition import equal_ranges
from collectives.patterns import agreed, doubling, folded, hand_down, reduce_up
from collectives.progress import Request
from collectives.reduce_scatter import split
from mpicomp.arrays import kernels_for, to_numpy
from mpicomp.vector import SparseVector, join, merge, top_k

if TYPE_CHECKING:
    from mpicomp.kernels.host import Search

Result = tuple[SparseVector, SparseVector]


def gtopk_allreduce(
    vector: SparseVector, comm: Any, k: int | None = None, *, algorithm: str = "auto", codec: str = "auto"
) -> Result:
    """Sum the vectors of all ranks and select k entries of large magnitude, the same on every rank.

    vector: of one length and dtype on all ranks, not of rows; any number of entries, also none. comm: an mpi4py
    intracommunicator. k: the same on all ranks; None takes the largest number of entries that a rank brings, of the
    ranks that a step joins (so at the end, of all).
    algorithm: "recursive_doubling" (also "auto"), "tree", or "exact", which gives the true k largest of the sum.
    codec: how vectors are written in messages: "plain", "quick" (a range or a bitmap where that is smaller), "smallest"
    (all formats of `mpicomp.codec`, none of which loses a bit), or "auto": "quick" inside a node, else "smallest".

    Returns (result, rejected). result: at most k entries, the same bits on every rank. rejected: what this rank must
    keep, for example in its residual. result + the sum of all ranks' rejected is the sum of all vectors: nothing is
    lost (to the last bit where the additions are exact, as on integer-valued floats).
    Both may share memory with `vector`.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when length, dtype, k or algorithm differ. TypeError at once when `comm` is no intracommunicator.
    """
    return gtopk_iallreduce(vector, comm, k, algorithm=algorithm, codec=codec).wait()


def gtopk_iallreduce(
    vector: SparseVector, comm: Any, k: int | None = None, *, algorithm: str = "auto", codec: str = "auto"
) -> Request[Result]:
    """Start `gtopk_allreduce` and return its Request; do not change the vector's arrays before it has ended."""
    terms: dict[str, Any] = {} if k is None else {"k": k}
    return begin("gtopk_allreduce", ALGORITHMS, vector, comm, algorithm, codec=codec, prepare=numbers, **terms)


def numbers(vector: Any, terms: dict[str, Any], size: int) -> SparseVector:
    """Return the vector if it is sound; raise ValueError for rows, which have no magnitude to select by."""
    checked = sound(vector, terms, size)
    if checked.width is not None:
        raise ValueError(f"vector has rows of {checked.width} values: gTop-k selects numbers; take sparse_allreduce")
    return checked


class Selection:
    """The k largest of what this rank holds, and what it has to keep of what that dropped."""

    def __init__(self, offer: Offer, rank: int) -> None:
        kept, self.rejected = top_k(offer.vector, offer.k)
        self.offer, self._rank = Offer(kept, offer.k), rank

    def combine(self, ours: Offer, theirs: Offer, block: int) -> Offer:
        """Return the k largest of the sum; `block` ranks drop the same, and this one keeps its share of that."""
        k = max(ours.k, theirs.k)
        kept, dropped = top_k(merge(ours.vector, theirs.vector), k)
        self.rejected = merge(self.rejected, dropped.every(block, self._rank % block))
        return Offer(kept, k)


def recursive_doubling(offer: Offer, channel: Channel) -> Steps[Result]:
    """Merge with a partner at doubling distance and keep the k largest; see the head of this file."""
    mine = Selection(offer, channel.rank)
    core = partial(doubling, channel=channel, combine=mine.combine)
    result = yield from folded(mine.offer, channel, mine.combine, core)
    return result.vector, mine.rejected


def tree(offer: Offer, channel: Channel) -> Steps[Result]:
    """Select on the way to rank 0, and broadcast: as published, but the rank that drops an entry keeps it."""
    if not (yield from agreed(channel)):
        return offer.vector, offer.vector
    mine = Selection(offer, channel.rank)
    total = yield from reduce_up(mine.offer, channel, mine.combine)
    result = yield from hand_down(total, channel)
    return result.vector, mine.rejected


def exact(offer: Offer, channel: Channel) -> Steps[Result]:
    """Add up every share on its owner, find the k-th largest over all, and gather what is at or above it.

    Ties at the threshold go to the lowest indices: the owners' ranges lie in rank order, so where not all are taken the
    owners first tell how many each has. Owners keep what they reject.
    """
    with channel.turn() as turn:
        if not (yield from agreed(channel)):
            return offer.vector, offer.vector
        total = yield from split(offer, channel, equal_ranges(offer.vector.length, channel.size))
        yield (turn,)
        share, _ = total.vector.divide(np.flatnonzero(total.vector.values))  # what cancelled out is nowhere missing
        kernels = kernels_for(share.values)
        keys, width = kernels.magnitude_keys(share.values)
        threshold, ties, there = yield from over_all_ranks(kernels.kth_largest(keys, total.k, width), total.k, channel)
    if ties < there:
        tied = yield from channel.gather(Offer(channel.nothing(), int(np.count_nonzero(keys == threshold))))
        ties = max(0, ties - sum(theirs.k for theirs in tied[: channel.rank]))
    kept, rejected = share.divide(kernels.select(keys, threshold, ties))
    result = yield from channel.gather(Offer(kept))
    return join([theirs.vector for theirs in result]), rejected


def over_all_ranks(search: "Search", k: int, channel: Channel) -> Steps[tuple[int, int, int]]:
    """Run a radix search over the keys of all ranks: it goes by the sum of their histograms.

    Returns what the search does, and how many keys equal the threshold: those that share every digit with it.
    """
    counts, alike = next(search), 0
    while True:
        reduction = channel.endpoint.reduce(to_numpy(counts))
        yield (reduction,)
        alike, k = sharing(reduction.total, k)
        try:
            counts = search.send(reduction.total)
        except StopIteration as end:
            threshold, ties = end.value
            return threshold, ties, alike


def sharing(counts: Any, k: int) -> tuple[int, int]:
    """Return how many keys have the digit of the k-th largest, and which one of them it is; (0, k) without so many."""
    descending = counts[::-1]
    ends = np.cumsum(descending)
    place = int(np.searchsorted(ends, k))
    if place == ends.size:
        return 0, k
    return int(descending[place]), k - int(ends[place] - descending[place])


ALGORITHMS = {"recursive_doubling": recursive_doubling, "tree": tree, "exact": exact}
