"""A small network in plain NumPy whose parameters, and whose gradient, are one flat array."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Labels = NDArray[np.integer]


class Network:
    """A multilayer perceptron with ReLU, for classes.

    sizes: of the layers, inputs first, classes last. seed: of the weights, normal with variance 2 / fan-in; biases
    start at zero. The layers are views of `parameters`, one flat float32 vector.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self.sizes = tuple(sizes)
        self.parameters = np.zeros(sum((m + 1) * n for m, n in pairwise(self.sizes)), np.float32)
        rng = np.random.default_rng(seed)
        for weights, _ in self._layers(self.parameters):
            weights[:] = rng.normal(0, np.sqrt(2 / len(weights)), weights.shape)

    def gradient(self, inputs: Floats, labels: Labels, at: Floats | None = None) -> Floats:
        """Return the gradient of the mean cross entropy, as flat as the parameters.

        at: the parameters to take it at, where those are not the network's own.
        """
        layers = [*self._layers(self.parameters if at is None else at)]
        entering, logs = _forward(layers, inputs)
        delta = np.exp(logs)
        delta[np.arange(labels.size), labels] -= 1
        delta /= np.float32(labels.size)
        flat = np.empty_like(self.parameters)
        parts = [*zip(entering, layers, self._layers(flat), strict=True)]
        for values, (weights, _), (d_weights, d_bias) in reversed(parts):
            np.matmul(values.T, delta, out=d_weights)
            delta.sum(axis=0, out=d_bias)
            if values is not inputs:
                delta = (delta @ weights.T) * (values > 0)
        return flat

    def evaluate(self, inputs: Floats, labels: Labels, at: Floats | None = None) -> tuple[float, float]:
        """Return the mean cross entropy in nats, infinite where it is no number, and the share of correct labels.

        at: see `gradient`.
        """
        with np.errstate(all="ignore"):  # a rate may have been too high
            logs = _forward([*self._layers(self.parameters if at is None else at)], inputs)[1]
            loss = -float(logs[np.arange(labels.size), labels].mean(dtype=float))
        return loss if np.isfinite(loss) else np.inf, float(np.mean(logs.argmax(axis=1) == labels))

    def _layers(self, flat: Floats) -> Iterator[tuple[Floats, Floats]]:
        """Yield (weights, bias) of each layer, as views of `flat`."""
        start = 0
        for m, n in pairwise(self.sizes):
            middle, end = start + m * n, start + (m + 1) * n
            yield flat[start:middle].reshape(m, n), flat[middle:end]
            start = end


def _forward(layers: Sequence[tuple[Floats, Floats]], inputs: Floats) -> tuple[list[Floats], Floats]:
    """Return the input of each layer, and the logarithms of the class probabilities."""
    entering = [inputs]
    for weights, bias in layers[:-1]:
        entering.append(np.maximum(entering[-1] @ weights + bias, 0))
    weights, bias = layers[-1]
    logits = entering[-1] @ weights + bias
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return entering, logits
