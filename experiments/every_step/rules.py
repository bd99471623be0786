"""The methods of `mpicomp_bench.methods` in the simulation: how P gradients become a step.

A method is a class with the constructor's arguments as its settings. It is called with
the parameters, the gradient of each rank (both float32; parameters flat and written in
place) and the rate.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from cosine import Cosine
from means import Dense, FewBits, Floats, PowerSgd, Shapes, Sparse, size_of
from numba import njit
from numpy.typing import NDArray

import mpicomp
from mpicomp import Basis, Compressor, ErrorFeedback, Feedback
from mpicomp_bench.methods import add, construct, method, outer_settings

WEIGHT_DECAY = np.float32(0.01)
INNER = 1e-3  # the rate of DiLoCo's local steps


class AdamW:
    """AdamW. beta2: of the second moments.

    An optimiser updates the parameters of several ranks in a call, each by its own
    gradient: arrays have a row for each rank.
    """

    def __init__(self, beta2: float = 0.999) -> None:
        self.betas, self.number = (0.9, beta2), 0

    def start(self, shapes: Shapes, ranks: int = 1) -> None:
        """Make the state for parameters of these shapes on so many ranks."""
        self.first, self.second = np.zeros((2, ranks * size_of(shapes)), np.float32)

    def update(self, parameters: Floats, gradients: Floats, rate: float) -> None:
        """Update the parameters."""
        self.number += 1
        corrections = [1 - beta**self.number for beta in self.betas]
        adamw(
            parameters.reshape(-1),
            gradients.reshape(-1),
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

    def start(self, shapes: Shapes, ranks: int = 1) -> None:
        """Make the state for parameters of these shapes on so many ranks."""
        self.momentum = np.zeros(ranks * size_of(shapes), np.float32)

    def update(self, parameters: Floats, gradients: Floats, rate: float) -> None:
        """Update the parameters."""
        beta1, beta2 = self.betas
        parameters, gradients = parameters.reshape(-1), gradients.reshape(-1)
        signs = np.sign(beta1 * self.momentum + (1 - beta1) * gradients)
        self.momentum += (1 - beta2) * (gradients - self.momentum)
        parameters *= 1 - rate * WEIGHT_DECAY
        parameters -= np.float32(rate) * signs


# a, b, c of X <- a X + (b G + c G^2) X with G = X X^T, a Newton-Schulz step each
QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5
# the first of Polar Express (arXiv 2505.16932)
POLAR = (
    (8.28721, -23.5959, 17.3004),
    (4.10706, -2.94785, 0.544843),
    (3.94869, -2.9089, 0.551819),
    (3.31842, -2.48849, 0.510049),
)


class Matrices(NamedTuple):
    """The hidden matrices of one shape: their places in the flat vector, and the momenta of (ranks, places, *shape)."""

    places: list[slice]
    momenta: Any


class Muon(AdamW):
    """Muon of the hidden matrices, as examples/muon.py, and AdamW at the same rate of the other parameters.

    steps: the polynomials of Newton-Schulz. by_row: NorMuon (arXiv 2510.05491), each
    row over the root of the mean of its squares, and the norm of the whole as it was.
    beta: of the momentum.
    """

    def __init__(
        self,
        steps: Sequence[tuple[float, ...]] = QUINTIC,
        *,
        by_row: bool = False,
        beta: float = 0.95,
    ) -> None:
        super().__init__()
        self.steps, self.by_row, self.beta = steps, by_row, beta

    def start(self, shapes: Shapes, ranks: int = 1) -> None:
        """Make the state for parameters of these shapes; a matrix is hidden where no side is shorter than the width.

        The width is the last side of the first tensor, the embedding of the symbols.
        """
        import torch

        places: dict[tuple[int, ...], list[slice]] = {}
        # of AdamW
        self.others = np.ones(size_of(shapes), bool)
        first = 0
        for shape in shapes:
            place = slice(first, first + math.prod(shape))
            first = place.stop
            if len(shape) == 2 and min(shape) >= shapes[0][-1]:
                places.setdefault(shape, []).append(place)
                self.others[place] = False
        super().start([(int(self.others.sum()),)], ranks)
        self.hidden = [
            Matrices(own, torch.zeros(ranks, len(own), *shape))
            for shape, own in places.items()
        ]
        # means of the squares of each row
        self.rows = [torch.zeros(*each.momenta.shape[:-1], 1) for each in self.hidden]

    def update(self, parameters: Floats, gradients: Floats, rate: float) -> None:
        """Update the parameters."""
        others, theirs = (
            np.compress(self.others, each, -1) for each in (parameters, gradients)
        )
        super().update(others, theirs, rate)
        parameters[..., self.others] = others
        for own, rows in zip(self.hidden, self.rows, strict=True):
            weights, gradient = (stacked(each, own) for each in (parameters, gradients))
            average = own.momenta.lerp_(gradient, 1 - self.beta)
            update = orthogonalised(gradient.lerp(average, self.beta), self.steps)
            if self.by_row:
                update = normalised(update, rows, self.number)
            scale = 0.2 * math.sqrt(max(update.shape[-2:]))
            weights *= 1 - rate * float(WEIGHT_DECAY)
            weights -= scale * rate * update
            for number, place in enumerate(own.places):
                parameters[..., place] = weights[:, number].flatten(1).numpy()

    @property
    def momenta(self) -> Floats:
        """The first moments, also of AdamW: a copy with a row for each rank, in the order of the parameters."""
        first = self.first.reshape(-1, int(self.others.sum()))
        found = np.empty((len(first), self.others.size), np.float32)
        found[:, self.others] = first
        for own in self.hidden:
            for number, place in enumerate(own.places):
                found[:, place] = own.momenta[:, number].flatten(1).numpy()
        return found

    @momenta.setter
    def momenta(self, values: Floats) -> None:
        self.first[...] = np.compress(self.others, values, -1).ravel()
        for own in self.hidden:
            own.momenta.copy_(stacked(values, own))


def stacked(vectors: Floats, matrices: Matrices) -> Any:
    """Return a copy of the matrices of one shape in the vectors of all ranks, as a tensor like their momenta."""
    import torch

    parts = [torch.from_numpy(vectors[..., place]) for place in matrices.places]
    return torch.stack(parts, -2).view(matrices.momenta.shape)


def orthogonalised(matrices: Any, steps: Sequence[tuple[float, ...]]) -> Any:
    """Return matrices with the same singular vectors, and singular values near 1, by Newton-Schulz steps."""
    import torch

    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalised(matrices.mT, steps).mT
    norms = matrices.norm(dim=(-2, -1), keepdim=True)
    found = (matrices / norms.clamp(min=1e-7)).flatten(0, 1)
    for first, second, third in steps:
        gram = found @ found.mT
        quintic = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
        found = torch.baddbmm(found, quintic, found, beta=first)
    return found.view(matrices.shape)


def normalised(update: Any, rows: Any, number: int, beta: float = 0.95) -> Any:
    """Return updates of which each row is divided by its root mean square, a moving one, and that keep their norms."""
    rows.lerp_(update.square().mean(-1, keepdim=True), 1 - beta)
    even = update / (rows / (1 - beta**number)).sqrt().clamp(min=1e-8)
    norms = [each.norm(dim=(-2, -1), keepdim=True) for each in (update, even)]
    return even * (norms[0] / norms[1])


OPTIMISERS: dict[str, Callable[..., Any]] = {
    "adamw": AdamW,
    "lion": Lion,
    "muon": Muon,
    "normuon": partial(Muon, by_row=True),
    "muon-quintic-3": partial(Muon, QUINTIC[:3]),
    "muon-polar-4": partial(Muon, POLAR),
}


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

    every: local steps. outer, momentum: of the outer step; with a momentum it is
    Nesterov's. radial: the mean of each tensor gets the mean norm of the ranks' own
    (the radial-directional mean of Decoupled DiLoCo, arXiv 2604.21428). momenta: of the
    optimiser; by default they stay on their ranks. delay: steps from the start of an
    exchange to the outer step. alpha: of what a delayed outer step would write to a
    replica the part that it does write.
    """

    pooled = False

    def __init__(
        self,
        exchange: Any,
        optimiser: Any,
        every: int,
        outer: float = 1.0,
        momentum: float = 0.0,
        *,
        radial: bool = False,
        momenta: "Momenta | None" = None,
        delay: int = 0,
        alpha: float = 1.0,
    ) -> None:
        self.every, self.outer, self.momentum, self.number = every, outer, momentum, 0
        self.exchange, self.optimiser, self.radial = exchange, optimiser, radial
        self.momenta, self.delay, self.alpha = momenta, delay, np.float32(alpha)

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.optimiser.start(shapes, ranks)
        self.exchange.start(shapes, ranks)
        self.sent: Floats | None = None  # the replicas at the start of an exchange
        self.velocity = np.zeros(size_of(shapes), np.float32)
        self.replicas: Floats | None = None
        self.firsts = np.cumsum([0, *map(math.prod, shapes[:-1])])
        if self.momenta:
            self.momenta.start(shapes, ranks)

    def step(
        self, parameters: Floats, gradients: Sequence[Floats], rate: float
    ) -> float:
        """Update the replicas, and after a round the parameters, which are the anchor."""
        if self.replicas is None:
            self.replicas = np.tile(parameters, (len(gradients), 1))
        self.optimiser.update(self.replicas, np.stack(gradients), rate)
        self.number += 1
        if self.momenta:
            self.momenta.step(self.number, self.optimiser)
        bits = 0.0
        if self.number % self.every == 0:
            changes = parameters - self.replicas
            self.mean, bits = self.exchange.mean(list(changes))
            if self.radial:
                self.mean = self.mean * self.stretch(changes, self.mean)
            self.sent = self.replicas.copy()
        if self.number % self.every == self.delay and self.sent is not None:
            self.outer_step(parameters)
        momenta = self.momenta.bits if self.momenta and bits else 0.0
        return bits / self.every + momenta

    def outer_step(self, parameters: Floats) -> None:
        """Update the anchor by the mean that was exchanged, and continue from it, with the progress since then."""
        self.velocity *= np.float32(self.momentum)
        self.velocity += self.mean
        parameters -= np.float32(self.outer) * (
            self.mean + np.float32(self.momentum) * self.velocity
        )
        written = parameters + (self.replicas - self.sent)
        own = np.float32(1) - self.alpha
        self.replicas = own * self.replicas + self.alpha * written
        self.sent = None

    def stretch(self, changes: Floats, mean: Floats) -> Floats:
        """Return for each value the mean norm of its tensor in the ranks' changes over that in the mean."""
        squares = [
            np.add.reduceat(each * each, self.firsts, axis=-1)
            for each in (changes, mean)
        ]
        ratios = np.sqrt(squares[0]).mean(0) / np.maximum(np.sqrt(squares[1]), 1e-20)
        sizes = np.diff([*self.firsts, mean.size])
        return np.repeat(ratios.astype(np.float32), sizes)


class Momenta:
    """The momenta of an optimiser, which an `OuterLoop` of their own averages over the ranks.

    bits: of a value; 32: dense sums. every: steps between two averages.
    """

    def __init__(self, bits: int, every: int) -> None:
        self.exchange: Any = Dense() if bits == 32 else FewBits(bits)
        self.every = every
        self.bits = 0.0  # of a value and step

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.exchange.start(shapes, ranks)
        self.anchor = np.zeros(size_of(shapes), np.float32)

    def step(self, number: int, optimiser: Any) -> None:
        """Average them, if it is due behind the step of this number."""
        if number % self.every:
            return
        own = optimiser.momenta
        change, bits = self.exchange.mean(list(self.anchor - own))
        self.anchor = self.anchor - change
        optimiser.momenta = np.tile(self.anchor, (len(own), 1))
        self.bits = bits / self.every


class Accumulating:
    """A method of which a step takes the mean gradients of several steps.

    grows: from this step on twice as many, and from half as much later on four times.
    """

    def __init__(self, method: Any, steps: int, grows: float = math.inf) -> None:
        self.method, self.steps, self.pooled = method, steps, method.pooled
        self.number, self.sums, self.grows = 0, 0.0, grows

    @property
    def replicas(self) -> Any:
        """The parameters of all ranks, or None where they are the same."""
        return getattr(self.method, "replicas", None)

    def start(self, shapes: Shapes, ranks: int) -> None:
        """Make the state for parameters of these shapes."""
        self.method.start(shapes, ranks)

    def step(
        self, parameters: Floats, gradients: Sequence[Floats], rate: float
    ) -> float:
        """Let the method take a step, if it is due; return the bits of a value and step."""
        steps = self.steps
        steps *= 1 if self.number < self.grows else 2
        steps *= 1 if self.number < 1.5 * self.grows else 2
        self.number += 1
        self.sums = self.sums + np.stack(gradients)
        if self.number % steps:
            return 0.0
        means, self.sums = self.sums / np.float32(steps), 0.0
        return float(self.method.step(parameters, list(means), rate)) / steps


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
        return FewBits(bits, basis)
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
# settings that the lines of the library do not have
OF_OPTIMISER = "beta", "beta2"
OWN = (
    *OF_OPTIMISER,
    *("tile", "mean", "radial", "accumulate", "grows", "momenta", "momenta_every"),
    *("delay", "alpha"),
)


add(  # which the library refuses: nothing is gained
    "local-in-basis",
    "local steps, the largest coefficients of each chunk in a basis, in two bits",
    'GradientExchange(comm, Quantised(ChunkedTopK(k=8, chunk=256), form="two_bit"), ErrorFeedback(decay=0.95), '
    'basis=Hadamard(chunk=256), average="contributors")',
    "every",
    "every=10",
)
add(
    "local-few-bits-in-basis",
    "local steps, every coefficient in a basis in few bits",
    "GradientExchange(comm, bits=4, basis=Hadamard(chunk=256))",
    "every",
    "every=10",
)


def made(name: str, optimiser: str = "adamw") -> Any:
    """Return a new method of the simulation by its name; raises ValueError if there is none.

    optimiser: of `OPTIMISERS`; signs are a step of their own. Beside the settings of
    the line: beta, of Muon, and beta2, of AdamW; mean=contributors, of a sign;
    tile=True, see `Signs`; radial=True, see `Local`; momenta=4, bits, every
    `momenta_every` steps, see `Momenta`; delay=1 and alpha=0.5, see `Local`;
    accumulate=5 and grows=150, see `Accumulating`.
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
    new = OPTIMISERS[optimiser](
        **{key: float(own[key]) for key in OF_OPTIMISER if key in own}
    )
    if outer:
        rarely = int(own.get("momenta_every", outer["every"]))
        local = DiLoCo if stem.startswith("diloco") else Local
        rule: Any = local(
            mean,
            new,
            outer["every"],
            outer.get("rate", 1.0),
            outer.get("momentum", 0.0),
            radial="radial" in own,
            momenta=Momenta(int(own["momenta"]), rarely) if "momenta" in own else None,
            delay=int(own.get("delay", outer.get("delay", 0))),
            alpha=float(own.get("alpha", 1)),
        )
    else:
        rule = EveryStep(mean[0] if isinstance(mean, tuple) else mean, new)
    if "accumulate" in own or "grows" in own:
        grows = float(own.get("grows", math.inf))
        return Accumulating(rule, int(own.get("accumulate", 1)), grows)
    return rule
