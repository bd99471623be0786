"""The choice of the algorithm of a collective called with "auto" (docs/collectives.md, "Costs").

Pure functions of values known to all ranks, so all ranks make the same choice. The
estimates have the terms that separate the algorithms, and no more: on the same places
`mpicomp_bench.formulas` predicts the times themselves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from collectives.planning.links import Constants, Cost, Links, seconds
from mpicomp.arrays.values import index_dtype

_STEPS = 64  # of `fresh`, to 1


@dataclass(frozen=True)
class Case:
    """A sum: `ranks` vectors of `length` with `entries` entries each.

    per_node: ranks on a node. value_nbytes: bytes of an entry's values in memory. bits:
    bits of an entry's values as coded; None for float values that were selected by
    magnitude. fresh: each further rank extends the union as so many independent supports
    do: 1 if they are independent, 0 if all are the same, more if they are disjoint.
    """

    ranks: int
    length: int
    entries: float
    per_node: int = 1
    value_nbytes: int = 4
    bits: float | None = None
    fresh: float = 1.0

    @property
    def nodes(self) -> int:
        """The number of nodes; between several, the codec of messages is `smallest`, else `quick`."""
        return -(-self.ranks // self.per_node)

    def union(self, ranks: float) -> float:
        """Return the expected number of entries of the sum of `ranks` vectors."""
        if self.entries >= self.length:
            return float(self.length)
        return self.length * -math.expm1(
            self._independent(ranks) * math.log1p(-self.entries / self.length)
        )

    def _independent(self, ranks: float) -> float:
        """Return the number of independent supports with the union of those of `ranks` ranks."""
        return 1 + (ranks - 1) * self.fresh

    def with_union(self, entries: float) -> "Case":
        """Return the case in which the sum of all vectors has so many entries."""
        if not (0 < self.entries < self.length and self.ranks > 1):
            return self
        # A sum without zeros counts as one with half an entry less, as the logarithm of
        # 0 is infinite.
        dense = math.log1p(-min(entries / self.length, 1 - 0.5 / self.length))
        independent = dense / math.log1p(-self.entries / self.length)
        fresh = max(0.0, independent - 1) / (self.ranks - 1)
        # The number is rounded, so that later calls are equal cases for the cache of
        # `choose`.
        return replace(self, fresh=round(_STEPS * fresh) / _STEPS)

    def of_nodes(self) -> "Case":
        """Return the sums between the nodes, of a share of the index space for each rank of a node."""
        lanes = self.per_node
        return replace(
            self,
            ranks=self.nodes,
            length=max(1, self.length // lanes),
            entries=self.union(lanes) / lanes,
            per_node=1,
            bits=None,
            fresh=lanes * self.fresh / self._independent(lanes),
        )


@lru_cache(maxsize=1024)
def choose(
    collective: str, case: Case, links: Links, *, of_all_ranks: bool = True
) -> str:
    """Return the algorithm with the shortest estimate, of equally fast ones the first.

    of_all_ranks: these are all ranks of the communicator, so MPI's own allreduce is a
    candidate.
    """
    estimates = ESTIMATES[collective](case, links)
    if not (of_all_ranks and case.value_nbytes):
        estimates.pop("dense_mpi", None)
    return min(estimates, key=estimates.__getitem__)


def constants_of(case: Case, links: Links) -> Constants:
    """Return the constants of messages of all ranks at once."""
    return links.inside() if case.nodes == 1 else links.between(case.per_node)


def upper(ranks: int) -> int:
    """Return ceil(lg ranks)."""
    return (ranks - 1).bit_length()


def _sparse_allreduce(case: Case, links: Links) -> dict[str, float]:
    estimates = _exact_sums(case, constants_of(case, links))
    if 1 < case.nodes < case.ranks:
        lanes = case.per_node
        between = links.between(lanes)
        lane = _exact_sums(case.of_nodes(), between)
        del lane["dense_mpi"]  # It takes all ranks.
        moved = case.entries + case.union(case.ranks)
        estimates["node_lanes"] = (
            seconds((3, 2 * lanes, 8 * moved, moved), links.inside())
            + upper(case.ranks) * between[0]
            + min(lane.values())
        )
    return estimates


def _exact_sums(case: Case, constants: Constants) -> dict[str, float]:
    """Return the seconds of the algorithms that ignore nodes, with the metadata before them."""
    rounds = upper(case.ranks)
    union = case.union(case.ranks)
    gathered = case.ranks * case.entries
    # Entries that are exchanged in each round, by the number of vectors in the sums.
    doubled = {1 << step: case.union(1 << step) for step in range(rounds)}
    # A rank beyond a power of two folds into another one. All bytes are multiplied
    # below by the share that is sent to other ranks, which the second factor cancels.
    folds = 2.0 if case.ranks & (case.ranks - 1) else 1.0
    folds *= case.ranks / max(1, case.ranks - 1)
    dense = 2.0 * case.length * case.value_nbytes
    waits = rounds
    if case.nodes > 1:
        # Neighbours in a ring over the ranks share a node.
        dense /= case.per_node
        waits *= 3
    value = case.value_nbytes if case.bits is None else case.bits / 8

    def index(held: float) -> float:
        """Return the bytes of an index in a vector with so many entries."""
        if case.nodes == 1:
            return index_dtype(case.length).itemsize
        gap = max(1.0, case.length / max(1.0, held))
        return min(gap, 2 + math.log2(gap)) / 8  # a bitmap, or Elias-Fano

    def summed(ranks: int) -> float:
        """Return the bytes of a value of the sum of so many vectors."""
        if ranks == 1 or (value > 1 and case.fresh > 0.75):
            return value
        if value > 2:
            return min(case.value_nbytes, value + upper(ranks) / 4)
        # Sums of up to 8 values of bfloat16, of similar size, fit the 11 bits of
        # float16.
        if value > 1 and ranks <= 8:
            return value
        # Other sums need all bits of a float, except those of the signs of two equal
        # supports.
        if 8 * ranks * value <= 2 and not case.fresh:
            return ranks * value
        return case.value_nbytes

    sent = value + index(case.entries)
    shares = case.entries * sent + union * (summed(case.ranks) + index(union))
    added = 0.6 * (case.entries + union)
    exchanged = 0.0
    for ranks, held in doubled.items():
        exchanged += folds * held * (summed(ranks) + index(held))
    merged = 1.5 * folds * sum(doubled.values())
    costs: dict[str, Cost] = {
        "recursive_doubling": (2 * rounds, 0, exchanged, merged),
        "allgather": (rounds, 0, gathered * sent, 2.5 * gathered),
        "split_allgather": (2 * rounds + 1, case.ranks, shares, added),
        "dense_mpi": (waits, 0, dense, case.length / 6),
    }
    start, message, byte, entry = constants
    # A rank sends nothing to itself.
    sending = start, message, byte * (1 - 1 / case.ranks), entry
    return {name: seconds(cost, sending) for name, cost in costs.items()}


def _gtopk_allreduce(case: Case, links: Links) -> dict[str, float]:
    rounds = upper(case.ranks)
    k = case.entries
    constants = constants_of(case, links)
    estimates = {
        "recursive_doubling": rounds * seconds((1, 0, 6 * k, 3 * k), constants),
        "exact": seconds((rounds + 1, 2 * case.ranks, 12 * k, 9 * k), constants),
    }
    if 1 < case.nodes < case.ranks:
        union = case.union(case.per_node)
        gathered = upper(case.per_node) * union
        estimates["node_leaders"] = seconds(
            (2 * rounds, 0, 8 * gathered, 3 * gathered), links.inside()
        ) + seconds((rounds + 3, 0, 4.5 * union, 0), links.between(1))
    return estimates


def _quantised_allreduce(case: Case, links: Links) -> dict[str, float]:
    coded = case.length * (case.bits or 4) / 4
    direct = 2, 2 * case.ranks, coded, 0
    estimates = {"direct": seconds(direct, constants_of(case, links))}
    if 1 < case.nodes < case.ranks:
        inside = seconds((2, 0, 6 * case.length, 0), links.inside())
        estimates["node_lanes"] = inside + seconds((4, 0, coded, 0), links.between(1))
    return estimates


# The estimates count the rounds, further messages, bytes and merged entries by which
# the algorithms differ. Their factors are fitted to docs/results/choice-*.json and to
# the predictions of `mpicomp explain`.
ESTIMATES: dict[str, Callable[[Case, Links], dict[str, float]]] = {
    "sparse_allreduce": _sparse_allreduce,
    "gtopk_allreduce": _gtopk_allreduce,
    "quantised_allreduce": _quantised_allreduce,
}
