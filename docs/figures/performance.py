"""Draw the figures of docs/performance.md, compressors.md, collectives.md and slow_links.md.

    mpicomp bench compressors --length 25e6 --densities 0.001 0.01 --distributions normal laplace layers --repeats 15 \
      --cpu-time --json docs/results/compressors.json
    python docs/figures/performance.py          # needs matplotlib; writes the figures beside this file

step.svg is drawn from docs/results/exchange-*.json, compressors.svg from
compressors.json there, gain.svg and choice.svg from the formulas of
`collectives.planning.choice` and `mpicomp explain`, rounds.svg from the steps in `ROUNDS`.
"""

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from style import save

from collectives.planning.choice import Case, choose
from collectives.planning.links import NETWORKS, Links
from collectives.runtime.metadata import WHOLE_NBYTES
from mpicomp_bench import explain

RESULTS = Path(__file__).parent.parent / "results"
RUNS = {
    "exchange-4": "Open MPI, 4 ranks",
    "exchange-2": "Open MPI, 2 ranks",
    "exchange-impi-rt-4": "Intel MPI, 4 ranks",
    "exchange-impi-rt-2": "Intel MPI, 2 ranks",
}
STEPS = {
    " residual in place, sparse mean": "in_place=True, sparse=True",
    ", sparse mean": "sparse=True",
    ", mean in out=": "out=gradient",
    ", new dense mean": "a new array",
}
COLOURS = ["#2f6f9f", "#7fb2d9", "#d98c4a", "#b9b9b9"]

LENGTH, RATES = 25_000_000, np.geomspace(1e7, 2e11, 60)  # values of a gradient, bit/s
GAINS = [
    (8, 0.001, "gtopk_allreduce", "#2f6f9f", "--"),
    (8, 0.001, "sparse_allreduce", "#2f6f9f", "-"),
    (8, 0.01, "sparse_allreduce", "#7fb2d9", "-"),
    (64, 0.001, "sparse_allreduce", "#c0622a", "-"),
    (64, 0.01, "sparse_allreduce", "#e8ae80", "-"),
    (8, 0.01, "8 bits", "#8fc487", "-"),
    (8, 0.01, "4 bits", "#3f8f4f", "-"),
    (8, 0.01, explain.HALVED, "#888888", ":"),
]
LATENCY, FRAMES = (
    40e-6,
    1.06,
    # seconds of a message; bytes on the link over those sent: as in
    # `collectives.planning.links.NETWORKS`
)

RANKS = [2**power for power in range(1, 11)]
DENSITIES = np.geomspace(1e-5, 0.5, 80)
PANELS = {
    "sparse_allreduce, a rank a node": ("sparse_allreduce", True),
    "sparse_allreduce, one node": ("sparse_allreduce", False),
    "gtopk_allreduce, a rank a node": ("gtopk_allreduce", True),
}
ALGORITHMS = {
    "allgather": "#dbe7f3",
    "recursive_doubling": "#7fb2d9",
    "split_allgather": "#dcefdc",
    "dense_mpi": "#d98c4a",
    "exact": "#f6dcd8",
}

# name, time, colour
STEP, EXCHANGE = ("step", 1.0, "#dcefdc"), ("exchange", 1.6, "#f6dcd8")
ROUNDS = {
    "exchange every step": [STEP, EXCHANGE] * 4,
    "every=4": [*[STEP] * 4, EXCHANGE, *[STEP] * 4],
}


def draw_step() -> None:
    """Draw how many times as fast as MPI's dense sum a step of an exchange is, by where it returns the mean."""
    figure, panels = panels_of(2, 8.4, 4.2)
    for density, axes in zip((0.001, 0.01), panels, strict=True):
        for place, run in enumerate(RUNS):
            rows = json.loads((RESULTS / f"{run}.json").read_text())["rows"]
            speedups = {row["name"]: row["speedup"] for row in rows}
            for number, step in enumerate(STEPS):
                speedup = speedups[f"{density:g} GradientExchange{step}"]
                bar = axes.barh(
                    -place - 0.19 * number,
                    speedup,
                    0.17,
                    color=COLOURS[number],
                    label=STEPS[step],
                )
                axes.bar_label(bar, fmt="%.1f", size=7.5, padding=2)
        axes.axvline(1, color="#333333", linewidth=1)
        axes.set(
            title=f"density {density:g}",
            xlabel="times as fast as MPI_Allreduce",
            xlim=(0, 7.6),
        )
        axes.set_yticks([-0.28 - place for place in range(len(RUNS))], RUNS.values())
    panels[1].set_yticklabels([])
    figure.legend(
        *legend(panels[:1]),
        title="the mean is returned by",
        loc="outside lower center",
        ncols=4,
    )
    save(figure, "step")


def draw_compressors() -> None:
    """Draw the time of each compressor over that of one read of the gradient, the median of the distributions."""
    rows = json.loads((RESULTS / "compressors.json").read_text())["rows"]
    names = list(dict.fromkeys(row["compressor"] for row in rows))
    figure, (axes,) = panels_of(1, 7, 4.6)
    for number, density in enumerate((0.001, 0.01)):
        own = [row for row in rows if row["density"] == density]
        reads = [
            median(
                row["seconds"] / row["floor"]
                for row in own
                if row["compressor"] == name
            )
            for name in names
        ]
        places = [0.4 * number - place for place in range(len(names))]
        bars = axes.barh(
            places, reads, 0.4, color=COLOURS[number], label=f"density {density:g}"
        )
        axes.bar_label(bars, fmt="%.3g", size=7.5, padding=2)
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks([0.2 - place for place in range(len(names))], names)
    axes.set(xscale="log", xlabel="time, in reads of the gradient", xlim=(0.5, 400))
    axes.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    axes.legend(loc="lower right")
    save(figure, "compressors")


def draw_gain() -> None:
    """Draw how many times as fast as a dense allreduce a whole exchange is, over the rate of the links."""
    figure, (axes,) = panels_of(1, 7, 4.2)
    for ranks, density, collective, colour, style in GAINS:
        label = f"{ranks} ranks, density {density:g}, {collective.partition('_')[0]}"
        if collective.endswith(" bits"):
            label = f"{ranks} ranks, {collective.removesuffix(' bits').removeprefix('mpi, ')} bits of every value"
        gains = [gain(ranks, density, collective, rate) for rate in RATES]
        axes.plot(RATES, gains, style, color=colour, label=label)
    axes.axhline(1, color="#333333", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(RATES[0], RATES[-1]),
        ylabel="dense allreduce / whole exchange, time",
    )
    axes.set_xticks(
        [1e7, 1e8, 1e9, 1e10, 1e11],
        ["10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"],
    )
    axes.set_yticks(
        [0.3, 1, 3, 10, 30, 100, 300], ["0.3", "1", "3", "10", "30", "100", "300"]
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, "gain")


def gain(ranks: int, density: float, collective: str, rate: float) -> float:
    """Return the seconds of a dense allreduce over those of an exchange, or of one in 16 bits, as predicted."""
    links = Links(LATENCY, rate / 8 / FRAMES)
    rows = explain.explained(Case(ranks, LENGTH, density * LENGTH), links)
    sought = (
        "dense_allreduce" if collective == explain.HALVED else "GradientExchange",
        collective,
    )
    return next(
        row["speedup"] for row in rows if (row["operation"], row["algorithm"]) == sought
    )


def draw_choice() -> None:
    """Draw which algorithm "auto" takes, by ranks and density, for 10^6 float32 with independent supports."""
    figure, panels = panels_of(len(PANELS), 8.4, 4)
    half_step, taken = (DENSITIES[1] / DENSITIES[0]) ** 0.5, set()
    for axes, (title, (collective, apart)) in zip(panels, PANELS.items(), strict=True):
        for ranks in RANKS:
            names = [
                algorithm(collective, ranks, density, apart) for density in DENSITIES
            ]
            for name, group in groupby(range(len(names)), names.__getitem__):
                places = list(group)
                bottom, top = (
                    DENSITIES[places[0]] / half_step,
                    DENSITIES[places[-1]] * half_step,
                )
                axes.bar(
                    ranks,
                    top - bottom,
                    ranks * 2**-0.5,
                    bottom,
                    color=ALGORITHMS[name],
                    align="center",
                )
                taken.add(name)
        axes.set(
            title=title,
            xlabel="ranks, powers of two",
            xscale="log",
            yscale="log",
            ylim=(1e-5, 0.5),
            xlim=(1.3, 1384),
        )
        axes.set_xticks([2, 8, 32, 128, 1024], ["2", "8", "32", "128", "1024"])
        axes.tick_params(axis="y", labelsize=10)  # Exponents are 0.7 of it.
        axes.minorticks_off()
    panels[0].set_ylabel("density")
    used = [(name, colour) for name, colour in ALGORITHMS.items() if name in taken]
    patches = [
        matplotlib().patches.Patch(color=colour, label=name) for name, colour in used
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
    save(figure, "choice")


def algorithm(collective: str, ranks: int, density: float, apart: bool) -> str:
    """Return what "auto" takes; see `collectives.allreduce.choose_freely`."""
    entries = max(1, round(density * 1_000_000))
    if collective == "sparse_allreduce":
        if ranks == 2:
            return "recursive_doubling"
        if (ranks - 1) * 8 * entries <= WHOLE_NBYTES:
            return "allgather"
    return choose(
        collective,
        Case(ranks, 1_000_000, entries, 1 if apart else ranks),
        NETWORKS["1gbit"],
    )


def draw_rounds() -> None:
    """Draw what a rank does over time, with an exchange in each step and with local steps."""
    figure, (axes,) = panels_of(1, 8, 1.9)
    for place, parts in enumerate(ROUNDS.values()):
        start = 0.0
        for name, time, colour in parts:
            axes.barh(
                -place,
                time,
                0.6,
                start,
                color=colour,
                edgecolor="#555555",
                linewidth=0.8,
            )
            axes.text(start + time / 2, -place, name, ha="center", va="center", size=8)
            start += time
    axes.set_yticks([0, -1], ROUNDS.keys())
    axes.set_xlabel("time of a rank")
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, "rounds")


def matplotlib() -> Any:
    """Return matplotlib with the settings of all figures."""
    import matplotlib as found
    import matplotlib.figure

    found.rcParams |= {
        "svg.hashsalt": "mpicomp",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
    }
    return found


def panels_of(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure and its panels side by side."""
    figure = matplotlib().figure.Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def legend(panels: Iterable[Any]) -> tuple[list[Any], list[str]]:
    """Return handles and labels of panels, each label once."""
    found = {
        text: handle
        for axes in panels
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    return list(found.values()), list(found)


if __name__ == "__main__":
    for draw in (draw_step, draw_compressors, draw_gain, draw_choice, draw_rounds):
        draw()
