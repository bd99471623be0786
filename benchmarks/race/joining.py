"""How a model takes part in a method of `mpicomp_bench.methods`, and at which learning rate."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from collectives import OuterLoop
from mpicomp_bench.methods import construct, method, outer_settings

sys.path.append(str(Path(__file__).resolve().parent.parent / "every_step"))

from losses import SEED, STEPS

SIMULATED = Path(__file__).resolve().parents[2] / "docs" / "results" / "every_step.json"
OF_CHARACTERS = "dense", "topk", "local"  # begin the names of methods of the model of characters; the GPT has all
ALONE = "alone"  # the method of ranks that never communicate


class Rate(NamedTuple):
    """A learning rate, and how many were tried in the simulation of benchmarks/every_step before it was taken."""

    learning_rate: float
    trials: int = 1


GIVEN, GIVEN_TO_CHARACTERS = Rate(1e-3), Rate(0.1)  # to methods of which none was tried


def rate_of(name: str, model: str) -> Rate:
    """Return the learning rate of a method: of the GPT the best of those tried; fp16 takes that of dense."""
    if model != "gpt":
        return GIVEN_TO_CHARACTERS
    own = simulated().get("dense" if name == "fp16" else name, [])
    if not own or name.startswith("diloco"):  # whose rate in the simulation is that of the outer step
        return GIVEN
    return Rate(min(own, key=lambda row: row["loss"])["rate"], len(own))


@cache
def simulated() -> dict[str, list[Any]]:
    """Return the trainings of the simulation at a constant rate from the first seed, by method."""
    found: dict[str, list[Any]] = {}
    for row in json.loads(SIMULATED.read_text())["rows"]:
        if (row["schedule"], row["steps"], row["seed"]) == ("constant", STEPS, SEED):
            found.setdefault(row["method"], []).append(row)
    return found


def is_known(name: str, model: str) -> bool:
    """Return whether a model has a method."""
    if name == ALONE:
        return True
    try:
        method(name)
    except ValueError:
        return False
    return model == "gpt" or name.startswith(OF_CHARACTERS)


def period(name: str) -> int:
    """Return every how many steps a method makes the replicas equal."""
    return int(outer_settings(name)["every"]) if name != ALONE and method(name).outer else 1


def is_in_every_step(name: str) -> bool:
    """Return whether a method is a GradientExchange in every step."""
    return name != ALONE and method(name).line.startswith("GradientExchange") and not method(name).outer


def join(name: str, model: str, trainer: Any, comm: Any) -> OuterLoop | None:
    """Let a trainer take part in a method; return the outer loop to step after each step, where there is one."""
    trainer.optimise(name, rate_of(name, model).learning_rate)
    if name == ALONE:
        return None
    if method(name).outer:
        return OuterLoop(construct(name, comm), trainer.arrays, **outer_settings(name))
    trainer.average(name, comm)
    return None
