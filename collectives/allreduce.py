"""Sparse allreduce: the exact sum of all ranks' vectors on every rank.

Sources: SparCML (C. Renggli et al., SC 2019, arXiv 1802.08021) for recursive doubling, split + allgather and split +
dense allgather; R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005, for halving and doubling.

Rounds and bytes: README.md beside this file. Invariant: each algorithm adds in an order that depends on the number of
ranks (and where nodes play a part, on their places) alone, and an entry is added up in one place or, bit for bit alike,
in several: all ranks hold the same bits.

Differences from the papers: any number of ranks; parts of unequal size; a piece travels as a bitmap or a dense range as
soon as its own count makes that smaller; shares that hold about as many entries each, wherever those stand; a survey
(`survey.py`) comes first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives import tuning
from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin, sound
from collectives.partition import Ranges, equal_ranges
from collectives.patterns import add, agreed, doubling, folded, hand_down, reduce_up
from collectives.progress import Request
from collectives.reduce_scatter import split
from collectives.schedule import halving
from collectives.survey import PARTITIONS, Survey, look_around
from collectives.votes import counting, with_votes
from mpicomp.arrays import beside, kernels_for, to_numpy
from mpicomp.vector import SparseVector, add_up

Choice = tuple[str, Survey]  # an algorithm, and what it has to know


def sparse_allreduce(
    vector: SparseVector,
    comm: Any,
    *,
    algorithm: str = "auto",
    partition: str = "auto",
    codec: str = "auto",
    votes: bool = False,
) -> Any:
    """Sum the vectors of all ranks on all ranks, exactly: no entry of the union is dropped.

    vector: of numbers or of rows, of one length, width and dtype on all ranks; any number of entries, also none.
    comm: an mpi4py intracommunicator.
    algorithm: "allgather", "recursive_doubling", "split_allgather", "recursive_halving", "dense", or "dense_mpi": MPI's
    own allreduce of the filled vector, which adds in MPI's order (see `dense_allreduce`); with the nodes in mind
    "node_leaders" or "node_lanes"; or "auto", which takes one by the profile of the communicator (`mpicomp tune`),
    without one by `collectives.tuning.choose_allreduce`.
    partition: how shares are cut where an algorithm cuts: "equal" ranges, "sampled" quantiles of where the entries
    stand, "hashed" blocks (in `split_allgather` and inside nodes; quantiles elsewhere), or "auto": equal ranges unless
    one would get over 1.25 times the mean, else quantiles. "dense" always cuts equal ranges, "dense_mpi" cuts none.
    codec: how vectors are written in messages: "plain", "quick" (a range or a bitmap where that is smaller), "smallest"
    (all formats of `mpicomp.codec`, none of which loses a bit), or "auto": "quick" inside a node, else "smallest".
    votes: count the ranks that bring each entry as well, for the bytes of one more value an entry; the same on all.

    Before anything else the ranks tell each other what they bring, in ceil(lg P) small messages; "auto" does without
    for up to 4 ranks (`collectives.tuning.without_survey`).

    Returns the sum, the same bits on every rank, and in every run of one algorithm. Entries whose sum is zero stay in
    it; "dense" and "dense_mpi" have every position as an entry. It may share memory with `vector`. With votes (sum,
    counts) is returned: int64, one for each entry.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when what must be the same differs. TypeError at once when `comm` is no intracommunicator.
    """
    return sparse_iallreduce(vector, comm, algorithm=algorithm, partition=partition, codec=codec, votes=votes).wait()


def sparse_iallreduce(
    vector: SparseVector,
    comm: Any,
    *,
    algorithm: str = "auto",
    partition: str = "auto",
    codec: str = "auto",
    votes: bool = False,
) -> Request[Any]:
    """Start `sparse_allreduce` and return its Request; do not change the vector's arrays before it has ended."""
    terms: dict[str, Any] = {"partition": partition, "votes": votes}
    return begin("sparse_allreduce", CHOICES, vector, comm, algorithm, codec=codec, prepare=PREPARE, **terms)


def with_partition(vector: Any, terms: dict[str, Any], size: int) -> SparseVector:
    """Return the vector if it is sound, and so is the partition among the terms."""
    if not (isinstance(terms["partition"], str) and terms["partition"] in PARTITIONS):
        raise ValueError(f"partition is {terms['partition']!r}: expected one of {list(PARTITIONS)}")
    return sound(vector, terms, size)


def auto(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Run what the survey suggests; few ranks need none, or by a profile no more than the sum of their counts."""
    return (yield from in_turn(partial(chosen, whole=True), offer, channel))


def in_turn(choose: Callable[[Offer, Channel], Steps[Choice]], offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Choose, and run what is chosen: MPI's own allreduce in the order in which the operations began."""
    with channel.turn() as turn:
        name, survey = yield from choose(offer, channel)
        if name == "dense_mpi":
            yield (turn,)
            return (yield from ALGORITHMS[name](offer, channel, survey))
    return (yield from ALGORITHMS[name](offer, channel, survey))


def chosen(offer: Offer, channel: Channel, *, whole: bool) -> Steps[Choice]:
    """Choose by what the ranks bring. whole: these are all ranks of MPI's communicator, and take their turn."""
    nodes, vector = channel.node_sizes(), offer.vector
    nothing = Survey([], [], vector.length)
    name = tuning.without_survey(nodes)
    if name is not None and channel.tuner.worth_asking(vector.length, vector.value_nbytes, nodes):
        entries = yield from counted_by(name, offer, channel)
        known = vector.length, entries / channel.size, vector.value_nbytes, nodes
        name, _ = channel.tuner.fastest(*known, whole=whole)
    if name in UNSAMPLED:
        return name, nothing

    def best(counts: list[int]) -> str:
        return channel.tuner.allreduce(vector.length, counts, vector.value_nbytes, nodes, whole=whole)

    # Samples are this rank's own affair: it brings them where what all bring, if it is like its own, is to be cut.
    cut = (name or best([vector.nnz] * channel.size)) not in UNSAMPLED or channel.terms.partition == "sampled"
    survey = yield from look_around(offer, channel, sampling=cut)
    return name or best(survey.counts), survey


def counted_by(name: str, offer: Offer, channel: Channel) -> Steps[int]:
    """Return how many entries all ranks bring, over the schedule of `name`, the algorithm that takes no survey.

    Whether it is worth asking is a function of the length, which is not compared before: a rank that asks and one that
    does not have to meet, and then know of each other. Both schedules let every rank hear of every other.
    """
    outline = Offer(channel.nothing, offer.vector.nnz)
    if name == "allgather":
        return sum(theirs.k for theirs in (yield from channel.gather(outline)))

    def total(ours: Offer, theirs: Offer, block: int) -> Offer:
        return Offer(ours.vector, ours.k + theirs.k)

    return (yield from folded(outline, channel, total, partial(doubling, channel=channel, combine=total))).k


def named(name: str, offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Run what the caller named."""
    return (yield from in_turn(partial(agreed_on, name), offer, channel))


def agreed_on(name: str, offer: Offer, channel: Channel) -> Steps[Choice]:
    """Look around for what the caller named, once it is clear that all ranks did: two schedules would not meet.

    Where "auto" begins with recursive doubling, the terms are first compared over its schedule.
    """
    if tuning.without_survey(channel.node_sizes()) == "recursive_doubling":
        yield from agreed(channel)
    return name, (yield from look_around(offer, channel, sampling=name not in UNSAMPLED))


def among_some(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Sum over some of the ranks: MPI's own allreduce, which is for all of them, is no choice."""
    name, survey = yield from chosen(offer, channel, whole=False)
    return (yield from ALGORITHMS[name](offer, channel, survey))


def allgather(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Gather all vectors everywhere, and add them up on every rank."""
    offers = yield from channel.gather(offer)
    return add_up([theirs.vector for theirs in offers])


def recursive_doubling(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Add the partner's sum over doubling distances."""
    return (yield from folded(offer, channel, add, partial(doubling, channel=channel, combine=add))).vector


def split_allgather(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Let every rank add up its share, and gather the shares."""
    partition = survey.shares(channel.size)
    share = yield from split(offer, channel, partition)
    shares = yield from channel.gather(Offer(share))
    return partition.unite([theirs.vector for theirs in shares])


def dense(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Let every rank add up its share, and gather the shares as dense pieces."""
    partition = equal_ranges(survey.length, channel.size)
    share = yield from split(offer, channel, partition)
    first, end = partition.bounds[channel.rank : channel.rank + 2]
    pieces = yield from channel.gather(Offer(share.filled(first, end)))
    return partition.unite([theirs.vector for theirs in pieces])


def dense_mpi(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Fill in the zeros, and let MPI's own allreduce add up, on a rank whose turn it is to call MPI's collectives.

    float16 travels as float32: MPI has no type for it.
    """
    vector = offer.vector
    values = vector.to_dense().astype(np.promote_types(vector.dtype, np.float32), copy=False)
    reduction = channel.endpoint.reduce(to_numpy(values).reshape(-1))
    yield (reduction,)
    total = beside(reduction.total, values).astype(vector.dtype, copy=False).reshape(values.shape)
    indices = kernels_for(total).consecutive(0, survey.length, vector.indices.dtype)
    return SparseVector(indices, total, survey.length)


def recursive_halving(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Halve the range that is held with a partner over halving distances, adding; then double it back."""
    bounds = survey.ranges(channel.core).bounds

    def core(offer: Offer) -> Steps[Offer]:
        low, high = 0, channel.core  # in shares of the index space
        for partner in halving(channel.rank, channel.core):
            middle = (low + high) // 2
            lower, upper = Ranges((bounds[low], bounds[middle], bounds[high])).cut(offer.vector)
            keep, give = (lower, upper) if channel.rank < partner else (upper, lower)
            low, high = (low, middle) if channel.rank < partner else (middle, high)
            offer = add(Offer(keep), (yield from channel.exchange(Offer(give), partner)))
        return (yield from doubling(offer, channel, add))  # disjoint ranges: to add is to put together

    return (yield from folded(offer, channel, add, core)).vector


def node_leaders(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Add up inside each node on its first rank, sum over those, and hand the result down inside."""
    nodes = channel.nodes()
    node = channel.among(next(ranks for ranks in nodes if channel.rank in ranks))
    total = yield from reduce_up(offer, node, add)
    if node.rank == 0:
        leaders = channel.among([ranks[0] for ranks in nodes])
        total = Offer((yield from among_some(counted(total.vector), leaders)))
    return (yield from hand_down(total, node)).vector


def node_lanes(offer: Offer, channel: Channel, survey: Survey) -> Steps[SparseVector]:
    """Split inside each node, sum every share over the ranks that own it in their nodes, and gather inside.

    There are as many lanes as ranks in the smallest node; further ranks of larger nodes own no share.
    """
    nodes = channel.nodes()
    lanes = min(len(ranks) for ranks in nodes)
    node = channel.among(next(ranks for ranks in nodes if channel.rank in ranks))
    partition = survey.shares(lanes)
    share = yield from split(offer, node, partition)
    if node.rank < lanes:
        lane = channel.among([ranks[node.rank] for ranks in nodes])
        share = yield from among_some(counted(share), lane)
    shares = yield from node.gather(Offer(share))
    return partition.unite([theirs.vector for theirs in shares[:lanes]])


def counted(vector: SparseVector) -> Offer:
    """Return a vector as an offer of as many entries as it has."""
    return Offer(vector, vector.nnz)


ALGORITHMS = {
    "allgather": allgather,
    "recursive_doubling": recursive_doubling,
    "split_allgather": split_allgather,
    "recursive_halving": recursive_halving,
    "dense": dense,
    "dense_mpi": dense_mpi,
    "node_leaders": node_leaders,
    "node_lanes": node_lanes,
}
CHOICES = counting({"auto": auto, **{name: partial(named, name) for name in ALGORITHMS}})
PREPARE = with_votes(with_partition)
UNSAMPLED = ("allgather", "recursive_doubling", "dense", "dense_mpi")  # they cut nothing, or equal ranges
