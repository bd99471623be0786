"""What the options of a benchmark mean: a value, or an error that says what is expected before anything is measured."""

import argparse
import importlib
import pathlib
from typing import Any


def positive(text: str) -> int:
    """Return the whole number that a text says: 25_000_000 and 25e6 are one."""
    try:
        number = float(text)
        if number < 1 or number != int(number):
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"got {text!r}: expected a whole number of at least 1") from None
    return int(number)


def share(text: str) -> float:
    """Return the density that a text says."""
    try:
        density = float(text)
        if not 0 < density <= 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected 0 < density <= 1 (0.001 is a thousandth)") from None
    return density


def above_zero(text: str) -> float:
    """Return the finite number above 0 that a text says."""
    try:
        number = float(text)
        if not 0 < number < float("inf"):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected a number above 0") from None
    return number


def new_file(text: str) -> pathlib.Path:
    """Return the path of a file that can be made; one that is there will be overwritten."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        wrong = "it is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise argparse.ArgumentTypeError(f"got {text!r}: {wrong}; expected the name of a file in a folder that exists")
    return path


def new_figure(text: str) -> pathlib.Path:
    """Return the path of a figure that can be drawn, in a format that matplotlib knows."""
    path = new_file(text)
    try:
        figure: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install matplotlib, or use --json") from None
    known = figure.Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected a name that ends in .{', .'.join(known)}")
    return path


def rows_file(text: str) -> list[dict[str, Any]]:
    """Return the rows that a benchmark of a collective wrote to a file."""
    from collectives.cli.bench import chart

    try:
        return chart.read(pathlib.Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {text!r}: {error}") from None


class each_once(argparse.Action):  # noqa: N801
    """Store a list of values without its repetitions."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Store the values."""
        setattr(namespace, self.dest, list(dict.fromkeys(values)))
