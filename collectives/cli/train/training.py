"""One training: its start and its batches depend on the seed alone, so that methods differ in nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from collectives import Traffic, traffic
from collectives.cli.train.methods import Descent, Method
from collectives.cli.train.network import Evaluation, Floats, Labels, Network
from collectives.cli.train.tasks import Task
from mpicomp import CollectiveError

Tell = Callable[[int, float], None]  # is told the step and the last figure
_POINTS = 25  # of a curve


@dataclass(frozen=True)
class Recipe:
    """What all trainings of a table have in common. batch: examples that a rank takes a step."""

    steps: int
    batch: int
    momentum: float = 0.9


@dataclass(frozen=True)
class Trial:
    """A training to be made. held_out: the part of the task that judges it, "test" or "validation"."""

    method: Method
    density: float
    rate: float
    seed: int
    held_out: str = "test"


@dataclass(frozen=True)
class Outcome:
    """What a training came to, the same on every rank.

    figure: of the held-out part, as the task counts; loss: there, in nats. curve: of (step, figure). messages, nbytes:
    that the busiest rank sends a step. sent: mean share of the entries that travel. seconds: the median step of the
    slowest rank, and exchange_seconds its part from gradient to update. diverged: numbers left the range, and the
    training ended there.
    """

    figure: float
    loss: float
    curve: list[tuple[int, float]]
    messages: float
    nbytes: float
    sent: float
    seconds: float
    exchange_seconds: float
    diverged: bool


class Training:
    """A network on its way, on this rank."""

    def __init__(self, task: Task, trial: Trial, recipe: Recipe, comm: Any) -> None:
        self.task, self.trial, self.recipe, self.comm = task, trial, recipe, comm
        self.network = Network(task.sizes, trial.seed)
        self.descent = Descent(comm, trial.method, trial.density, trial.rate, recipe.momentum)
        self.curve: list[tuple[int, float]] = []
        self.last: Evaluation | None = None
        self.times: list[tuple[float, float]] = []
        self.shares: list[float] = []
        self._shard = task.training(trial.held_out)[comm.rank :: comm.size]
        self._batches = np.random.default_rng([trial.seed, comm.rank])

    def step(self) -> bool:
        """Take a step, and return whether all numbers stayed in range; if not, the parameters are as before."""
        began = perf_counter()
        chosen: Labels = self._shard[self._batches.integers(self._shard.size, size=self.recipe.batch)]
        inputs, labels = self.task.examples(chosen)
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            gradient = self.network.gradient(inputs, labels, self.descent.point(self.network.parameters))
            computed = perf_counter()
            if not self._updated(gradient):
                return False
        ended = perf_counter()
        self.times.append((ended - began, ended - computed))
        self.shares.append(self.descent.sent)
        return True

    def look(self, step: int) -> None:
        """Evaluate the network on rank 0: the others have the same one."""
        if self.comm.rank == 0:
            self.last = self.network.evaluate(*self.task.held_out(self.trial.held_out))
            self.curve.append((step, self.task.figure_of(self.last)))

    def _updated(self, gradient: Floats) -> bool:
        """Update the parameters. An exchange refuses what is not finite, on all ranks: so they can ask each other."""
        try:
            self.network.parameters -= self.descent.update(gradient)
        except OverflowError:  # the sum, which all ranks have
            return False
        except (ValueError, CollectiveError):
            if not any(self.comm.allgather(not np.isfinite(gradient).all())):
                raise
            return False
        return True


def train(task: Task, trial: Trial, recipe: Recipe, comm: Any, tell: Tell) -> Outcome:
    """Train on all ranks of `comm` and return what came of it; `tell` is called on rank 0 after every step."""
    training, before, going = Training(task, trial, recipe, comm), traffic(comm), True
    training.look(0)
    done, every = 0, -(-recipe.steps // _POINTS)
    while going and done < recipe.steps:
        going = training.step()
        done += going
        if done % every == 0 or done == recipe.steps or not going:
            training.look(done)
        if comm.rank == 0:
            tell(done, training.curve[-1][1])
    return summary(training, before, *comm.bcast((training.last, training.curve)), diverged=not going)


def summary(training: Training, before: Traffic, last: Evaluation, curve: Any, *, diverged: bool) -> Outcome:
    """Put together what the ranks counted."""
    comm, now, steps = training.comm, traffic(training.comm), max(1, len(training.times))
    medians = np.median(training.times or [(0.0, 0.0)], axis=0)
    counted = (now.messages - before.messages) / steps, (now.nbytes - before.nbytes) / steps
    messages, nbytes, seconds, exchange = np.max(comm.allgather((*counted, *medians)), axis=0).tolist()
    return Outcome(
        figure=training.task.figure_of(last),
        loss=last.loss,
        curve=curve,
        messages=messages,
        nbytes=nbytes,
        sent=float(np.mean(comm.allgather(np.mean(training.shares or [0.0])))),
        seconds=seconds,
        exchange_seconds=exchange,
        diverged=diverged,
    )
