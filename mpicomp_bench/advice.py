"""`mpicomp explain --train`: the methods by the predicted time for the progress of one dense step; without MPI.

That time is steps x (computing + compression + messages). Steps: how many a method
needs for the progress of one dense step with the same optimiser and the batches of all
ranks, the mean over the models of the simulation of experiments/every_step; fewer than one
count as one, as a lead on small models is no reason to expect it on others. With other
ranks or local steps they grow as on the small model of its map, and for a model as small
they are those of the map. Compression: seconds measured
on one core, counted in copies of the vector in the same run, each a read and a write at
the memory rate of a rank.
Messages: by `mpicomp_bench.formulas`, which add and copy
inside a node at that rate as well. The time is that of cores which all compute: nothing
overlaps, as in the race. `overlapped` is the time where a core is left to messages: the
longer of computation and messages, and the messages of a last bucket; of local steps with
a delay of one step what takes longer than that step. PowerSGD, and ours on a GPU, hide
nothing. It is within 15 % of the steps of the race with a free core. `mpicomp explain`
predicts an exchange by the same functions.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from importlib.resources import files
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np

from collectives.planning.choice import Case, choose, constants_of, upper
from collectives.planning.links import NETWORKS, Links
from mpicomp_bench import recipes
from mpicomp_bench.formulas import dense_seconds, predicted
from mpicomp_bench.measuring import Row
from mpicomp_bench.methods import outer_settings

# Bytes a second of a core that reads or writes an array.
MEMORY = 1.5e10
# Bytes a second from which a memory counts as that of a GPU.
GPU = 3e11
# Rate of the fastest links on which methods were measured.
FASTEST = NETWORKS["1gbit"].rate
# Least speed-up over simpler methods for which a method is recommended.
PAYS = 1.05
# Copies of the vector that a cast to 16 bits and back takes; not measured.
CASTS = 1.0
DENSE = "dense"
SIXTEEN = "fp16"
POWERSGD = "powersgd-8"
FEW_BITS = "few-bits-4"
LOCAL = "local-few-bits-10"
SPARSE = "local-sparse-10"
IN_BASIS = "in-basis-two-bit-8"
ALONE = "one node alone"
THEIRS = DENSE, SIXTEEN, POWERSGD  # PyTorch's own
NOT_OURS = *THEIRS, ALONE


class Training(NamedTuple):
    """A training. computing: seconds of a step. memory: bytes a second of a rank. optimizer: one of `measured()`.

    every: local steps between exchanges; None: any of those that were measured.
    """

    ranks: int
    parameters: int
    computing: float
    links: Links
    per_node: int = 1
    memory: float = MEMORY
    optimizer: str = "adamw"
    every: int | None = None

    @property
    def methods(self) -> list[str]:
        """The names of the methods that are compared."""
        local = [self.every] if self.every else on_the_map(self.optimizer)
        sparse = with_every(SPARSE, self.every or 10)
        others = [name for name in MESSAGES if name not in (SPARSE, LOCAL)]
        return [*others, sparse, *(with_every(LOCAL, every) for every in local)]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.ranks // self.per_node)

    @property
    def case(self) -> Case:
        """The dense sum."""
        on_node = evenly(self.ranks, self.per_node)
        return Case(self.ranks, self.parameters, self.parameters, on_node)

    @property
    def hardware(self) -> Links:
        """The links, for ranks with this rate of memory."""
        return with_memory(self.links, self.memory)

    @property
    def is_measured(self) -> bool:
        """Whether methods were measured over links and in memory of such rates."""
        return self.links.rate <= FASTEST and self.memory < GPU


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """Return what was measured, as experiments/every_step/condense.py wrote it."""
    text = files(__package__).joinpath("measured.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def evenly(ranks: int, per_node: int) -> int:
    """Return the ranks of the fullest node, if nodes have at most `per_node` and differ by one."""
    return -(-ranks // -(-ranks // per_node))


def with_memory(links: Links, memory: float) -> Links:
    """Return links for ranks that read and write so many bytes a second."""
    return replace(links, crowding=MEMORY / memory)


def sixteen_bits(case: Case, links: Links) -> float:
    """Return the seconds of a dense sum in 16 bits: as of half as many values."""
    return dense_seconds(replace(case, length=-(-case.length // 2)), links)


def powersgd(case: Case, links: Links) -> float:
    """Return the seconds of the sums of PowerSGD: two of factors, and one of what is no matrix."""
    share = measured()["methods"]["adamw"][POWERSGD]["bits"] / 32
    factors = replace(case, length=max(1, round(share * case.length)))
    short = replace(case, length=1)
    return dense_seconds(factors, links) + 2 * dense_seconds(short, links)


def few_bits(case: Case, links: Links) -> float:
    """Return the seconds of a sum of every value in 4 bits."""
    coded = replace(case, entries=case.length, bits=4)
    return by_auto("quantised_allreduce", coded, links)


def sparse(density: float, case: Case, links: Links) -> float:
    """Return the seconds of a sum of a fraction of the entries, of two bits each."""
    coded = replace(case, entries=max(1.0, case.length * density), bits=2)
    return by_auto("sparse_allreduce", coded, links)


def auto(collective: str, case: Case, links: Links) -> str:
    """Return the algorithm that "auto" takes; it knows of cores, and not of faster ranks."""
    return choose(collective, case, replace(links, crowding=max(1.0, links.crowding)))


def by_auto(collective: str, case: Case, links: Links) -> float:
    """Return the seconds of a collective by "auto", and of the agreement to keep the step."""
    name = auto(collective, case, links)
    agreement = constants_of(case, links)[0] * upper(case.ranks)
    return predicted(collective, case, links)[name][0] + agreement


# Seconds of the messages of an exchange, by method.
MESSAGES: dict[str, Callable[[Case, Links], float]] = {
    DENSE: dense_seconds,
    SIXTEEN: sixteen_bits,
    POWERSGD: powersgd,
    FEW_BITS: few_bits,
    IN_BASIS: partial(sparse, 8 / 256),
    SPARSE: partial(sparse, 128 / 4096),
    LOCAL: few_bits,
}
# Bytes of gradients in a bucket of DDP: by default, and in the lines of `recipes`.
DDP_NBYTES = 25 << 20
SHORT_NBYTES = 4 << 20
# Bytes sent for each byte of the gradient, by method.
SENT = {FEW_BITS: 1 / 8, IN_BASIS: 8 / 256}


def compression(name: str, case: Case, links: Links, every: int = 1) -> float:
    """Return the seconds that an exchange computes in a step; every: steps between exchanges."""
    of_round = f"{name.removesuffix(f'-{every}')}-1" if every > 1 else name
    copies = {DENSE: 0.0, SIXTEEN: CASTS} | measured()["copies"]
    memory = MEMORY / links.crowding
    copy = 2 * case.length * case.value_nbytes / memory
    return float(copies[of_round]) / every * copy


def with_every(name: str, every: int) -> str:
    """Return the name of a local method with other local steps."""
    return f"{name.removesuffix('10')}{every}"


def with_ten(name: str) -> str:
    """Return the name of a method, a local one with 10 local steps, as larger models were trained."""
    every = outer_settings(name).get("every")
    return f"{name.removesuffix(str(every))}10" if every else name


def measured_of(name: str, training: Training) -> Row:
    """Return what was measured of a method; sums of 16 bits take the steps of dense ones."""
    base = DENSE if name == SIXTEEN else with_ten(name)
    found: Row = measured()["methods"][training.optimizer][base]
    return {**found, "steps": found["steps"] * growth(name, training)}


def on_the_map(optimizer: str) -> list[int]:
    """Return the local steps with which 4 bits were trained on 2 to 16 ranks."""
    return sorted(
        every
        for name in measured()["map"]["steps"][optimizer]
        if (every := outer_settings(name).get("every"))
    )


def growth(name: str, training: Training) -> float:
    """Return how many times as many steps a method takes as with the ranks, local steps and size of larger models.

    That is so on the model of the map: 4 bits in every step, and local steps by their
    number. A model as small as that one takes its steps.
    """
    every = outer_settings(name).get("every")
    if not every and name not in measured()["map"]["steps"][training.optimizer]:
        return 1.0
    there = geometric_mean(
        steps_on_the_map(training.optimizer, every and 10, ranks)
        for ranks in measured()["ranks"]
    )
    here = steps_on_the_map(training.optimizer, every, training.ranks)
    larger = measured()["methods"][training.optimizer][LOCAL if every else name]
    level = {
        measured()["map"]["parameters"]: there / larger["steps"],
        geometric_mean(measured()["parameters"]): 1.0,
    }
    return here / there * interpolated(level, training.parameters)


def interpolated(known: Mapping[Any, float], place: float) -> float:
    """Return a value between those that are known, by the logarithms of their places; beyond them the nearest."""
    return float(np.interp(math.log(place), np.log([*known]), [*known.values()]))


def steps_on_the_map(optimizer: str, every: int | None, ranks: int) -> float:
    """Return the steps of 4 bits in every step, or of local steps, on the model of the map."""
    rows = measured()["map"]["steps"][optimizer]

    def of(name: str) -> float:
        return interpolated(dict(rows[name]), ranks)

    if not every:
        return of(FEW_BITS)
    found = {each: of(with_every(LOCAL, each)) for each in on_the_map(optimizer)}
    return interpolated(found, every)


def ranked(training: Training) -> list[Row]:
    """Return a row for each method, the fastest to the progress of a dense step first.

    One node alone accumulates the batches of all nodes.
    """
    rows = [row(name, training) for name in training.methods]
    baseline = rows[0]["seconds"]
    if training.nodes > 1:
        batches = training.nodes * training.computing
        one = training._replace(ranks=training.case.per_node, computing=batches)
        alone = row(DENSE, one)
        rows.append({**alone, "method": ALONE})
    return sorted(
        ({**each, "gain": baseline / each["seconds"]} for each in rows),
        key=lambda each: each["seconds"],
    )


def row(name: str, training: Training) -> Row:
    """Return the row of a method."""
    every = outer_settings(name).get("every", 1)
    about = training.case, training.hardware
    of_round = MESSAGES[with_ten(name)](*about) if training.ranks > 1 else 0.0
    messages = of_round / every
    computed = compression(name, *about, every)
    alone = training.computing + computed
    found = measured_of(name, training)
    counted = max(1.0, found["steps"])
    return {
        "method": name,
        "step": alone + messages,
        "computing": training.computing,
        "compression": computed,
        "messages": messages,
        "seconds": counted * (alone + messages),
        "overlapped": counted * overlapped(name, alone, messages, training),
        **{
            each: found[each]
            for each in ("steps", "on_each", "rate", "trials", "seeds")
        },
    }


def overlapped(name: str, alone: float, messages: float, training: Training) -> float:
    """Return the seconds of a step whose messages are hidden behind its computation, as far as a method can."""
    if name not in THEIRS and training.memory >= GPU:
        return alone + messages
    if every := outer_settings(name).get("every"):
        left: float = max(0.0, messages - alone / every)
        return alone + left
    last = min(1.0, last_bucket(name, training) / (4 * training.parameters))
    return min(alone + messages, max(alone, messages) + last * messages)


def last_bucket(name: str, training: Training) -> float:
    """Return the bytes of gradients that are sent after the last one is computed."""
    if name == DENSE:
        return DDP_NBYTES
    if name == SIXTEEN:
        return SHORT_NBYTES
    # PowerSGD takes one bucket, and nothing is hidden inside a node.
    if name == POWERSGD or training.nodes == 1:
        return math.inf
    own = training.links.bucket_nbytes(SENT[name], training.ranks)
    return max(SHORT_NBYTES, own)


def seconds_of(rows: list[Row], what: str = "seconds") -> dict[str, float]:
    """Return the seconds of each method for the progress of a dense step; what: or "overlapped"."""
    return {each["method"]: each[what] for each in rows}


def recommended(rows: list[Row], training: Training) -> str:
    """Return the method to take: each only if it is `PAYS` times as fast as all that are simpler.

    Of ours none inside one node, nor where nothing was measured; one node alone
    wherever it is as fast as dense. The methods of PyTorch are simpler than ours, and 4
    bits in every step, which leave loop and optimiser as they are, than our others.
    """
    seconds = seconds_of(rows)
    if training.nodes == 1:
        return DENSE
    chosen = ALONE if seconds[ALONE] <= seconds[DENSE] else DENSE
    least = seconds[chosen]
    ours = next(name for name in seconds if name not in NOT_OURS)
    measured_ones = [POWERSGD, FEW_BITS, ours] if training.is_measured else []
    for name in [SIXTEEN, *measured_ones]:
        if least > PAYS * seconds[name]:
            chosen = name
        least = min(least, seconds[name])
    return chosen


def lines_of(name: str, training: Training) -> str:
    """Return the lines of Python of a method."""
    if name == ALONE:
        return recipes.ALONE
    rate = measured_of(name, training)["rate"]
    return recipes.recipe(name, rate, training.optimizer)
