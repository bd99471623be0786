"""The choice of algorithm and codec for a collective called with "auto".

Pure functions of values known to all ranks, so all ranks make the same choice. Closed formulas (`formulas`) give
rounds, messages, bytes and merged entries of each algorithm from the number and the coded size of the entries; the
constants of the links (`links`), of a node's memory and of its cores turn these into seconds (`predictions`), and the
fastest algorithm is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from collectives.choice.formulas import SHORT_NBYTES, Case
from collectives.choice.links import NETWORKS, Links, agreed_links
from collectives.choice.predictions import fastest
from mpicomp.codec import CODECS, Coding, plain
from mpicomp.vector import SparseVector

if TYPE_CHECKING:
    from mpi4py import MPI

TYPICAL_DENSITY = 0.001  # of gTop-k where the call has no k


class Choice:
    """The choice for one communicator, the same on all of its ranks.

    links: those between nodes. crowding: ranks that share a core, on the node with the most; at least 1. last: the
    algorithms of the last calls on this rank, by what tells calls apart; ranks may differ in it, after an error on one
    of them.
    """

    def __init__(self, links: Links = NETWORKS["1gbit"], crowding: float = 1.0) -> None:
        self.links, self.crowding = links, crowding
        self.last: dict[tuple[Any, ...], str] = {}
        self._named = lru_cache(maxsize=1024)(self.algorithm)  # of calls that are repeated; 10 us

    def coding(self, vector: SparseVector, *, apart: bool) -> Coding:
        """Return the codec of a message: `plain` if it is short, else between nodes `smallest`, inside one `quick`."""
        if vector.indices.nbytes + vector.values.nbytes <= SHORT_NBYTES:
            return plain(vector)
        return CODECS["smallest" if apart else "quick"](vector)

    def algorithm(self, collective: str, case: Case, nodes: Sequence[int], *, whole: bool = True) -> str:
        """Return the algorithm for a case; entries are rounded to steps of 9 %.

        nodes: the number of ranks on each. whole: see `predictions.fastest`.
        """
        entries = min(case.length, 2 ** (round(8 * math.log2(case.entries)) / 8)) if case.entries > 0 else 0.0
        bits, overlap = case.bits and float(round(case.bits)), round(16 * case.overlap) / 16
        rounded = replace(case, entries=entries, overlap=overlap, bits=bits, crowding=self.crowding)
        return fastest(collective, rounded, len(nodes), self.links, whole=whole)

    def gtopk(self, length: int, k: int | None, value_nbytes: int, nodes: Sequence[int]) -> str:
        """Return the algorithm of `gtopk_allreduce` for k; None counts as a thousandth of the length.

        Only k is known to all ranks, so the supports count as independent.
        """
        entries = min(length, max(1, round(TYPICAL_DENSITY * length)) if k is None else k)
        case = Case(sum(nodes), length, entries, value_nbytes=value_nbytes, coded=len(nodes) > 1)
        return self._named("gtopk_allreduce", case, tuple(nodes))

    def quantised(self, length: int, bits: int, value_nbytes: int, nodes: Sequence[int]) -> str:
        """Return the algorithm of `quantised_allreduce` for so many bits a value."""
        case = Case(sum(nodes), length, length, value_nbytes=value_nbytes, bits=bits, coded=len(nodes) > 1)
        return self._named("quantised_allreduce", case, tuple(nodes))


def agreed_choice(comm: "MPI.Intracomm", nodes: Sequence[int], crowding: float = 1.0) -> Choice:
    """Return the choice for a communicator, the same on all ranks. Collective, blocks.

    nodes: the first rank of each rank's node. crowding: see `Choice`. Raises as `agreed_links`.
    """
    return Choice(agreed_links(comm, nodes), crowding)
