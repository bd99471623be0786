"""The table of the simulation: losses by method and rate, for README.md."""

from collections.abc import Sequence
from typing import Any

import numpy as np

SEED = 0  # with which rates are tried


def names(method: str) -> str:
    """Return a method's name for a reader: its kind, and the settings that are not the defaults."""
    kind, _, settings = method.partition(":")
    return f"`{kind}`" + (f", {settings.replace(',', ', ').replace('=', ' = ')}" if settings else "")


def best_rate(rows: Sequence[Any]) -> float:
    """Return the rate with the least loss among the trainings of a method that tried rates."""
    tried = [row for row in rows if row["seed"] == SEED]
    return float(min(tried, key=lambda row: row["loss"])["rate"])


def at_best_rate(rows: Sequence[Any]) -> list[float]:
    """Return the losses of all seeds at the best rate of a method."""
    best = best_rate(rows)
    return [row["loss"] for row in sorted(rows, key=lambda row: row["seed"]) if row["rate"] == best]


def table(rows: Sequence[Any], steps: int = 300) -> list[list[str]]:
    """Return the cells of the table, its head first: a line for each method, a column for each rate.

    The last two columns are the losses of all seeds at the best rate, and the bits of a value that a rank sends.
    """
    rows = [row for row in rows if row["steps"] == steps]
    rates = sorted({row["rate"] for row in rows})
    by_method: dict[str, list[Any]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    ordered = sorted(by_method.items(), key=lambda pair: float(np.mean(at_best_rate(pair[1]))))
    heads = ["method", *(f"rate {rate:g}" for rate in rates), "at the best rate, by seed", "bits a value"]
    return [heads, *(line(method, own, rates) for method, own in ordered)]


def line(method: str, own: Sequence[Any], rates: Sequence[float]) -> list[str]:
    """Return the cells of a method."""
    losses = {row["rate"]: f"{row['loss']:.3f}" for row in own if row["seed"] == SEED}
    seeds = ", ".join(f"{loss:.3f}" for loss in at_best_rate(own))
    return [names(method), *(losses.get(rate, "") for rate in rates), seeds, f"{own[0]['bits']:.2g}"]
