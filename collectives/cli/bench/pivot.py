"""What a reader learns from the comparison of the compressors: a Markdown table and a figure for each density."""

import importlib
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.cli.bench.compressors import Selection
from collectives.cli.colours import look_of


def markdown(rows: Sequence[Selection]) -> str:
    """Return a table for each density: a line for each compressor, what it keeps of each distribution in a column."""
    tables = []
    for density in _in_order(row.density for row in rows):
        of_density = [row for row in rows if row.density == density]
        distributions = _in_order(row.distribution for row in of_density)
        head = ["compressor", "time / top-k", "time / read", "bytes an entry", *distributions]
        lines = [head, ["---"] * len(head)]
        for name in _in_order(row.compressor for row in of_density):
            lines.append(_line(name, [row for row in of_density if row.compressor == name]))
        tables.append(f"Density {density:g}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables) + "\n"


def _line(name: str, rows: Sequence[Selection]) -> list[str]:
    against_top_k = _median_and_range([1 / row.speedup for row in rows])
    reads = f"{statistics.median(row.seconds / (row.floor or 1) for row in rows):.1f}"
    nbytes = f"{statistics.median(row.bytes_per_entry for row in rows):.2f}"
    return [name, against_top_k, reads, nbytes, *(_kept(row) for row in rows)]


def _kept(row: Selection) -> str:
    return f"{_achieved(row)}, {row.share_of_top_k:.2f}"


def _achieved(row: Selection) -> str:
    """Return achieved over target, of the first call too where it differs; the density in brackets without a target."""
    if row.share_of_target is None:
        return f"({row.achieved:.2g})"
    first, settled = f"{row.first_share_of_target:.2f}", f"{row.share_of_target:.2f}"
    return settled if first == settled else f"{first} → {settled}"


def _median_and_range(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.1f} ({min(figures):.1f} to {max(figures):.1f})"


def plot(rows: Sequence[Selection], file: pathlib.Path) -> None:
    """Draw, for each density, time against what is captured, and how near each compressor comes to its target."""
    figure_module: Any = importlib.import_module("matplotlib.figure")
    densities = _in_order(row.density for row in rows)
    figure = figure_module.Figure(figsize=(1 + 6.5 * len(densities), 11), layout="constrained")
    axes = figure.subplots(2, len(densities), squeeze=False)
    for column, density in enumerate(densities):
        of_density = [row for row in rows if row.density == density]
        _draw_captured(axes[0, column], of_density, f"density {density:g}, n = {of_density[0].length:g}")
        _draw_targets(axes[1, column], of_density)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3 * len(densities))
    figure.savefig(file, dpi=120)


def _draw_captured(axes: Any, rows: Sequence[Selection], title: str) -> None:
    """Draw a point for each compressor: medians over the distributions, with the range of what is captured."""
    for place, name in enumerate(_in_order(row.compressor for row in rows)):
        own = [row for row in rows if row.compressor == name]
        shares = [max(row.share_of_top_k, 1e-4) for row in own]
        middle, reads = statistics.median(shares), statistics.median(row.seconds / (row.floor or 1) for row in own)
        range_ = [[middle - min(shares)], [max(shares) - middle]]
        axes.errorbar(reads, middle, range_, **look_of(place), linestyle="", capsize=3, label=name)
    axes.set(xscale="log", yscale="log", title=title, xlabel="time, in reads of the gradient")
    axes.set_ylabel("captured squared norm, over that of exact top-k\n(median and range over the distributions)")
    axes.grid(alpha=0.3)


def _draw_targets(axes: Any, rows: Sequence[Selection]) -> None:
    """Draw achieved over target for each compressor and distribution, coloured by that of the first call."""
    with_target = [row for row in rows if row.share_of_target is not None]
    names, distributions = (
        _in_order(getattr(row, kind) for row in with_target) for kind in ("compressor", "distribution")
    )
    ratios = np.ones((len(names), len(distributions)))
    for row in with_target:
        place = names.index(row.compressor), distributions.index(row.distribution)
        ratios[place] = row.first_share_of_target
        axes.text(place[1], place[0], _achieved(row), ha="center", va="center", fontsize=9)
    axes.imshow(np.log2(ratios), cmap="RdBu_r", vmin=-4, vmax=4, aspect="auto")
    axes.set_xticks(range(len(distributions)), distributions)
    axes.set_yticks(range(len(names)), names)
    meaning = "first call → mean of the timed calls\n(colour of the first: red too many, blue too few)"
    axes.set_title(f"achieved density over target, {meaning}")


def _in_order(items: Any) -> list[Any]:
    """Return the different items, in the order in which they come."""
    return list(dict.fromkeys(items))
