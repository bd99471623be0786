"""The methods of the simulation by name, such as "coefficients:basis=Cosine,k=4": how P gradients become a step.

A method is a class with the constructor's arguments as its settings. It is called with the parameters, the gradient of
each rank (both float32; parameters flat and written in place) and the rate.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
from means import Dense, FewBits, Floats, PowerSgd, Sparse, size_of
from numba import njit
from numpy.typing import NDArray

import mpicomp
from mpicomp import ChunkedTopK, Compressor, Quantised, TopK

WEIGHT_DECAY = np.float32(0.01)


class AdamW:
    """AdamW of the mean gradient, which is exact: dense training, the baseline. beta2: of the second moments."""

    def __init__(self, beta2: float = 0.999, mean: Any = None) -> None:
        self.betas, self.number, self.mean = (0.9, beta2), 0, mean or Dense()
        self.pooled = self.mean.pooled

    def start(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.mean.start(shapes, ranks)
        self.first, self.second = np.zeros((2, size_of(shapes)), np.float32)

    def step(self, parameters: Floats, gradients: Sequence[Floats], rate: float) -> float:
        """Update the parameters, and return the bits of a value that a rank sends."""
        gradient, bits = self.mean.mean(gradients)
        self.number += 1
        corrections = [1 - beta**self.number for beta in self.betas]
        adamw(parameters, gradient, self.first, self.second, *map(np.float32, (*self.betas, *corrections, rate)))
        return float(bits)


@njit
def adamw(
    parameters: Floats,
    gradient: Floats,
    first: Floats,
    second: Floats,
    beta1: np.float32,
    beta2: np.float32,
    correction1: np.float32,
    correction2: np.float32,
    rate: np.float32,
) -> None:
    """Step by AdamW, in one pass. correction1, correction2: one less the powers of beta1 and beta2."""
    one, small = np.float32(1), np.float32(1e-8)
    for i in range(parameters.size):
        first[i] += (one - beta1) * (gradient[i] - first[i])
        second[i] += (one - beta2) * (gradient[i] * gradient[i] - second[i])
        scale = np.sqrt(second[i] / correction2) + small
        parameters[i] = parameters[i] * (one - rate * WEIGHT_DECAY) - rate / correction1 * first[i] / scale


class AdamWOfFewBits(AdamW):
    """AdamW of the mean gradient in few bits of every value, both ways."""

    def __init__(self, bits: int = 4) -> None:
        super().__init__(mean=FewBits(bits))


class AdamWOfTopK(AdamW):
    """AdamW of the mean of the largest entries of each gradient."""

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(mean=Sparse(TopK(density=density)))


class AdamWOfPowerSgd(AdamW):
    """AdamW of the mean gradient by PowerSGD."""

    def __init__(self, rank: int = 8) -> None:
        super().__init__(mean=PowerSgd(rank))


class Lion:
    """Dense training by Lion (arXiv 2302.06675), which takes the sign of a momentum, as coefficients do."""

    pooled = True

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99) -> None:
        self.betas = beta1, beta2

    def start(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.momentum = np.zeros(size_of(shapes), np.float32)

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
        of_values = None if basis == "none" else getattr(mpicomp, basis)(chunk=chunk)
        self.exchange = Sparse(chunks(k, chunk, form), decay, of_values, over=mean)
        self.side = round(chunk**0.5) if tile else None

    def start(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.order = tiled(shapes, self.side) if self.side else None
        self.exchange.start(shapes, ranks)
        self.rate: float | None = None

    def step(self, parameters: Floats, gradients: Sequence[Floats], rate: float) -> float:
        """Update the parameters, and return the bits of a value that rank 0 sends."""
        if self.rate not in (None, rate):  # in the paper the residual is of products with the rate
            self.exchange.rescale(self.rate / rate)
        self.rate = rate
        mean, bits = self.exchange.mean(gradients if self.order is None else [each[self.order] for each in gradients])
        signs = np.sign(mean)
        if self.order is not None:
            signs[self.order] = signs.copy()
        parameters *= 1 - rate * WEIGHT_DECAY
        parameters -= np.float32(rate) * signs
        return bits


class Local:
    """Local steps of AdamW on each rank, then the outer step of `OuterLoop` by the mean of the pseudo-gradients.

    every: local steps. message: "dense"; "two_bit", 3.1 % of chunks in two bits, a mean over contributors; "bits4",
    four bits of every value; "basis", 8 of 256 coefficients in two bits. outer, momentum: of the outer step; with a
    momentum it is Nesterov's.
    """

    pooled = False

    def __init__(self, every: int = 10, message: str = "two_bit", outer: float = 1.0, momentum: float = 0.0) -> None:
        self.every, self.outer, self.momentum, self.number = every, outer, momentum, 0
        self.exchange = MESSAGES[message]()

    def start(self, shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.optimisers = [AdamW() for _ in range(ranks)]
        for each in self.optimisers:
            each.start(shapes, 1)
        self.exchange.start(shapes, ranks)
        self.velocity = np.zeros(size_of(shapes), np.float32)
        self.replicas: list[Floats] | None = None

    def step(self, parameters: Floats, gradients: Sequence[Floats], rate: float) -> float:
        """Update the replicas, and after a round the parameters, which are the anchor."""
        if self.replicas is None:
            self.replicas = [parameters.copy() for _ in gradients]
        for replica, optimiser, gradient in zip(self.replicas, self.optimisers, gradients, strict=True):
            optimiser.step(replica, [gradient], rate)
        self.number += 1
        if self.number % self.every:
            return 0.0
        mean, bits = self.exchange.mean([parameters - replica for replica in self.replicas])
        self.velocity *= np.float32(self.momentum)
        self.velocity += mean
        parameters -= np.float32(self.outer) * (mean + np.float32(self.momentum) * self.velocity)
        self.replicas = None
        return bits / self.every


class DiLoCo(Local):
    """Local steps of AdamW at `inner`, a dense mean, and an outer step at the rate with a Nesterov momentum of 0.9."""

    def __init__(self, every: int = 10, inner: float = 1e-3) -> None:
        super().__init__(every, "dense", momentum=0.9)
        self.inner = inner

    def step(self, parameters: Floats, gradients: Sequence[Floats], rate: float) -> float:
        """Update the replicas, and after a round the parameters; rate: of the outer step."""
        self.outer = rate
        return super().step(parameters, gradients, self.inner)


def chunks(k: int, chunk: int, form: str) -> Compressor:
    """Return the selection of the k largest of each chunk, in a form of `Quantised` or "full"."""
    largest = ChunkedTopK(k=k, chunk=chunk)
    return largest if form == "full" else Quantised(largest, form)


MESSAGES: dict[str, Callable[[], Any]] = {  # of `Local`
    "dense": Dense,
    "two_bit": lambda: Sparse(chunks(128, 4096, "two_bit"), 0.95, over="contributors"),
    "bits4": lambda: FewBits(4),
    "basis": lambda: Sparse(chunks(8, 256, "two_bit"), 0.95, mpicomp.Hadamard(chunk=256), over="contributors"),
}


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


KINDS: dict[str, Any] = {
    "adamw": AdamW,
    "lion": Lion,
    "bits": AdamWOfFewBits,
    "topk": AdamWOfTopK,
    "powersgd": AdamWOfPowerSgd,
    "coefficients": Coefficients,
    "local": Local,
    "diloco": DiLoCo,
}


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
