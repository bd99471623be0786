"""Predicted seconds of each algorithm of a collective, for a number of nodes and the links between them."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from collectives.choice.formulas import (
    FORMULAS,
    LINE,
    Case,
    Cost,
    both,
    gather,
    metadata_cost,
    quantised_direct,
    seconds,
    split,
)
from collectives.choice.links import Links, inside
from collectives.partition import likely

Taken = tuple[float, Cost]  # seconds, and what takes them
HANDICAPS = {"halving": 1.25}  # in the choice, times the seconds: it rounds partial sums as well


def predicted(collective: str, case: Case, nodes: int, links: Links) -> dict[str, Taken]:
    """Return seconds and cost of each algorithm that has a formula. nodes: their number.

    For algorithms that ignore nodes, all ranks of a node share its link.
    """
    per_node = -(-case.ranks // nodes)
    constants = constants_of(nodes, per_node, links, case.crowding)
    costs = {name: formula(case) for name, formula in FORMULAS[collective].items()}
    taken = {name: (seconds(cost, constants), cost) for name, cost in costs.items()}
    if 1 < nodes < case.ranks:
        taken |= {name: formula(case, nodes, links) for name, formula in ON_NODES[collective].items()}
    if collective == "sparse_allreduce":
        for name, (its_own, cost) in taken.items():
            first = metadata_cost(case, name)
            taken[name] = seconds(first, constants) + its_own, both(first, cost)
    return taken


@lru_cache(maxsize=1024)
def fastest(collective: str, case: Case, nodes: int, links: Links, *, whole: bool = True) -> str:
    """Return the algorithm with the shortest predicted time, of equally fast ones the first; see `HANDICAPS`.

    whole: these are all ranks of the communicator, so MPI's own allreduce is a candidate.
    """
    taken = predicted(collective, case, nodes, links)
    names = [name for name in taken if name != "dense_mpi" or whole]
    names = [name for name in names if case.value_nbytes or not name.startswith("dense")]
    return min(names, key=lambda name: HANDICAPS.get(name, 1.0) * taken[name][0])


def constants_of(nodes: int, ranks: int, links: Links, crowding: float) -> Cost:
    """Return the constants (see `formulas.seconds`) of messages that `ranks` ranks of each node send at once."""
    return inside(crowding) if nodes == 1 else links.constants(ranks, crowding)


def upper(ranks: int) -> int:
    """Return ceil(lg ranks)."""
    return (ranks - 1).bit_length()


def node_leaders(case: Case, nodes: int, links: Links) -> Taken:
    """See `collectives.allreduce.node_leaders`: up a tree in each node, and down again."""
    per_node = -(-case.ranks // nodes)
    rounds, node = upper(per_node), replace(case, ranks=per_node, coded=False)
    nbytes = rounds * node.message(case.union(case.ranks))
    return _and_between((2 * rounds, 2 * rounds, nbytes, 2 * rounds * case.union(per_node)), case, nodes, 1, links)


def node_lanes(case: Case, nodes: int, links: Links) -> Taken:
    """See `collectives.allreduce.node_lanes`: every rank of a node has a share of the index space."""
    per_node, union = -(-case.ranks // nodes), case.union(case.ranks)
    node = replace(case, ranks=per_node, coded=False)
    rounds, messages, nbytes, merged = split(node)
    shares = (per_node - 1) * node.message(union / per_node, 1 / per_node)
    gathers = upper(per_node)
    inner = rounds + gathers, messages + gathers, nbytes + shares, merged + union
    return _and_between(inner, case, nodes, per_node, links)


def _and_between(inner: Cost, case: Case, nodes: int, lanes: int, links: Links) -> Taken:
    """Return the prediction for an inner cost and the fastest exact sum between the nodes, in each lane."""
    union, length = case.union(-(-case.ranks // nodes)), max(1, case.length // lanes)
    between = replace(case, ranks=nodes, length=length, entries=min(length, union / lanes), bits=None)
    constants = links.constants(lanes, case.crowding)
    sums = FORMULAS["sparse_allreduce"].items()
    costs = [both(metadata_cost(between, name), sum_of(between)) for name, sum_of in sums if name != "dense_mpi"]
    outer = min(costs, key=lambda cost: seconds(cost, constants))
    return seconds(inner, inside(case.crowding)) + seconds(outer, constants), both(inner, outer)


def gtopk_node_leaders(case: Case, nodes: int, links: Links) -> Taken:
    """See `collectives.gtopk.node_leaders`, if the first ranks of the nodes gather once."""
    per_node = -(-case.ranks // nodes)
    union, constants, rounds = case.union(per_node), links.constants(1, case.crowding), upper(per_node)
    between = replace(case, ranks=nodes, entries=union, bits=None)
    several = union + between.union(nodes - 1) - between.union(nodes)  # entries of a node that others have as well
    sent = min(likely(case.entries / nodes, nodes), between.union(nodes) / nodes)
    outer = gather(between, between.message(sent, summed=True), 2 * nodes * sent)
    for entries, bits in (union, 0.0), (several, 0.0), (several, None):
        outer = both(outer, split(replace(between, entries=entries, bits=bits)))
    up_and_down = rounds * replace(case, coded=False).message(case.entries)
    inner: Cost = (2 * rounds, 2 * rounds, up_and_down, 2 * rounds * union)
    agreeing = upper(case.ranks)
    outer = both(outer, (agreeing, agreeing, LINE * agreeing, 0))
    return seconds(inner, inside(case.crowding)) + seconds(outer, constants), both(inner, outer)


def quantised_node_lanes(case: Case, nodes: int, links: Links) -> Taken:
    """See `collectives.quantised.node_lanes`: values inside a node, few bits between the nodes, in each lane."""
    per_node, agreeing = -(-case.ranks // nodes), upper(case.ranks)
    others = per_node - 1
    sent = others * (case.length * max(case.value_nbytes, 4) + case.few_bits()) / per_node
    inner: Cost = (2, 2 * others, sent, case.length / 4)
    outer = quantised_direct(replace(case, ranks=nodes, length=max(1, case.length // per_node)))
    outer = both(outer, (agreeing, agreeing, LINE * agreeing, 0))
    constants = links.constants(per_node, case.crowding)
    return seconds(inner, inside(case.crowding)) + seconds(outer, constants), both(inner, outer)


ON_NODES: dict[str, dict[str, Callable[[Case, int, Links], Taken]]] = {
    "sparse_allreduce": {"node_lanes": node_lanes, "node_leaders": node_leaders},
    "gtopk_allreduce": {"node_leaders": gtopk_node_leaders},
    "quantised_allreduce": {"node_lanes": quantised_node_lanes},
}
