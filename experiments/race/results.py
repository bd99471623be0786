"""Rows of the race: their table and their figure.

A row is one training: model, windows of a rank's batch, schedule of the learning rate,
sleep in a backward pass (ms), hosts, rate and delay of the links (ms, one way), limit (seconds to train for), method,
optimiser, learning rate and how many of them were tried, seed, sitting, ranks,
parameters, and `curve`, whose points are seconds, steps, bytes that the busiest host
has sent, and held-out loss in nats. The rows of one setting are one table and one
column of panels.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from joining import ALONE
from losses import of
from numpy.typing import NDArray

from mpicomp_bench.measuring import Row

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rendering import draw
from rendering import table as lines_of

SETTING = "model", "batch", "sleep", "schedule", "hosts", "rate", "delay", "limit"
SECONDS, STEPS, NBYTES, LOSS = range(4)  # of a point
# of an exchange, as its statistics count them
PARTS = "compress", "communicate", "restore"
OURS = "local-sparse", "local-few-bits", "in-basis", "few-bits"
HEADS = [
    "method",
    "rate (tried)",
    "runs",
    "ms a step",
    "MB sent a step",
    "loss",
    "s to {:.2f}",
    "MB to {:.2f}",
]


def key(row: Row) -> tuple[Any, ...]:
    """Return what tells a row apart from all others."""
    sitting = row["sitting"] if row["method"] == ALONE else ""
    return (
        *(
            row[name]
            for name in (*SETTING, "method", "optimizer", "learning_rate", "seed")
        ),
        sitting,
    )


def name_of(row: Row) -> str:
    """Return the name of a row's participant: the method, and an optimiser that is not the usual one."""
    return row["method"] + f" ({row['optimizer']})" * (row["optimizer"] == "muon")


def settings(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, list[Row]]]:
    """Return the rows by setting and then by `name_of`, in the order in which they come."""
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(key(row)[: len(SETTING)], {}).setdefault(
            name_of(row), []
        ).append(row)
    return found


def sittings(rows: Sequence[Row], setting: tuple[Any, ...]) -> dict[str, float]:
    """Return the milliseconds of a step of ranks alone, by sitting and optimiser: how fast the machine was."""
    training = dict(zip(SETTING[:3], setting, strict=False))
    alone = sorted(of(rows, method=ALONE, **training), key=sitting_of)
    return {
        name: step(own)
        for name, own in ((name, list(own)) for name, own in groupby(alone, sitting_of))
    }


def sitting_of(row: Row) -> str:
    """Return the sitting of a row, and its optimiser where it is not the usual one."""
    return row["sitting"] + f" ({row['optimizer']})" * (row["optimizer"] == "muon")


def step(rows: Sequence[Row]) -> float:
    """Return the mean milliseconds of a step."""
    return float(
        np.mean(
            [1e3 * row["curve"][-1][SECONDS] / row["curve"][-1][STEPS] for row in rows]
        )
    )


def by_learning_rate(own: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of a method by learning rate, the one with the least loss first."""
    rates = {row["learning_rate"] for row in own}
    return sorted(
        ([row for row in own if row["learning_rate"] == rate] for rate in rates),
        key=final,
    )


def final(own: Sequence[Row]) -> float:
    """Return the mean loss at the end of the trainings of a method."""
    return float(np.mean([row["curve"][-1][LOSS] for row in own]))


def best_other(by_method: dict[str, list[Row]]) -> float:
    """Return the least final loss of the methods that are not ours; of ours where there is no other."""
    best = {
        method: final(by_learning_rate(own)[0]) for method, own in by_method.items()
    }
    others = [loss for method, loss in best.items() if not method.startswith(OURS)]
    return min(others or best.values())


def reached(row: Row, loss: float, axis: int) -> float:
    """Return the seconds, or bytes, at which a training first has a loss, straight between points; nan for never."""
    curve = np.array(row["curve"])
    below = np.flatnonzero(curve[:, LOSS] <= loss)
    if not below.size:
        return float("nan")
    if below[0] == 0:
        return 0.0
    (before, after), (high, low) = curve[below[0] - 1 : below[0] + 1, [axis, LOSS]].T
    return float(before + (high - loss) / (high - low) * (after - before))


def table(
    setting: tuple[Any, ...],
    by_method: dict[str, list[Row]],
    alone: Mapping[str, float],
) -> str:
    """Return the table of a setting in Markdown, means over the runs, beneath lines that say what it is.

    alone: the milliseconds of a step of ranks alone, by sitting.
    """
    target = best_other(by_method)
    rows = [row for own in by_method.values() for row in own]
    names = sorted({*map(sitting_of, rows)})
    speeds = [
        f"{name}: {f'{alone[name]:.0f}' if name in alone else 'not measured'}"
        for name in names
    ]
    model, batch, sleep, schedule, *_, limit = setting
    training = f"{model}, {rows[0]['parameters']:,} parameters, batches of {batch}, {schedule} rate"
    training += f", {sleep:g} ms of sleep in a backward pass" * bool(sleep)
    about = f"{training}, {links(setting)}, {limit:g} s\n\n"
    about += f"A step of computing alone, ms, by sitting: {', '.join(speeds)}."
    cells = [
        line(method, each, target)
        for method, own in by_method.items()
        for each in by_learning_rate(own)
    ]
    return "\n".join(
        [about, "", *lines_of([head.format(target) for head in HEADS], cells), ""]
    )


def links(setting: tuple[Any, ...]) -> str:
    """Return the hosts and links of a setting for a reader."""
    hosts, rate, delay = setting[-4:-1]
    return f"{hosts} hosts at {rate}" + f" and {delay:g} ms" * bool(delay)


def line(method: str, own: Sequence[Row], target: float) -> list[str]:
    """Return the cells of a method at a learning rate. target: the loss whose time and bytes are asked for."""
    ends = np.array([row["curve"][-1] for row in own])
    spread = f" +- {np.ptp(ends[:, LOSS]) / 2:.2f}" if len(own) > 1 else ""
    seconds, nbytes = (
        np.mean([reached(row, target, axis) for row in own])
        for axis in (SECONDS, NBYTES)
    )
    return [
        method,
        f"{own[0]['learning_rate']:g} ({max(row['trials'] for row in own)})",
        str(len(own)),
        f"{step(own):.0f}",
        f"{np.mean(ends[:, NBYTES] / ends[:, STEPS]) / 1e6:.3g}",
        f"{np.mean(ends[:, LOSS]):.2f}{spread}",
        f"{seconds:.0f}" if np.isfinite(seconds) else "-",
        f"{nbytes / 1e6:.3g}" if np.isfinite(nbytes) else "-",
    ]


X_LABELS = {
    SECONDS: "seconds of training",
    NBYTES: "bytes that the busiest host has sent",
}


def plot(rows: Iterable[Row], axis: int, file: Path) -> None:
    """Draw loss against seconds or bytes, a panel for each setting; axis: SECONDS or NBYTES."""
    panels = []
    for setting, by_method in settings(rows).items():
        model, *_, limit = setting
        curves = [np.array(row["curve"]).T for own in by_method.values() for row in own]
        early = [np.interp(limit / 10, curve[SECONDS], curve[LOSS]) for curve in curves]

        def places(curve: NDArray[Any]) -> NDArray[Any]:
            last = curve[-1, axis]
            if axis == NBYTES:
                return np.geomspace(curve[1, axis], last, 21)
            return np.linspace(0, last, 21)[1:]

        panels.append(
            {
                "lines": lines(by_method, axis, places),
                "title": f"{model}, {links(setting)}",
                "xlabel": X_LABELS[axis],
                "xscale": "log" if axis == NBYTES else "linear",
                "ylabel": "held-out loss, nats",
                "ylim": (None, float(np.median(early))),
            }
        )
    draw([panels], file)


def lines(
    by_method: dict[str, list[Row]],
    axis: int,
    places: Callable[[NDArray[Any]], NDArray[Any]],
) -> list[dict[str, Any]]:
    """Return a line for each method: the mean over the runs at `places` of the curve that ends first.

    The runs are those of the learning rate with the least loss.
    """
    found = []
    for method, (own, *_) in {
        method: by_learning_rate(own) for method, own in by_method.items()
    }.items():
        # nothing but the system's own packets
        if method.startswith(ALONE) and axis == NBYTES:
            continue
        curves = [np.array(row["curve"]) for row in own]
        shortest = min(curves, key=lambda curve: curve[-1, axis])
        if shortest[-1, axis] > shortest[0, axis]:
            x = places(shortest)
            y = np.mean(
                [np.interp(x, curve[:, axis], curve[:, LOSS]) for curve in curves],
                axis=0,
            )
            found.append({"label": method, "x": x, "y": y, "markevery": 5})
    return found


def where(rows: Iterable[Row]) -> list[str]:
    """Return the lines of the table of where the time of a step goes; rows: of hook.py."""
    by_method = {row["method"]: row["milliseconds"] for row in rows}
    alone = by_method.get("alone", {"step": float("nan")})["step"]
    lines = []
    for method, taken in by_method.items():
        whole = [f"{each:.0f}" for each in (taken["step"], taken["step"] - alone)]
        lines.append(
            [
                method,
                *whole,
                *(f"{taken[part]:.0f}" if part in taken else "" for part in PARTS),
            ]
        )
    return lines_of(["method", "ms a step", "above alone", *PARTS], lines)
