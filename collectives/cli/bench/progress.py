"""A progress bar on a terminal's standard error, where tqdm is installed; else nothing."""

import importlib
import sys
from typing import Any


class Silent:
    """Take the calls of a bar, and show none."""

    def update(self) -> None:
        """Go on by one."""

    def clear(self) -> None:
        """Make room for a line of output."""

    def close(self) -> None:
        """End."""


def progress(total: int) -> Any:
    """Return a bar of `total` steps: update(), clear() before other output, close() at the end."""
    try:
        tqdm: Any = importlib.import_module("tqdm")
    except ImportError:
        return Silent()
    return tqdm.tqdm(total=total, unit="call", file=sys.stderr, disable=None, leave=False)
