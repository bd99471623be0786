"""Tables and JSON from rows."""

import argparse
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, TextIO

from mpicomp import threads
from mpicomp_bench.files import write
from mpicomp_bench.measuring import Row

# The head of a column, its alignment and width as in a format, and the function of a
# cell's text.
Column = tuple[str, str, Callable[[Row], str]]


def figure(
    name: str, form: str = "", scale: float = 1.0, unit: str = ""
) -> Callable[[Row], str]:
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
    (
        "/floor",
        ">8",
        lambda row: f"{row['seconds'] / row['floor']:.2f}x" if row["floor"] else "-",
    ),
    (
        "rate",
        ">10",
        lambda row: (
            f"{row['entries'] / row['seconds'] / 1e6:.0f} M/s" if row["entries"] else ""
        ),
    ),
    ("baseline", "", text("baseline")),
]


def show(
    rows: Iterable[Row], columns: Sequence[Column], out: TextIO | None, about: str = ""
) -> list[Row]:
    """Print rows below a header as they are yielded, if there is an output, and return them.

    about: the common text above the first column.
    """
    done = []
    (first, *_) = columns[0]
    heads = [head for head, _, _ in columns]
    if out:
        out.write(_line(columns, [about or first, *heads[1:]]))
    for row in rows:
        done.append(row)
        if out:
            out.write(_line(columns, [cell(row) for _, _, cell in columns]))
            out.flush()
    return done


def _line(columns: Sequence[Column], cells: Sequence[str]) -> str:
    return (
        "  ".join(
            f"{cell:{form}}" for (_, form, _), cell in zip(columns, cells, strict=True)
        ).rstrip()
        + "\n"
    )


def write_rows(
    options: argparse.Namespace,
    rows: Sequence[Row],
    about: Mapping[str, Any] | None = None,
    comm: Any = None,
) -> int:
    """Write rows, machine and description of a run as JSON where --json names a file; see `files.write`."""
    return write(
        options,
        comm,
        json=lambda file: file.write_text(
            as_json(rows, {**machine(), **(about or {})})
        ),
    )


def as_json(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Return rows and description of a run as JSON; numbers that are not finite become null."""
    return json.dumps(_finite({**about, "rows": rows}), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine() -> dict[str, Any]:
    """Return the properties of the machine that results depend on."""
    versions = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numpy", "numba")},
    }
    return {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": threads.count(),
        **versions,
    }
