"""Sparse allreduce: the exact sum of all ranks' vectors on every rank. Rounds and bytes: docs/contributing/costs.md.

Source: SparCML (C. Renggli et al., SC 2019, arXiv 1802.08021) for recursive doubling
and split + allgather.

Invariant: the order of additions depends only on the number of ranks (and, in
algorithms that use nodes, on their placement). An entry is summed on one rank, or on
several with the same bits, so all ranks hold the same bits.

Differences from the paper: any number of ranks; a piece is sent as a bitmap or a dense
range as soon as that is smaller; shares hold about equal numbers of entries, however
these are distributed; a metadata exchange comes first.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from collectives.calls.call import Call, Codec, Comm, Sum
from collectives.calls.collective import collective
from collectives.planning.choice import choose
from collectives.planning.partition import equal_bounds
from collectives.reduce_scatter import scatter, sum_of_share
from collectives.runtime.group import Group, vectors_of
from collectives.runtime.messages import Steps
from collectives.runtime.metadata import (
    Metadata,
    bounds_of,
    can_show,
    entries_of,
    exchange_metadata,
    is_short,
    mean_bits,
    union_of,
    whole_vectors,
)
from collectives.runtime.patterns import add, doubling
from collectives.runtime.votes import gather_votes
from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for, on_device, to_device_of, to_numpy
from mpicomp.arrays.values import converted
from mpicomp.codec import encoded_nbytes
from mpicomp.settings import to_bool
from mpicomp.vector import SparseVector, add_up, count_up, join

SumAlgorithm = Literal[
    "auto",
    "allgather",
    "recursive_doubling",
    "split_allgather",
    "dense_mpi",
    "node_lanes",
]


def with_votes(result: Any) -> Sum:
    """Return the `Sum` of a result with or without votes."""
    value, votes = result if isinstance(result, tuple) else (result, None)
    return Sum(value, votes=votes)


@collective(
    with_votes,
    counting={"votes": True},
    checks={"votes": lambda votes, size: to_bool("votes", votes)},
)
def sparse_allreduce(
    vector: SparseVector,
    comm: "Comm",
    *,
    algorithm: SumAlgorithm = "auto",
    codec: Codec = "auto",
    votes: bool = False,
) -> Call[SparseVector]:
    """Sum the vectors of all ranks on all ranks; no entry of the union is dropped.

    Additions round as floats do. The result has the same bits on every rank, and in every
    run of one algorithm. Entries whose sum is zero are kept.

    Args:
        vector: this rank's summand, of numbers or of rows, with any number of entries; one
            length, width and dtype on all ranks.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        algorithm: "auto", the fastest by the estimates of `mpicomp explain`; "allgather";
            "recursive_doubling"; "split_allgather"; "node_lanes", for several ranks on a
            node; or "dense_mpi", MPI's own allreduce of the filled vector, which adds in
            MPI's order and returns an entry for every position. The same on all ranks.
        codec: format of the messages: "plain"; "quick", also ranges and bitmaps; "smallest",
            all lossless formats; or "auto", which is "smallest" between nodes, else "quick".
            Ranks may differ.
        votes: also count the ranks that contribute each entry; the same on all ranks.

    Returns:
        The sum, on the device of `vector`. With `votes` a pair (sum, counts), of which type
        checkers see the sum alone: counts is int64, one for each entry.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: an argument of this rank has a wrong value; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    >>> vector = TopK(k=2).compress(gradient)
    >>> sparse_allreduce(vector, comm).to_dense().tolist()
    [0.0, -3.0, 0.0, 2.0]
    """
    return Call(vector, comm, algorithm, codec, {"votes": votes})


sparse_iallreduce = sparse_allreduce.nonblocking


# The name of an algorithm, and the metadata that it needs.
Choice = tuple[str, Metadata]
Choose = Callable[[SparseVector, Group], Steps[Choice]]
Summing = Callable[[SparseVector, Group, Metadata], Steps[SparseVector]]
# Bytes from all other ranks, at most, with which a call sends its vector in place of
# the metadata, if the last call of its kind chose allgather.
LONG_NBYTES = 1 << 22
# Kinds of sums that are remembered, at most. Entries and bits count by powers of two.
MOST_KINDS = 1024
UNSAMPLED = ("allgather", "recursive_doubling", "dense_mpi")  # they have no shares
NO_METADATA: Metadata = ()
ALGORITHMS: dict[str, Summing] = {}


def algorithm(function: Summing) -> Summing:
    """Declare an algorithm of `sparse_allreduce`; if a caller names it, the ranks first agree on it."""
    name = function.__name__
    ALGORITHMS[name] = function
    sparse_allreduce.algorithm(name=name, compares_calls=True)(
        partial(run_chosen, partial(agree_on, name))
    )
    return function


def run_chosen(
    choose: Choose, vector: SparseVector, group: Group, votes: bool = False
) -> Steps[Any]:
    """Choose an algorithm and run it; MPI's own allreduces run in the order in which the operations began."""
    group.join_queue()
    name, metadata = yield from choose(vector, group)
    group.algorithm = name
    if name != "dense_mpi":
        group.leave_queue()
    run = partial(run_counting, name) if votes else ALGORITHMS[name]
    return (yield from run(vector, group, metadata))


def run_counting(
    name: str, vector: SparseVector, group: Group, metadata: Metadata
) -> Steps[tuple[SparseVector, Array]]:
    """Run an algorithm, and return the sum and its votes."""
    if name == "allgather" or (name == "recursive_doubling" and group.size <= 2):
        parts = yield from all_vectors(vector, group, metadata)
        return add_up(parts), count_up(parts).values.astype(np.int64)
    bounds = equal_bounds(vector.length, group.size)
    if name == "split_allgather":
        bounds = bounds_of(metadata, group.size)
        received = yield from scatter(vector, group, bounds)
        total = join((yield from all_vectors(add_up(vectors_of(received)), group)))
    else:
        total = yield from ALGORITHMS[name](vector, group, metadata)
        received = yield from scatter(vector.support(), group, bounds)
    counts = count_up(vectors_of(received))
    return total, (yield from gather_votes(total, counts, bounds, group))


def choose_freely(
    vector: SparseVector, group: Group, *, of_all_ranks: bool = True
) -> Steps[Choice]:
    """Choose an algorithm by the contributions of the ranks, with metadata as docs/contributing/costs.md says.

    Two ranks need none to choose: no algorithm sends less than the vectors. of_all_ranks: the
    group contains all ranks of the communicator, so it can call MPI's own allreduce.
    """
    if group.size <= 2:
        return "recursive_doubling", NO_METADATA
    coding = group.coding(vector)
    bits = 8 * coding[1].nbytes(vector.values.size) / max(1, vector.nnz)

    def best(entries: float, bits: float, union: float | None = None) -> str:
        case = group.case(
            vector.length, entries, value_nbytes=vector.value_nbytes, bits=bits
        )
        if union is not None:
            case = case.with_union(union)
        links = group.link.choice
        return choose("sparse_allreduce", case, links, of_all_ranks=of_all_ranks)

    kind = (
        of_all_ranks,
        group.size,
        vector.length,
        vector.value_nbytes,
        vector.nnz.bit_length(),
        math.frexp(bits)[1],
    )
    taken = group.link.taken
    last = taken.get(kind)
    short = is_short(vector, group)
    again = (
        last == "allgather"
        and not on_device(vector.indices)
        and (group.size - 1) * encoded_nbytes(vector, coding) <= LONG_NBYTES
    )
    # Samples are sent only if the algorithm that is likely to be chosen divides the sum
    # into shares.
    cut = not short and (last or best(vector.nnz, bits)) not in UNSAMPLED
    metadata = yield from exchange_metadata(
        vector,
        group,
        sampling=cut,
        bits=bits,
        sends_vector=short or again,
        shows=can_show(vector, group),
    )
    vectors = whole_vectors(metadata)
    if vectors and all([is_short(vector, group) for vector in vectors]):
        return "allgather", metadata
    mean = sum(entries_of(metadata)) / group.size
    name = best(mean, mean_bits(metadata), union_of(metadata))
    if len(taken) >= MOST_KINDS:
        taken.clear()
    taken[kind] = name
    return name, metadata


@sparse_allreduce.auto
def automatic(vector: SparseVector, group: Group, votes: bool = False) -> Steps[Any]:
    """Run the fastest algorithm."""
    if group.size <= 2 and not votes:
        # The operation does not join the queue, as it does not call MPI's allreduce.
        group.algorithm = "recursive_doubling"
        return recursive_doubling(vector, group, NO_METADATA)
    return run_chosen(choose_freely, vector, group, votes)


def agree_on(name: str, vector: SparseVector, group: Group) -> Steps[Choice]:
    """Exchange the metadata for a named algorithm; detects ranks that named different ones."""
    return name, (
        yield from exchange_metadata(vector, group, sampling=name not in UNSAMPLED)
    )


@algorithm
def allgather(
    vector: SparseVector, group: Group, metadata: Metadata
) -> Steps[SparseVector]:
    """Gather the vectors on all ranks, unless the metadata exchange did, and add them up on every rank."""
    return add_up((yield from all_vectors(vector, group, metadata)))


def all_vectors(
    vector: SparseVector, group: Group, metadata: Metadata = NO_METADATA
) -> Steps[Sequence[SparseVector]]:
    """Gather the vectors of all ranks, unless the metadata exchange did."""
    return whole_vectors(metadata) or vectors_of((yield from group.gather(vector)))


@algorithm
def recursive_doubling(
    vector: SparseVector, group: Group, metadata: Metadata
) -> Steps[SparseVector]:
    """Exchange sums with partners at doubling distances, and add."""
    return (yield from doubling((vector, 0), group, add))[0]


@algorithm
def split_allgather(
    vector: SparseVector, group: Group, metadata: Metadata
) -> Steps[SparseVector]:
    """Sum every share on its owner, and gather the shares."""
    bounds = bounds_of(metadata, group.size)
    share = yield from sum_of_share(vector, group, bounds)
    return join((yield from all_vectors(share, group)))


@algorithm
def dense_mpi(
    vector: SparseVector, group: Group, metadata: Metadata
) -> Steps[SparseVector]:
    """Convert to a dense array, and sum it by MPI's own allreduce once this operation's turn has come.

    float16 is sent as float32: MPI has no type for it.
    """
    values = vector.to_dense().astype(
        np.promote_types(vector.dtype, np.float32), copy=False
    )
    filled = to_numpy(values).reshape(-1)
    summed = np.empty_like(filled)
    yield from group.reduce(filled, summed)
    total = converted(to_device_of(summed, values), vector.dtype).reshape(values.shape)
    indices = kernels_for(total).consecutive(0, vector.length, vector.indices.dtype)
    return SparseVector(indices, total, vector.length)


@algorithm
def node_lanes(
    vector: SparseVector, group: Group, metadata: Metadata
) -> Steps[SparseVector]:
    """Reduce-scatter inside each node, sum every share over its owners in all nodes, and gather inside each node.

    There are as many lanes as ranks in the smallest node; further ranks of larger nodes
    own no share.
    """
    lanes = min(map(len, group.by_node))
    node = group.node()
    bounds = bounds_of(metadata, lanes)
    share = yield from sum_of_share(vector, node, bounds)
    if node.rank < lanes:
        lane = group.lane(node)
        # MPI's own allreduce needs all ranks.
        name, metadata = yield from choose_freely(share, lane, of_all_ranks=False)
        share = yield from ALGORITHMS[name](share, lane, metadata)
    return join((yield from all_vectors(share, node))[:lanes])
