"""The tasks, each a network and its data: images, and the next character of a text. None downloads anything."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from data_sets import fashion, plays
from layers import LSTM, Affine, Convolution, Flatten, Floats, Layer, Pool, Relu
from network import Labels, Network, perceptron
from numpy.typing import NDArray

WINDOW = 8  # characters from which the next one is predicted by the perceptron
STEPS = 32  # characters of a window of the recurrent network
# examples that are evaluated at once: a convolution copies each pixel 25 times
TOGETHER = 128
SAMPLE = 2000  # of the examples trained on, for the loss on them


@dataclass(frozen=True)
class Task:
    """A classification, and the name of its result.

    layers: returns the layers of the network. raw, labels: one row for each example; a
    row of labels is one class, or one for each step. encode: converts raw rows to
    network inputs. parts: the indices of the examples for "training", "validation" and
    "test"; every: one in `every` held-out examples is evaluated. figure: the name of
    the result; figure_of: computes it from loss and fraction of correct labels. rates:
    learning rates to choose from.
    """

    name: str
    layers: Callable[[], Sequence[Layer]]
    raw: NDArray[Any]
    labels: Labels
    encode: Callable[[NDArray[Any]], Floats]
    parts: Mapping[str, Labels]
    figure: str
    figure_of: Callable[[float, float], float]
    more_is_better: bool
    rates: tuple[float, ...]
    every: int = 1

    def network(self, seed: int) -> Network:
        """Return the network with initial parameters from a seed."""
        return Network(self.layers(), seed)

    @property
    def parameters(self) -> int:
        """Number of values of a gradient."""
        return self.network(0).parameters.size

    def examples(self, chosen: Labels) -> tuple[Floats, Labels]:
        """Return inputs and labels of the examples with these indices."""
        return self.encode(self.raw[chosen]), self.labels[chosen]

    def held_out(self, part: str) -> Labels:
        """Return the indices of the held-out examples to evaluate."""
        return self.parts[part][:: self.every]

    def sample(self) -> Labels:
        """Return the indices of a sample of the training part, for its loss."""
        training = self.parts["training"]
        return training[:: -(-len(training) // SAMPLE)]

    def evaluate(
        self, network: Network, chosen: Labels, at: Floats | None = None
    ) -> tuple[float, float]:
        """Return loss and fraction of correct labels of the examples with these indices; see `Network.evaluate`."""
        some = np.split(chosen, range(TOGETHER, len(chosen), TOGETHER))
        losses, correct = np.array(
            [network.evaluate(*self.examples(each), at) for each in some]
        ).T
        weights = [len(each) for each in some]
        return float(np.average(losses, weights=weights)), float(
            np.average(correct, weights=weights)
        )

    def training(self, held_out: str) -> Labels:
        """Return the indices of the training examples if "test" or "validation" is held out.

        They never include the test part, and include the validation part unless it is
        held out.
        """
        parts = (
            ("training",) if held_out == "validation" else ("training", "validation")
        )
        return np.concatenate([self.parts[part] for part in parts])


ACCURACY: dict[str, Any] = {
    "figure": "test accuracy, %",
    "figure_of": lambda loss, correct: 100 * correct,
    "more_is_better": True,
}
BITS: dict[str, Any] = {
    "figure": "held-out loss, bits a character",
    "figure_of": lambda loss, correct: loss / float(np.log(2)),
    "more_is_better": False,
}


def digits() -> Task:
    """Return the 1,797 handwritten digits of scikit-learn, 8 x 8 pixels: a fifth for the test, drawn once.

    Raises ImportError, with the remedy, if scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the task 'digits' needs scikit-learn, which has the images: pip install scikit-learn, or take --task text"
        ) from error
    data = load_digits()
    images, labels = (
        (data.data / 16).astype(np.float32),
        np.asarray(data.target, np.intp),
    )
    return Task(
        "digits",
        layers=lambda: perceptron(images.shape[1], 512, 256, 10),
        raw=images,
        labels=labels,
        encode=lambda rows: rows,
        parts=parted(np.random.default_rng(0).permutation(labels.size), 1 / 5),
        rates=(0.0125, 0.025, 0.05, 0.1, 0.2),
        **ACCURACY,
    )


def images() -> Task:
    """Return Fashion-MNIST: 60,000 images of 28 x 28 pixels and 10,000 for the test; see `data_sets.fashion`."""
    return of_images(*fashion())


def of_images(raw: NDArray[np.uint8], labels: Labels, tests: int) -> Task:
    """Return the task of a convolutional network on square images of 10 classes, the last `tests` for the test."""
    pixels = ((raw.shape[1] - 4) // 2 - 4) // 2

    def layers() -> list[Layer]:
        convolutions = [
            Convolution("conv1", 1, 16, 5),
            Pool(),
            Relu(),
            Convolution("conv2", 16, 32, 5),
            Pool(),
            Relu(),
        ]
        return [
            *convolutions,
            Flatten(),
            Affine("hidden", 32 * pixels**2, 256),
            Relu(),
            Affine("output", 256, 10),
        ]

    return Task(
        "images",
        layers=layers,
        raw=raw,
        labels=labels,
        encode=lambda rows: (rows.transpose(1, 2, 0)[None] / np.float32(255)).astype(
            np.float32, order="C"
        ),
        parts=parted(np.arange(labels.size), tests / labels.size),
        rates=(0.0125, 0.025, 0.05, 0.1),
        **ACCURACY,
    )


def text() -> Task:
    """Return the help texts of Python (`pydoc_data.topics`): windows of characters, each with the next one.

    The end of the text is held out. The text depends on the version of Python: compare
    losses of one installation only.
    """
    from pydoc_data.topics import topics

    symbols, windows = windows_of(
        "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace"),
        WINDOW,
    )
    return Task(
        "text",
        layers=lambda: perceptron(WINDOW * len(symbols), 128, len(symbols)),
        raw=windows[:, :-1],
        labels=windows[:, -1].astype(np.intp),
        encode=lambda rows: symbols[rows].reshape(len(rows), -1),
        parts=parted(np.arange(len(windows)), 1 / 10),
        every=16,
        rates=(0.2, 0.4, 0.8),
        **BITS,
    )


def shakespeare() -> Task:
    """Return the plays and poems of Shakespeare, for a recurrent network; see `data_sets.plays`."""
    return of_plays(plays())


def of_plays(whole: bytes) -> Task:
    """Return the task of an LSTM of 128 cells on a text: predict each character of a window from the earlier ones.

    Windows begin at every eighth character. The end of the text is held out.
    """
    symbols, windows = windows_of(whole, STEPS)
    windows = windows[::8]
    return Task(
        "shakespeare",
        layers=lambda: [
            LSTM("lstm", len(symbols), 128),
            Affine("output", 128, len(symbols)),
        ],
        raw=windows[:, :-1],
        labels=windows[:, 1:],
        encode=lambda rows: symbols[rows],
        parts=parted(np.arange(len(windows)), 1 / 10),
        every=32,
        rates=(0.25, 0.5, 1.0, 2.0),
        **BITS,
    )


def windows_of(whole: bytes, length: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the symbols of a text as one-hot vectors, a row each, and all windows of length + 1 of their numbers."""
    found, codes = np.unique(np.frombuffer(whole, np.uint8), return_inverse=True)
    windows = np.lib.stride_tricks.sliding_window_view(
        codes.astype(np.uint8), length + 1
    )
    return np.eye(found.size, dtype=np.float32), windows


def parted(order: Labels, share: float) -> dict[str, Labels]:
    """Return the parts of a task: the last `share` for the test, and of the rest the last `share` for validation."""
    rest, test = np.split(order, [round(order.size * (1 - share))])
    training, validation = np.split(rest, [round(rest.size * (1 - share))])
    return {"training": training, "validation": validation, "test": test}


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "images": images,
    "text": text,
    "shakespeare": shakespeare,
}
