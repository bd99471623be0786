"""Time of the collectives against density and against the number of ranks, and where the dense sum is as fast."""

import importlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from collectives.cli.colours import look_of

Rows = Sequence[dict[str, Any]]
SETTING = "subject", "length", "dtype", "pattern", "from_gradient"


def read(file: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of a file that a benchmark of a collective wrote; ValueError for another file."""
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        missing = [name for row in rows for name in (*SETTING, "ranks", "density", "dense_seconds") if name not in row]
    except (ValueError, KeyError, TypeError):
        rows, missing = [], []
    if missing or not rows:
        raise ValueError("expected what `mpicomp bench allreduce --json FILE`, or another collective's, wrote")
    return rows


def plot(rows: Rows, figure_file: pathlib.Path) -> None:
    """Draw a line of panels for each setting: against density at each P, and against P at each density."""
    figure_module: Any = importlib.import_module("matplotlib.figure")
    settings = _different(tuple(row[name] for name in SETTING) for row in rows)
    lines = [panels([row for row in rows if tuple(row[name] for name in SETTING) == setting]) for setting in settings]
    names = _different((row["algorithm"], row["codec"]) for row in rows)
    columns = max(map(len, lines))
    figure = figure_module.Figure(figsize=(4 + 6 * columns, 1 + 5 * len(lines)), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False)
    for axes_of_line, line, setting in zip(grid, lines, settings, strict=True):
        for axes, panel in zip(axes_of_line, line, strict=False):
            _draw(axes, *panel, _title(setting), names)
        for axes in axes_of_line[len(line) :]:
            axes.set_axis_off()
    labelled = [axes.get_legend_handles_labels() for axes in grid.flat]
    known = {label: handle for handles, labels in labelled for handle, label in zip(handles, labels, strict=True)}
    figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(figure_file, dpi=120)


def panels(rows: Rows) -> list[tuple[str, str, Rows]]:
    """Return what the panels show: the horizontal axis, what is fixed, the rows."""
    ranks, densities = (sorted({row[name] for row in rows}) for name in ("ranks", "density"))
    found: list[tuple[str, str, Rows]] = []
    if len(densities) > 1 or len(ranks) == 1:
        found += [("density", f"P = {p}", [row for row in rows if row["ranks"] == p]) for p in ranks]
    if len(ranks) > 1:
        found += [("ranks", f"density {d:g}", [row for row in rows if row["density"] == d]) for d in densities]
    return found


def crossovers(along: Sequence[float], ours: Sequence[float], dense: Sequence[float]) -> list[float]:
    """Return where two lines of positive figures cross, straight between their points on logarithmic axes."""
    gaps = [math.log(own / other) for own, other in zip(ours, dense, strict=True)]
    points = list(zip(map(math.log, along), gaps, strict=True))
    return [
        math.exp(x + gap / (gap - next_gap) * (next_x - x))
        for (x, gap), (next_x, next_gap) in itertools.pairwise(points)
        if gap * next_gap < 0
    ]


def _draw(axes: Any, axis: str, fixed: str, rows: Rows, title: str, names: Sequence[tuple[str, str]]) -> None:
    """Draw a panel. names: the contestants of the figure: one looks the same in all panels."""
    for place, name in enumerate(names):
        own = sorted((row for row in rows if (row["algorithm"], row["codec"]) == name), key=lambda row: row[axis])
        if not own:
            continue
        along, middle = ([row[what] for row in own] for what in (axis, "seconds"))
        spread = [[row["seconds"] - row["low"] for row in own], [row["high"] - row["seconds"] for row in own]]
        label = name[0] if name[1] in ("-", "auto") else f"{name[0]}, {name[1]}"
        look = look_of(place)
        axes.errorbar(along, middle, spread, **look, capsize=2, label=label)
        _mark(axes, axis, own, look["color"])
    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel="seconds, the slowest rank", title=f"{title}, {fixed}")
    if axis == "ranks":
        known = sorted({row[axis] for row in rows})
        axes.set_xticks(known, [str(ranks) for ranks in known])
        axes.minorticks_off()
    axes.grid(alpha=0.3)


def _mark(axes: Any, axis: str, own: Rows, color: Any) -> None:
    """Mark where a contestant and the dense sum take the same time, and write where that is."""
    timed = [row for row in own if row["dense_seconds"]]  # that of the dense sum itself has no gap, so no crossing
    along, ours, dense = ([row[name] for row in timed] for name in (axis, "seconds", "dense_seconds"))
    for place in crossovers(along, ours, dense):
        axes.axvline(place, color=color, linestyle=":", linewidth=1)
        where = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right"}  # heights as shares of a panel
        axes.text(place, 0.02, f"as dense: {place:.2g}", color=color, fontsize=8, **where)


def _title(setting: tuple[Any, ...]) -> str:
    subject, length, dtype, pattern, from_gradient = setting
    return f"{subject}{' from gradient' if from_gradient else ''}, n = {length:g} {dtype}, {pattern}"


def _different(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
