"""The tables of the simulation: losses by method, optimiser and rate, for README.md and the pages."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SEED = 0  # with which rates are tried
STEPS, LONG_STEPS = 300, 2000
# models, and the schedule of the rate in the summary
SCHEDULED = {"gpt": "linear", "manual": "cosine"}
# for a reader
OPTIMISERS = {
    "adamw": "AdamW",
    "muon": "Muon",
    "lion": "Lion",
    "sgd": "SGD with signs",
    "normuon": "NorMuon",
    "muon-quintic-3": "Muon, 3 steps of Newton-Schulz",
    "muon-polar-4": "Muon, 4 of Polar Express",
}


def of(rows: Sequence[Any], **wanted: Any) -> list[Any]:
    """Return the rows that have these values.

    >>> of([{"seed": 0, "loss": 2.0}, {"seed": 1, "loss": 3.0}], seed=1)
    [{'seed': 1, 'loss': 3.0}]
    """
    return [
        row for row in rows if all(row[key] == value for key, value in wanted.items())
    ]


def grouped(rows: Sequence[Any], name: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return the rows by name, the name with the least loss at its best rate first."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(name(row), []).append(row)
    return dict(
        sorted(found.items(), key=lambda pair: float(np.mean(at_best_rate(pair[1]))))
    )


def rows_at_best_rate(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of all seeds at the rate of a method that is the best for the first seed."""
    best = min(of(rows, seed=SEED), key=lambda row: row["loss"])["rate"]
    return sorted(of(rows, rate=best), key=lambda row: row["seed"])


def at_best_rate(rows: Sequence[Any]) -> list[float]:
    """Return the losses of all seeds at the rate of a method that is the best for the first seed."""
    return [row["loss"] for row in rows_at_best_rate(rows)]


def summary(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of trainings with a schedule, its head first, a line for each method and optimiser.

    They are, for each model, the losses at the best rate, by seed, the rate and how
    many were tried, and the losses after `LONG_STEPS` steps; then the bits of a value
    that a rank sends.
    """
    scheduled = [row for row in rows if SCHEDULED.get(row["model"]) == row["schedule"]]
    lines = []
    for (method, optimiser), own in grouped(
        scheduled, lambda row: (row["method"], row["optimizer"])
    ).items():
        cells = [f"`{method}`", OPTIMISERS[optimiser]]
        for model in SCHEDULED:
            short, longer = (
                of(own, model=model, steps=steps) for steps in (STEPS, LONG_STEPS)
            )
            cells += [at_best(short), ", ".join(f"{row['loss']:.3f}" for row in longer)]
        lines.append([*cells, f"{own[0]['bits']:.2g}"])
    heads = [
        f"{model}, {steps:,} steps"
        for model in SCHEDULED
        for steps in (STEPS, LONG_STEPS)
    ]
    return [["method", "optimiser", *heads, "bits a value"], *lines]


def at_best(rows: Sequence[Any]) -> str:
    """Return the losses at the best rate, the rate and how many were tried, as text; empty without rows."""
    if not rows:
        return ""
    rate = rows_at_best_rate(rows)[0]["rate"]
    return f"{', '.join(f'{loss:.3f}' for loss in at_best_rate(rows))} ({rate:g} of {len(of(rows, seed=SEED))})"


def table(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of all trainings, its head first, the best first.

    They are the loss at each rate, with the first seed, the losses of all seeds at the
    best one, and the bits of a value that a rank sends.
    """
    heads = [
        "model, schedule, steps",
        "method",
        "optimiser",
        "rate: loss",
        "at the best rate, by seed",
        "bits a value",
    ]
    names = "model", "schedule", "steps", "method", "optimizer"
    by_setting = grouped(rows, lambda row: tuple(row[name] for name in names))
    lines = []
    for (model, schedule, steps, method, optimiser), own in sorted(
        by_setting.items(), key=lambda pair: pair[0][:3]
    ):
        setting = f"{model}, {schedule}, {steps:,}"
        lines.append([setting, f"`{method}`", OPTIMISERS[optimiser], *figures(own)])
    return [heads, *lines]


def figures(rows: Sequence[Any]) -> list[str]:
    """Return as text the loss at each rate with the first seed, those of all seeds at the best, and the bits."""
    first = sorted((row["rate"], row["loss"]) for row in of(rows, seed=SEED))
    tried = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in first)
    seeds = ", ".join(f"{loss:.3f}" for loss in at_best_rate(rows))
    return [tried, seeds, f"{rows[0]['bits']:.2g}"]
