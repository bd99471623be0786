"""The style that the figures share: a canvas without axes, boxes, arrows, colours, and where a figure is saved."""

import sys
from pathlib import Path
from typing import Any

from architecture import COLOURS, arrow, box, canvas

__all__ = ["COLOURS", "arrow", "blank", "box", "cells", "save", "target"]


def blank(
    width: float, height: float, x: tuple[float, float], y: tuple[float, float]
) -> tuple[Any, Any]:
    """Return an empty figure, width by height inches, whose text is drawn in any browser's sans-serif."""
    import matplotlib

    figure, axes = canvas(width, height, x, y)
    matplotlib.rcParams["font.family"] = "sans-serif"
    return figure, axes


def cells(
    axes: Any, x: float, y: float, values: Any, colours: Any, *, zeros: bool = False
) -> None:
    """Draw a row of squares with a number in each; zeros are left empty unless they count."""
    from matplotlib.patches import Rectangle

    for place, (value, colour) in enumerate(zip(values, colours, strict=True)):
        axes.add_patch(
            Rectangle(
                (x + place, y),
                1,
                1,
                facecolor=colour,
                edgecolor="#555555",
                linewidth=0.6,
            )
        )
        if value or zeros:
            axes.text(
                x + place + 0.5,
                y + 0.5,
                f"{value:g}",
                ha="center",
                va="center",
                size=7.5,
            )


def target(name: str) -> Path:
    """Return the file of a figure: beside this one, or as PNG in the folder that the command line names."""
    return (
        Path(sys.argv[1]) / f"{name}.png"
        if len(sys.argv) > 1
        else Path(__file__).parent / f"{name}.svg"
    )


def save(figure: Any, name: str) -> None:
    """Save a figure; the same data give the same file."""
    file = target(name)
    figure.savefig(
        file, dpi=100, **({"metadata": {"Date": None}} if file.suffix == ".svg" else {})
    )
