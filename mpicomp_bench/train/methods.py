"""The methods by name: a compressor, a feedback and a collective each; and the update that a method makes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives import GradientExchange, OuterLoop, dense_allreduce
from mpicomp import EF21, AdaComp, ErrorFeedback, Feedback, MomentumCorrection, NoFeedback, StepAhead
from mpicomp_bench.bench.collective import COLLECTIVES as OPERATIONS
from mpicomp_bench.bench.collective import algorithms
from mpicomp_bench.bench.compressors import COMPRESSORS, WITHOUT_TARGET
from mpicomp_bench.train.network import Floats

MOMENTUM = 0.9
BIN = 500  # of AdaComp: the paper's for fully connected layers
FEEDBACKS: dict[str, Callable[[float, float], Feedback]] = {  # of rate and momentum
    "none": lambda rate, momentum: NoFeedback(),
    "error-feedback": lambda rate, momentum: ErrorFeedback(),
    "error-feedback-decay": lambda rate, momentum: ErrorFeedback(decay=0.95),
    "momentum-correction": lambda rate, momentum: MomentumCorrection(momentum),
    "step-ahead": StepAhead,
    "ef21": lambda rate, momentum: EF21(),
    "ef21-momentum": lambda rate, momentum: EF21(1 - momentum),
}
OWN_MOMENTUM = ("momentum-correction", "step-ahead", "ef21-momentum")
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "allgather": OPERATIONS["allgather"],
    "allreduce": OPERATIONS["allreduce"],
    "gtopk": OPERATIONS["gtopk"],
    **{f"gtopk-{name}": partial(OPERATIONS["gtopk"], algorithm=name) for name in algorithms()["gtopk"]},
}


class Method(NamedTuple):
    """A row of the table, by the names above; all of them "dense" for the baseline."""

    name: str
    compressor: str
    feedback: str
    collective: str
    average: bool | str = True  # over all ranks, or "contributors"
    local: bool = False  # exchanges what several local steps did: see `LocalDescent`

    @property
    def has_density(self) -> bool:
        """Whether the method depends on the density."""
        return self.compressor not in ("dense", *WITHOUT_TARGET)


METHODS = {
    name: Method(name, *parts)
    for name, *parts in (
        ("dense", "dense", "dense", "dense"),
        ("topk-allgather", "TopK", "error-feedback", "allgather"),
        ("gtopk", "TopK", "error-feedback", "gtopk"),
        ("gtopk-exact", "TopK", "error-feedback", "gtopk-exact"),
        ("sidco", "SIDCo-exponential", "error-feedback", "allgather"),
        ("adacomp", "AdaComp", "error-feedback", "allgather"),
        ("dgc", "SampledTopK", "momentum-correction", "allgather"),
        ("aggregation-aware", "AggregationAware", "error-feedback", "allreduce"),
        ("step-ahead", "TopK", "step-ahead", "allgather"),
        ("ef21", "TopK", "ef21", "allgather"),
        ("ef21-momentum", "TopK", "ef21-momentum", "allgather"),
        ("topk-no-feedback", "TopK", "none", "allgather"),
        ("local-dense", "Dense", "none", "allreduce", True, True),
        ("local-sparse", "ChunkedTopK-two_bit", "error-feedback-decay", "allreduce", "contributors", True),
        ("local-sparse-mean", "ChunkedTopK-two_bit", "error-feedback-decay", "allreduce", True, True),
    )
}


class Descent:
    """Stochastic gradient descent with momentum over all ranks: from this rank's gradient to the common update.

    Momentum is heavy-ball, v = momentum v + mean and x -= rate v, on the mean that comes out of the exchange; methods
    that have momentum of their own (`OWN_MOMENTUM`) get the same factor there, and none after. With the same rate all
    take equally long steps where nothing is compressed. Messages are coded as between nodes (`codec="smallest"`), also
    when all ranks share one. Step-ahead returns an update, which includes the rate. EF21's momentum is a mean of
    gradients, where heavy-ball's is a sum of 1 / (1 - momentum) of them.
    """

    def __init__(self, comm: Any, method: Method, density: float, rate: float, momentum: float) -> None:
        self.comm = comm
        self.exchange = None if method.compressor == "dense" else exchange_of(comm, method, density, rate, momentum)
        factors = {"step-ahead": 1.0, "ef21-momentum": rate / (1 - momentum)}
        self.rate = np.float32(factors.get(method.feedback, rate))
        self.momentum = 0.0 if method.feedback in OWN_MOMENTUM else momentum
        self._velocity: Floats | float = 0.0

    def point(self, parameters: Floats) -> Floats:
        """Return where this rank is to take its gradient: at the parameters, or ahead of them."""
        feedback = self.exchange and self.exchange.feedback
        return feedback.ahead(parameters) if isinstance(feedback, StepAhead) else parameters

    def update(self, gradient: Floats) -> Floats:
        """Return what is to be subtracted from the parameters, the same on every rank."""
        if self.exchange is None:
            mean: Floats = dense_allreduce(gradient, self.comm) / np.float32(self.comm.size)
        else:
            mean = self.exchange(gradient)
        self._velocity = self.momentum * self._velocity + mean if self.momentum else mean
        return self.rate * self._velocity

    def step(self, parameters: Floats, gradient: Floats) -> None:
        """Update the parameters in place; they are as before when it raises."""
        parameters -= self.update(gradient)

    def common(self, parameters: Floats) -> Floats:
        """Return the parameters that all ranks have."""
        return parameters

    @property
    def sent(self) -> float | None:
        """Share of the entries that this rank has sent in the last exchange; None before."""
        return share_sent(self.exchange)


class LocalDescent:
    """Momentum descent on each rank's own gradients; every so many steps the ranks exchange what these did.

    See `OuterLoop`, here with an outer rate of 1 and no outer momentum. Momentum is heavy-ball with the rank's own
    gradients, and is kept from round to round. Until the first exchange, and after the last, ranks differ.
    """

    def __init__(self, comm: Any, method: Method, density: float, rate: float, momentum: float, every: int) -> None:
        self.comm, self.rate, self.momentum, self.every = comm, np.float32(rate), momentum, every
        self.exchange = exchange_of(comm, method, density, rate, momentum)
        self._outer: OuterLoop | None = None  # of the parameters of the first step
        self._velocity: Floats | float = 0.0

    def point(self, parameters: Floats) -> Floats:
        """Return the parameters: where this rank takes its gradient."""
        self._loop(parameters)
        return parameters

    def step(self, parameters: Floats, gradient: Floats) -> None:
        """Update the parameters in place; every so many steps they are then the same on every rank."""
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
            self._outer = OuterLoop(self.exchange, parameters, self.every)
        return self._outer

    @property
    def sent(self) -> float | None:
        """Share of the entries that this rank has sent in the last exchange; None before."""
        return share_sent(self.exchange)


def exchange_of(comm: Any, method: Method, density: float, rate: float, momentum: float) -> GradientExchange:
    """Return the exchange of a method; messages are coded as between nodes."""
    compressor = AdaComp(BIN) if method.compressor == "AdaComp" else COMPRESSORS[method.compressor](density)
    feedback, run = FEEDBACKS[method.feedback](rate, momentum), COLLECTIVES[method.collective]
    return GradientExchange(comm, compressor, feedback, partial(run, codec="smallest"), average=method.average)


def share_sent(exchange: GradientExchange | None) -> float | None:
    """Return the share of the entries that this rank has sent in the last step of an exchange; 1 without one."""
    if exchange is None:
        return 1.0
    return exchange.statistics.sent / exchange.statistics.length if exchange.statistics else None
