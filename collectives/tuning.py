"""Choose an algorithm from what every rank knows: pure functions, so that all ranks choose alike."""

from collections.abc import Sequence

from mpicomp.vector import index_dtype

SMALL_PIECE = 64  # entries: below, a message costs its latency, and fewer of them are better
DIRECT_RANKS = 64  # up to here P - 1 messages of a split cost less than lg P rounds of larger ones


def expected_union(length: int, counts: Sequence[int]) -> float:
    """Return how many positions `counts` entries a rank take up together if the supports are independent."""
    missing = 1.0
    for count in counts:
        missing *= 1 - count / length if length else 1.0
    return length * (1 - missing)


def without_survey(nodes: Sequence[int]) -> str | None:
    """Return the algorithm of `sparse_allreduce` for which no rank has to know what the others bring, if there is one.

    nodes: the ranks on each node. `recursive_doubling` for 1, 2 and 4 ranks, `allgather` for 3: up to 4 ranks none
    sends fewer bytes where supports are disjoint, none over a third fewer where they are equal, and none has fewer
    rounds. None where several nodes have several ranks: what leaves a node is to leave it once.
    """
    if sum(nodes) > 4 or (len(nodes) > 1 and max(nodes) > 1):
        return None
    return "allgather" if sum(nodes) == 3 else "recursive_doubling"


def choose_allreduce(
    length: int, counts: Sequence[int], value_nbytes: int = 4, nodes: Sequence[int] | None = None
) -> str:
    """Return the algorithm of `sparse_allreduce`.

    counts: the entries that each rank brings, with values of so many bytes an entry. nodes: the ranks on each node,
    None for one.

    What `without_survey` says, if it says something. With several ranks on one of several nodes `node_lanes`, by which
    a sum crosses the network once a node and over all of its ranks, or `node_leaders` when the shares of the lanes
    would have fewer than 64 entries on average. Else `allgather` when the P^2 pieces of a split
    would have fewer than 64. `dense` when the expected union of independent supports is no smaller in plain form than
    the dense vector: half of the length for float32. Else `split_allgather` up to 64 ranks, which sends (P+1)/P of the
    bytes of an allgather when the supports are disjoint and far fewer when they overlap, and spreads the additions;
    `recursive_halving` above.
    """
    ranks = len(counts)
    nodes = nodes or [ranks]
    known = without_survey(nodes)
    if known:
        return known
    if len(nodes) > 1 and max(nodes) > 1:
        return "node_lanes" if sum(counts) >= SMALL_PIECE * ranks * min(nodes) else "node_leaders"
    if sum(counts) < SMALL_PIECE * ranks**2:
        return "allgather"
    plain = expected_union(length, counts) * (value_nbytes + index_dtype(length).itemsize)
    if value_nbytes and plain >= length * value_nbytes:
        return "dense"
    return "split_allgather" if ranks <= DIRECT_RANKS else "recursive_halving"
