"""A classifier in plain NumPy, whose parameters and gradient are one flat array each."""

from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np
from layers import Affine, Backward, Floats, Layer, Relu
from numpy.typing import NDArray

Labels = NDArray[np.integer]


class Network:
    """A sequence of layers, with a softmax over the last axis of the output.

    seed: of the initial parameters. `parameters` is one flat float32 vector; `tensors`
    returns its parts by name, such as "hidden.weight".
    """

    def __init__(self, layers: Sequence[Layer], seed: int) -> None:
        self.layers, rng = layers, np.random.default_rng(seed)
        starts = [
            (layer.name, each) for layer in layers for each in layer.start(rng).items()
        ]
        self.shapes = {f"{name}.{part}": array.shape for name, (part, array) in starts}
        self.parameters = np.concatenate(
            [array.ravel() for _, (_, array) in starts]
        ).astype(np.float32)

    def tensors(self, flat: Floats) -> dict[str, Floats]:
        """Return the parts of a vector as long as the parameters, by name: views, of the shapes of the tensors."""
        found, start = {}, 0
        for name, shape in self.shapes.items():
            end = start + int(np.prod(shape))
            found[name] = flat[start:end].reshape(shape)
            start = end
        return found

    def gradient(
        self, inputs: Floats, labels: Labels, at: Floats | None = None
    ) -> Floats:
        """Return the gradient of the mean cross entropy, as flat as the parameters.

        at: the parameters at which to evaluate it; by default the network's own.
        """
        logs, ways_back = self._forward(inputs, at)
        delta = np.exp(logs)
        delta[np.arange(labels.size), labels.ravel()] -= 1
        delta /= np.float32(labels.size)
        parts: list[Floats] = []
        for way_back in reversed(ways_back):
            own, inner = way_back(delta)
            parts[:0] = [each.ravel() for each in own]
            if way_back is not ways_back[0]:
                delta = inner()
        return np.concatenate(parts)

    def evaluate(
        self, inputs: Floats, labels: Labels, at: Floats | None = None
    ) -> tuple[float, float]:
        """Return the mean cross entropy in nats, infinite instead of NaN, and the fraction of correct labels.

        at: see `gradient`.
        """
        with np.errstate(all="ignore"):  # a rate may have been too high
            logs = self._forward(inputs, at)[0]
            loss = -float(
                logs[np.arange(labels.size), labels.ravel()].mean(dtype=float)
            )
        return loss if np.isfinite(loss) else np.inf, float(
            np.mean(logs.argmax(axis=1) == labels.ravel())
        )

    def _forward(
        self, values: Floats, at: Floats | None
    ) -> tuple[Floats, list[Backward]]:
        """Return the logarithms of the class probabilities, and the backward function of each layer."""
        tensors, ways_back = (
            iter(self.tensors(self.parameters if at is None else at).values()),
            [],
        )
        for layer in self.layers:
            values, way_back = layer(values, *islice(tensors, len(layer.parts)))
            ways_back.append(way_back)
        values -= values.max(axis=1, keepdims=True)
        values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
        return values, ways_back


def perceptron(*sizes: int) -> Sequence[Layer]:
    """Return affine layers with a ReLU between each two. sizes: of the layers, inputs first, classes last."""
    names = [*(f"hidden{number}" for number in range(1, len(sizes) - 1)), "output"]
    affine = [
        Affine(name, *pair) for name, pair in zip(names, pairwise(sizes), strict=True)
    ]
    return [layer for each in affine for layer in (each, Relu())][:-1]
