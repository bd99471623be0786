"""The formulas of the choice: rounds, messages, bytes and merged entries of each algorithm, and the seconds they take.

The union of j independent supports has n (1 - (1 - k/n)^j) entries, of disjoint ones j k, of equal ones k. The number
`overlap` interpolates: -1 is disjoint, 0 independent, 1 equal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import mul

from collectives.choice.overlap import DIGEST
from collectives.partition import likely
from collectives.schedule import core_size
from mpicomp.vector import index_dtype

Cost = tuple[float, float, float, float]  # rounds, messages, bytes and merged entries of the busiest rank

SHORT_NBYTES = 1 << 10  # a packet of a network: it takes longer to shorten it than to send it
LINE = 64  # bytes: the header of a message, and what it is padded to
LONG_NBYTES = 1 << 22  # of all other ranks' vectors, from which a round of small messages is no matter


@dataclass(frozen=True)
class Case:
    """A sum to predict: `ranks` vectors of `length` with `entries` entries each.

    overlap: of the supports, see the module. value_nbytes: bytes of an entry's values in memory. bits: bits of an
    entry's values as coded; None for float values that were selected by magnitude. coded: the codec is `smallest`, as
    between nodes; else `quick`. crowding: ranks that share a core; below 1 in predictions of ranks of several cores.
    """

    ranks: int
    length: int
    entries: float
    overlap: float = 0.0
    value_nbytes: int = 4
    bits: float | None = None
    coded: bool = True
    crowding: float = 1.0

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
                elias_fano = 28 + (entries * (low + 1) + found / 2**low) / 8
                indices = min(indices, bitmap, elias_fano)
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

    Inside a node one call takes half as long as a round of messages.
    """
    rounds, _, nbytes, merged = gather(case, 2 * case.length / case.ranks * max(case.value_nbytes, 4), case.length / 8)
    rounds = 2 * rounds if case.coded else 0.5
    return rounds, rounds, nbytes, merged


def gtopk_exact(case: Case) -> Cost:
    """See `collectives.gtopk.exact`, which gathers once if the largest entries are spread evenly.

    An entry is added up, selected from and searched for, which takes two and a half times as long as merging.
    """
    share = case.union(case.ranks) / case.ranks
    sent = min(likely(case.entries / case.ranks, case.ranks), share)
    message = case.message(sent, 1 / case.ranks, summed=True)
    merged = 2.5 * (case.entries + share + 2 * case.ranks * sent)
    return both(split(case), gather(case, message, merged - case.entries))


def compressed(case: Case) -> Cost:
    """See `collectives.compressed.split_allgather`, for a sum compressed to as many entries as each rank has.

    An owner reads its share twice, for the sum and to select from it.
    """
    message = case.message(case.entries / case.ranks, 1 / case.ranks, summed=True)
    return both(split(case), gather(case, message, case.entries + case.length / (2 * case.ranks)))


def gtopk_doubling(case: Case) -> Cost:
    """See `collectives.gtopk.recursive_doubling`; selecting from a sum takes as long as merging."""
    rounds, messages, nbytes, merged = recursive_doubling(case, case.entries)
    return rounds, messages, nbytes, 2 * merged


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
        "recursive_doubling": gtopk_doubling,
    },
    "quantised_allreduce": {"direct": quantised_direct, "halving": quantised_halving},
}


def metadata_cost(case: Case, algorithm: str) -> Cost:
    """Return the cost of `collectives.metadata` before an algorithm of `sparse_allreduce`.

    None for two ranks, nor where calls like this one gather the vectors: these are sent in the place of the metadata.
    """
    entry = index_dtype(case.length).itemsize + case.value_nbytes
    if case.ranks <= 2 or (algorithm == "allgather" and (case.ranks - 1) * case.entries * entry <= LONG_NBYTES):
        return 0, 0, 0, 0
    return gather(case, case.message(min(case.entries, DIGEST)) if case.coded else LINE, 0)


def seconds(cost: Cost, constants: Cost) -> float:
    """Return the seconds of a cost. constants: seconds of a round, of a further message of it, a byte, an entry."""
    return float(sum(map(mul, constants, (cost[0], cost[1] - cost[0], *cost[2:]))))
