"""The methods by name: a compressor, a feedback and a collective each; and their updates.

A name may be followed by a colon and settings, as Python keyword arguments: "SIDCo-pareto:stages=1,adaptation=None". A
compressor may also be a class of the user's: "module:Class", or "module:Class:settings".
"""

import ast
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from layers import Floats

from collectives import GradientExchange, OuterLoop, dense_allreduce, quantised_allreduce
from mpicomp import (
    AdaComp,
    Compressor,
    Dense,
    ErrorFeedback,
    Feedback,
    Hadamard,
    MomentumCorrection,
    NoFeedback,
    SparseVector,
    StepAhead,
    WarmUp,
)
from mpicomp.compressors import Wrapper
from mpicomp_bench.bench.collective import COLLECTIVES as OPERATIONS
from mpicomp_bench.bench.collective import algorithms
from mpicomp_bench.bench.compressors import COMPRESSORS, WITHOUT_TARGET

MOMENTUM = 0.9
SIGN_RATE = 0.01  # of a method that returns signs, by the rate of the others
CHUNK = 256  # of a basis, and of the compressors in it
BINS = {4: 50}  # of AdaComp, by the axes of a tensor: the paper's for convolutions
BIN = 500  # for fully connected and recurrent layers
FEEDBACKS: dict[str, Callable[..., Feedback]] = {  # of rate, momentum and settings
    "none": lambda rate, momentum: NoFeedback(),
    "error-feedback": lambda rate, momentum, **settings: ErrorFeedback(**settings),
    "momentum-correction": lambda rate, momentum, **settings: MomentumCorrection(momentum, **settings),
    "step-ahead": StepAhead,
}
OWN_MOMENTUM = ("momentum-correction", "step-ahead")
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "allgather": OPERATIONS["allgather"],
    "allreduce": OPERATIONS["allreduce"],
    "allreduce-votes": partial(OPERATIONS["allreduce"], votes=True),
    "gtopk": OPERATIONS["gtopk"],
    **{f"gtopk-{name}": partial(OPERATIONS["gtopk"], algorithm=name) for name in algorithms()["gtopk"]},
    "compressed": OPERATIONS["compressed"],
}
FEW_BITS = {f"few-bits-{bits}": partial(quantised_allreduce, bits=bits) for bits in (8, 4, 2)}  # of dense arrays
TRAINED = [name for name in COMPRESSORS if name != "Dense"]


class Method(NamedTuple):
    """A method of the table, by the names above; all of them "dense" for the baseline.

    average: over all ranks, or "contributors", or "sign". local: exchanges the progress of several local steps, see
    `LocalDescent`. by_tensor: each tensor has a compressor and a feedback of its own; those of one axis are sent dense.
    warm_up: densities of the first stages of the training, of `stage` steps each. basis: the
    compressor selects coefficients of chunks.
    """

    name: str
    compressor: str
    feedback: str
    collective: str
    average: bool | str = True
    local: bool = False
    by_tensor: bool = False
    warm_up: Sequence[float] = ()
    stage: int = 1
    basis: bool = False

    @property
    def has_density(self) -> bool:
        """Whether the method depends on the density."""
        return self.compressor not in ("dense", *WITHOUT_TARGET)


OWN = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?::(.*))?")  # module:Class, and settings

METHODS = {
    name: Method(name, *parts)
    for name, *parts in (
        ("dense", "dense", "dense", "dense"),
        ("topk-allgather", "TopK", "error-feedback", "allgather"),
        ("gtopk", "TopK", "error-feedback", "gtopk"),
        ("gtopk-exact", "TopK", "error-feedback", "gtopk-exact"),
        ("sidco", "SIDCo-exponential", "error-feedback", "allgather"),
        ("adacomp", "AdaComp", "error-feedback", "allgather", True, False, True),
        ("dgc", "SampledTopK", "momentum-correction", "allgather"),
        ("aggregation-aware", "AggregationAware", "error-feedback", "allreduce"),
        ("step-ahead", "TopK", "step-ahead", "allgather"),
        ("topk-no-feedback", "TopK", "none", "allgather"),
        ("local-dense", "Dense", "none", "allreduce", True, True),
        ("local-sparse", "ChunkedTopK-two_bit", "error-feedback:decay=0.95", "allreduce", "contributors", True),
        ("local-sparse-mean", "ChunkedTopK-two_bit", "error-feedback:decay=0.95", "allreduce", True, True),
    )
}
METHODS |= {name: Method(name, "Dense", "error-feedback", name) for name in FEW_BITS}
METHODS |= {
    name: Method(
        name, f"{compressor}:chunk={CHUNK}", "error-feedback:decay=0.999", "allreduce", average="sign", basis=True
    )
    for name, compressor in (("in-basis", "ChunkedTopK"), ("in-basis-two-bit", "ChunkedTopK-two_bit"))
}


def with_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Return a name, and the settings after its colon; a value that is not a Python constant is a string."""
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"got {text!r}: expected settings such as {name}:name=value,name=value")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return name, settings


def made(known: Mapping[str, Callable[..., Any]], text: str, *arguments: Any) -> Any:
    """Return the object that a name with settings, or a class of the user's, constructs from the arguments."""
    if text.partition(":")[0] not in known and (own := OWN.fullmatch(text)):
        return own_object(text, own, *arguments)
    name, settings = with_settings(text)
    return known[name](*arguments, **settings)


def own_object(text: str, own: re.Match[str], *arguments: Any) -> Any:
    """Return an object of a class that is imported, also from the folder where the command was started."""
    module, kind, rest = own.groups()
    _, settings = with_settings(f"{kind}:{rest or ''}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(import_module(module), kind, None)
    if found is None:
        raise ImportError(f"the module {module!r} has no {kind!r}: expected module:Class in {text!r}")
    try:
        return found(*arguments, **settings)
    except TypeError as error:
        raise TypeError(
            f"{text} cannot be constructed: {error}; it is called with the density and the settings behind it"
        ) from error


class Recorder(Wrapper):
    """Store copies of the compressor's input in some calls. calls: their numbers, from 1."""

    def __init__(self, compressor: Compressor, calls: Collection[int]) -> None:
        super().__init__(compressor)
        self.calls, self.step, self.captured = list(calls), 0, dict[int, Floats]()

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """See `Compressor.compress`."""
        vector = self.compressor.compress(corrected, gradient=gradient)
        self.step, self.report = self.step + 1, self.compressor.report
        if self.step in self.calls:
            self.captured = {**self.captured, self.step: np.array(corrected)}
        return vector


class Parts:
    """The parts of a method's exchange. record: the steps whose corrected gradients are stored."""

    def __init__(self, method: Method, density: float, comm: Any, record: Collection[int]) -> None:
        self.method, self.density, self.record = method, density, record

    def compressor(self, axes: int) -> Compressor:
        """Return the compressor of a tensor with `axes` axes; 0 for the whole gradient."""
        compressor = self._selecting(axes)
        if self.method.warm_up and compressor.density is not None:
            densities = [*self.method.warm_up, compressor.density]
            compressor = WarmUp(compressor, densities, calls=self.method.stage)
        if self.record:
            compressor = Recorder(compressor, self.record)
        return compressor

    def of_tensor(self, name: str, shape: tuple[int, ...]) -> Compressor:
        """Return the compressor of a named tensor, as `GradientExchange` asks for it."""
        return self.compressor(len(shape))

    def collective(self) -> Callable[..., Any]:
        """Return the collective; "compressed" compresses the sum as the ranks do their gradients."""
        name = self.method.collective
        if name in FEW_BITS:
            return FEW_BITS[name]
        more = {"compressor": self._selecting(2)} if name == "compressed" else {}
        return partial(COLLECTIVES[name], codec="smallest", **more)

    def _selecting(self, axes: int) -> Compressor:
        found: Compressor
        if self.method.by_tensor and axes == 1:
            found = Dense()
        elif self.method.compressor == "AdaComp":
            found = AdaComp(BINS.get(axes, BIN))
        else:
            found = made(COMPRESSORS, self.method.compressor, self.density)
        return found


def exchange_of(
    comm: Any, method: Method, density: float, rate: float, momentum: float, record: Collection[int] = ()
) -> GradientExchange:
    """Return the exchange of a method; see `Parts`. Messages are coded as between nodes."""
    parts = Parts(method, density, comm, record)
    feedback = made(FEEDBACKS, method.feedback, rate, momentum)
    selecting = parts.of_tensor if method.by_tensor else parts.compressor(0)
    settings: dict[str, Any] = {"average": method.average, "small": 0}
    settings["basis"] = Hadamard(CHUNK) if method.basis else None
    return GradientExchange(comm, selecting, feedback, parts.collective(), **settings)


def one_tensor(flat: Floats) -> dict[str, Floats]:
    """Return a whole vector by a name."""
    return {"gradient": flat}


class Descent:
    """SGD with momentum over all ranks: computes the common update from this rank's gradient.

    Momentum is heavy-ball, v = momentum v + mean and x -= rate v, on the mean of the exchange; methods with their own
    momentum (`OWN_MOMENTUM`) use the same factor, and none after the exchange. At the same rate all take equally long
    steps without compression. Messages are coded as between nodes (`codec="smallest"`), also if all ranks share one.
    Step-ahead returns an update, which includes the rate. Signs are longer than gradients, and take `SIGN_RATE` of the
    rate; their momentum is the residual.

    tensors: returns the parts of a flat vector by name, for methods by tensor. record: see `Recorder`.
    """

    def __init__(
        self,
        comm: Any,
        method: Method,
        density: float,
        rate: float,
        momentum: float,
        tensors: Callable[[Floats], dict[str, Floats]] | None = None,
        record: Collection[int] = (),
    ) -> None:
        self.comm, self.exchange = comm, None
        if method.compressor != "dense":
            self.exchange = exchange_of(comm, method, density, rate, momentum, record)
        self.tensors = (tensors or one_tensor) if method.by_tensor else None
        feedback, _ = with_settings(method.feedback)
        self.rate = np.float32(1.0 if feedback == "step-ahead" else rate)
        self.momentum = 0.0 if feedback in OWN_MOMENTUM else momentum
        if method.average == "sign":
            self.rate, self.momentum = np.float32(SIGN_RATE * rate), 0.0
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
        self._velocity = self.momentum * self._velocity + mean if self.momentum else mean
        return self.rate * self._velocity

    def _mean(self, gradient: Floats) -> Floats:
        mean: Floats
        if self.exchange is None:
            mean = dense_allreduce(gradient, self.comm) / np.float32(self.comm.size)
        elif self.tensors is None:
            mean = self.exchange(gradient)
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

    See `OuterLoop`, here with an outer rate of 1 and no outer momentum. Momentum is heavy-ball with the rank's own
    gradients, and is kept from round to round. Until the first exchange, and after the last, ranks differ.
    """

    def __init__(self, comm: Any, method: Method, density: float, rate: float, momentum: float, every: int) -> None:
        self.comm, self.rate, self.momentum, self.every = comm, np.float32(rate), momentum, every
        self.exchange = exchange_of(comm, method, density, rate, momentum)
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
            self._outer = OuterLoop(self.exchange, parameters, self.every)
        return self._outer


def entries(descent: Descent | LocalDescent) -> tuple[float, float]:
    """Return the fractions of the entries that this rank sent in its last step, and that the sum had.

    (1, 1) without an exchange object, (nan, nan) in a step that did not exchange.
    """
    if descent.exchange is None:
        return 1.0, 1.0
    found = descent.exchange.statistics
    return (found.sent / found.length, found.received / found.length) if found else (np.nan, np.nan)
