"""The methods of the simulation by name, such as "coefficients:basis=Cosine,k=4": how P gradients become a step.

A method is a class with the constructor's arguments as its settings. It is called with the parameters, the gradient of
each rank (both float32; parameters flat and written in place) and the rate.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpicomp
from mpicomp import ChunkedTopK, Compressor, ErrorFeedback, Quantised, SparseVector
from mpicomp.codec import encoded_nbytes, smallest

Floats = NDArray[np.float32]

WEIGHT_DECAY = np.float32(0.01)


class AdamW:
    """Dense training by AdamW, the baseline. beta2: of the second moments."""

    pooled = True  # the ranks' gradients are only averaged: one gradient of all batches together will do

    def __init__(self, beta2: float = 0.999) -> None:
        self.betas, self.number = (0.9, beta2), 0

    def start(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        size = sum(map(int, map(np.prod, shapes)))
        self.first, self.second = np.zeros((2, size), np.float32)

    def step(self, parameters: Floats, gradients: Sequence[Floats], rate: float) -> float:
        """Update the parameters, and return the bits of a value that a rank sends."""
        (gradient,), (beta1, beta2) = gradients, self.betas
        self.number += 1
        self.first += (1 - beta1) * (gradient - self.first)
        self.second += (1 - beta2) * (gradient * gradient - self.second)
        scale = np.sqrt(self.second / (1 - beta2**self.number)) + 1e-8
        parameters *= 1 - rate * WEIGHT_DECAY
        parameters -= rate / (1 - beta1**self.number) * self.first / scale
        return 32.0


class Lion:
    """Dense training by Lion (arXiv 2302.06675), which takes the sign of a momentum, as coefficients do."""

    pooled = True

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99) -> None:
        self.betas = beta1, beta2

    def start(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.momentum = np.zeros(sum(map(int, map(np.prod, shapes))), np.float32)

    def step(self, parameters: Floats, gradients: Sequence[Floats], rate: float) -> float:
        """Update the parameters, and return the bits of a value that a rank sends."""
        (gradient,), (beta1, beta2) = gradients, self.betas
        signs = np.sign(beta1 * self.momentum + (1 - beta1) * gradient)
        self.momentum += (1 - beta2) * (gradient - self.momentum)
        parameters *= 1 - rate * WEIGHT_DECAY
        parameters -= np.float32(rate) * signs
        return 32.0


class Coefficients:
    """The k largest coefficients of each chunk in a basis, and the sign of their mean: DeMo (arXiv 2411.19870).

    basis: "Hadamard", "Cosine", or "none" for the values themselves. decay: of the residual. form: of `Quantised`, or
    "full". mean: over all "ranks" or over the "contributors" of each coefficient. tile: the chunk is a square tile of
    a two-dimensional tensor, not consecutive values of the flat vector.
    """

    pooled = False

    def __init__(
        self,
        basis: str = "Hadamard",
        k: int = 8,
        chunk: int = 256,
        decay: float = 0.999,
        form: str = "full",
        mean: str = "ranks",
        tile: bool = False,
    ) -> None:
        self.basis = None if basis == "none" else getattr(mpicomp, basis)(chunk=chunk)
        self.chunk, self.decay, self.mean, self.tile = chunk, decay, mean, tile
        top = ChunkedTopK(k=k, chunk=chunk)
        self.compressor: Compressor = top if form == "full" else Quantised(top, form)

    def start(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.order = tiled(shapes, round(self.chunk**0.5)) if self.tile else None
        self.feedbacks = [ErrorFeedback(decay=self.decay) for _ in range(ranks)]
        self.rate: float | None = None

    def step(self, parameters: Floats, gradients: Sequence[Floats], rate: float) -> float:
        """Update the parameters, and return the bits of a value that rank 0 sends."""
        if self.rate not in (None, rate):  # in the paper the residual is of products with the rate
            for feedback in self.feedbacks:
                feedback.rescale(self.rate / rate)
        self.rate = rate
        sent = [self.selected(*each) for each in zip(self.feedbacks, gradients, strict=True)]
        total = np.zeros_like(parameters)
        for vector in sent:
            vector.add_to(total)
        if self.mean == "contributors":
            counts = np.zeros_like(parameters)
            for vector in sent:
                counts[vector.indices] += 1
            total /= np.maximum(counts, 1)
        if self.basis:
            self.basis.inverse(total, total)
        signs = np.sign(total)
        if self.order is not None:
            signs[self.order] = signs.copy()
        parameters *= 1 - rate * WEIGHT_DECAY
        parameters -= np.float32(rate) * signs
        return 8 * encoded_nbytes(sent[0], smallest(sent[0])) / parameters.size

    def selected(self, feedback: ErrorFeedback, gradient: Floats) -> SparseVector:
        """Return the coefficients that a rank sends; its feedback keeps the others."""
        coefficients = gradient.copy() if self.order is None else gradient[self.order]
        if self.basis:
            self.basis.forward(coefficients, coefficients)
        corrected, sent = feedback.compress(coefficients, self.compressor)
        feedback.settle(corrected, sent, None, sent)
        feedback.commit()
        return sent


def tiled(shapes: Sequence[tuple[int, ...]], side: int) -> NDArray[np.intp]:
    """Return the positions in the flat vector in the order of the tiles: whole tiles, then what fills none.

    A Hadamard transform of a tile's values in this order is the two-dimensional one of the tile.
    """
    whole, rest, first = [], [], 0
    for shape in shapes:
        places = first + np.arange(np.prod(shape)).reshape(shape)
        first += places.size
        if len(shape) != 2 or min(shape) < side:
            rest.append(places.ravel())
            continue
        rows, columns = (length // side * side for length in shape)
        tiles = places[:rows, :columns].reshape(rows // side, side, columns // side, side)
        whole.append(tiles.swapaxes(1, 2).ravel())
        rest += [places[rows:].ravel(), places[:rows, columns:].ravel()]
    return np.concatenate([*whole, *rest])


KINDS: dict[str, Any] = {"adamw": AdamW, "lion": Lion, "coefficients": Coefficients}


def made(name: str) -> Any:
    """Return a new method by its name; raises ValueError if there is none."""
    kind, _, given = name.partition(":")
    known = signature(KINDS[kind]).parameters if kind in KINDS else {}
    settings = dict(each.split("=") for each in given.split(",")) if given else {}
    if kind not in KINDS or not settings.keys() <= known.keys():
        raise ValueError(f"method is {name!r}: expected one of {list(KINDS)}, with settings such as :k=4,chunk=256")
    return KINDS[kind](**{key: type_of(known[key].default)(text) for key, text in settings.items()})


def type_of(default: Any) -> Any:
    """Return what turns the text of a setting into its value."""
    return "True".__eq__ if isinstance(default, bool) else type(default)
