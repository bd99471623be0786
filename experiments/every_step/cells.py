"""The map of local steps: losses by ranks, local steps and total batch, beside dense training with the same batch.

The rows are those of experiments/results/map.json. A cell is a text, a total batch, which is
the number of windows of all ranks in a step, and a number of ranks.
"""

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from losses import (
    LONG_STEPS,
    OPTIMISERS,
    SEED,
    STEPS,
    figures,
    grouped,
    of,
    rows_at_best_rate,
)

MODELS = {"small": "library", "small-manual": "manual"}
RANKS = 2, 4, 8, 16
ALONE = 16, 4  # the total batch that stays, and the batch of a rank that stays
EVERY = 5, 10, 30, 100
OF_ONE_WINDOW = 16, 32  # ranks with a window each
DENSE, FEW_BITS = "dense", "few-bits-4"
KINDS = ("muon", 4), ("muon", 2), ("adamw", 4)  # optimisers, and the bits of a value
TENTH = 0.03, 0.045  # bits of a value and step, about a tenth of 4 bits every 10 steps


def local(every: int, bits: int = 4) -> str:
    """Return the name of local steps with every value in few bits."""
    return f"local-few-bits-{every}{'' if bits == 4 else f':bits={bits}'}"


ON_THE_MAP = (DENSE, FEW_BITS, *map(local, EVERY))


class Cell(NamedTuple):
    """A cell. total: windows of all ranks in a step."""

    model: str
    total: int
    ranks: int

    def trained(
        self, rows: Sequence[Any], method: str, optimizer: str, steps: int = STEPS
    ) -> list[Any]:
        """Return the rows of a method at its best rate, one for each seed; dense training needs no ranks."""
        ranks = {} if method == DENSE else {"ranks": self.ranks}
        own = of(
            rows,
            model=self.model,
            method=method,
            optimizer=optimizer,
            steps=steps,
            **ranks,
        )
        own = [row for row in own if row["ranks"] * row["batch"] == self.total]
        return rows_at_best_rate(own) if own else []

    def loss(self, rows: Sequence[Any], method: str, optimizer: str) -> float | None:
        """Return the mean loss over the seeds at the best rate, or None."""
        own = self.trained(rows, method, optimizer)
        return fmean(row["loss"] for row in own) if own else None

    def gap(
        self,
        rows: Sequence[Any],
        method: str,
        optimizer: str,
        other: str = DENSE,
        steps: int = STEPS,
    ) -> float | None:
        """Return the nats behind dense training, or another method, over the seeds that both have, or None."""
        losses = [
            {
                row["seed"]: row["loss"]
                for row in self.trained(rows, name, optimizer, steps)
            }
            for name in (method, other)
        ]
        both = losses[0].keys() & losses[1].keys()
        return (
            fmean(losses[0][each] - losses[1][each] for each in both) if both else None
        )


def cells(rows: Sequence[Any]) -> list[Cell]:
    """Return the cells of the map in which something was trained."""
    found = {
        Cell(row["model"], row["ranks"] * row["batch"], row["ranks"])
        for row in rows
        if row["ranks"] in RANKS
    }
    return sorted(found)


def worth(rows: Sequence[Any], optimizer: str, model: str = "small") -> float | None:
    """Return the nats that e times the steps are worth to dense training; None without a long one."""
    dense = of(rows, model=model, method=DENSE, optimizer=optimizer, seed=SEED)
    dense = [row for row in dense if row["ranks"] * row["batch"] == ALONE[0]]
    long = of(dense, steps=LONG_STEPS)
    if not long:
        return None
    (short,) = of(dense, steps=STEPS, rate=long[0]["rate"])
    return float((short["loss"] - long[0]["loss"]) / math.log(LONG_STEPS / STEPS))


def table(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of the map, its head first: losses, a line for each cell and kind of messages."""
    heads = ["text", "windows a step", "ranks", "optimiser, bits", "dense"]
    heads += ["every step", *(f"H = {every}" for every in EVERY)]
    lines = []
    for cell, (optimizer, bits) in product(cells(rows), KINDS):
        methods = [f"few-bits-{bits}", *(local(every, bits) for every in EVERY)]
        losses = [cell.loss(rows, name, optimizer) for name in (DENSE, *methods)]
        if any(losses[1:]):
            texts = ["" if each is None else f"{each:.3f}" for each in losses]
            place = [MODELS[cell.model], str(cell.total), str(cell.ranks)]
            lines.append([*place, f"{OPTIMISERS[optimizer]}, {bits}", *texts])
    return [heads, *lines]


def fewer_bits(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of what sends about a tenth of 4 bits every 10 steps, the least gap first."""
    heads = ["steps", "local steps of Muon", "bits a value and step", "rate: loss"]
    heads += ["at the best rate, by seed", "nats behind 4 bits, H = 10"]
    total, batch = ALONE
    place = Cell("small", total, total // batch)
    own = of(rows, model="small", ranks=place.ranks, batch=batch, optimizer="muon")
    lines = []
    for steps in (STEPS, LONG_STEPS):
        for name, trained in grouped(
            of(own, steps=steps), lambda row: row["method"]
        ).items():
            gap = place.gap(rows, name, "muon", local(10), steps)
            tried, seeds, bits = figures(trained)
            if gap is not None and TENTH[0] < trained[0]["bits"] < TENTH[1]:
                line = [f"{steps:,}", f"`{name}`", bits, tried, seeds, f"{gap:.3f}"]
                lines.append(line)
    return [heads, *lines]


def by_bits(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of all that was tried on ranks with one window each, the fewest bits first."""
    heads = ["text, ranks", "method", "bits a value and step", "rate: loss"]
    heads += ["at the best rate, by seed", "nats behind dense Muon"]
    lines = []
    for ranks, (model, text) in product(OF_ONE_WINDOW, MODELS.items()):
        about = {"model": model, "ranks": ranks, "batch": 1}
        own = of(rows, **about, optimizer="muon", steps=STEPS)
        methods = grouped(own, lambda row: row["method"])
        for name in sorted(methods, key=lambda name: methods[name][0]["bits"]):
            tried, seeds, bits = figures(methods[name])
            gap = Cell(model, ranks, ranks).gap(rows, name, "muon")
            behind = "" if gap is None else f"{gap:.2f}"
            place = f"{text}, {ranks}"
            lines.append([place, f"`{name}`", bits, tried, seeds, behind])
    return [heads, *lines]


def behind(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of a short table, its head first: nats behind dense Muon by ranks, with the batch that stays."""
    places = [Cell("small", ALONE[0], ranks) for ranks in RANKS]
    heads = ["nats behind dense Muon", *(f"{ranks} ranks" for ranks in RANKS)]
    named = {"4 bits in every step": FEW_BITS}
    named |= {f"local steps, H = {every}": local(every) for every in EVERY[:3]}
    named["2 bits, H = 5"] = local(5, 2)
    lines = []
    for name, method in named.items():
        gaps = [cell.gap(rows, method, "muon") for cell in places]
        lines.append([name, *("" if gap is None else f"{gap:.2f}" for gap in gaps)])
    adamw, muon = (places[0].loss(rows, DENSE, each) for each in ("adamw", "muon"))
    lead = f"{(adamw or 0) - (muon or 0):.2f}"
    return [heads, *lines, ["dense AdamW", *[lead] * len(RANKS)]]


def trainings(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of all trainings of the map, its head first, the best of a cell first."""
    heads = ["text, windows a step, ranks, steps", "method", "optimiser"]
    heads += ["rate: loss", "at the best rate, by seed", "bits a value"]
    names = "model", "ranks", "batch", "steps", "method", "optimizer"
    by_setting = grouped(rows, lambda row: tuple(row[name] for name in names))
    lines = []
    for (model, ranks, batch, steps, method, optimizer), own in sorted(
        by_setting.items(), key=lambda pair: pair[0][:4]
    ):
        setting = f"{MODELS[model]}, {ranks * batch}, {ranks}, {steps:,}"
        lines.append([setting, f"`{method}`", OPTIMISERS[optimizer], *figures(own)])
    return [heads, *lines]
