"""`mpicomp explain --train`: the methods by the predicted time for the progress of one dense step; without MPI.

That time is steps x (computing + compression + messages). Steps: how many a method
needs for the progress of one dense step with the same optimiser, the mean over the
models of the simulation of benchmarks/every_step; fewer than one count as one, as a
lead on small models is no reason to expect it on others. Compression: seconds measured
on one core, counted in reads of the vector at `MEMORY`, at the memory rate of a rank.
Messages: by the formulas of algorithm="auto" (`collectives.planning.choice`), which add and copy
inside a node at that rate as well. Nothing overlaps; for PyTorch's own methods
`overlapped` is the least time if their sums are hidden behind the backward pass.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from collectives.planning.choice import choose, constants_of, predicted
from collectives.planning.formulas import Case, dense_mpi, upper
from collectives.planning.links import NETWORKS, Links, seconds
from mpicomp_bench import recipes
from mpicomp_bench.measuring import Row
from mpicomp_bench.methods import outer_settings

MEMORY = 1.5e10  # bytes a second of a core that reads or writes an array
GPU = 3e11  # bytes a second from which a memory is that of a GPU
FASTEST = NETWORKS["1gbit"].rate  # of the links on which methods were measured
# times as fast as what is simpler: the least gain for which a method is recommended
PAYS = 1.1
CASTS = 2.0  # reads of the vector for a copy to 16 bits and back; not measured
DENSE, SIXTEEN, POWERSGD, IN_BASIS = "dense", "fp16", "powersgd-8", "in-basis-two-bit-8"
ALONE = "one node alone"
THEIRS = DENSE, SIXTEEN, POWERSGD  # PyTorch's own


class Training(NamedTuple):
    """A training. computing: seconds of a step. memory: bytes a second of a rank. optimizer: one of `measured()`."""

    ranks: int
    parameters: int
    computing: float
    links: Links
    per_node: int = 1
    memory: float = MEMORY
    optimizer: str = "adamw"

    @property
    def nodes(self) -> int:
        """Their number."""
        return -(-self.ranks // self.per_node)

    @property
    def on_node(self) -> int:
        """The ranks of a node."""
        return -(-self.ranks // self.nodes)

    @property
    def case(self) -> Case:
        """The dense sum."""
        return Case(self.ranks, self.parameters, self.parameters, self.on_node)

    @property
    def hardware(self) -> Links:
        """The links, for ranks with this rate of memory."""
        return replace(self.links, crowding=MEMORY / self.memory)

    @property
    def is_measured(self) -> bool:
        """Whether methods were measured over links and in memory of such rates."""
        return self.links.rate <= FASTEST and self.memory < GPU


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """Return what was measured, as benchmarks/every_step/condense.py wrote it."""
    found: dict[str, Any] = json.loads(
        Path(__file__).with_name("measured.json").read_text()
    )
    return found


def dense(training: Training) -> float:
    """Return the seconds of a dense sum: by a ring over all ranks, node by node, or one of each share over the nodes.

    A node's link carries the messages of one rank in the first, and of all its ranks,
    each of its share, in the second.
    """
    case, nodes, on_node, links = (
        training.case,
        training.nodes,
        training.on_node,
        training.hardware,
    )
    ring = seconds(dense_mpi(case), links.inside() if nodes == 1 else links.between(1))
    if not 1 < nodes < case.ranks:
        return ring
    node = dense_mpi(replace(case, ranks=on_node))
    lane = dense_mpi(
        replace(case, ranks=nodes, length=-(-case.length // on_node), per_node=1)
    )
    by_lanes = seconds(node, links.inside()) + seconds(lane, links.between(on_node))
    return min(ring, by_lanes)


def sixteen_bits(training: Training) -> float:
    """Return the seconds of a dense sum in 16 bits: as of half as many values."""
    return dense(training._replace(parameters=-(-training.parameters // 2)))


def powersgd(training: Training) -> float:
    """Return the seconds of the sums of PowerSGD: two of factors, and one of what is no matrix."""
    sent = measured_of(POWERSGD, training)["bits"] / 32
    factors = max(1, round(sent * training.parameters))
    return dense(training._replace(parameters=factors)) + 2 * dense(
        training._replace(parameters=1)
    )


def few_bits(bits: int) -> Callable[[Training], float]:
    """Return the prediction for every value in so many bits."""
    return lambda training: by_auto(
        "quantised_allreduce", replace(training.case, bits=bits), training
    )


def sparse(density: float, bits: float) -> Callable[[Training], float]:
    """Return the prediction for the sum of a fraction of the entries, of so many bits each."""

    def messages(training: Training) -> float:
        case = replace(
            training.case, entries=max(1.0, training.parameters * density), bits=bits
        )
        return by_auto("sparse_allreduce", case, training)

    return messages


def by_auto(collective: str, case: Case, training: Training) -> float:
    """Return the seconds of a collective by the algorithm that "auto" takes, and of the agreement to keep the step."""
    links = training.hardware
    name = choose(collective, case, replace(links, crowding=max(1.0, links.crowding)))
    return predicted(collective, case, links)[name][0] + constants_of(
        training.case, links
    )[0] * upper(case.ranks)


# the seconds of the messages of an exchange
MESSAGES: dict[str, Callable[[Training], float]] = {
    DENSE: dense,
    SIXTEEN: sixteen_bits,
    POWERSGD: powersgd,
    "few-bits-4": few_bits(4),
    IN_BASIS: sparse(8 / 256, 2),
    "local-sparse-10": sparse(128 / 4096, 2),
    "local-few-bits-10": few_bits(4),
}


def reads_of(name: str, every: int) -> float:
    """Return the reads of the vector that a step computes beside the training; every: steps between exchanges."""
    of_round = f"{name.removesuffix(f'-{every}')}-1" if every > 1 else name
    known = {DENSE: 0.0, SIXTEEN: CASTS} | measured()["reads"]
    return float(known[of_round]) / every


def measured_of(name: str, training: Training) -> Row:
    """Return what was measured of a method; sums of 16 bits take the steps of dense ones."""
    found: Row = measured()["methods"][training.optimizer][
        DENSE if name == SIXTEEN else name
    ]
    return found


def ranked(training: Training) -> list[Row]:
    """Return a row for each method, the fastest to the progress of a dense step first.

    One node alone accumulates the batches of all nodes.
    """
    rows = [row(name, training) for name in MESSAGES]
    baseline = rows[0]["seconds"]
    if training.nodes > 1:
        batches = training.nodes * training.computing
        alone = row(DENSE, training._replace(ranks=training.on_node, computing=batches))
        rows.append({**alone, "method": ALONE, "overlapped": None})
    return sorted(
        ({**each, "gain": baseline / each["seconds"]} for each in rows),
        key=lambda each: each["seconds"],
    )


def row(name: str, training: Training) -> Row:
    """Return the row of a method. overlapped: None where it is not one of PyTorch's."""
    every = outer_settings(name).get("every", 1)
    messages = MESSAGES[name](training) / every if training.ranks > 1 else 0.0
    compression = reads_of(name, every) * 4 * training.parameters / training.memory
    alone = training.computing + compression
    parts = {
        "step": alone + messages,
        "computing": training.computing,
        "compression": compression,
    }
    measurements = {
        each: measured_of(name, training)[each]
        for each in ("steps", "on_each", "rate", "trials", "seeds")
    }
    counted = max(1.0, measurements["steps"])
    overlapped = counted * max(alone, messages) if name in THEIRS else None
    total = {
        "messages": messages,
        "seconds": counted * (alone + messages),
        "overlapped": overlapped,
    }
    return {"method": name, **parts, **total, **measurements}


def recommended(rows: list[Row], training: Training) -> str:
    """Return the method to take: each only if it is `PAYS` times as fast as what is simpler, ours last.

    Of ours none inside one node, nor where nothing was measured; one node alone
    wherever it is as fast as dense.
    """
    seconds_of = {each["method"]: each["seconds"] for each in rows}
    if training.nodes == 1:
        return DENSE
    chosen = ALONE if seconds_of[ALONE] <= seconds_of[DENSE] else DENSE
    ours = next(
        each["method"] for each in rows if each["method"] not in (*THEIRS, ALONE)
    )
    for name in [SIXTEEN, POWERSGD, ours] if training.is_measured else [SIXTEEN]:
        if seconds_of[chosen] > PAYS * seconds_of[name]:
            chosen = name
    return chosen


def lines_of(name: str, training: Training) -> str:
    """Return the lines of Python of a method."""
    rate = measured_of(DENSE if name == ALONE else name, training)["rate"]
    return (
        recipes.ALONE
        if name == ALONE
        else recipes.recipe(name, rate, training.optimizer)
    )
