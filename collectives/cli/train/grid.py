"""A table's worth of trainings: for every method and density a rate, and with that one training a seed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.cli.train.methods import Method
from collectives.cli.train.progress import Progress
from collectives.cli.train.tasks import Task
from collectives.cli.train.training import Outcome, Recipe, Trial, train

TUNING_SEED = 1_000_000  # never one of those that are shown
LATENCY = 50e-6  # seconds that a message takes beside its bytes: TCP over Ethernet

Cell = tuple[Method, float | None]  # of the table: a method, and its density if it asks for one


@dataclass
class Row:
    """What one method came to at one density. tried: the validation loss of each rate that was tried, in nats."""

    method: Method
    density: float | None
    rate: float
    tried: dict[float, float]
    outcomes: list[Outcome]

    @property
    def name(self) -> str:
        """What the row is called."""
        return label(self.method, self.density)

    @property
    def figures(self) -> list[float]:
        """The final figure of each seed."""
        return [outcome.figure for outcome in self.outcomes]

    @property
    def spread(self) -> float:
        """Standard deviation of the figures, 0 for a single one, no number where one of them is not finite."""
        if not np.isfinite(self.figures).all():
            return np.nan
        return float(np.std(self.figures, ddof=1)) if len(self.figures) > 1 else 0.0

    def mean(self, of: str) -> float:
        """Return the mean over the seeds of a field of `Outcome`."""
        return float(np.mean([getattr(outcome, of) for outcome in self.outcomes]))

    def network_seconds(self, bits_a_second: float) -> float:
        """Return what the busiest rank's messages of a step would take: a latency each, and bits over the rate."""
        return self.mean("messages") * LATENCY + 8 * self.mean("nbytes") / bits_a_second


@dataclass(frozen=True)
class Grid:
    """What is to be trained. rates: to choose from, or the only one; seeds: how many trainings count."""

    task: Task
    cells: Sequence[Cell]
    rates: Sequence[float]
    seeds: int
    recipe: Recipe

    @property
    def tuned(self) -> bool:
        """Whether there are rates to choose from."""
        return len(self.rates) > 1

    @property
    def steps(self) -> int:
        """Steps of all trainings together."""
        return len(self.cells) * (self.seeds + self.tuned * len(self.rates)) * self.recipe.steps

    def rows(self, comm: Any, progress: Progress) -> Iterator[Row]:
        """Train on all ranks of `comm`, and yield the rows as they are done."""
        return (self.row(method, density, comm, progress) for method, density in self.cells)

    def row(self, method: Method, density: float | None, comm: Any, progress: Progress) -> Row:
        """Train one method at one density.

        Of several rates it takes the one with the least loss on the validation part, after a training without that part
        from a seed of its own. The trainings that count then have the validation part as well.
        """

        def outcome(rate: float, seed: int, held_out: str) -> Outcome:
            progress.begin(f"{label(method, density)} at {rate:g}", self.recipe.steps)
            trial = Trial(method, density or 1.0, rate, seed, held_out)
            return train(self.task, trial, self.recipe, comm, progress.tell)

        tried = {rate: outcome(rate, TUNING_SEED, "validation").loss for rate in self.rates} if self.tuned else {}
        rate = min(tried, key=lambda rate: tried[rate]) if tried else self.rates[0]
        return Row(method, density, rate, tried, [outcome(rate, seed, "test") for seed in range(self.seeds)])


def cells(methods: Iterable[Method], densities: Sequence[float]) -> list[Cell]:
    """Return what there is a row for; a method that asks for no density has one row."""
    asked, none = list(densities), [None]
    return [(method, density) for method in methods for density in (asked if method.has_density else none)]


def label(method: Method, density: float | None) -> str:
    """Return the name of a row."""
    return method.name if density is None else f"{method.name} {density:g}"
