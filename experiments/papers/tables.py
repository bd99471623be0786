"""The tables of the experiments for README.md and docs/contributing/accuracy.md, each from the rows of its file."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from figures import (
    LOSS,
    SECONDS,
    curve,
    different,
    feedback,
    layer_rates,
    selection,
    union,
)
from rendering import table as text

from mpicomp_bench.measuring import Row

STEPS = 50, 100, 200, 300  # of E5, at which the loss is shown
LEAST_LOSS = 0.5  # nats, of E4: the seconds to it are shown


def final(row: Row) -> str:
    """Return the figure at the end with its spread."""
    return f"{row['figure']:.2f} ± {row['spread']:.2f}"


def adacomp(rows: Sequence[Row]) -> list[str]:
    """Return the rates by layer, the figure at the end and the bytes, of AdaComp beside dense."""
    lines, rates = [], dict[str, Any]()
    for steps in different(rows, "steps"):
        of_steps = {row["name"]: row for row in rows if row["steps"] == steps}
        dense, sparse = of_steps["dense"], of_steps["adacomp"]
        rates = {name: np.mean(found) for name, found in layer_rates(sparse).items()}
        cells = [
            f"{dense['nbytes'] / sparse['nbytes']:.0f}",
            *(f"{rate:.0f}x" for rate in rates.values()),
        ]
        lines.append([sparse["task"], f"{steps}", final(dense), final(sparse), *cells])
    return text(["", "steps", "dense", "AdaComp", "dense bytes / these", *rates], lines)


def densities(rows: Sequence[Row]) -> list[str]:
    """Return achieved over target: means over the seeds of the mean and of the 5 and 95 % quantiles."""
    columns = list(dict.fromkeys((row["task"], row["density"]) for row in rows))
    found = {}
    for row in rows:
        mean, low, high = (
            np.mean([each["achieved"] for each in row["trainings"]], axis=0)
            / row["density"]
        )
        found[row["name"], row["task"], row["density"]] = (
            f"{mean:.2f} ({low:.2f}-{high:.2f})"
        )
    heads = [
        "achieved / target",
        *(f"{task}, {100 * density:g} %" for task, density in columns),
    ]
    names = {row["name"]: selection(row) for row in rows}
    return text(
        heads,
        [
            [names[name], *(found.get((name, *each), "") for each in columns)]
            for name in names
        ],
    )


def overhead_and_links(rows: Sequence[Row]) -> list[str]:
    """Return times on captured gradients over that of exact top-k, and seconds to a loss over links."""
    timed = [row for row in rows if row["link"] is None and "floor" in row]
    lengths = different(timed, "length")
    lines = []
    for name in different(timed, "compressor"):
        cells = []
        for length in lengths:
            own = [
                1 / row["speedup"]
                for row in timed
                if (row["length"], row["compressor"]) == (length, name)
            ]
            cells.append(f"{np.median(own):.2f} ({min(own):.2f}-{max(own):.2f})")
        lines.append([name, *cells])
    trained = [row for row in rows if row["link"]]
    links = different(trained, "link")
    seconds = {(row["name"], row["link"]): f"{reached(row):.1f}" for row in trained}
    heads = [
        f"{len(trained) and trained[0]['ranks']} hosts, seconds to {LEAST_LOSS} nats",
        *links,
    ]
    second = text(
        heads,
        [
            [name, *(seconds[name, link] for link in links)]
            for name in different(trained, "name")
        ],
    )
    return [
        *text(
            ["time / exact top-k", *(f"n = {length:g}" for length in lengths)], lines
        ),
        "",
        *second,
    ]


def reached(row: Row) -> float:
    """Return the seconds at which the training loss is first `LEAST_LOSS`, straight between points; nan for never."""
    losses, seconds = curve(row, LOSS)[1], curve(row, SECONDS)[1]
    below = np.flatnonzero(losses <= LEAST_LOSS)
    if not below.size or not below[0]:
        return float("nan") if not below.size else 0.0
    ends = slice(below[0] - 1, below[0] + 1)
    return float(np.interp(-LEAST_LOSS, -losses[ends], seconds[ends]))


def step_ahead(rows: Sequence[Row]) -> list[str]:
    """Return the training loss by step, and the bytes of the busiest rank."""
    lines = []
    for row in rows:
        steps, losses = curve(row, LOSS)
        name = (
            "no compression"
            if row["name"] == "dense"
            else "top-k 1 %"
            if row["density"] < 1
            else "scaled sign"
        )
        at = [f"{losses[np.flatnonzero(steps == step)[0]]:.3f}" for step in STEPS]
        about = f"{row['task']}: {', '.join(filter(None, [name, feedback(row)]))}"
        lines.append([about, f"{row['rate']:g}", *at, f"{row['nbytes'] / 1e3:.1f}"])
    return text(["training loss at step", "rate", *map(str, STEPS), "kB a step"], lines)


def warm_up(rows: Sequence[Row]) -> list[str]:
    """Return the accuracy of gTop-k with and without warm-up, and of dense."""
    lines = []
    for row in rows:
        name = row["name"] + (", warm-up" if row["warm_up"] else "")
        about = [row["task"], f"{row['steps']}", name, f"{row['rate']:g}"]
        lines.append([*about, final(row), f"{curve(row, LOSS)[1][-1]:.4f}"])
    return text(
        ["", "steps", "method", "rate", "test accuracy, %", "training loss"], lines
    )


def scaling(rows: Sequence[Row]) -> list[str]:
    """Return the times of MPI's sum and allgather over those of gTop-k, by the number of hosts; the longest vectors."""
    length, sizes = max(row["length"] for row in rows), sorted(different(rows, "ranks"))
    seconds = {
        (row["algorithm"], row["ranks"]): row["seconds"]
        for row in rows
        if row["length"] == length
    }
    lines = []
    for name in dict.fromkeys(
        name for name, _ in seconds if not name.startswith("MPI")
    ):
        cells = []
        for size in sizes:
            dense, gathered = (
                seconds[f"MPI_{each}", size] for each in ("Allreduce", "Allgatherv")
            )
            own = seconds[name, size]
            cells.append(f"{dense / own:.0f}x, {gathered / own:.1f}x")
        lines.append([name, *cells])
    return text(
        [
            f"dense, allgather / these, n = {length / 1e6:g}e6",
            *(f"P = {size}" for size in sizes),
        ],
        lines,
    )


def aggregates(rows: Sequence[Row]) -> list[str]:
    """Return the size of the sum over k, the kilobytes of the busiest rank a step, and the training loss at the end."""
    columns = list(dict.fromkeys((row["task"], row["ranks"]) for row in rows))
    found = {}
    for row in rows:
        cell = f"{union(row):.1f} k, {row['nbytes'] / 1e3:.0f} kB, {curve(row, LOSS)[1][-1]:.4f}"
        found[row["name"], row["task"], row["ranks"]] = cell
    names = {row["name"]: selection(row) for row in rows}
    lines = [
        [names[name], *(found.get((name, *each), "") for each in columns)]
        for name in names
    ]
    return text(
        [
            "entries of the sum, sent, loss",
            *(f"{task}, P = {ranks}" for task, ranks in columns),
        ],
        lines,
    )


def local_steps(rows: Sequence[Row]) -> list[str]:
    """Return the figure at the end by the number of local steps."""
    steps = [every for every in different(rows, "every") if every]
    lines = []
    for task, name, density in dict.fromkeys(
        (row["task"], row["name"], row["density"]) for row in rows
    ):
        own = {
            row["every"]: row
            for row in rows
            if (row["task"], row["name"], row["density"]) == (task, name, density)
        }
        cells = [final(own[every]) if every in own else "" for every in (None, *steps)]
        lines.append(
            [
                f"{task}: `{name}`" + f", {100 * (density or 0):g} %" * bool(density),
                *cells,
            ]
        )
    return text(["", "every step", *(f"every {every}" for every in steps)], lines)


def every_step(rows: Sequence[Row]) -> list[str]:
    """Return the figure at the end, the rate and the bytes of a step, by task and method."""
    lines = []
    for row in rows:
        name = f"{row['task']}: `{row['name']}`" + ", 3.1 %" * bool(row["density"])
        lines.append([name, final(row), f"{row['rate']:g}", f"{row['nbytes']:,.0f}"])
    return text(["", "figure", "rate", "bytes a step"], lines)


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "E1": adacomp, "E2": adacomp, "E3": densities, "E4": overhead_and_links,
    "E5": step_ahead, "E6": warm_up, "E7": scaling, "E8": aggregates, "E9": local_steps, "E10": every_step,
}  # fmt: skip


def table(name: str, rows: Sequence[Any]) -> list[str]:
    """Return the table of an experiment; without rows a line that says how to get them."""
    return (
        TABLES[name](rows)
        if rows
        else [f"No rows yet: `python experiments/papers/papers.py {name}`."]
    )
