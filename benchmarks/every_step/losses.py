"""The table of the simulation: losses by method and rate, for README.md."""

from collections.abc import Sequence
from typing import Any

import numpy as np

SEED = 0  # with which rates are tried
STEPS, LONG_STEPS = 300, 2000
MAIN = (  # of the summary
    "dense",
    "lion",
    "in-basis-8:basis=none",
    "in-basis-8",
    "in-basis-two-bit-8",
    "in-basis-4",
    "in-basis-two-bit-4",
    "few-bits-8",
    "few-bits-4",
    "few-bits-2",
    "topk-0.01",
    "powersgd-8",
    "local-sparse-5",
    "local-sparse-10",
    "local-few-bits-10",
    "diloco-10",
)


def name(row: Any) -> str:
    """Return a method's name for a reader, with schedule and steps where they are not the defaults."""
    parts = [f"`{row['method']}`"]
    if row["schedule"] != "constant":
        parts.append(f"{row['schedule']} schedule")
    if row["steps"] != STEPS:
        parts.append(f"{row['steps']} steps")
    return ", ".join(parts)


def rows_at_best_rate(rows: Sequence[Any]) -> list[Any]:
    """Return the rows of all seeds at the rate of a method that is the best for the first seed."""
    best = min((row for row in rows if row["seed"] == SEED), key=lambda row: row["loss"])["rate"]
    return [row for row in sorted(rows, key=lambda row: row["seed"]) if row["rate"] == best]


def at_best_rate(rows: Sequence[Any]) -> list[float]:
    """Return the losses of all seeds at the rate of a method that is the best for the first seed."""
    return [row["loss"] for row in rows_at_best_rate(rows)]


def summary(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table of the main methods, its head first: rates tried, losses, and bits.

    The losses are those at the best rate, after `STEPS` and, where a method was trained so long, `LONG_STEPS` steps.
    """
    lines = []
    for method in MAIN:
        of_method = [row for row in rows if (row["method"], row["schedule"]) == (method, "constant")]
        own = [row for row in of_method if row["steps"] == STEPS]
        if own:
            tried = sorted({row["rate"] for row in own})
            losses = ", ".join(f"{loss:.3f}" for loss in at_best_rate(own))
            longer = ", ".join(f"{row['loss']:.3f}" for row in of_method if row["steps"] == LONG_STEPS)
            rates = ", ".join(f"{rate:g}" for rate in tried)
            lines.append([name(own[0]), rates, losses, longer, f"{own[0]['bits']:.2g}"])
    heads = ["method", "rates tried", "loss at the best, by seed", f"after {LONG_STEPS:,} steps", "bits a value"]
    return [heads, *lines]


def table(rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of the table, its head first: a line for each method, the best first.

    They are the number of learning rates tried, the loss at each, with the first seed, the losses of all seeds at the
    best one, and the bits of a value that a rank sends.
    """
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        by_name.setdefault(name(row), []).append(row)
    ordered = sorted(by_name.items(), key=lambda pair: float(np.mean(at_best_rate(pair[1]))))
    heads = ["method", "tried", "rate: loss", "at the best rate, by seed", "bits a value"]
    return [heads, *(line(*pair) for pair in ordered)]


def line(method: str, own: Sequence[Any]) -> list[str]:
    """Return the cells of a method."""
    first = sorted((row["rate"], row["loss"]) for row in own if row["seed"] == SEED)
    tried = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in first)
    seeds = ", ".join(f"{loss:.3f}" for loss in at_best_rate(own))
    return [method, str(len(first)), tried, seeds, f"{own[0]['bits']:.2g}"]
