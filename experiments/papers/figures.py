"""The figures of the experiments, each from the rows of its file."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicomp_bench.measuring import Row

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rendering import Panel, draw

STEP, FIGURE, LOSS, SECONDS = range(4)  # of a point of a curve
# of an entry in AdaComp's own format, by the kind of layer: a bin of 50; of 500
CODED_BITS = {"conv": 8}
WIDE_BITS = 16


def different(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of a field, in the order in which they come."""
    return list(dict.fromkeys(row[name] for row in rows))


def longest(rows: Sequence[Row], task: str) -> list[Row]:
    """Return the rows of the longest trainings of a task."""
    steps = max(row["steps"] for row in rows if row["task"] == task)
    return [row for row in rows if (row["task"], row["steps"]) == (task, steps)]


def curve(row: Row, axis: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps, and the mean over the trainings of what a point of the curve has, from the `first` point on."""
    points = np.array([each["curve"][first:] for each in row["trainings"]], float)
    return points[0, :, STEP], points[:, :, axis].mean(axis=0)


def layer_rates(row: Row) -> dict[str, list[float]]:
    """Return the rates of compression of each layer but the biases: 32 bits over those of AdaComp's own format."""
    names = [
        name for name in row["trainings"][0]["tensors"] if not name.endswith("bias")
    ]
    return {
        name: [
            32 / (bits_of(name) * each["tensors"][name]) for each in row["trainings"]
        ]
        for name in names
    }


def bits_of(layer: str) -> int:
    """Return the bits of an entry in the format of the AdaComp paper: 8 in bins of 50, 16 in bins of 500."""
    return CODED_BITS.get(layer[:4], WIDE_BITS)


def adacomp(rows: Sequence[Row], path: Path) -> None:
    """Draw the rates by layer, and the curves beside dense."""
    of_names = {row["name"]: row for row in longest(rows, rows[0]["task"])}
    dense, sparse = of_names["dense"], of_names["adacomp"]
    rates = layer_rates(sparse)
    means = [float(np.mean(found)) for found in rates.values()]
    errors = [[mean - min(found) for mean, found in zip(means, rates.values(), strict=True)],
              [max(found) - mean for mean, found in zip(means, rates.values(), strict=True)]]  # fmt: skip
    places = range(len(rates))
    first = {"lines": [{"label": "adacomp", "x": places, "y": means, "yerr": errors, "linestyle": ""}],
             "xticks": (places, list(rates)), "yscale": "log", "xlabel": "layer",
             "ylabel": "rate of compression, paper's format", "xlim": (-0.5, len(rates) - 0.5)}  # fmt: skip
    lines = [
        {"label": row["name"], **dict(zip("xy", curve(row, FIGURE, 1), strict=True))}
        for row in (dense, sparse)
    ]
    ylabel = (
        "test accuracy, %"
        if sparse["task"] == "images"
        else "held-out loss, bits a character"
    )
    draw([[first, {"lines": lines, "xlabel": "step", "ylabel": ylabel}]], path)


def densities(rows: Sequence[Row], path: Path) -> None:
    """Draw achieved over target density: mean and 5 to 95 % of the steps, for each network and density."""
    names, grid = different(rows, "name"), []
    for density in different(rows, "density"):
        panels = []
        for task in different(rows, "task"):
            lines = []
            for place, name in enumerate(names):
                for row in rows:
                    if (row["task"], row["density"], row["name"]) == (
                        task,
                        density,
                        name,
                    ):
                        mean, low, high = (
                            np.mean(
                                [each["achieved"] for each in row["trainings"]], axis=0
                            )
                            / density
                        )
                        error = [[mean - low], [high - mean]]
                        lines.append(
                            {
                                "label": name,
                                "x": [place],
                                "y": [mean],
                                "yerr": error,
                                "linestyle": "",
                            }
                        )
            band = [
                {
                    "label": "target",
                    "x": [-0.5, len(names) - 0.5],
                    "y": [1, 1],
                    "linestyle": ":",
                }
            ]
            panels.append({"lines": lines + band, "title": f"{task}, target {100 * density:g} %", "xticks": ([], []),
                           "yscale": "log", "ylim": (0.05, 20), "ylabel": "achieved / target density"})  # fmt: skip
        grid.append(panels)
    draw(grid, path)


def overhead_and_links(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of each compressor over exact top-k on captured gradients, and loss against seconds."""
    timed, trained = (
        [row for row in rows if "compressor" in row and "floor" in row],
        [row for row in rows if row["link"]],
    )
    top = []
    for length in different(timed, "length"):
        lines = []
        names = different(timed, "compressor")
        for place, name in enumerate(names):
            own = [
                1 / row["speedup"]
                for row in timed
                if (row["length"], row["compressor"]) == (length, name)
            ]
            middle = float(np.median(own))
            error = [[middle - min(own)], [max(own) - middle]]
            lines.append(
                {
                    "label": name,
                    "x": [place],
                    "y": [middle],
                    "yerr": error,
                    "linestyle": "",
                }
            )
        top.append({"lines": lines, "title": f"captured gradients, n = {length:g}", "xticks": ([], []),
                    "yscale": "log", "ylabel": "time / exact top-k of mpicomp"})  # fmt: skip
    bottom = []
    for link in different(trained, "link"):
        lines = []
        for row in (row for row in trained if row["link"] == link):
            _, seconds = curve(row, SECONDS)
            lines.append({"label": row["name"], "x": seconds, "y": curve(row, LOSS)[1]})
        bottom.append({"lines": lines, "title": f"{trained[0]['ranks']} hosts at {link}", "xlabel": "seconds",
                       "xscale": "log", "ylabel": "training loss, nats"})  # fmt: skip
    draw([panels for panels in (top, bottom) if panels], path)


def feedback(row: Row) -> str:
    """Return the feedback of a method both ways, for a reader; "" for dense."""
    if row["name"] == "dense":
        return ""
    averaging = (
        f", averaging every {row['averaging_period']} steps"
        if row.get("averaging_period")
        else ""
    )
    return f"{'step-ahead' if 'step-ahead' in row['name'] else 'error feedback'}{averaging}"


def step_ahead(rows: Sequence[Row], path: Path) -> None:
    """Draw the loss on the training part by step, a panel for each network and compressor."""
    grid = []
    for task in different(rows, "task"):
        panels = []
        for signs in (False, True):
            lines = []
            for row in rows:
                if row["task"] == task and (
                    row["name"] == "dense" or row["name"].startswith("sign") == signs
                ):
                    x, y = curve(row, LOSS)
                    lines.append(
                        {"label": feedback(row) or "no compression", "x": x, "y": y}
                    )
            title = f"{task}, {'scaled sign' if signs else 'top-k 1 %'} both ways"
            panels.append({"lines": lines, "title": title, "xlabel": "step", "ylabel": "training loss, nats",
                           "yscale": "log"})  # fmt: skip
        grid.append(panels)
    draw(grid, path)


def warm_up(rows: Sequence[Row], path: Path) -> None:
    """Draw the curves of gTop-k with and without warm-up."""

    def label(row: Row) -> str:
        if row["name"] == "dense":
            return "dense"
        return f"gTop-k 0.1 %{', warm-up' if row['warm_up'] else ''}"

    grid: list[list[Panel]] = [[], []]
    for task in different(rows, "task"):
        for panels, axis, ylabel, scale in zip(
            grid,
            (FIGURE, LOSS),
            ("test accuracy, %", "training loss, nats"),
            ("linear", "log"),
            strict=True,
        ):
            own = longest(rows, task)
            lines = [
                {"label": label(row), **dict(zip("xy", curve(row, axis), strict=True))}
                for row in own
            ]
            limits = {"ylim": (70, 100)} if axis == FIGURE else {}
            panels.append(
                {
                    "lines": lines,
                    "title": task,
                    "xlabel": "step",
                    "ylabel": ylabel,
                    "yscale": scale,
                    **limits,
                }
            )
    draw(grid, path)


def scaling(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of a dense sum, and of Top-k by an allgather, over that of gTop-k, by the number of hosts."""
    seconds = {
        (row["length"], row["algorithm"], row["ranks"]): row["seconds"] for row in rows
    }
    sizes, panels = sorted(different(rows, "ranks")), []
    for baseline, model in (
        ("MPI_Allreduce", dense_model),
        ("MPI_Allgatherv", allgather_model),
    ):
        lines = []
        for length, algorithm in dict.fromkeys(
            key[:2] for key in seconds if not key[1].startswith("MPI")
        ):
            measured = [size for size in sizes if (length, algorithm, size) in seconds]
            ratios = [
                seconds[length, baseline, size] / seconds[length, algorithm, size]
                for size in measured
            ]
            lines.append(
                {"label": f"{algorithm}, n = {length:g}", "x": measured, "y": ratios}
            )
        modelled = {"x": sizes, "y": [model(size) for size in sizes], "linestyle": "--"}
        lines.append({"label": "the paper's model, bytes alone", **modelled})
        ticks = {
            "xticks": (sizes, list(map(str, sizes))),
            "xscale": "log",
            "yscale": "log",
            "xlabel": "hosts",
        }
        panels.append(
            {"lines": lines, "ylabel": f"time of {baseline} / time of gTop-k", **ticks}
        )
    draw([panels], path)


def dense_model(size: int, density: float = 0.001) -> float:
    """Return the values that a ring allreduce sends over those of the gTop-k tree: 2 (P-1)/P n and 4 k log2 P."""
    return 2 * (size - 1) / size / (4 * density * math.log2(size))


def allgather_model(size: int) -> float:
    """Return the values that an allgather sends over those of the gTop-k tree: 2 (P-1) k and 4 k log2 P."""
    return 2 * (size - 1) / (4 * math.log2(size))


def selection(row: Row) -> str:
    """Return the name of a method, or of its metric."""
    return (
        str(row["name"])
        .removeprefix("aggregation-aware:metric=")
        .removesuffix(",votes=True")
    )


def aggregates(rows: Sequence[Row], path: Path) -> None:
    """Draw the size of the sum over k, and the loss at the end, against the root's bytes."""
    grid: list[list[Panel]] = [[], []]
    for task, ranks in dict.fromkeys((row["task"], row["ranks"]) for row in rows):
        own = [row for row in rows if (row["task"], row["ranks"]) == (task, ranks)]
        sizes, ends = [], []
        for place, row in enumerate(own):
            about = {"label": selection(row), "linestyle": ""}
            sizes.append({**about, "x": [place], "y": [union(row)]})
            ends.append(
                {**about, "x": [row["nbytes"] / 1e3], "y": [curve(row, LOSS)[1][-1]]}
            )
        title = f"{task}, P = {ranks}, 1 %"
        grid[0].append(
            {
                "lines": sizes,
                "title": title,
                "xticks": ([], []),
                "ylabel": "entries of the sum / k",
            }
        )
        grid[1].append({"lines": ends, "xlabel": "kB that the busiest rank sends a step", "yscale": "log",
                        "ylabel": "training loss after 300 steps, nats"})  # fmt: skip
    draw(grid, path)


def union(row: Row) -> float:
    """Return the entries of the sum over those of a rank."""
    return float(row["received"] / row["sent"])


def local_steps(rows: Sequence[Row], path: Path) -> None:
    """Draw the figure at the end against the number of local steps, a panel for each network."""
    panels = []
    for task in different(rows, "task"):
        lines = []
        for name, density in dict.fromkeys(
            (row["name"], row["density"]) for row in rows if row["every"]
        ):
            own = [
                row
                for row in rows
                if (row["task"], row["name"], row["density"]) == (task, name, density)
            ]
            label = f"{name}{f', {100 * density:g} %' if density else ''}"
            spread = {"yerr": [row["spread"] for row in own]}
            lines.append(
                {
                    "label": label,
                    "x": different(own, "every"),
                    "y": [row["figure"] for row in own],
                    **spread,
                }
            )
        ylabel = "bits a character" if task == "text" else "test accuracy, %"
        panels.append(
            {"lines": lines, "title": task, "xlabel": "local steps", "ylabel": ylabel}
        )
    draw([panels], path)


def every_step(rows: Sequence[Row], path: Path) -> None:
    """Draw the figure at the end against the bytes of a step, a panel for each network."""
    panels = []
    for task in different(rows, "task"):
        own = [row for row in rows if row["task"] == task]
        lines = [
            {
                "label": row["name"],
                "x": [row["nbytes"]],
                "y": [row["figure"]],
                "yerr": [row["spread"]],
                "linestyle": "",
            }
            for row in own
        ]
        ylabel = "bits a character" if task == "text" else "test accuracy, %"
        about = {
            "title": task,
            "xlabel": "bytes that the busiest rank sends a step",
            "xscale": "log",
            "ylabel": ylabel,
        }
        panels.append({"lines": lines, **about})
    draw([panels], path)


FIGURES: dict[str, Callable[[Sequence[Row], Path], None]] = {
    "E1": adacomp, "E2": adacomp, "E3": densities, "E4": overhead_and_links,
    "E5": step_ahead, "E6": warm_up, "E7": scaling, "E8": aggregates, "E9": local_steps, "E10": every_step,
}  # fmt: skip
