"""The table of the simulation: losses by method and rate, for README.md."""

from collections.abc import Sequence
from typing import Any

import numpy as np

SEED = 0  # with which rates are tried
STEPS = 300
MAIN = (  # of the summary
    "adamw",
    "lion",
    "coefficients:basis=none",
    "coefficients",
    "coefficients:form=two_bit",
    "coefficients:k=4",
    "coefficients:k=4,form=two_bit",
)


def name(row: Any) -> str:
    """Return a method's name for a reader: its kind, the settings that are not the defaults, and the schedule."""
    kind, _, settings = row["method"].partition(":")
    parts = [f"`{kind}`", *settings.replace("=", " = ").split(",")]
    if row["schedule"] != "constant":
        parts.append(f"{row['schedule']} schedule")
    if row["steps"] != STEPS:
        parts.append(f"{row['steps']} steps")
    return ", ".join(filter(None, parts))


def at_best_rate(rows: Sequence[Any]) -> list[float]:
    """Return the losses of all seeds at the rate of a method that is the best for the first seed."""
    best = min((row for row in rows if row["seed"] == SEED), key=lambda row: row["loss"])["rate"]
    return [row["loss"] for row in sorted(rows, key=lambda row: row["seed"]) if row["rate"] == best]


def summary(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of the main methods, its head first: rates tried, losses, and bits."""
    lines = []
    for method in MAIN:
        own = [row for row in rows if (row["method"], row["schedule"], row["steps"]) == (method, "constant", STEPS)]
        if own:
            tried = sorted({row["rate"] for row in own})
            losses = ", ".join(f"{loss:.3f}" for loss in at_best_rate(own))
            lines.append([name(own[0]), ", ".join(f"{rate:g}" for rate in tried), losses, f"{own[0]['bits']:.2g}"])
    return [["method", "rates tried", "loss at the best, by seed", "bits a value"], *lines]


def table(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table, its head first: a line for each method, a column for each rate.

    The last two columns are the losses of all seeds at the best rate, and the bits of a value that a rank sends.
    """
    rates = sorted({row["rate"] for row in rows})
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        by_name.setdefault(name(row), []).append(row)
    ordered = sorted(by_name.items(), key=lambda pair: float(np.mean(at_best_rate(pair[1]))))
    heads = ["method", *(f"rate {rate:g}" for rate in rates), "at the best rate, by seed", "bits a value"]
    return [heads, *(line(each, own, rates) for each, own in ordered)]


def line(method: str, own: Sequence[Any], rates: Sequence[float]) -> list[str]:
    """Return the cells of a method."""
    losses = {row["rate"]: f"{row['loss']:.3f}" for row in own if row["seed"] == SEED}
    seeds = ", ".join(f"{loss:.3f}" for loss in at_best_rate(own))
    return [method, *(losses.get(rate, "") for rate in rates), seeds, f"{own[0]['bits']:.2g}"]
