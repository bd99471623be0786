"""The formulas of the choice: rounds, messages, bytes and merged entries of each algorithm.

The union of j independent supports has n (1 - (1 - k/n)^j) entries. Those of gradients
count as independent: at P = 16 the union of Top-k has 12.7 k entries, of at most 16 k
(docs/contributing/papers.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from collectives.planning.links import Cost, Links, seconds
from collectives.planning.partition import likely
from collectives.planning.schedule import core_size
from collectives.runtime.group import SHORT_NBYTES
from collectives.runtime.messages import LINE
from mpicomp.arrays import index_dtype

# of all other ranks' vectors, from which a round of small messages is no matter
LONG_NBYTES = 1 << 22

# benchmarks/fit_choice.py prints what the codec and docs/results/choice-*.json give for
# each of these. Bits of a value as `smallest` codes it, over those in memory: of floats
# selected by magnitude, of sums of these, of sums of 16-bit floats.
FLOATS = 0.77
SUMS = 0.88
HALF_SUMS = 0.54
# Seconds over those of merging an entry: of an entry in a sum of many lists or in a
# selection; of a value of a dense array that is read and written, and of one that MPI
# adds.
SUMMED = 2.5
FILLED = 0.25
ADDED = 0.125

# the cost inside the nodes, and between them by so many ranks of each
OnNodes = tuple[Cost, Cost, int]


@dataclass(frozen=True)
class Case:
    """A sum to predict: `ranks` vectors of `length` with `entries` entries each.

    per_node: ranks on a node. value_nbytes: bytes of an entry's values in memory. bits:
    bits of an entry's values as coded; None for float values that were selected by
    magnitude.
    """

    ranks: int
    length: int
    entries: float
    per_node: int = 1
    value_nbytes: int = 4
    bits: float | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes; between several, the codec of messages is `smallest`, else `quick`."""
        return -(-self.ranks // self.per_node)

    def rounded(self) -> "Case":
        """Return the case with entries in steps of 9 %, and whole bits: few cases differ."""
        entries = (
            min(self.length, 2 ** (round(8 * math.log2(self.entries)) / 8))
            if self.entries > 0
            else 0.0
        )
        return replace(
            self, entries=entries, bits=self.bits and float(round(self.bits))
        )

    def union(self, ranks: float) -> float:
        """Return the expected number of entries of the sum of `ranks` vectors."""
        density = min(1.0, self.entries / self.length) if self.length else 1.0
        return (
            self.length * -math.expm1(ranks * math.log1p(-density))
            if density < 1
            else float(self.length)
        )

    def value_bits(self, *, summed: bool) -> float:
        """Return the bits of the values of an entry as `smallest` codes them."""
        plain = 8.0 * self.value_nbytes
        own = FLOATS * plain if self.bits is None else min(plain, self.bits)
        return (
            max(own, (HALF_SUMS if 0.4 * plain < own < 0.6 * plain else SUMS) * plain)
            if summed
            else own
        )

    def message(
        self, entries: float, share: float = 1.0, *, summed: bool = False
    ) -> float:
        """Return the bytes of a message with `entries` entries in a share of the index space."""
        span = share * self.length
        indices = index_dtype(self.length).itemsize * entries
        values = entries * self.value_nbytes
        is_coded = self.nodes > 1 and indices + values > SHORT_NBYTES
        if is_coded:
            values = entries * self.value_bits(summed=summed) / 8
        if entries > span - 0.5 and self.value_nbytes:
            indices = 8
            values = span * self.value_nbytes
        elif entries >= 1:
            # from the first entry to the last one
            extent = span * (entries - 1) / (entries + 1) + 1
            bitmap = 16 + extent / 8
            low = max(0, int(extent / entries).bit_length() - 1)
            if is_coded:
                # Elias-Fano
                indices = min(
                    indices, bitmap, 28 + (entries * (low + 1) + extent / 2**low) / 8
                )
            elif 4 * bitmap <= indices:
                indices = bitmap
        return LINE * math.ceil((LINE + indices + values) / LINE)

    def few_bits(self) -> float:
        """Return the bytes of all values in `bits` bits each, with scales of blocks of 256."""
        bits = self.bits or 4.0
        scales = (2 if bits == 2 else 1) * max(2, self.value_nbytes // 2)
        return self.length * (bits / 8 + scales / 256)


def plus(*costs: Cost) -> Cost:
    """Return the summed cost of several steps."""
    rounds, messages, nbytes, merged = map(sum, zip(*costs, strict=True))
    return rounds, messages, nbytes, merged


def in_rounds(rounds: float, nbytes: float = 0.0, merged: float = 0.0) -> Cost:
    """Return the cost of rounds of one message each."""
    return rounds, rounds, nbytes, merged


def upper(ranks: int) -> int:
    """Return ceil(lg ranks)."""
    return (ranks - 1).bit_length()


def gather(case: Case, nbytes: float, merged: float = 0.0) -> Cost:
    """Return the cost of gathering `nbytes` of each rank, and of merging the messages."""
    return in_rounds(upper(case.ranks), (case.ranks - 1) * nbytes, merged)


def _allgather(case: Case) -> Cost:
    return gather(case, case.message(case.entries), SUMMED * case.ranks * case.entries)


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
        nbytes = nbytes + case.message(held, summed=block + beyond > 1)
        merged = merged + 2 * held
    if not beyond:
        return in_rounds(rounds, nbytes, merged)
    unfolded = case.message(min(most, case.union(case.ranks)), summed=True)
    return in_rounds(rounds + 2, nbytes + unfolded, merged + 2 * case.entries)


def split(case: Case) -> Cost:
    """Return the cost of summing every share on its owner."""
    others = case.ranks - 1
    part = case.message(case.entries / case.ranks, 1 / case.ranks)
    return min(1, others), others, others * part, case.entries


def gather_shares(case: Case, entries: float, merged: float) -> Cost:
    """Return the cost of gathering the sums of the shares, which have so many entries together."""
    return gather(
        case, case.message(entries / case.ranks, 1 / case.ranks, summed=True), merged
    )


def _split_allgather(case: Case) -> Cost:
    union = case.union(case.ranks)
    return plus(split(case), gather_shares(case, union, union))


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
    # selecting from a sum takes as long as merging
    return rounds, messages, nbytes, 2 * merged


def quantised_direct(case: Case) -> Cost:
    """Return the cost of a sum in few bits by its owners; merging is coding and decoding."""
    others = case.ranks - 1
    return (
        2 * min(1, others),
        2 * others,
        2 * others * case.few_bits() / case.ranks,
        FILLED * case.length,
    )


# of equally fast algorithms the first is taken
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
    """Return the cost of `collectives.agreement.metadata` before an algorithm of `sparse_allreduce`.

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
        split(node), gather(node, node.message(union / lanes, 1 / lanes), union)
    )
    return inner, _sum_between(case, lanes, links), lanes


def _sum_between(case: Case, lanes: int, links: Links) -> Cost:
    """Return the cost of the fastest exact sum between the nodes, in each of several lanes."""
    length = max(1, case.length // lanes)
    entries = min(length, case.union(case.per_node) / lanes)
    between = replace(
        case, ranks=case.nodes, per_node=1, length=length, entries=entries, bits=None
    )
    sums = FORMULAS["sparse_allreduce"].items()
    costs = [
        plus(metadata_cost(between, name), sum_of(between))
        for name, sum_of in sums
        if name != "dense_mpi"
    ]
    return min(costs, key=lambda cost: seconds(cost, links.between(lanes)))


def _gtopk_node_leaders(case: Case, links: Links) -> OnNodes:
    # The first ranks of the nodes gather once.
    nodes = case.nodes
    union = case.union(case.per_node)
    rounds = upper(case.per_node)
    between = replace(case, ranks=nodes, per_node=1, entries=union, bits=None)
    # entries of a node that others have as well
    several = union + between.union(nodes - 1) - between.union(nodes)
    sent = min(likely(case.entries / nodes, nodes), between.union(nodes) / nodes)
    # the indices, those asked for, and their values
    exchanged = [(union, 0.0), (several, 0.0), (several, None)]
    splits = [
        split(replace(between, entries=entries, bits=bits))
        for entries, bits in exchanged
    ]
    gathered = gather(between, between.message(sent, summed=True), 2 * nodes * sent)
    inner = in_rounds(
        2 * rounds,
        rounds * replace(case, ranks=case.per_node).message(case.entries),
        2 * rounds * union,
    )
    return inner, plus(gathered, *splits, _compared(case)), 1


def _quantised_node_lanes(case: Case, links: Links) -> OnNodes:
    lanes = case.per_node
    sent = (
        (lanes - 1)
        * (case.length * max(case.value_nbytes, 4) + case.few_bits())
        / lanes
    )
    inner: Cost = (2, 2 * (lanes - 1), sent, FILLED * case.length)
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
