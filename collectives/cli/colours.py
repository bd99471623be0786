"""What tells the lines of a figure apart."""

import importlib
from typing import Any


def look_of(place: int) -> dict[str, Any]:
    """Return colour and marker of the line with a number: together they come again after 140 lines.

    The dark ones of the twenty colours come first, and then their light counterparts.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    shade = place % 20
    return {"color": matplotlib.colormaps["tab20"](2 * shade % 20 + shade // 10), "marker": "osD^vP*"[place % 7]}
