"""The tasks: handwritten digits, and the next character of a text. Both need no download."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp_bench.train.network import Floats, Labels

WINDOW = 8  # characters from which the next one is predicted


@dataclass(frozen=True)
class Task:
    """A classification, and the name of its result.

    sizes: of the network's layers. raw, labels: one row, one class an example. encode: makes network inputs of raw
    rows. parts: the indices of the examples for "training", "validation" and "test"; every: of those held out, one in
    so many is evaluated. figure: the name of the result; figure_of: the result, of loss and share of correct labels.
    rates: of learning, to choose from.
    """

    name: str
    sizes: tuple[int, ...]
    raw: NDArray[Any]
    labels: Labels
    encode: Callable[[NDArray[Any]], Floats]
    parts: Mapping[str, Labels]
    figure: str
    figure_of: Callable[[float, float], float]
    more_is_better: bool
    rates: tuple[float, ...]
    every: int = 1

    @property
    def parameters(self) -> int:
        """How many values a gradient has."""
        return sum((m + 1) * n for m, n in pairwise(self.sizes))

    def examples(self, chosen: Labels) -> tuple[Floats, Labels]:
        """Return inputs and labels of the examples with these indices."""
        return self.encode(self.raw[chosen]), self.labels[chosen]

    def held_out(self, part: str) -> tuple[Floats, Labels]:
        """Return inputs and labels of the examples that judge a training."""
        return self.examples(self.parts[part][:: self.every])

    def training(self, held_out: str) -> Labels:
        """Return the indices of the examples to train on where "test" or "validation" is held out.

        The test part is never among them; the validation part is, unless it is held out.
        """
        parts = ("training",) if held_out == "validation" else ("training", "validation")
        return np.concatenate([self.parts[part] for part in parts])


def digits() -> Task:
    """Return the 1,797 handwritten digits of scikit-learn, 8 x 8 pixels: a fifth for the test, drawn once.

    Raises ImportError, with the remedy, where scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the task 'digits' needs scikit-learn, which has the images: pip install scikit-learn, or take --task text"
        ) from error
    data = load_digits()
    images, labels = (data.data / 16).astype(np.float32), np.asarray(data.target, np.intp)
    return Task(
        "digits",
        sizes=(images.shape[1], 512, 256, 10),
        raw=images,
        labels=labels,
        encode=lambda rows: rows,
        parts=parted(np.random.default_rng(0).permutation(labels.size), 1 / 5),
        figure="test accuracy, %",
        figure_of=lambda loss, correct: 100 * correct,
        more_is_better=True,
        rates=(0.0125, 0.025, 0.05, 0.1, 0.2),
    )


def text() -> Task:
    """Return the help texts of Python (`pydoc_data.topics`): windows of characters, each with the next one.

    The end of the text is held out. Another version of Python has another text: compare losses of one installation.
    """
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    characters, codes = np.unique(np.frombuffer(whole.encode("ascii", "replace"), np.uint8), return_inverse=True)
    windows = np.lib.stride_tricks.sliding_window_view(codes.astype(np.uint8), WINDOW + 1)
    one_hot = np.eye(characters.size, dtype=np.float32)
    return Task(
        "text",
        sizes=(WINDOW * characters.size, 128, characters.size),
        raw=windows[:, :-1],
        labels=windows[:, -1].astype(np.intp),
        encode=lambda rows: one_hot[rows].reshape(len(rows), -1),
        parts=parted(np.arange(len(windows)), 1 / 10),
        every=16,
        figure="held-out loss, bits a character",
        figure_of=lambda loss, correct: loss / float(np.log(2)),
        more_is_better=False,
        rates=(0.2, 0.4, 0.8),
    )


def parted(order: Labels, share: float) -> dict[str, Labels]:
    """Return the parts of a task: the last `share` for the test, and of the rest the last `share` for validation."""
    rest, test = np.split(order, [round(order.size * (1 - share))])
    training, validation = np.split(rest, [round(rest.size * (1 - share))])
    return {"training": training, "validation": validation, "test": test}


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "text": text}
