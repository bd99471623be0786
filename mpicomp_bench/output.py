"""Tables, JSON and figures from rows."""

import importlib
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from mpicomp_bench.measuring import Row

Column = tuple[str, str, Callable[[Row], str]]  # its head; alignment and width, as in a format; the text of a cell
Panel = dict[str, Any]  # `lines`, and what matplotlib's Axes.set takes


def figure(name: str, form: str = "", scale: float = 1.0, unit: str = "") -> Callable[[Row], str]:
    """Return a function that formats a number of a row, times `scale`; "-" if it is None."""
    return lambda row: "-" if row[name] is None else f"{scale * row[name]:{form}}{unit}"


def text(name: str) -> Callable[[Row], str]:
    """Return a function that formats a text of a row."""
    return lambda row: str(row[name])


def quartiles(row: Row) -> str:
    """Format the quartiles of a row in milliseconds."""
    return f"{1e3 * row['low']:.3g}-{1e3 * row['high']:.3g}"


COMPARISON: list[Column] = [
    ("", "<61", text("name")),
    ("median ms", ">9", figure("seconds", ".3f", 1e3)),
    ("quartiles", ">13", quartiles),
    ("base ms", ">9", figure("baseline_seconds", ".3f", 1e3)),
    ("speed-up", ">8", figure("speedup", ".2f", unit="x")),
    ("/floor", ">8", lambda row: f"{row['seconds'] / row['floor']:.2f}x" if row["floor"] else "-"),
    ("rate", ">10", lambda row: f"{row['entries'] / row['seconds'] / 1e6:.0f} M/s" if row["entries"] else ""),
    ("baseline", "", text("baseline")),
]


def show(rows: Iterable[Row], columns: Sequence[Column], out: TextIO | None, about: str = "") -> list[Row]:
    """Print rows below a header as they are yielded, if there is an output, and return them.

    about: the common text above the first column.
    """
    done = []
    (first, *_), heads = columns[0], [head for head, _, _ in columns]
    if out:
        out.write(_line(columns, [about or first, *heads[1:]]))
    for row in rows:
        done.append(row)
        if out:
            out.write(_line(columns, [cell(row) for _, _, cell in columns]))
            out.flush()
    return done


def _line(columns: Sequence[Column], cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:{form}}" for (_, form, _), cell in zip(columns, cells, strict=True)).rstrip() + "\n"


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *lines])


def as_json(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Return rows and description of a run as JSON; numbers that are not finite become null."""
    return json.dumps(_finite({**about, "rows": rows}), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(grid: Sequence[Sequence[Panel]], file: pathlib.Path) -> None:
    """Draw lines of panels, with one legend beside them.

    A panel has `lines`: arguments of matplotlib's `Axes.errorbar` with `label`, and `look`, which selects the colour in
    all panels. `marks` are vertical lines: position, text, look.
    """
    matplotlib: Any = importlib.import_module("matplotlib.figure")
    columns = max(map(len, grid))
    drawing = matplotlib.Figure(figsize=(4 + 6 * columns, 1 + 5 * len(grid)), layout="constrained")
    every_line = [line for panels in grid for panel in panels for line in panel["lines"]]
    looks = list(dict.fromkeys(line.get("look", line["label"]) for line in every_line))
    handles: dict[str, Any] = {}
    for axes_of_line, panels in zip(drawing.subplots(len(grid), columns, squeeze=False), grid, strict=True):
        for axes, panel in itertools.zip_longest(axes_of_line, panels):
            if panel is None:
                axes.set_axis_off()
                continue
            settings = dict(panel)
            for each in settings.pop("lines"):
                line = dict(each)
                look = look_of(looks.index(line.pop("look", line["label"])))
                handles.setdefault(line["label"], axes.errorbar(**look, **line, capsize=2))
            for place, words, look in settings.pop("marks", ()):
                color = look_of(looks.index(look))["color"]
                axes.axvline(place, color=color, linestyle=":", linewidth=1)
                axes.text(
                    place, 0.02, words, color=color, rotation=90, transform=axes.get_xaxis_transform(), fontsize=8
                )
            ticks = settings.pop("xticks", None)
            axes.set(**settings)
            if ticks:  # after the scale, which would replace them
                axes.set_xticks(*ticks)
                axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axes.grid(alpha=0.3)
    drawing.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    drawing.savefig(file, dpi=120)


def look_of(place: int) -> dict[str, Any]:
    """Return colour and marker by a line's number; the combinations repeat after 140 lines.

    The ten dark colours are used first, then their light counterparts.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    shade = place % 20
    return {"color": matplotlib.colormaps["tab20"](2 * shade % 20 + shade // 10), "marker": "osD^vP*"[place % 7]}
