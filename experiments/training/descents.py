"""The updates of a method of `mpicomp_bench.methods`: SGD with momentum over all ranks, or local steps."""

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from layers import Floats
from sampled import SampledTopK

import collectives
from collectives import GradientExchange, OuterLoop, average_residuals, dense_allreduce
from mpicomp import Compressor, Feedback, SparseVector, WarmUp
from mpicomp.compressors import Wrapper
from mpicomp_bench.methods import add, construct, method, outer_settings

MOMENTUM = 0.9
SIGN_RATE = 0.01  # of a method that returns signs, by the rate of the others
CODED = {  # as between nodes, also where all ranks share one
    name: partial(getattr(collectives, name), codec="smallest")
    for name in (
        "sparse_allreduce",
        "sparse_allgather",
        "gtopk_allreduce",
        "compressed_allreduce",
    )
}
# further names of the lines, such as modules of the user's
NAMES: dict[str, Any] = {"SampledTopK": SampledTopK}

TWO_BIT = 'GradientExchange(comm, Quantised(ChunkedTopK(k=128, chunk=4096), form="two_bit"), ErrorFeedback(decay=0.95))'
add(
    "local-sparse-mean",
    "as local-sparse, their mean over all ranks",
    TWO_BIT,
    "every",
    "every=10",
)
TOP = "GradientExchange(comm, TopK(density=0.01), "
add(
    "topk-no-feedback",
    "the largest entries, no residual",
    f"{TOP}NoFeedback(), sparse_allgather)",
    "density",
)
EXACT = 'collective=partial(gtopk_allreduce, algorithm="exact"))'
add("gtopk-exact", "the largest entries of the exact sum", f"{TOP}{EXACT}", "density")
for _kind, _what, _compressor in (
    ("", "the largest entries", "TopK(density=0.01)"),
    ("sign-", "signs with a scale", 'Quantised(TopK(density=1.0), "sign")'),
):  # what its owners compress as well
    _line, _sum = (
        f"GradientExchange(comm, {_compressor}, ",
        f"partial(compressed_allreduce, compressor={_compressor}))",
    )
    add(
        f"{_kind or 'topk-'}both-ways",
        f"{_what}, and of their sum",
        f"{_line}collective={_sum}",
        "density",
    )
    _ahead = f"{_line}StepAhead(rate, momentum), {_sum}"
    add(
        f"{_kind}step-ahead-both-ways",
        f"step-ahead of {_what}, and of their sum",
        _ahead,
        "density",
    )


class Recorder(Wrapper):
    """Store copies of the compressor's input in some calls. calls: their numbers, from 1."""

    def __init__(self, compressor: Compressor, calls: Collection[int]) -> None:
        super().__init__(compressor)
        self.calls, self.step, self.captured = list(calls), 0, dict[int, Floats]()

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """See `Compressor.compress`."""
        vector = self.compressor.compress(corrected, gradient=gradient)
        self.step += 1
        if self.step in self.calls:
            self.captured = {**self.captured, self.step: np.array(corrected)}
        return vector


class Terms(NamedTuple):
    """Terms of a training.

    warm_up: densities of the first stages, of `stage` steps each. record: the steps
    whose corrected gradients are stored. tensors: returns the parts of a flat vector by
    name, for methods that compress each tensor. averaging_period: steps from one
    averaging of the residuals to the next; None for none.
    """

    rate: float
    momentum: float = MOMENTUM
    warm_up: Collection[float] = ()
    stage: int = 1
    record: Collection[int] = ()
    tensors: Callable[[Floats], dict[str, Floats]] = lambda flat: {"gradient": flat}
    averaging_period: int | None = None


def at_density(name: str, density: float) -> str | None:
    """Return the name of a method at a density; None where it has none."""
    line = method(name).line
    chunk = re.search(r"k=\d+, chunk=(\d+)", line)
    if not chunk and "density=" not in line:
        return None
    setting = (
        f"k={max(1, round(density * int(chunk[1])))}" if chunk else f"density={density}"
    )
    return f"{name}{',' if ':' in name else ':'}{setting}"


def exchange_of(comm: Any, name: str, terms: Terms) -> GradientExchange:
    """Return the exchange of a method: messages are coded as between nodes, and small tensors are compressed too."""

    def prepared(compressor: Any) -> Any:
        if terms.warm_up and getattr(compressor, "density", None) is not None:
            compressor = WarmUp(
                compressor, [*terms.warm_up, compressor.density], calls=terms.stage
            )
        return (
            Recorder(compressor, terms.record)
            if terms.record and isinstance(compressor, Compressor)
            else compressor
        )

    def exchange(
        comm: Any,
        compressor: Any = None,
        feedback: Feedback | None = None,
        collective: Any = CODED["sparse_allreduce"],
        **settings: Any,
    ) -> GradientExchange:
        if "bits" in settings:
            return GradientExchange(comm, small=0, **settings)
        return GradientExchange(
            comm, prepared(compressor), feedback, collective, small=0, **settings
        )

    names = {**CODED, **NAMES, "rate": terms.rate, "momentum": terms.momentum}
    found: GradientExchange = construct(name, comm, GradientExchange=exchange, **names)
    return found


class Descent:
    """SGD with momentum over all ranks: computes the common update from this rank's gradient.

    Momentum is heavy-ball, v = momentum v + mean and x -= rate v, on the mean of the
    exchange; methods with their own momentum (momentum correction, step-ahead) use the
    same factor, and none after the exchange. At the same rate all take equally long
    steps without compression. Step-ahead returns an update, which includes the rate.
    Signs are longer than gradients, and take `SIGN_RATE` of the rate; their momentum is
    the residual.
    """

    def __init__(self, comm: Any, name: str, terms: Terms) -> None:
        line = method(name).line
        self.comm, self.exchange = (
            comm,
            exchange_of(comm, name, terms) if line else None,
        )
        self.tensors = terms.tensors if "lambda" in line else None
        self.rate, self.momentum = np.float32(terms.rate), terms.momentum
        if 'average="sign"' in line:
            self.rate, self.momentum = np.float32(SIGN_RATE * terms.rate), 0.0
        elif "StepAhead" in line:
            self.rate, self.momentum = np.float32(1), 0.0
        elif "MomentumCorrection" in line:
            self.momentum = 0.0
        self.averaging_period, self.number = terms.averaging_period, 0
        self._velocity: Floats | float = 0.0

    def point(self, parameters: Floats) -> Floats:
        """Return the point at which this rank evaluates its gradient: the parameters, or a point ahead of them."""
        if self.exchange is None:
            return parameters
        if self.tensors is None:
            ahead: Floats = self.exchange.ahead(parameters)
            return ahead
        parts = self.tensors(parameters)
        moved = self.exchange.ahead(parts)
        return np.concatenate([moved[name].ravel() for name in parts])

    def update(self, gradient: Floats) -> Floats:
        """Return the update to subtract from the parameters, the same on every rank."""
        mean = self._mean(gradient)
        self._velocity = (
            self.momentum * self._velocity + mean if self.momentum else mean
        )
        return self.rate * self._velocity

    def _mean(self, gradient: Floats) -> Floats:
        mean: Floats
        if self.exchange is None:
            mean = dense_allreduce(gradient, self.comm) / np.float32(self.comm.size)
        elif self.tensors is None:
            mean = self.exchange(gradient)
            self.number += 1
            if self.averaging_period and self.number % self.averaging_period == 0:
                average_residuals(self.exchange)
        else:
            mean = np.empty_like(gradient)
            self.exchange(self.tensors(gradient), out=self.tensors(mean))
        return mean

    def step(self, parameters: Floats, gradient: Floats) -> None:
        """Update the parameters in place; if it raises, they do not change."""
        parameters -= self.update(gradient)

    def common(self, parameters: Floats) -> Floats:
        """Return the parameters that all ranks have."""
        return parameters


class LocalDescent:
    """SGD with momentum on each rank's own gradients; the ranks exchange their progress every few steps.

    Momentum is heavy-ball with the rank's own gradients, and is kept from round to
    round. Until the first exchange, and after the last, ranks differ.
    """

    def __init__(self, comm: Any, name: str, terms: Terms) -> None:
        self.comm, self.rate, self.momentum = (
            comm,
            np.float32(terms.rate),
            terms.momentum,
        )
        self.exchange, self.outer_settings = (
            exchange_of(comm, name, terms),
            outer_settings(name),
        )
        self._outer: OuterLoop | None = None  # of the parameters of the first step
        self._velocity: Floats | float = 0.0

    def point(self, parameters: Floats) -> Floats:
        """Return the parameters, at which this rank evaluates its gradient."""
        self._loop(parameters)
        return parameters

    def step(self, parameters: Floats, gradient: Floats) -> None:
        """Update the parameters in place; after an exchange they are the same on every rank."""
        outer = self._loop(parameters)
        self._velocity = self.momentum * self._velocity + gradient
        parameters -= self.rate * self._velocity
        outer.step()

    def common(self, parameters: Floats) -> Floats:
        """Return the parameters that all ranks have: those after the last exchange."""
        anchor: Floats = self._loop(parameters).anchor
        return anchor

    def _loop(self, parameters: Floats) -> OuterLoop:
        if self._outer is None:
            self._outer = OuterLoop(self.exchange, parameters, **self.outer_settings)
        return self._outer


def descent_of(comm: Any, name: str, terms: Terms) -> Descent | LocalDescent:
    """Return the descent of a method."""
    return (LocalDescent if method(name).outer else Descent)(comm, name, terms)


def entries(descent: Descent | LocalDescent) -> tuple[float, float]:
    """Return the fractions of the entries that this rank sent in its last step, and that the sum had.

    (1, 1) without an exchange object, (nan, nan) in a step that did not exchange.
    """
    if descent.exchange is None:
        return 1.0, 1.0
    found = descent.exchange.statistics
    return (
        (found.sent / found.length, found.received / found.length)
        if found
        else (np.nan, np.nan)
    )
