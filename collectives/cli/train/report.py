"""What the trainings came to: the table, the JSON, the plot."""

import importlib
import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, pairwise
from typing import Any

import numpy as np

from collectives.cli.colours import look_of
from collectives.cli.train.grid import LATENCY, Grid, Row

NETWORKS = (1e9, 1e10)  # bits a second that the simulated times are of


def header(figure: str) -> str:
    """Return the head of the table."""
    groups = f"{'':25}{'':>8}{figure + ' ':>20}{'share':>8}{'bytes a rank':>14}{'dense':>9}{'ms a step, measured':>21}"
    titles = f"{'method, density':25}{'rate':>8}{'mean and spread ':>20}{'sent':>8}{'sends a step':>14}{'/ these':>9}"
    return f"{groups}{'network, simulated':>21}\n{titles}{'all':>10}{'exchange':>11}{'1 Gbit/s':>11}{'10':>10}"


def line(row: Row, dense: float) -> str:
    """Return a row of the table. dense: bytes of a dense step."""
    nbytes = row.mean("nbytes")
    less = f"{dense / nbytes:9.1f}" if nbytes else f"{'':>9}"
    spread = f"{row.spread:.2f}" if math.isfinite(row.spread) else "-"
    final = f"{row.mean('figure'):.2f} +- {spread}"
    times = [row.mean("seconds"), row.mean("exchange_seconds"), *map(row.network_seconds, NETWORKS)]
    measured, exchange, *simulated = [1e3 * seconds for seconds in times]
    diverged = sum(outcome.diverged for outcome in row.outcomes)
    return (
        f"{row.name:25}{row.rate:8g}{final:>20}{row.mean('sent'):8.2%}{nbytes:14,.0f}{less}{measured:10.2f}"
        f"{exchange:11.2f}{simulated[0]:11.2f}{simulated[1]:10.2f}"
        + (f"  {diverged} of {len(row.outcomes)} diverged" if diverged else "")
    )


def notes(grid: Grid, size: int) -> str:
    """Return what the table has to be read with."""
    recipe, task = grid.recipe, grid.task
    rates = f"the best on validation of {', '.join(f'{rate:g}' for rate in grid.rates)}" if grid.tuned else "given"
    return (
        f"{task.name}, {size} ranks, {recipe.steps} steps of {recipe.batch} examples a rank, {grid.seeds} seeds; "
        f"momentum {recipe.momentum:g}; rate: {rates}.\n"
        "Spread: standard deviation over the seeds. Bytes: of the rank that sends most, coded as between nodes;\n"
        "dense: 2 (P-1)/P n v. Measured: median step of the slowest rank, with the wait for others in it.\n"
        f"Simulated: {1e6 * LATENCY:g} us for each message that the busiest rank sends, and its bytes over the rate."
    )


def dense_bytes(grid: Grid, size: int) -> float:
    """Return the least that a rank sends in a dense allreduce of the gradient."""
    return 2 * (size - 1) / size * 4 * parameters(grid)


def parameters(grid: Grid) -> int:
    """Return how many values a gradient has."""
    sizes = grid.task.sizes
    return sum((m + 1) * n for m, n in pairwise(sizes))


def as_json(grid: Grid, done: Sequence[Row], **about: Any) -> str:
    """Return the rows, and what the run was about, as JSON; what is not finite becomes null."""
    told = {
        **about,
        "task": grid.task.name,
        "figure": grid.task.figure,
        "parameters": parameters(grid),
        **asdict(grid.recipe),
        "rates": list(grid.rates),
        "seeds": grid.seeds,
        "latency_seconds": LATENCY,
        "rows": [_told(row) for row in done],
    }
    return json.dumps(_finite(told), indent=1, allow_nan=False)


def _told(row: Row) -> dict[str, Any]:
    fields = ("figure", "loss", "messages", "nbytes", "sent", "seconds", "exchange_seconds")
    return {
        **asdict(row.method),
        "density": row.density,
        "rate": row.rate,
        "tried": {f"{rate:g}": loss for rate, loss in row.tried.items()},
        **{name: row.mean(name) for name in fields},
        "spread": row.spread,
        "network_seconds": {f"{rate:g}": row.network_seconds(rate) for rate in NETWORKS},
        "trainings": [asdict(outcome) for outcome in row.outcomes],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(grid: Grid, done: Sequence[Row], path: pathlib.Path) -> None:
    """Draw the figure against the steps, and against the bytes that the busiest rank has sent."""
    figure_module: Any = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(14, 6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(row.method.name for row in done))
    densities = sorted({row.density or 1 for row in done}, reverse=True)
    styles = dict(zip(densities, cycle(("-", "--", ":", "-.")), strict=False))
    for row in done:
        steps, figures = curve(row)
        sent = steps[1:] * max(row.mean("nbytes"), 1)  # nothing yet at step 0, and the scale is logarithmic
        look = {**look_of(names.index(row.method.name)), "markevery": 5, "linestyle": styles[row.density or 1]}
        left.plot(steps, figures, label=row.name, **look)
        right.plot(sent, figures[1:], **look)
    left.set(xlabel="step", ylabel=grid.task.figure)
    right.set(xlabel="bytes that the busiest rank has sent", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if grid.task.more_is_better and done:
        left.set_ylim(bottom=min(80.0, *(row.mean("figure") for row in done)) - 5, top=101)
    figure.legend(loc="outside right upper", handlelength=4)
    figure.savefig(path, dpi=120)


def curve(row: Row) -> tuple[Any, Any]:
    """Return the steps, and the mean over the seeds of the figures there; up to where the first one diverged."""
    curves = [outcome.curve for outcome in row.outcomes]
    shortest = min(curves, key=len)
    figures = np.mean([[figure for _, figure in each[: len(shortest)]] for each in curves], axis=0)
    return np.array([step for step, _ in shortest]), figures
