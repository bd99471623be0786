"""The choice of algorithm and codec for a collective called with "auto".

Pure functions of values known to all ranks, so all ranks make the same choice. Closed formulas give rounds, messages,
bytes and merged entries of each algorithm from the number and the coded size of the entries; typical constants turn
these into seconds, and the fastest algorithm is taken. If `mpicomp tune` has measured these ranks, the winner at the
nearest point of its table is taken instead, by the logarithms of length, density and bits of a value.

The union of j independent supports has n (1 - (1 - k/n)^j) entries, of disjoint ones j k, of equal ones k. The number
`overlap` interpolates: -1 is disjoint, 0 independent, 1 equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import Any

from collectives.choice.overlap import DIGEST
from collectives.partition import likely
from collectives.schedule import core_size
from mpicomp.codec import CODECS, Coding
from mpicomp.vector import SparseVector, index_dtype

Cost = tuple[float, float, float, float]  # rounds, messages, bytes and merged entries of the busiest rank

# Seconds of a round, of a further message of a round, of a byte and of a merged entry.
INSIDE: Cost = (100e-6, 50e-6, 3e-10, 6e-9)  # a node, whose cores the ranks may have to share
BETWEEN: Cost = (40e-6, 8e-6, 1 / 118e6, 1.5e-9)  # nodes, over 1 Gbit/s
FEW = 64  # entries for each rank of a node: below, messages cost their latency, and fewer are better
TYPICAL_DENSITY = 0.001  # of gTop-k where the call has no k
SHORT_NBYTES = 1 << 10  # a packet of a network: it takes longer to shorten it than to send it
LINE = 64  # bytes: the header of a message, and what it is padded to
LONG_NBYTES = 1 << 22  # of all other ranks' vectors, from which a round of small messages is no matter


@dataclass(frozen=True)
class Case:
    """A sum to predict: `ranks` vectors of `length` with `entries` entries each.

    overlap: of the supports, see the module. value_nbytes: bytes of an entry's values in memory. bits: bits of an
    entry's values as coded; None for float values that were selected by magnitude. coded: the codec is `smallest`, as
    between nodes; else `quick`.
    """

    ranks: int
    length: int
    entries: float
    overlap: float = 0.0
    value_nbytes: int = 4
    bits: float | None = None
    coded: bool = True

    def union(self, ranks: float) -> float:
        """Return the expected number of entries of the sum of `ranks` vectors."""
        density = min(1.0, self.entries / self.length) if self.length else 1.0
        independent = self.length * -math.expm1(ranks * math.log1p(-density)) if density < 1 else float(self.length)
        extreme = self.entries if self.overlap > 0 else min(ranks * self.entries, self.length)
        return independent + abs(self.overlap) * (extreme - independent)

    def value_bits(self, *, summed: bool = False) -> float:
        """Return the bits of the values of an entry.

        Sums of quantised values need a sign and a fraction, or fit a short format by chance. With disjoint supports
        they are the values of the ranks, each of which may have its own magnitude.
        """
        plain = 8.0 * self.value_nbytes
        own = plain if not self.coded else 0.8 * plain if self.bits is None else min(plain, self.bits)
        if not summed or not self.coded:
            return own
        if self.overlap < -0.95:
            return max(own, 0.62 * plain) if own < 0.4 * plain else own
        return max(own, (0.55 if 0.4 * plain < own < 0.6 * plain else 0.87) * plain)

    def message(self, entries: float, share: float = 1.0, *, summed: bool = False) -> float:
        """Return the bytes of a message with `entries` entries in a share of the index space."""
        span, indices = share * self.length, index_dtype(self.length).itemsize * entries
        coded = self.coded and indices + entries * self.value_nbytes > SHORT_NBYTES
        values = entries * (self.value_bits(summed=summed) / 8 if coded else self.value_nbytes)
        if entries > span - 0.5 and self.value_nbytes:
            indices, values = 8, span * self.value_nbytes
        elif entries >= 1:
            found = span * (entries - 1) / (entries + 1) + 1  # from the first entry to the last one
            bitmap, low = 16 + found / 8, max(0, int(found / entries).bit_length() - 1)
            if coded:
                elias_fano, blocks = 28 + (entries * (low + 1) + found / 2**low) / 8, 24 + found / 16384 + 2 * entries
                indices = min(indices, bitmap, elias_fano, blocks)
            elif 4 * bitmap <= indices:
                indices = bitmap
        return LINE * math.ceil((LINE + indices + values) / LINE)

    def few_bits(self) -> float:
        """Return the bytes of all values in `bits` bits each, with scales of blocks of 256."""
        bits = self.bits or 4.0
        scales = (2 if bits == 2 else 1) * max(2, self.value_nbytes // 2)
        return self.length * (bits / 8 + scales / 256)


def both(first: Cost, second: Cost) -> Cost:
    """Return the summed cost of two steps."""
    return first[0] + second[0], first[1] + second[1], first[2] + second[2], first[3] + second[3]


def gather(case: Case, nbytes: float, merged: float) -> Cost:
    """Return the cost of gathering `nbytes` of each rank, and of merging the messages."""
    rounds = (case.ranks - 1).bit_length()
    return rounds, rounds, (case.ranks - 1) * nbytes, merged


def allgather(case: Case) -> Cost:
    """See `collectives.allreduce.allgather`; merging many lists takes longer than merging two."""
    return gather(case, case.message(case.entries), 1.6 * case.ranks * case.entries)


def recursive_doubling(case: Case, most: float = math.inf) -> Cost:
    """See `collectives.allreduce.recursive_doubling`; `most` bounds the entries of a vector for gTop-k.

    Rank 0 is the busiest: one of the ranks beyond the core ranks, the largest power of two, folds into it.
    """
    core = core_size(case.ranks)
    beyond, rounds, nbytes, merged = case.ranks - core, core.bit_length() - 1, 0.0, 0.0
    for block in [1 << step for step in range(rounds)]:
        held = min(most, case.union(block + min(block, beyond)))
        nbytes, merged = nbytes + case.message(held, summed=block + beyond > 1), merged + 2 * held
    if beyond:
        nbytes += case.message(min(most, case.union(case.ranks)), summed=True)
        return rounds + 2, rounds + 2, nbytes, merged + 2 * case.entries
    return rounds, rounds, nbytes, merged


def split(case: Case) -> Cost:
    """See `collectives.reduce_scatter.split`."""
    others, part = case.ranks - 1, case.message(case.entries / case.ranks, 1 / case.ranks)
    return min(1, others), others, others * part, case.entries


def split_allgather(case: Case) -> Cost:
    """See `collectives.allreduce.split_allgather`."""
    union = case.union(case.ranks)
    return both(split(case), gather(case, case.message(union / case.ranks, 1 / case.ranks, summed=True), union))


def recursive_halving(case: Case) -> Cost:
    """See `collectives.allreduce.recursive_halving`; rank 0 is the busiest."""
    core, union = core_size(case.ranks), case.union(case.ranks)
    beyond = case.ranks - core
    cost: Cost = (2, 2, case.message(union, summed=True), 2 * case.entries) if beyond else (0, 0, 0, 0)
    for parts in [1 << step for step in range(core.bit_length() - 1)]:
        held = case.union(parts + min(parts, -(-beyond * parts // core))) / parts
        half = case.message(held / 2, 1 / (2 * parts), summed=parts + beyond > 1)
        doubled = case.message(union * parts / core, parts / core, summed=True)
        cost = both(cost, (2, 2, half + doubled, held + 2 * union * parts / core))
    return cost


def dense(case: Case) -> Cost:
    """See `collectives.allreduce.dense`."""
    return both(split(case), gather(case, case.message(case.length / case.ranks, 1 / case.ranks), case.length / 4))


def dense_mpi(case: Case) -> Cost:
    """See `collectives.allreduce.dense_mpi`: the least bytes that MPI's own allreduce can send.

    One call takes half as long as a round of messages.
    """
    _, _, nbytes, merged = gather(case, 2 * case.length / case.ranks * max(case.value_nbytes, 4), case.length / 8)
    return 0.5, 0.5, nbytes, merged


def gtopk_exact(case: Case) -> Cost:
    """See `collectives.gtopk.exact`, which gathers once if the largest entries are spread evenly."""
    share = case.union(case.ranks) / case.ranks
    sent = min(likely(case.entries / case.ranks, case.ranks), share)
    message = case.message(sent, 1 / case.ranks, summed=True)
    return both(split(case), gather(case, message, share + 2 * case.ranks * sent))


def gtopk_exact_doubling(case: Case) -> Cost:
    """See `collectives.gtopk.exact_doubling`, which selects from the whole sum."""
    return both(recursive_doubling(case), (0, 0, 0, 2 * case.union(case.ranks)))


def gtopk_doubling(case: Case) -> Cost:
    """See `collectives.gtopk.recursive_doubling`, which selects from each sum in little time."""
    return recursive_doubling(case, case.entries)


def quantised_direct(case: Case) -> Cost:
    """See `collectives.quantised.direct`; a value takes `case.bits` bits, and merging is coding and decoding."""
    others = case.ranks - 1
    return 2 * min(1, others), 2 * others, 2 * others * case.few_bits() / case.ranks, case.length / 4


def quantised_halving(case: Case) -> Cost:
    """See `collectives.quantised.halving`; rank 0 is the busiest."""
    core, nbytes = core_size(case.ranks), case.few_bits()
    beyond = case.ranks > core
    rounds, sent = 2 * (core.bit_length() - 1 + beyond), 2 * (core - 1) / core * nbytes + beyond * nbytes
    agreed = core.bit_length() - 1 + 2 * beyond
    return agreed + rounds, agreed + rounds, agreed * LINE + sent, case.length / 4


FORMULAS: dict[str, dict[str, Callable[[Case], Cost]]] = {
    "sparse_allreduce": {
        each.__name__: each
        for each in (recursive_doubling, allgather, split_allgather, recursive_halving, dense, dense_mpi)
    },
    "gtopk_allreduce": {  # of equally fast ones the first
        "exact": gtopk_exact,
        "exact_doubling": gtopk_exact_doubling,
        "recursive_doubling": gtopk_doubling,
    },
}
QUANTISED = {"direct": quantised_direct, "halving": quantised_halving}  # not in the tables of `mpicomp tune`
ON_NODES = ("node_lanes", "node_leaders")  # gTop-k has the second one


def metadata_cost(case: Case, algorithm: str) -> Cost:
    """Return the cost of `collectives.metadata` before an algorithm of `sparse_allreduce`.

    None for two ranks, nor where calls like this one gather the vectors: these are sent in the place of the metadata.
    """
    entry = index_dtype(case.length).itemsize + case.value_nbytes
    if case.ranks <= 2 or (algorithm == "allgather" and (case.ranks - 1) * case.entries * entry <= LONG_NBYTES):
        return 0, 0, 0, 0
    return gather(case, case.message(min(case.entries, DIGEST)) if case.coded else LINE, 0)


def seconds(cost: Cost, constants: Cost) -> float:
    """Return the seconds of a cost, for constants such as `INSIDE`."""
    return float(sum(map(mul, constants, (cost[0], cost[1] - cost[0], *cost[2:]))))


@lru_cache(maxsize=1024)
def fastest(collective: str, case: Case, *, whole: bool = True) -> str:
    """Return the fastest algorithm by the formulas; with the constants between nodes if the case is coded.

    whole: these are all ranks of the communicator; inside a node MPI's own allreduce is then a candidate.
    """
    formulas, constants = FORMULAS[collective], BETWEEN if case.coded else INSIDE
    names = [name for name in formulas if name != "dense_mpi" or (whole and not case.coded)]
    names = [name for name in names if case.value_nbytes or not name.startswith("dense")]
    costs = {name: formulas[name](case) for name in names}
    if collective == "sparse_allreduce" and not case.coded:  # between nodes, fewest bytes count
        costs = {name: both(metadata_cost(case, name), cost) for name, cost in costs.items()}
    return min(costs, key=lambda name: seconds(costs[name], constants))


class Choice:
    """The choice for one communicator, the same on all of its ranks.

    table: measured by `mpicomp tune`: "ranks", "nodes", and "winners" with a list of points for each collective:
    length, density, bits of a value, fastest algorithm. None: use the formulas. last: the algorithms of the last calls
    on this rank, by what tells calls apart; ranks may differ in it, after an error on one of them.
    """

    def __init__(self, table: Mapping[str, Any] | None = None) -> None:
        self.table = table
        self.last: dict[tuple[Any, ...], str] = {}

    def coding(self, vector: SparseVector, *, apart: bool) -> Coding:
        """Return the codec of a message: between nodes `smallest`; for short ones and inside a node `quick`, a copy."""
        return CODECS["smallest" if apart and vector.nbytes > SHORT_NBYTES else "quick"](vector)

    def measured(self, collective: str, nodes: Sequence[int]) -> Sequence[Sequence[Any]]:
        """Return the points of the table, none if it is for other ranks. nodes: the number of ranks on each."""
        if self.table is None or (self.table["ranks"], self.table["nodes"]) != (sum(nodes), len(nodes)):
            return ()
        return self.table["winners"].get(collective, ())  # type: ignore[no-any-return]

    def algorithm(self, collective: str, case: Case, nodes: Sequence[int], *, whole: bool = True) -> str:
        """Return the algorithm for a case; entries are rounded to steps of 9 %. whole: see `fastest`."""
        entries = min(case.length, 2 ** (round(8 * math.log2(case.entries)) / 8)) if case.entries > 0 else 0.0
        if whole and (places := self.measured(collective, nodes)):
            here = _coordinates(case.length, entries / max(1, case.length), case.value_bits())
            return str(min(places, key=lambda place: math.dist(here, _coordinates(*place[:3])))[3])
        few, several = case.entries < FEW * min(nodes), 1 < len(nodes) < sum(nodes)
        if several and collective == "sparse_allreduce":
            return ON_NODES[few]
        if several and not few:
            return "node_leaders"  # of few entries of gTop-k, fewer rounds between nodes are faster
        bits = case.bits and float(round(case.bits))
        rounded = replace(case, entries=entries, overlap=round(16 * case.overlap) / 16, bits=bits)
        return fastest(collective, rounded, whole=whole)

    def gtopk(self, length: int, k: int | None, value_nbytes: int, nodes: Sequence[int]) -> str:
        """Return the algorithm of `gtopk_allreduce` for k; None counts as a thousandth of the length.

        Only k is known to all ranks. On several nodes the formulas treat all links as links between nodes.
        """
        entries = min(length, max(1, round(TYPICAL_DENSITY * length)) if k is None else k)
        case = Case(sum(nodes), length, entries, value_nbytes=value_nbytes, coded=len(nodes) > 1)
        return self.algorithm("gtopk_allreduce", case, nodes)

    def quantised(self, length: int, bits: int, value_nbytes: int, nodes: Sequence[int]) -> str:
        """Return the algorithm of `quantised_allreduce`; halving, which rounds partial sums, if it saves a fifth."""
        if 1 < len(nodes) < sum(nodes):
            return "node_lanes"
        case = Case(sum(nodes), length, length, value_nbytes=value_nbytes, bits=bits, coded=len(nodes) > 1)
        constants = BETWEEN if case.coded else INSIDE
        direct, halving = (seconds(cost(case), constants) for cost in QUANTISED.values())
        return "halving" if halving < 0.8 * direct else "direct"


def _coordinates(length: float, density: float, bits: float) -> tuple[float, float, float]:
    return math.log2(max(1, length)), math.log2(max(1e-18, density)), math.log2(1 + bits)
