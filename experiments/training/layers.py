"""The layers of the networks, in plain NumPy, with their backward passes.

A layer is called with its input and its parameters. It returns the output and a
function `backward(delta)` of the gradient with respect to the output. This returns the
gradients with respect to the parameters, and a function that computes the gradient with
respect to the input, which the first layer of a network does not need. Parameters have
PyTorch's layouts, except in `Affine`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Backward = Callable[[Floats], tuple[Sequence[Floats], Callable[[], Floats]]]


class Layer:
    """A layer without parameters; others have a name, and the names of their parameters in `parts`."""

    name = ""
    parts: tuple[str, ...] = ()

    def start(self, rng: np.random.Generator) -> Mapping[str, NDArray[np.float64]]:
        """Return the initial parameters, by the names in `parts`."""
        return {}

    def __call__(self, values: Floats, *parameters: Floats) -> tuple[Floats, Backward]:
        """Return the output, and the function of the backward pass."""
        raise NotImplementedError(f"{type(self).__name__} is not callable")


class Affine(Layer):
    """values @ weight + bias over the last axis; the other axes become one.

    weight: (inputs, outputs), initially normal with variance 2 / inputs; bias:
    (outputs,), initially zero.
    """

    parts = "weight", "bias"

    def __init__(self, name: str, inputs: int, outputs: int) -> None:
        self.name, self.inputs, self.outputs = name, inputs, outputs

    def start(self, rng: np.random.Generator) -> Mapping[str, NDArray[np.float64]]:
        """See `Layer.start`."""
        weight = rng.normal(0, np.sqrt(2 / self.inputs), (self.inputs, self.outputs))
        return {"weight": weight, "bias": np.zeros(self.outputs)}

    def __call__(self, values: Floats, *parameters: Floats) -> tuple[Floats, Backward]:
        """Return (rows, outputs)."""
        weight, bias = parameters
        rows = values.reshape(-1, self.inputs)

        def backward(delta: Floats) -> tuple[Sequence[Floats], Callable[[], Floats]]:
            return (rows.T @ delta, delta.sum(axis=0)), lambda: (
                delta @ weight.T
            ).reshape(values.shape)

        return rows @ weight + bias, backward


class Relu(Layer):
    """The larger of a value and zero."""

    def __call__(self, values: Floats, *parameters: Floats) -> tuple[Floats, Backward]:
        """Return an array of the shape of `values`."""
        return np.maximum(values, 0), lambda delta: ((), lambda: delta * (values > 0))


class Convolution(Layer):
    """Correlate images (channels, height, width, examples) with square kernels, without padding.

    weight: (outputs, channels, side, side), initially normal with variance 2 / fan-in;
    bias: (outputs,), initially zero. The windows become the rows of one matrix product;
    with the examples last they are copied in long runs.
    """

    parts = "weight", "bias"

    def __init__(self, name: str, channels: int, outputs: int, side: int) -> None:
        self.name, self.shape = name, (outputs, channels, side, side)

    def start(self, rng: np.random.Generator) -> Mapping[str, NDArray[np.float64]]:
        """See `Layer.start`."""
        outputs, *window = self.shape
        return {
            "weight": rng.normal(0, np.sqrt(2 / np.prod(window)), self.shape),
            "bias": np.zeros(outputs),
        }

    def __call__(self, values: Floats, *parameters: Floats) -> tuple[Floats, Backward]:
        """Return (outputs, height - side + 1, width - side + 1, examples)."""
        outputs, _, side, _ = self.shape
        kernels, bias = parameters[0].reshape(outputs, -1), parameters[1]
        windows = np.lib.stride_tricks.sliding_window_view(values, (side, side), (1, 2))
        places = windows.shape[1:4]
        rows = windows.transpose(0, 4, 5, 1, 2, 3).reshape(kernels.shape[1], -1)

        def backward(delta: Floats) -> tuple[Sequence[Floats], Callable[[], Floats]]:
            flat = delta.reshape(outputs, -1)
            d_weight = (flat @ rows.T).reshape(self.shape)
            return (d_weight, flat.sum(axis=1)), lambda: self._spread(
                kernels.T @ flat, values, places
            )

        return (kernels @ rows + bias[:, None]).reshape(outputs, *places), backward

    def _spread(self, rows: Floats, values: Floats, places: Sequence[int]) -> Floats:
        """Return, for each pixel of `values`, the sum over all windows that contain it."""
        _, channels, side, _ = self.shape
        by_offset, total = (
            rows.reshape(channels, side, side, *places),
            np.zeros(values.shape, values.dtype),
        )
        for y, x in product(range(side), repeat=2):
            total[:, y : y + places[0], x : x + places[1]] += by_offset[:, y, x]
        return total


class Pool(Layer):
    """The largest of each square of 2 x 2 pixels, which receives the gradient; ties share it equally."""

    def __call__(self, values: Floats, *parameters: Floats) -> tuple[Floats, Backward]:
        """Return (channels, height / 2, width / 2, examples)."""
        channels, height, width, examples = values.shape
        squares = values.reshape(channels, height // 2, 2, width // 2, 2, examples)
        largest = squares.max(axis=(2, 4), keepdims=True)

        def inner(delta: Floats) -> Floats:
            chosen: Floats = (squares == largest).astype(values.dtype)
            chosen *= delta.reshape(largest.shape) / chosen.sum(
                axis=(2, 4), keepdims=True
            )
            return chosen.reshape(values.shape)

        return largest[:, :, 0, :, 0], lambda delta: ((), lambda: inner(delta))


class Flatten(Layer):
    """From (channels, height, width, examples) to (examples, values)."""

    def __call__(self, values: Floats, *parameters: Floats) -> tuple[Floats, Backward]:
        """Return (examples, channels * height * width)."""
        flat = np.ascontiguousarray(values.reshape(-1, values.shape[-1]).T)
        return flat, lambda delta: ((), lambda: delta.T.reshape(values.shape))


class LSTM(Layer):
    """A long short-term memory with state zero at the start of each window: (examples, time, inputs).

    input, recurrent: (4 cells, inputs) and (4 cells, cells), of the gates input,
    forget, cell and output, normal with variance 1 / fan-in at the start; bias: (4
    cells,), zero, and 1 for the forget gate.
    """

    parts = "input", "recurrent", "bias"

    def __init__(self, name: str, inputs: int, cells: int) -> None:
        self.name, self.inputs, self.cells = name, inputs, cells

    def start(self, rng: np.random.Generator) -> Mapping[str, NDArray[np.float64]]:
        """See `Layer.start`."""
        input, recurrent = (
            rng.normal(0, np.sqrt(1 / fan_in), (4 * self.cells, fan_in))
            for fan_in in (self.inputs, self.cells)
        )
        return {
            "input": input,
            "recurrent": recurrent,
            "bias": np.repeat([0.0, 1.0, 0.0, 0.0], self.cells),
        }

    def __call__(self, values: Floats, *parameters: Floats) -> tuple[Floats, Backward]:
        """Return (examples, time, cells)."""
        input, recurrent, bias = parameters
        examples, steps, _ = values.shape
        rows = np.ascontiguousarray(values.transpose(1, 0, 2)).reshape(-1, self.inputs)
        gates = (rows @ input.T + bias).reshape(steps, examples, 4, self.cells)
        hidden, memory = (
            np.zeros((steps + 1, examples, self.cells), values.dtype) for _ in range(2)
        )
        # tanh makes the sigmoid too: no exp overflows
        half = np.array([0.5, 0.5, 1, 0.5], values.dtype)[:, None]
        for step, gate in enumerate(gates):
            gate += (hidden[step] @ recurrent.T).reshape(gate.shape)
            gate[:] = np.tanh(gate * half) * half + (1 - half)
            opened, kept, fresh, shown = gate.transpose(1, 0, 2)
            memory[step + 1] = kept * memory[step] + opened * fresh
            hidden[step + 1] = shown * np.tanh(memory[step + 1])

        def backward(delta: Floats) -> tuple[Sequence[Floats], Callable[[], Floats]]:
            flat = self._back(delta.transpose(1, 0, 2), gates, memory, recurrent)
            d_recurrent = flat.T @ hidden[:-1].reshape(-1, self.cells)
            own = flat.T @ rows, d_recurrent, flat.sum(axis=0)
            return (
                own,
                lambda: (flat @ input).reshape(steps, examples, -1).transpose(1, 0, 2),
            )

        return hidden[1:].transpose(1, 0, 2), backward

    def _back(
        self, delta: Floats, gates: Floats, memory: Floats, recurrent: Floats
    ) -> Floats:
        """Return the gradient with respect to the inputs of the gates, of shape (time * examples, 4 cells)."""
        found = np.empty_like(gates)
        d_hidden = d_memory = np.zeros_like(delta[0])
        for step in reversed(range(len(gates))):
            opened, kept, fresh, shown = gates[step].transpose(1, 0, 2)
            d_hidden, bounded = d_hidden + delta[step], np.tanh(memory[step + 1])
            d_memory = d_memory + d_hidden * shown * (1 - bounded * bounded)
            d_gate = found[step].transpose(1, 0, 2)
            d_gate[0] = d_memory * fresh * opened * (1 - opened)
            d_gate[1] = d_memory * memory[step] * kept * (1 - kept)
            d_gate[2] = d_memory * opened * (1 - fresh * fresh)
            d_gate[3] = d_hidden * bounded * shown * (1 - shown)
            d_hidden = found[step].reshape(len(d_hidden), -1) @ recurrent
            d_memory = d_memory * kept
        return found.reshape(-1, 4 * self.cells)
