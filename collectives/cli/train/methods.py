"""The methods by name: a compressor, a feedback and a collective each; and what a method does with a gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from collectives import GradientExchange, dense_allreduce, gtopk_allreduce, sparse_allgather, sparse_allreduce
from collectives.cli.train.network import Floats
from mpicomp import (
    EF21,
    AdaComp,
    AggregationAware,
    BlockRandomK,
    Compressor,
    ErrorFeedback,
    Feedback,
    GaussianK,
    MomentumCorrection,
    MSTopK,
    NoFeedback,
    RandomK,
    RedSync,
    SampledTopK,
    SIDCo,
    StepAhead,
    TopK,
)

COMPRESSORS: dict[str, Callable[[float], Compressor]] = {
    "topk": TopK,
    "sidco": SIDCo,
    "sampled-topk": SampledTopK,
    "redsync": RedSync,
    "gaussiank": GaussianK,
    "mstopk": MSTopK,
    "randomk": RandomK,
    "block-randomk": BlockRandomK,
    "aggregation-aware": AggregationAware,
    "adacomp": lambda density: AdaComp(500),  # the paper's bin for fully connected layers
}
WITHOUT_DENSITY = ("adacomp", "dense")
FEEDBACKS: dict[str, Callable[[float, float], Feedback]] = {  # of rate and momentum
    "none": lambda rate, momentum: NoFeedback(),
    "error-feedback": lambda rate, momentum: ErrorFeedback(),
    "momentum-correction": lambda rate, momentum: MomentumCorrection(momentum),
    "step-ahead": StepAhead,
    "ef21": lambda rate, momentum: EF21(),
    "ef21-momentum": lambda rate, momentum: EF21(1 - momentum),
}
OWN_MOMENTUM = ("momentum-correction", "step-ahead", "ef21-momentum")
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "allgather": sparse_allgather,
    "allreduce": sparse_allreduce,
    "gtopk": gtopk_allreduce,
    "gtopk-tree": partial(gtopk_allreduce, algorithm="tree"),
    "gtopk-exact": partial(gtopk_allreduce, algorithm="exact"),
}


@dataclass(frozen=True)
class Method:
    """What a row of the table is about, by the names above; all of them "dense" for the baseline."""

    name: str
    compressor: str
    feedback: str
    collective: str

    @property
    def has_density(self) -> bool:
        """Whether the method asks how much is to travel."""
        return self.compressor not in WITHOUT_DENSITY


METHODS = {
    method.name: method
    for method in (
        Method("dense", "dense", "dense", "dense"),
        Method("topk-allgather", "topk", "error-feedback", "allgather"),
        Method("gtopk", "topk", "error-feedback", "gtopk"),
        Method("gtopk-exact", "topk", "error-feedback", "gtopk-exact"),
        Method("sidco", "sidco", "error-feedback", "allgather"),
        Method("adacomp", "adacomp", "error-feedback", "allgather"),
        Method("dgc", "sampled-topk", "momentum-correction", "allgather"),
        Method("aggregation-aware", "aggregation-aware", "error-feedback", "allreduce"),
        Method("step-ahead", "topk", "step-ahead", "allgather"),
        Method("ef21", "topk", "ef21", "allgather"),
        Method("ef21-momentum", "topk", "ef21-momentum", "allgather"),
        Method("topk-no-feedback", "topk", "none", "allgather"),
    )
}


class Descent:
    """Stochastic gradient descent with momentum over all ranks: makes of this rank's gradient the common update.

    Momentum is heavy-ball, v = momentum v + mean and x -= rate v, on the mean that comes out of the exchange; methods
    that have momentum of their own (`OWN_MOMENTUM`) get the same factor there, and none after. With the same rate all
    take equally long steps where nothing is compressed.
    """

    def __init__(self, comm: Any, method: Method, density: float, rate: float, momentum: float) -> None:
        self.comm, self.exchange = comm, _exchange(comm, method, density, rate, momentum)
        self.rate = scale(method.feedback, rate, momentum)
        self.momentum = 0.0 if method.feedback in OWN_MOMENTUM else momentum
        self._velocity: Floats | float = 0.0

    def point(self, parameters: Floats) -> Floats:
        """Return where this rank is to take its gradient: at the parameters, or ahead of them."""
        feedback = self.exchange and self.exchange.feedback
        return feedback.ahead(parameters) if isinstance(feedback, StepAhead) else parameters

    def update(self, gradient: Floats) -> Floats:
        """Return what is to be subtracted from the parameters, the same on every rank."""
        mean = self._mean(gradient)
        self._velocity = self.momentum * self._velocity + mean if self.momentum else mean
        return np.float32(self.rate) * self._velocity

    @property
    def sent(self) -> float:
        """Share of the entries that this rank has sent in the last step."""
        statistics = self.exchange and self.exchange.statistics
        return statistics.sent / statistics.length if statistics else 1.0

    def _mean(self, gradient: Floats) -> Floats:
        if self.exchange is None:
            total: Floats = dense_allreduce(gradient, self.comm)
            return total / np.float32(self.comm.size)
        mean: Floats = self.exchange(gradient)
        return mean


def scale(feedback: str, rate: float, momentum: float) -> float:
    """Return the factor of what comes out of the exchange.

    Step-ahead hands out an update, which has the rate in it. EF21's momentum is a mean of gradients, where heavy-ball's
    is a sum that comes to 1 / (1 - momentum) of them.
    """
    if feedback == "step-ahead":
        return 1.0
    return rate / (1 - momentum) if feedback == "ef21-momentum" else rate


def _exchange(comm: Any, method: Method, density: float, rate: float, momentum: float) -> GradientExchange | None:
    """Return the exchange of a method; None for the dense baseline, which has none.

    Messages are coded as between nodes (`codec="smallest"`), where the bytes count, also when all ranks share one.
    """
    if method.compressor == "dense":
        return None
    compressor, feedback = COMPRESSORS[method.compressor](density), FEEDBACKS[method.feedback](rate, momentum)
    return GradientExchange(comm, compressor, feedback, partial(COLLECTIVES[method.collective], codec="smallest"))
