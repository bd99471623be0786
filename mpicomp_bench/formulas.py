"""The predictions of `mpicomp explain`: rounds, messages, bytes and merged entries of each algorithm, and its seconds.

`collectives.planning.choice`, by which "auto" goes, has an estimate with fewer terms;
tests/collectives/test_choice.py compares the two.

The union of j independent supports has n (1 - (1 - k/n)^j) entries. Those of gradients
count as independent: at P = 16 the union of Top-k has 12.7 k entries, of at most 16 k
(docs/contributing/papers.md).
"""

import math
from collections.abc import Callable
from dataclasses import replace

from collectives.allreduce import LONG_NBYTES
from collectives.planning.choice import Case, constants_of, upper
from collectives.planning.links import Cost, Links, seconds
from collectives.planning.partition import likely
from collectives.planning.schedule import core_size
from collectives.runtime.group import PIECE_OVERHEAD, SHORT_NBYTES
from collectives.runtime.messages import LINE
from mpicomp.arrays.values import index_dtype
from mpicomp_bench.bounds import index_bits

# The following constants are what benchmarks/fit_choice.py prints from the codec and
# docs/results/choice-*.json. Bits of a value as `smallest` codes it, over those in
# memory: of floats selected by magnitude, of sums of these, of sums of 16-bit floats.
FLOATS = 0.77
SUMS = 0.88
HALF_SUMS = 0.54
# Bits of a change in a patch: those that every change takes, and those for each bit of
# the entropy of its position (docs/results/patches.json). The old weights predict the
# rest.
OF_PATCH = 3.1
OF_POSITION = 0.62
# Times over that of merging an entry: of an entry in a sum of many lists or in a
# selection; of a value of a dense array that is read and written, and of one that MPI
# adds.
SUMMED = 2.5
FILLED = 0.25
ADDED = 0.125

# The cost inside the nodes, the cost between them, and how many ranks of each node send
# there at once.
OnNodes = tuple[Cost, Cost, int]


def value_bits(case: Case, *, summed: bool) -> float:
    """Return the bits of the values of an entry as `smallest` codes them."""
    plain = 8.0 * case.value_nbytes
    own = FLOATS * plain if case.bits is None else min(plain, case.bits)
    return (
        max(own, (HALF_SUMS if 0.4 * plain < own < 0.6 * plain else SUMS) * plain)
        if summed
        else own
    )


def message(
    case: Case, entries: float, share: float = 1.0, *, summed: bool = False
) -> float:
    """Return the bytes of a message with `entries` entries in a share of the index space."""
    span = share * case.length
    indices = index_dtype(case.length).itemsize * entries
    values = entries * case.value_nbytes
    is_coded = case.nodes > 1 and indices + values > SHORT_NBYTES
    if is_coded:
        values = entries * value_bits(case, summed=summed) / 8
    if entries > span - 0.5 and case.value_nbytes:
        indices = 8
        values = span * case.value_nbytes
    elif entries >= 1:
        # The bitmap begins at the first entry and ends at the last one.
        extent = span * (entries - 1) / (entries + 1) + 1
        bitmap = 16 + extent / 8
        low = max(0, int(extent / entries).bit_length() - 1)
        if is_coded:
            # The third size is that of Elias-Fano coding.
            indices = min(
                indices, bitmap, 28 + (entries * (low + 1) + extent / 2**low) / 8
            )
        elif 4 * bitmap <= indices:
            indices = bitmap
    return LINE * math.ceil((LINE + indices + values) / LINE)


def few_bits(case: Case) -> float:
    """Return the bytes of all values in `bits` bits each, with scales of blocks of 256."""
    bits = case.bits or 4.0
    scales = (2 if bits == 2 else 1) * max(2, case.value_nbytes // 2)
    return case.length * (bits / 8 + scales / 256)


def plus(*costs: Cost) -> Cost:
    """Return the summed cost of several steps."""
    rounds, messages, nbytes, merged = map(sum, zip(*costs, strict=True))
    return rounds, messages, nbytes, merged


def in_rounds(rounds: float, nbytes: float = 0.0, merged: float = 0.0) -> Cost:
    """Return the cost of rounds of one message each."""
    return rounds, 0.0, nbytes, merged


def gather(case: Case, nbytes: float, merged: float = 0.0) -> Cost:
    """Return the cost of gathering `nbytes` of each rank, and of merging the messages."""
    return in_rounds(upper(case.ranks), (case.ranks - 1) * nbytes, merged)


def _allgather(case: Case) -> Cost:
    return gather(case, message(case, case.entries), SUMMED * case.ranks * case.entries)


def _recursive_doubling(case: Case, most: float = math.inf) -> Cost:
    # Rank 0 is the busiest: one of the ranks beyond the core ranks, the largest power
    # of two, folds into it.
    core = core_size(case.ranks)
    beyond = case.ranks - core
    rounds = core.bit_length() - 1
    nbytes = 0.0
    merged = 0.0
    for block in [1 << step for step in range(rounds)]:
        held = min(most, case.union(block + min(block, beyond)))
        nbytes = nbytes + message(case, held, summed=block + beyond > 1)
        merged = merged + 2 * held
    if not beyond:
        return in_rounds(rounds, nbytes, merged)
    unfolded = message(case, min(most, case.union(case.ranks)), summed=True)
    return in_rounds(rounds + 2, nbytes + unfolded, merged + 2 * case.entries)


def split(case: Case) -> Cost:
    """Return the cost of summing every share on its owner."""
    others = case.ranks - 1
    part = message(case, case.entries / case.ranks, 1 / case.ranks)
    return min(1, others), max(0, others - 1), others * part, case.entries


def gather_shares(case: Case, entries: float, merged: float) -> Cost:
    """Return the cost of gathering the sums of the shares, which have so many entries together."""
    return gather(
        case, message(case, entries / case.ranks, 1 / case.ranks, summed=True), merged
    )


def _split_allgather(case: Case) -> Cost:
    union = case.union(case.ranks)
    return plus(split(case), gather_shares(case, union, union))


def patch(case: Case) -> tuple[Cost, Cost]:
    """Return the cost of broadcasting a patch of weights, of which `entries` changed: what a rank sends, and the time.

    In the time the last rank also waits for a piece of each rank before it.
    """
    bits = OF_PATCH + OF_POSITION * index_bits(case.entries / case.length)
    nbytes = case.entries * bits / 8
    piece = 1 + math.isqrt(int(nbytes) * PIECE_OVERHEAD // case.ranks)
    others = max(0, case.ranks - 2)
    # The ranks also compare their calls, and agree on memory and on versions.
    rounds = (nbytes / piece + others + 3 * upper(case.ranks)) * (case.ranks > 1)
    sent = nbytes * (case.ranks > 1)
    return in_rounds(rounds, sent), in_rounds(rounds, sent + others * piece)


def dense_mpi(case: Case) -> Cost:
    """Return the cost of MPI's own allreduce: the least bytes that it can send.

    Inside a node one call takes half as long as a round of messages.
    """
    nbytes = 2 * (case.ranks - 1) * case.length / case.ranks * max(case.value_nbytes, 4)
    return in_rounds(
        2 * upper(case.ranks) if case.nodes > 1 else 0.5, nbytes, ADDED * case.length
    )


def _gtopk_exact(case: Case) -> Cost:
    share = case.union(case.ranks) / case.ranks
    sent = min(likely(case.entries / case.ranks, case.ranks), share)
    merged = SUMMED * (case.entries + share + 2 * case.ranks * sent)
    return plus(
        split(case), gather_shares(case, case.ranks * sent, merged - case.entries)
    )


def _gtopk_doubling(case: Case) -> Cost:
    rounds, messages, nbytes, merged = _recursive_doubling(case, case.entries)
    # Selecting from a sum takes as long as merging.
    return rounds, messages, nbytes, 2 * merged


def quantised_direct(case: Case) -> Cost:
    """Return the cost of a sum in few bits by its owners; merging is coding and decoding."""
    others = case.ranks - 1
    return (
        2 * min(1, others),
        2 * max(0, others - 1),
        2 * others * few_bits(case) / case.ranks,
        FILLED * case.length,
    )


# The first of equally fast algorithms is the choice of "auto".
FORMULAS: dict[str, dict[str, Callable[[Case], Cost]]] = {
    "sparse_allreduce": {
        "recursive_doubling": _recursive_doubling,
        "allgather": _allgather,
        "split_allgather": _split_allgather,
        "dense_mpi": dense_mpi,
    },
    "gtopk_allreduce": {"exact": _gtopk_exact, "recursive_doubling": _gtopk_doubling},
    "quantised_allreduce": {"direct": quantised_direct},
}


def metadata_cost(case: Case, algorithm: str) -> Cost:
    """Return the cost of `collectives.runtime.metadata` before an algorithm of `sparse_allreduce`.

    None for two ranks, nor where calls like this one gather the vectors: these are sent
    in the place of the metadata.
    """
    entry = index_dtype(case.length).itemsize + case.value_nbytes
    if case.ranks <= 2 or (
        algorithm == "allgather"
        and (case.ranks - 1) * case.entries * entry <= LONG_NBYTES
    ):
        return in_rounds(0)
    return gather(case, LINE)


def _node_lanes(case: Case, links: Links) -> OnNodes:
    lanes = case.per_node
    union = case.union(case.ranks)
    node = replace(case, ranks=case.per_node)
    inner = plus(
        split(node), gather(node, message(node, union / lanes, 1 / lanes), union)
    )
    return inner, _sum_between(case, links), lanes


def _sum_between(case: Case, links: Links) -> Cost:
    """Return the cost of the fastest exact sum between the nodes, in each of several lanes."""
    between = case.of_nodes()
    sums = FORMULAS["sparse_allreduce"].items()
    costs = [
        plus(metadata_cost(between, name), sum_of(between))
        for name, sum_of in sums
        if name != "dense_mpi"
    ]
    return min(costs, key=lambda cost: seconds(cost, links.between(case.per_node)))


def _gtopk_node_leaders(case: Case, links: Links) -> OnNodes:
    # The first ranks of the nodes gather once.
    nodes = case.nodes
    union = case.union(case.per_node)
    rounds = upper(case.per_node)
    between = replace(case, ranks=nodes, per_node=1, entries=union, bits=None)
    # Entries of a node that other nodes have as well.
    several = union + between.union(nodes - 1) - between.union(nodes)
    sent = min(likely(case.entries / nodes, nodes), between.union(nodes) / nodes)
    # The ranks exchange the indices, the indices that are asked for, and their values.
    exchanged = [(union, 0.0), (several, 0.0), (several, None)]
    splits = [
        split(replace(between, entries=entries, bits=bits))
        for entries, bits in exchanged
    ]
    gathered = gather(between, message(between, sent, summed=True), 2 * nodes * sent)
    inner = in_rounds(
        2 * rounds,
        rounds * message(replace(case, ranks=case.per_node), case.entries),
        2 * rounds * union,
    )
    return inner, plus(gathered, *splits, _compared(case)), 1


def _quantised_node_lanes(case: Case, links: Links) -> OnNodes:
    lanes = case.per_node
    sent = (
        (lanes - 1) * (case.length * max(case.value_nbytes, 4) + few_bits(case)) / lanes
    )
    inner: Cost = (2, 2 * (lanes - 2), sent, FILLED * case.length)
    between = replace(
        case, ranks=case.nodes, per_node=1, length=max(1, case.length // lanes)
    )
    return inner, plus(quantised_direct(between), _compared(case)), lanes


def _compared(case: Case) -> Cost:
    return in_rounds(upper(case.ranks), LINE * upper(case.ranks))


ON_NODES: dict[str, dict[str, Callable[[Case, Links], OnNodes]]] = {
    "sparse_allreduce": {"node_lanes": _node_lanes},
    "gtopk_allreduce": {"node_leaders": _gtopk_node_leaders},
    "quantised_allreduce": {"node_lanes": _quantised_node_lanes},
}


def predicted(
    collective: str, case: Case, links: Links
) -> dict[str, tuple[float, Cost]]:
    """Return seconds and cost of each algorithm that has a formula, for a node's link that all of its ranks share."""
    constants = constants_of(case, links)
    costs = {name: formula(case) for name, formula in FORMULAS[collective].items()}
    taken = {name: (seconds(cost, constants), cost) for name, cost in costs.items()}
    if "dense_mpi" in costs:
        taken["dense_mpi"] = dense_seconds(case, links), costs["dense_mpi"]
    if 1 < case.nodes < case.ranks:
        for name, formula in ON_NODES[collective].items():
            inner, outer, lanes = formula(case, links)
            taken[name] = (
                seconds(inner, links.inside()) + seconds(outer, links.between(lanes)),
                plus(inner, outer),
            )
    if collective == "sparse_allreduce":
        for name, (its_own, cost) in taken.items():
            first = metadata_cost(case, name)
            taken[name] = seconds(first, constants) + its_own, plus(first, cost)
    return taken


def dense_seconds(case: Case, links: Links) -> float:
    """Return the seconds of a dense sum by MPI or NCCL: the faster of a ring over the ranks and one over the nodes.

    Neighbours in the ring share a node, whose link carries the messages of one rank;
    over the nodes it carries those of all its ranks, each of its share.
    """
    if not 1 < case.nodes < case.ranks:
        return seconds(dense_mpi(case), constants_of(case, links))
    ring = seconds(dense_mpi(case), links.between(1))
    share = -(-case.length // case.per_node)
    inside = dense_mpi(replace(case, ranks=case.per_node))
    between = dense_mpi(replace(case, ranks=case.nodes, per_node=1, length=share))
    lanes = seconds(inside, links.inside())
    lanes += seconds(between, links.between(case.per_node))
    return min(ring, lanes)
