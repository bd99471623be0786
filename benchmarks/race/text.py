"""The text: the source of the modules of Python's library, as symbols, with a tenth held out.

Python installs it, so nothing is downloaded. Another version of Python has another text: compare losses of one
installation only.
"""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 10_000  # symbols; every tenth block is held out, so that both parts have all kinds of text


class Text(NamedTuple):
    """Symbols, numbered from 0, of the two parts of the text. count: of different symbols."""

    training: NDArray[np.int64]
    held_out: NDArray[np.int64]
    count: int

    def windows(self, seed: list[int], batch: int, length: int) -> NDArray[np.int64]:
        """Return windows of the training part that a seed draws, of shape (batch, length)."""
        starts = np.random.default_rng(seed).integers(self.training.size - length + 1, size=batch)
        return self.training[starts[:, None] + np.arange(length)]

    def judges(self, windows: int, length: int) -> NDArray[np.int64]:
        """Return windows spread evenly over the held-out part, of shape (windows, length)."""
        starts = np.linspace(0, self.held_out.size - length, windows).astype(int)
        return self.held_out[starts[:, None] + np.arange(length)]


def load() -> Text:
    """Return the text; about 4.7 million characters with Python 3.11."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    whole = b"\n".join(path.read_bytes() for path in library)
    found, symbols = np.unique(np.minimum(np.frombuffer(whole, np.uint8), 127), return_inverse=True)
    held_out = np.arange(symbols.size) // BLOCK % 10 == 9
    return Text(symbols[~held_out], symbols[held_out], found.size)
