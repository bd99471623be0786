"""The texts, as symbols, with a tenth held out: the source of Python's library, and a part of Python's manual.

Python installs both, so nothing is downloaded. Another version of Python has others:
compare losses of one installation only.
"""

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# symbols; every tenth block is held out, so that both parts have all kinds of text
BLOCK = 10_000


class Text(NamedTuple):
    """Symbols, numbered from 0, of the two parts of the text. count: of different symbols."""

    training: NDArray[np.int64]
    held_out: NDArray[np.int64]
    count: int

    def windows(self, seed: list[int], batch: int, length: int) -> NDArray[np.int64]:
        """Return windows of the training part that a seed draws, of shape (batch, length)."""
        starts = np.random.default_rng(seed).integers(
            self.training.size - length + 1, size=batch
        )
        return self.training[starts[:, None] + np.arange(length)]

    def judges(self, windows: int, length: int) -> NDArray[np.int64]:
        """Return windows spread evenly over the held-out part, of shape (windows, length)."""
        starts = np.linspace(0, self.held_out.size - length, windows).astype(int)
        return self.held_out[starts[:, None] + np.arange(length)]


def library() -> Text:
    """Return the source of the modules; about 4.7 million characters with Python 3.11."""
    return text_of(
        path.read_bytes()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    )


def manual() -> Text:
    """Return the pages that `help` shows on the language, English prose; about 0.5 million characters."""
    from pydoc_data.topics import topics

    return text_of(page.encode() for _, page in sorted(topics.items()))


def text_of(parts: Iterable[bytes]) -> Text:
    """Return the symbols of parts of a text; all beyond ASCII are one symbol."""
    found, symbols = np.unique(
        np.minimum(np.frombuffer(b"\n".join(parts), np.uint8), 127), return_inverse=True
    )
    held_out = np.arange(symbols.size) // BLOCK % 10 == 9
    return Text(symbols[~held_out], symbols[held_out], found.size)
