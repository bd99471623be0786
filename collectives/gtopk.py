"""gTop-k: the k largest entries of a sum, without making the sum.

Source: S. Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359). There a tree reduces to one rank and a broadcast follows; here the ranks
double recursively, which halves the rounds and leaves no rank idle.

Rounds: floor(lg P), and 2 more when P is no power of two. Bytes sent by a rank: at most k s a round.
The published tree is here as the baseline. `exact` is a reduce-scatter, after which the owners of the shares gather
their largest entries everywhere, and those that had none dropped in the selection send more (`largest_of_all`): as a
rule one allgather of few more than k. It searches for no threshold: the rounds of that carry nothing but counts (as in
P. Cao and Z. Wang, "Efficient top-k query calculation in distributed networks", PODC 2004). `exact_doubling` adds up
everything first: no round more than recursive doubling has, and as many bytes as the whole sum, so it is for few ranks,
fast links or few entries.

Invariant: after round j the 2^(j+1) ranks of a block hold the same vector, bit for bit, because merge() is commutative
and top_k() breaks ties by index; so they drop the same entries, and each keeps its share of those as `rejected`.

Differences from the paper: any P; unequal k; nothing is lost. But for the exact ones, the result is an approximation of
the k largest of the sum, as in the paper: an entry that is small in every block is dropped though its sum may be large.
"""

from functools import partial
from typing import Any

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin, sound
from collectives.partition import Ranges, equal_ranges, likely
from collectives.patterns import agreed, doubling, folded, hand_down, reduce_up
from collectives.progress import Request
from collectives.reduce_scatter import scatter
from mpicomp.vector import SparseVector, add_up, join, merge, top_k, within, without_zeros

Result = tuple[SparseVector, SparseVector]


def gtopk_allreduce(
    vector: SparseVector, comm: Any, k: int | None = None, *, algorithm: str = "auto", codec: str = "auto"
) -> Result:
    """Sum the vectors of all ranks and select k entries of large magnitude, the same on every rank.

    vector: of one length and dtype on all ranks, not of rows; any number of entries, also none. comm: an mpi4py
    intracommunicator. k: at least 1, the same on all ranks; None takes the largest number of entries that a rank
    contributes, of the ranks that a step joins (so at the end, of all).
    algorithm: "recursive_doubling" (also "auto"), "tree", or one that gives the true k largest of the sum: "exact",
    which sends the least, or "exact_doubling", which has the fewest rounds.
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
    return begin(
        "gtopk_allreduce", ALGORITHMS, vector, comm, algorithm, codec=codec, prepare=numbers, least_k=1, **terms
    )


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
    yield from agreed(channel)
    mine = Selection(offer, channel.rank)
    total = yield from reduce_up(mine.offer, channel, mine.combine)
    result = yield from hand_down(total, channel)
    return result.vector, mine.rejected


def exact_doubling(offer: Offer, channel: Channel) -> Steps[Result]:
    """Add up everything with partners at doubling distances, and select once, alike on every rank.

    Every rank keeps what it brought where the sum was dropped.
    """

    def combine(ours: Offer, theirs: Offer, block: int) -> Offer:
        return Offer(merge(ours.vector, theirs.vector), max(ours.k, theirs.k))

    core = partial(doubling, channel=channel, combine=combine)
    total = yield from folded(offer, channel, combine, core)
    result, dropped = top_k(without_zeros(total.vector), total.k)  # what cancelled out is nowhere missing
    return result, within(offer.vector, dropped)


def exact(offer: Offer, channel: Channel) -> Steps[Result]:
    """Add up every share on its owner, and select from what the owners have; see the head of this file.

    Owners keep what is rejected of their shares. The terms take no rounds of their own: every rank sends to every other
    one at once, and so hears of each (`collectives.agreement`).
    """
    shares = equal_ranges(offer.vector.length, channel.size)
    parts = yield from scatter(Offer(offer.vector, offer.vector.nnz), channel, shares)
    share = without_zeros(add_up([theirs.vector for theirs in parts]))  # what cancelled out is nowhere missing
    k = max(theirs.k for theirs in parts) if channel.terms.k is None else channel.terms.k
    entries, here = sum(theirs.k for theirs in parts), sum(theirs.vector.nnz for theirs in parts)
    del parts  # nearly k s of memory until the end otherwise
    return (yield from largest_of_all(share, k, likely(k * here / max(entries, 1), channel.size), shares, channel))


def largest_of_all(share: SparseVector, k: int, quota: int, shares: Ranges, channel: Channel) -> Steps[Result]:
    """Return the k largest of what all owners have, and what is rejected of this rank's share.

    The owners send their largest entries first, `quota` at once. An owner of which one is dropped has none left that
    could be chosen; from the others more is gathered: of what may yet be chosen as many as it has sent, all of which
    was chosen, or an even part of k. So about k entries travel in the first gathering, at most 2k + P in any other one,
    and there are at most ceil(lg P) + 2 of them in all.
    """
    left, chance, sent = share, min(share.nnz, k), 0
    result = rejected = channel.nothing
    waited = set(range(channel.size))  # the owners that may have more
    while waited:
        some, left = top_k(left, min(quota, chance))
        gathered = yield from channel.gather(Offer(some, chance - some.nnz))
        came = join([theirs.vector for theirs in gathered])
        result, dropped = top_k(merge(result, came), k)
        lost = shares.cut(dropped)
        rejected = merge(rejected, lost[channel.rank])
        waited = {rank for rank in waited if gathered[rank].k and not lost[rank].nnz}
        chance = within(left, top_k(merge(result, left), k)[0]).nnz if channel.rank in waited else 0
        sent += some.nnz
        quota = max(sent, -(-k // channel.size))
    return result, merge(rejected, left)


ALGORITHMS = {
    "recursive_doubling": recursive_doubling,
    "tree": tree,
    "exact": exact,
    "exact_doubling": exact_doubling,
}
