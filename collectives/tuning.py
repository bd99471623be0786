"""Choose an algorithm from what every rank knows: pure functions, so that all ranks choose alike.

Without a profile by a fixed rule. With one, by the times that `cost.py` predicts: the ranks of a communicator agree on
the profile when they first use it, so that they predict alike.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from collectives import cost, profiles
from collectives.cost import Case, Cost, Model, expected_union
from collectives.profiles import Profile, ProfileError
from mpicomp.codec import CODECS, Coding
from mpicomp.vector import SparseVector, index_dtype

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

SMALL_PIECE = 64  # entries: below, a message costs its latency, and fewer of them are better
DIRECT_RANKS = 64  # up to here P - 1 messages of a split cost less than lg P rounds of larger ones
REMEMBERED = 1024  # answers of a Tuner
STEPS_AN_OCTAVE = 8  # densities that are 9 % apart have one answer
SHORTEST = 1e-12  # seconds: what no sum is faster than
WORTH_ASKING = 1.25  # times as fast: below, within what predictions are off, ranks that need no survey make none


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
    """Return the algorithm of `sparse_allreduce` by the fixed rule.

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


class Tuner:
    """Chooses for one communicator: by a profile that all of its ranks agreed on, or by the fixed rule without one.

    It remembers answers, which are functions of what it is asked alone. Entries are counted in steps of 9 %.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self.profile = profile
        self._answers: dict[Any, Any] = {}

    def knows(self, nodes: Sequence[int]) -> bool:
        """Return whether there is a profile with the links between and inside these nodes."""
        known = self.profile
        if known is None or (len(nodes) > 1 and known.between is None):
            return False
        return max(nodes) == 1 or known.inside is not None or len(nodes) == 1

    def allreduce(
        self, length: int, counts: Sequence[int], value_nbytes: int, nodes: Sequence[int], *, whole: bool = True
    ) -> str:
        """Return the algorithm of `sparse_allreduce` when the survey has been made; arguments: `choose_allreduce`.

        whole: these are all ranks of the communicator, so that MPI's own allreduce is a choice.
        """
        if not self.knows(nodes):
            return choose_allreduce(length, counts, value_nbytes, nodes)
        return self.fastest(length, sum(counts) / len(counts), value_nbytes, nodes, whole=whole)[0]

    def fastest(
        self, length: int, entries: float, value_nbytes: int, nodes: Sequence[int], *, whole: bool = True
    ) -> tuple[str, float]:
        """Return the algorithm that is predicted to be the fastest for so many entries a rank, and its seconds.

        With the samples that it needs in the survey, and without the rest of that, which all of them need.
        """
        step = round(STEPS_AN_OCTAVE * math.log2(entries)) if entries >= 1 else -1
        key = length, step, value_nbytes, tuple(nodes), whole
        return self._once(key, partial(self._fastest, *key))

    def _fastest(
        self, length: int, step: int, value_nbytes: int, nodes: Sequence[int], whole: bool
    ) -> tuple[str, float]:
        assert self.profile is not None, "asked for a prediction without a profile"
        entries = min(float(length), 2 ** (step / STEPS_AN_OCTAVE)) if step >= 0 else 0.0
        model = Model(case_of(length, entries, value_nbytes, nodes), self.profile)
        names = candidates(nodes, value_nbytes, whole=whole)
        sampling = cost.survey(model, told=True).seconds - cost.survey(model, told=False).seconds
        seconds = {name: cost.ALLREDUCE[name](model).seconds + sampling * (name in cost.SAMPLED) for name in names}
        best = min(names, key=seconds.__getitem__)  # the first one of equals
        return best, seconds[best]

    def automatic(self, case: Case, nodes: Sequence[int], *, by: Profile | None = None) -> tuple[str, Cost]:
        """Return the algorithm that "auto" of `sparse_allreduce` runs in the end, and what all of it is to cost.

        The choice takes supports for independent, whatever the overlap of the case: the ranks do not know it. by:
        another profile for what it costs; the choice is by this one's.
        """
        profile = by or self.profile
        assert profile is not None, "asked for a prediction without a profile"
        model, name = Model(case, profile), without_survey(nodes)
        spent = cost.begun("sparse_allreduce", model)
        asked = case.length, case.entries, case.value_nbytes, nodes
        if name is None:
            name = self.fastest(*asked)[0]
            spent += cost.survey(model, told=name in cost.SAMPLED)
        elif self.worth_asking(case.length, case.value_nbytes, nodes):
            name, spent = self.fastest(*asked)[0], spent + model.agreed()
            spent += cost.survey(model, told=True) if name in cost.SAMPLED else Cost()
        return name, spent + cost.ALLREDUCE[name](model)

    def worth_asking(self, length: int, value_nbytes: int, nodes: Sequence[int]) -> bool:
        """Return whether the ranks of a communicator that can do without a survey do better to ask for the counts.

        That is, whether at some density another algorithm is over a quarter faster, with the round of asking added,
        and by a larger factor than that round slows the smallest sums.
        """
        known = without_survey(nodes)
        if known is None or sum(nodes) == 1 or not self.knows(nodes):
            return False
        key = length, value_nbytes, tuple(nodes)
        return self._once(key, partial(self._worth_asking, known, length, value_nbytes, nodes))

    def _worth_asking(self, known: str, length: int, value_nbytes: int, nodes: Sequence[int]) -> bool:
        assert self.profile is not None, "asked for a prediction without a profile"
        gain = loss = 0.0
        for halvings in range(14):
            case = case_of(length, length / 2**halvings, value_nbytes, nodes)
            model = Model(case, self.profile)
            start = cost.begun("sparse_allreduce", model).seconds
            plain = start + cost.ALLREDUCE[known](model).seconds
            asking = start + model.agreed().seconds + self.fastest(length, case.entries, value_nbytes, nodes)[1]
            gain, loss = max(gain, plain / max(asking, SHORTEST)), max(loss, asking / max(plain, SHORTEST))
        return gain > max(WORTH_ASKING, loss)

    def coding(self, vector: SparseVector, *, apart: bool) -> Coding:
        """Return how a message is coded when the caller leaves it open.

        apart: whether it may leave the node. Without a profile "smallest" then, else "quick", as copying inside a node
        is faster than coding; with one, what is predicted to be there first.
        """
        nodes = [1, 1] if apart else [2]
        if self.profile is None or not self.knows(nodes):
            return CODECS["smallest" if apart else "quick"](vector)
        step = round(STEPS_AN_OCTAVE * math.log2(vector.nnz)) if vector.nnz else -1
        sparseness = round(STEPS_AN_OCTAVE * math.log2(vector.span / vector.nnz)) if vector.nnz else 0
        key = "codec", step, sparseness, vector.value_nbytes, vector.indices.itemsize, apart
        name = self._once(key, partial(self._codec, vector.nnz, vector.span, vector.value_nbytes, apart))
        return CODECS[name](vector)

    def _codec(self, entries: int, span: int, value_nbytes: int, apart: bool) -> str:
        assert self.profile is not None, "asked for a prediction without a profile"
        model = Model(case_of(span, entries, value_nbytes, [1, 1] if apart else [2]), self.profile)
        return model.codec(entries, span, value_nbytes, far=apart)

    def _once(self, key: Any, answer: Callable[[], T]) -> T:
        if key not in self._answers:
            if len(self._answers) >= REMEMBERED:
                self._answers.clear()
            self._answers[key] = answer()
        return cast(T, self._answers[key])


def of_named(operation: str, algorithm: str, case: Case, nodes: Sequence[int], profile: Profile) -> float:
    """Return the seconds that an algorithm is predicted to take when it is named.

    A sum that is named for 2 or 4 ranks first agrees on the terms, see `allreduce.agreed_on`.
    """
    seconds = cost.predict(operation, algorithm, case, profile).seconds
    if operation == "sparse_allreduce" and without_survey(nodes) == "recursive_doubling":
        seconds += Model(case, profile).agreed().seconds
    return seconds


def of_auto(tuner: Tuner, case: Case, nodes: Sequence[int], profile: Profile) -> float:
    """Return the seconds that "auto" of `sparse_allreduce` is predicted to take by a profile.

    tuner: what chooses; without a profile of its own it goes by the fixed rule.
    """
    if tuner.knows(nodes):
        return tuner.automatic(case, nodes, by=profile)[1].seconds
    counts = [round(case.entries)] * case.ranks
    name = choose_allreduce(case.length, counts, case.value_nbytes, nodes)
    asked = without_survey(nodes) is None
    return cost.predict("sparse_allreduce", name, case, profile, asked=asked).seconds


def case_of(length: int, entries: float, value_nbytes: int, nodes: Sequence[int]) -> Case:
    """Return the case of a sum over ranks that stand on nodes."""
    return Case(sum(nodes), length, entries, value_nbytes=value_nbytes, nodes=len(nodes))


def candidates(nodes: Sequence[int], value_nbytes: int, *, whole: bool = True) -> list[str]:
    """Return the algorithms of `sparse_allreduce` that a choice is made from.

    With several ranks on one of several nodes those that know of nodes, without values none that fills the length;
    MPI's own for all ranks of a communicator.
    """
    several = len(nodes) > 1 and max(nodes) > 1
    names = ["node_lanes", "node_leaders"] if several else list(cost.FLAT)
    if whole and sum(nodes) > 1:
        names.append("dense_mpi")
    return [name for name in names if value_nbytes or not name.startswith("dense")]


def agreed_tuner(comm: "MPI.Intracomm", nodes: Sequence[int]) -> Tuner:
    """Return the tuner of a communicator, the same on all ranks: rank 0's profile is theirs. Collective, blocks.

    nodes: the first rank of each rank's node. Which file it is, and whether there is one, is up to rank 0 alone: the
    others get its text, so there is nothing that could differ. Raises ProfileError on all ranks when rank 0 was told to
    use a profile (MPICOMP_PROFILE) that is none.
    """
    said = _found(nodes) if comm.rank == 0 else b""
    size = np.array([len(said)], np.int64)
    comm.Bcast(size)
    if not size[0]:
        return Tuner()
    text = np.frombuffer(said, np.uint8).copy() if comm.rank == 0 else np.empty(int(size[0]), np.uint8)
    comm.Bcast(text)
    what, _, rest = text.tobytes().decode().partition("\n")
    if what == "error":
        raise ProfileError(rest)
    return Tuner(profiles.parse(rest))


def _found(nodes: Sequence[int]) -> bytes:
    """Return "profile" or "error" and a text; nothing where there is no profile."""
    asked = os.environ.get(profiles.VARIABLE, "")
    if asked == "none":
        return b""
    path = asked or str(default_path(len(nodes), len(set(nodes))))
    if not asked and not os.path.exists(path):
        return b""
    try:
        text = profiles.read(path)
        profiles.named(path, text)
    except ProfileError as error:
        return f"error\n{error}. Rank 0 read it {_why(asked)}".encode()
    return f"profile\n{text}".encode()


def _why(asked: str) -> str:
    if asked:
        return f"because {profiles.VARIABLE} names it; unset that to do without"
    return f"because it is there; delete it, or set {profiles.VARIABLE}=none, to do without"


def default_path(ranks: int, nodes: int) -> Path:
    """Return where `mpicomp tune` puts a profile of this host, MPI library and number of ranks by default."""
    from mpi4py import MPI

    return profiles.default_path(*host_and_library(MPI), ranks, nodes, os.environ)


def host_and_library(mpi: Any) -> tuple[str, str]:
    """Return the group of hosts that this one belongs to, and the MPI library."""
    return profiles.host_group(mpi.Get_processor_name()), profiles.library_name(mpi.Get_library_version())
