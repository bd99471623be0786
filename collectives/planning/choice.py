"""The choice of the algorithm of a collective called with "auto" (docs/collectives.md, "Costs").

Pure functions of values known to all ranks, so all ranks make the same choice: formulas
give the cost of each algorithm, the constants of links, memory and cores turn it into
seconds, and the fastest is taken.
"""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from collectives.planning.formulas import (
    FORMULAS,
    ON_NODES,
    Case,
    dense_mpi,
    metadata_cost,
    plus,
)
from collectives.planning.links import Constants, Cost, Links, seconds

if TYPE_CHECKING:
    from collectives.runtime.group import Group
    from mpicomp.vector import SparseVector


def algorithm_for(
    collective: str,
    vector: "SparseVector",
    group: "Group",
    entries: float,
    *,
    of_all_ranks: bool = True,
    **about: Any,
) -> str:
    """Return the algorithm for a vector and a group, with so many entries of each rank; see `choose` and `Case`."""
    per_node = -(-group.size // len(group.nodes))
    case = Case(
        group.size,
        vector.length,
        entries,
        per_node,
        value_nbytes=vector.value_nbytes,
        **about,
    )
    return _chosen(collective, case, group.link.choice, of_all_ranks)


@lru_cache(maxsize=1024)
# rounding takes 3 us
def _chosen(collective: str, case: Case, links: Links, of_all_ranks: bool) -> str:
    return choose(collective, case.rounded(), links, of_all_ranks=of_all_ranks)


@lru_cache(maxsize=1024)
def choose(
    collective: str, case: Case, links: Links, *, of_all_ranks: bool = True
) -> str:
    """Return the algorithm with the shortest predicted time, of equally fast ones the first.

    of_all_ranks: these are all ranks of the communicator, so MPI's own allreduce is a
    candidate.
    """
    taken = predicted(collective, case, links)
    names = [
        name
        for name in taken
        if name != "dense_mpi" or (of_all_ranks and case.value_nbytes)
    ]
    return min(names, key=lambda name: taken[name][0])


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


def constants_of(case: Case, links: Links) -> Constants:
    """Return the constants of messages of all ranks at once."""
    return links.inside() if case.nodes == 1 else links.between(case.per_node)


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
