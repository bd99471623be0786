"""gTop-k: the k largest entries of a sum, without making the sum.

Source: S. Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359). There a tree reduces to one rank and a broadcast follows; here the ranks
double recursively, which halves the rounds and leaves no rank idle.

Rounds: floor(lg P), and 2 more when P is no power of two. Bytes sent by a rank: at most k s a round.
Invariant: after round j the 2^(j+1) ranks of a block hold the same vector, bit for bit, because merge() is commutative
and top_k() breaks ties by index; so they drop the same entries, and each keeps its share of those as `rejected`.

Differences from the paper: any P; unequal k; nothing is lost. The result is an approximation of the k largest of the
sum, as in the paper: an entry that is small in every block is dropped on the way, though its sum may be large.
"""

from typing import Any

from collectives.agreement import Steps
from collectives.channel import Channel, Offer
from collectives.doubling import doubling
from collectives.operation import begin
from collectives.progress import Request
from mpicomp.vector import SparseVector, merge, top_k

Selection = tuple[SparseVector, SparseVector]


def gtopk_allreduce(vector: SparseVector, comm: Any, k: int | None = None, *, algorithm: str = "auto") -> Selection:
    """Sum the vectors of all ranks and select k entries of large magnitude, the same on every rank.

    vector: of one length and dtype on all ranks; any number of entries, also none. comm: an mpi4py intracommunicator.
    k: the same on all ranks; None takes the largest number of entries that a rank brings, of the ranks that a step
    joins (so at the end, of all).
    algorithm: "auto" or "recursive_doubling".

    Returns (result, rejected). result: at most k entries, the same bits on every rank. rejected: what this rank must
    keep, for example in its residual. result + the sum of all ranks' rejected is the sum of all vectors: nothing is
    lost (to the last bit where the additions are exact, as on integer-valued floats).
    Both may share memory with `vector`.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when length, dtype, k or algorithm differ. TypeError at once when `comm` is no intracommunicator.
    """
    return gtopk_iallreduce(vector, comm, k, algorithm=algorithm).wait()


def gtopk_iallreduce(
    vector: SparseVector, comm: Any, k: int | None = None, *, algorithm: str = "auto"
) -> Request[Selection]:
    """Start `gtopk_allreduce` and return its Request; do not change the vector's arrays before it has ended."""
    return begin("gtopk_allreduce", {"recursive_doubling": recursive_doubling}, vector, comm, algorithm, k)


def recursive_doubling(offer: Offer, channel: Channel) -> Steps[Selection]:
    """Merge with a partner at doubling distance and keep the k largest; see the head of this file."""
    kept, rejected = top_k(offer.vector, offer.k)

    def select(ours: Offer, theirs: Offer, block: int) -> Offer:
        nonlocal rejected
        k = max(ours.k, theirs.k)
        vector, dropped = top_k(merge(ours.vector, theirs.vector), k)
        rejected = merge(rejected, dropped.every(block, channel.rank % block))
        return Offer(vector, k)

    result = yield from doubling(Offer(kept, offer.k), channel, select)
    return result.vector, rejected
