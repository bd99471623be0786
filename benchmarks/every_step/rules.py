"""The methods of `mpicomp_bench.methods` in the simulation: how P gradients become a step.

A method is a class with the constructor's arguments as its settings. It is called with
the parameters, the gradient of each rank (both float32; parameters flat and written in
place) and the rate.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cosine import Cosine
from means import Dense, FewBits, Floats, PowerSgd, Shapes, Sparse, size_of
from numba import njit
from numpy.typing import NDArray

import mpicomp
from mpicomp import Basis, Compressor, ErrorFeedback, Feedback
from mpicomp_bench.methods import add, construct, method, outer_settings

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))  # muon.py

WEIGHT_DECAY = np.float32(0.01)
INNER = 1e-3  # the rate of DiLoCo's local steps


class AdamW:
    """AdamW. beta2: of the second moments."""

    def __init__(self, beta2: float = 0.999) -> None:
        self.betas, self.number = (0.9, beta2), 0

    def start(self, shapes: Shapes) -> None:
        """Make the state for parameters of these shapes."""
        self.first, self.second = np.zeros((2, size_of(shapes)), np.float32)

    def update(self, parameters: Floats, gradient: Floats, rate: float) -> None:
        """Update the parameters."""
        self.number += 1
        corrections = [1 - beta**self.number for beta in self.betas]
        adamw(
            parameters,
            gradient,
            self.first,
            self.second,
            *map(np.float32, (*self.betas, *corrections, rate)),
        )


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
        parameters[i] = (
            parameters[i] * (one - rate * WEIGHT_DECAY)
            - rate / correction1 * first[i] / scale
        )


class Lion:
    """Lion (arXiv 2302.06675), which takes the sign of a momentum, as coefficients do."""

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99) -> None:
        self.betas = beta1, beta2

    def start(self, shapes: Shapes) -> None:
        """Make the state for parameters of these shapes."""
        self.momentum = np.zeros(size_of(shapes), np.float32)

    def update(self, parameters: Floats, gradient: Floats, rate: float) -> None:
        """Update the parameters."""
        beta1, beta2 = self.betas
        signs = np.sign(beta1 * self.momentum + (1 - beta1) * gradient)
        self.momentum += (1 - beta2) * (gradient - self.momentum)
        parameters *= 1 - rate * WEIGHT_DECAY
        parameters -= np.float32(rate) * signs


class Muon(AdamW):
    """Muon of the hidden matrices (examples/muon.py), and AdamW at the same rate of the other parameters."""

    def __init__(self) -> None:
        super().__init__()
        # places in the flat vector, the matrix, its gradient
        self.hidden: list[tuple[slice, Floats, Floats]] = []

    def start(self, shapes: Shapes) -> None:
        """Make the state for parameters of these shapes; a matrix is hidden where no side is shorter than the width.

        The width is the last side of the first tensor, the embedding of the symbols.
        """
        import torch
        from muon import new_muon

        super().start(shapes)
        weights, first = [], 0
        for shape in shapes:
            place = slice(first, first + math.prod(shape))
            first = place.stop
            if len(shape) == 2 and min(shape) >= shapes[0][-1]:
                weight = torch.nn.Parameter(torch.empty(shape))
                weight.grad = torch.empty(shape)
                weights.append(weight)
                self.hidden.append(
                    (
                        place,
                        weight.detach().view(-1).numpy(),
                        weight.grad.view(-1).numpy(),
                    )
                )
        # the rate is that of each update
        self.optimiser = new_muon(weights, 0.0, float(WEIGHT_DECAY))

    def update(self, parameters: Floats, gradient: Floats, rate: float) -> None:
        """Update the parameters."""
        for place, values, slope in self.hidden:
            values[...], slope[...] = parameters[place], gradient[place]
        super().update(parameters, gradient, rate)
        self.optimiser.param_groups[0]["lr"] = rate
        self.optimiser.step()
        for place, values, _ in self.hidden:
            parameters[place] = values


OPTIMISERS = {"adamw": AdamW, "lion": Lion, "muon": Muon}


class EveryStep:
    """An optimiser's step by the mean gradient, as an exchange in every step computes it; `Dense` is the baseline."""

    def __init__(self, exchange: Any, optimiser: Any) -> None:
        self.exchange, self.optimiser, self.pooled = (
            exchange,
            optimiser,
            exchange.pooled,
        )

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.exchange.start(shapes, ranks)
        self.optimiser.start(shapes)

    def step(
        self, parameters: Floats, gradients: Sequence[Floats], rate: float
    ) -> float:
        """Update the parameters, and return the bits of a value that a rank sends."""
        gradient, bits = self.exchange.mean(gradients)
        self.optimiser.update(parameters, gradient, rate)
        return float(bits)


class Signs:
    """A step by the sign of the mean in a basis: DeMo (arXiv 2411.19870).

    mean: as a `means.Sparse`. side: chunks are square tiles of two-dimensional tensors
    of this side, not consecutive values of the flat vector.
    """

    pooled = False

    def __init__(self, mean: Sparse, side: int | None = None) -> None:
        self.exchange, self.side = mean, side

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.order = tiled(shapes, self.side) if self.side else None
        self.exchange.start(shapes, ranks)
        self.rate: float | None = None

    def step(
        self, parameters: Floats, gradients: Sequence[Floats], rate: float
    ) -> float:
        """Update the parameters, and return the bits of a value that rank 0 sends."""
        # in the paper the residual is of products with the rate
        if self.rate not in (None, rate):
            self.exchange.rescale(self.rate / rate)
        self.rate = rate
        mean, bits = self.exchange.mean(
            gradients
            if self.order is None
            else [each[self.order] for each in gradients]
        )
        signs = np.sign(mean)
        if self.order is not None:
            signs[self.order] = signs.copy()
        parameters *= 1 - rate * WEIGHT_DECAY
        parameters -= np.float32(rate) * signs
        return bits


class Local:
    """Local steps on each rank, then the outer step of `OuterLoop` by the mean of the pseudo-gradients.

    new_optimiser: of a rank. every: local steps. outer, momentum: of the outer step;
    with a momentum it is Nesterov's.
    """

    pooled = False

    def __init__(
        self,
        exchange: Any,
        new_optimiser: Callable[[], Any],
        every: int,
        outer: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        self.every, self.outer, self.momentum, self.number = every, outer, momentum, 0
        self.exchange, self.new_optimiser = exchange, new_optimiser

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.optimisers = [self.new_optimiser() for _ in range(ranks)]
        for each in self.optimisers:
            each.start(shapes)
        self.exchange.start(shapes, ranks)
        self.velocity = np.zeros(size_of(shapes), np.float32)
        self.replicas: list[Floats] | None = None

    def step(
        self, parameters: Floats, gradients: Sequence[Floats], rate: float
    ) -> float:
        """Update the replicas, and after a round the parameters, which are the anchor."""
        if self.replicas is None:
            self.replicas = [parameters.copy() for _ in gradients]
        for replica, optimiser, gradient in zip(
            self.replicas, self.optimisers, gradients, strict=True
        ):
            optimiser.update(replica, gradient, rate)
        self.number += 1
        if self.number % self.every:
            return 0.0
        mean, bits = self.exchange.mean(
            [parameters - replica for replica in self.replicas]
        )
        self.velocity *= np.float32(self.momentum)
        self.velocity += mean
        parameters -= np.float32(self.outer) * (
            mean + np.float32(self.momentum) * self.velocity
        )
        self.replicas = None
        return bits / self.every


class DiLoCo(Local):
    """Local steps at `INNER`; the rate is that of the outer step."""

    def step(
        self, parameters: Floats, gradients: Sequence[Floats], rate: float
    ) -> float:
        """Update the replicas, and after a round the parameters; rate: of the outer step."""
        self.outer = rate
        return super().step(parameters, gradients, INNER)


def tiled(shapes: Shapes, side: int) -> NDArray[np.intp]:
    """Return the positions in the flat vector in the order of the tiles: whole tiles, then what fills none.

    A Hadamard transform of a tile's values in this order is the two-dimensional one of
    the tile.
    """
    whole, rest, first = [], [], 0
    for shape in shapes:
        places = first + np.arange(np.prod(shape)).reshape(shape)
        first += places.size
        if len(shape) != 2 or min(shape) < side:
            rest.append(places.ravel())
            continue
        rows, columns = (length // side * side for length in shape)
        tiles = places[:rows, :columns].reshape(
            rows // side, side, columns // side, side
        )
        whole.append(tiles.swapaxes(1, 2).ravel())
        rest += [places[rows:].ravel(), places[:rows, columns:].ravel()]
    return np.concatenate([*whole, *rest])


def mean_of(
    comm: None,
    compressor: Compressor | None = None,
    feedback: Feedback | None = None,
    *,
    bits: int | None = None,
    basis: Basis | None = None,
    average: bool | str = True,
) -> Any:
    """Return the mean of `means` that a GradientExchange with these arguments computes."""
    if bits:
        return FewBits(bits)
    if isinstance(compressor, mpicomp.Dense):
        return Dense()
    decay = feedback.decay if isinstance(feedback, ErrorFeedback) else 1.0
    return Sparse(
        compressor,
        decay,
        basis,
        over="contributors" if average == "contributors" else "ranks",
    )


def powersgd(
    state: None,
    matrix_approximation_rank: int,
    start_powerSGD_iter: int,  # noqa: N803
) -> PowerSgd:
    """Return the mean of PyTorch's hook with these arguments."""
    return PowerSgd(matrix_approximation_rank, start_powerSGD_iter)


HOOKS = SimpleNamespace(PowerSGDState=powersgd, powerSGD_hook=None)
# no basis
NAMES = {
    "GradientExchange": mean_of,
    "powerSGD_hook": HOOKS,
    "Cosine": Cosine,
    "none": lambda chunk: None,
}
OWN = "beta2", "tile", "mean"  # settings that the library does not have


add(  # which the library refuses: nothing is gained
    "local-in-basis",
    "local steps, the largest coefficients of each chunk in a basis, in two bits",
    'GradientExchange(comm, Quantised(ChunkedTopK(k=8, chunk=256), form="two_bit"), ErrorFeedback(decay=0.95), '
    'basis=Hadamard(chunk=256), average="contributors")',
    "every",
    "every=10",
)


def made(name: str, optimiser: str = "adamw") -> Any:
    """Return a new method of the simulation by its name; raises ValueError if there is none.

    optimiser: of `OPTIMISERS`; signs are a step of their own. Beside the settings of
    the line: beta2, of AdamW; mean=contributors, of a sign; tile=True, see `Signs`.
    """
    stem, _, given = name.partition(":")
    settings = dict(each.partition("=")[::2] for each in given.split(",") if each)
    own = {key: settings.pop(key) for key in OWN if key in settings}
    name = ":".join(
        filter(
            None, [stem, ",".join(f"{key}={value}" for key, value in settings.items())]
        )
    )
    found, outer = method(name), outer_settings(name)
    mean = construct(name, None, **NAMES) if found.line else Dense()
    if 'average="sign"' in found.line:
        mean.over = own.get("mean", mean.over)
        chunk = re.search(r"chunk=(\d+)", found.line)
        return Signs(mean, round(int(chunk[1]) ** 0.5) if "tile" in own else None)
    new = partial(
        OPTIMISERS[optimiser], **{key: float(own[key]) for key in own if key == "beta2"}
    )
    if outer:
        local = DiLoCo if stem.startswith("diloco") else Local
        return local(mean, new, outer["every"], momentum=outer.get("momentum", 0))
    return EveryStep(mean[0] if isinstance(mean, tuple) else mean, new())
