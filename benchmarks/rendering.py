"""Tables in Markdown and figures, for all benchmarks and pages."""

import argparse
import importlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpicomp_bench.files import FileType, new_file

Panel = dict[str, Any]  # `lines`, and what matplotlib's Axes.set takes

COLUMNS = 2  # of a figure, at most
MOST_IN_A_LEGEND = 12


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [
        f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *rows]
    ]


@FileType
def new_figure(path: Path) -> Path:
    """Return the path of a figure that can be drawn, in a format that matplotlib supports."""
    new_file.convert(path)
    try:
        figure: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise argparse.ArgumentTypeError(
            "a plot needs matplotlib: pip install matplotlib, or use --json"
        ) from None
    known = figure.Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise argparse.ArgumentTypeError(
            f"got {str(path)!r}: expected a name that ends in .{', .'.join(known)}"
        )
    return path


def draw(grid: Sequence[Sequence[Panel]], file: Path) -> None:
    """Draw lines of panels in at most two columns: a page shrinks what is wider, letters included.

    One legend is below them; panels of different lines have one each. A panel has
    `lines`: arguments of matplotlib's `Axes.errorbar` with `label`, and `look`, which
    selects the colour in all panels. `marks` are vertical lines: position, text, look.
    """
    matplotlib: Any = importlib.import_module("matplotlib.figure")
    if max(map(len, grid)) > COLUMNS:
        grid = [*itertools.zip_longest(*grid)] if len(grid) == COLUMNS else cut(grid)
    columns = max(map(len, grid))
    drawing = matplotlib.Figure(
        figsize=(1 + 3.6 * columns, 1.6 + 3.2 * len(grid)), layout="constrained"
    )
    panels_of_all = [panel for panels in grid for panel in panels if panel]
    every_line = [line for panel in panels_of_all for line in panel["lines"]]
    kinds = {
        frozenset(line["label"] for line in each["lines"]) for each in panels_of_all
    }
    legend_each = len(kinds) > 1 and len(frozenset.union(*kinds)) > MOST_IN_A_LEGEND
    looks = list(dict.fromkeys(line.get("look", line["label"]) for line in every_line))
    handles: dict[str, Any] = {}
    for axes_of_line, panels in zip(
        drawing.subplots(len(grid), columns, squeeze=False), grid, strict=True
    ):
        for axes, panel in itertools.zip_longest(axes_of_line, panels):
            if panel is None:
                axes.set_axis_off()
                continue
            settings = dict(panel)
            for each in settings.pop("lines"):
                line = dict(each)
                look = look_of(looks.index(line.pop("look", line["label"])))
                handles.setdefault(
                    line["label"], axes.errorbar(**look, **line, capsize=2)
                )
            for place, words, look in settings.pop("marks", ()):
                color = look_of(looks.index(look))["color"]
                axes.axvline(place, color=color, linestyle=":", linewidth=1)
                axes.text(
                    place,
                    0.98,
                    words,
                    color=color,
                    rotation=90,
                    va="top",
                    transform=axes.get_xaxis_transform(),
                    fontsize=8,
                    # above the curves, which it would cross
                    zorder=5,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )
            ticks = settings.pop("xticks", None)
            axes.set(**settings)
            axes.title.set_size(9)
            axes.tick_params(labelsize=8)
            if ticks:  # after the scale, which would replace them
                axes.set_xticks(*ticks)
                axes.tick_params(
                    axis="x", which="minor", bottom=False, labelbottom=False
                )
            axes.grid(alpha=0.3)
            if legend_each:
                axes.legend(fontsize=8)
    if not legend_each:
        drawing.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=columns,
            fontsize="small",
        )
    drawing.savefig(file, dpi=120)


def cut(grid: Sequence[Sequence[Panel]]) -> list[Sequence[Panel]]:
    """Return the panels in rows of at most `COLUMNS`."""
    return [
        row[first : first + COLUMNS]
        for row in grid
        for first in range(0, len(row), COLUMNS)
    ]


def look_of(place: int) -> dict[str, Any]:
    """Return colour and marker by a line's number; the combinations repeat after 140 lines.

    The ten dark colours are used first, then their light counterparts.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    shade = place % 20
    return {
        "color": matplotlib.colormaps["tab20"](2 * shade % 20 + shade // 10),
        "marker": "osD^vP*"[place % 7],
    }
