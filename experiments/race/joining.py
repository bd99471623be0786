"""How the GPT takes part in a method of `mpicomp_bench.methods`, and at which learning rate."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from collectives import OuterLoop
from mpicomp_bench.methods import add, construct, method, outer_settings

sys.path.append(str(Path(__file__).resolve().parent.parent / "every_step"))

from losses import SEED, STEPS, of

SIMULATED = (
    Path(__file__).resolve().parents[2] / "experiments" / "results" / "every_step.json"
)
ALONE = "alone"  # the method of ranks that never communicate
add(
    "local-few-bits-delayed",
    "local steps, every value in few bits, exchanged during the next step",
    "GradientExchange(comm, bits=4)",
    "every",
    "every=10, delay=1",
)


class Rate(NamedTuple):
    """A learning rate, and how many were tried in the simulation of experiments/every_step before it was taken."""

    learning_rate: float
    trials: int = 1


GIVEN = Rate(1e-3)  # to methods of which none was tried


def rate_of(name: str, optimizer: str, schedule: str) -> Rate:
    """Return the learning rate of a method: the best of those tried; fp16 and ranks alone take that of dense.

    Where none was tried with the schedule, those at a constant rate count; where none
    was with the settings of a method, those without.
    """
    known = of(simulated(), model="gpt", steps=STEPS, seed=SEED, optimizer=optimizer)
    wanted = "dense" if name in ("fp16", ALONE) else name.replace("-delayed", "")
    tried = of(known, method=wanted) or of(known, method=wanted.partition(":")[0])
    own = of(tried, schedule=schedule) or of(tried, schedule="constant")
    # whose rate in the simulation is that of the outer step
    if not own or name.startswith("diloco"):
        return GIVEN
    return Rate(min(own, key=lambda row: row["loss"])["rate"], len(own))


@cache
def simulated() -> list[Any]:
    """Return the trainings of the simulation."""
    found: list[Any] = json.loads(SIMULATED.read_text())["rows"]
    return found


def is_known(name: str) -> bool:
    """Return whether there is such a method."""
    if name == ALONE:
        return True
    try:
        method(name)
    except ValueError:
        return False
    return True


def period(name: str) -> int:
    """Return every how many steps a method makes the replicas equal."""
    return (
        int(outer_settings(name)["every"])
        if name != ALONE and method(name).outer
        else 1
    )


def is_in_every_step(name: str) -> bool:
    """Return whether a method is a GradientExchange in every step."""
    return (
        name != ALONE
        and method(name).line.startswith("GradientExchange")
        and not method(name).outer
    )


def join(
    name: str, optimizer: str, rate: float, trainer: Any, comm: Any
) -> OuterLoop | None:
    """Let a trainer take part in a method; return the outer loop to step after each step, where there is one."""
    trainer.optimise(optimizer, rate)
    if name == ALONE:
        return None
    if method(name).outer:
        return OuterLoop(construct(name, comm), trainer.arrays, **outer_settings(name))
    trainer.average(name, comm)
    return None
