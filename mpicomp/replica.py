"""The parameters of this rank in local steps: the anchor, the pseudo-gradient, and the outer step.

`collectives.local_steps.outer` defines them, and exchanges the pseudo-gradients. This module has
the arithmetic of one rank. `end_round` is called after the exchange and must not fail
on one rank alone: it writes to allocated memory, and allocates only buffers of bounded
size.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpicomp.arrays import Array, ByName
from mpicomp.arrays.device import kernels_for, to_device_of, to_numpy
from mpicomp.arrays.frameworks import writable_memory
from mpicomp.arrays.memory import address, check_apart
from mpicomp.arrays.values import has_nonzero
from mpicomp.feedback.base import accumulation_dtype
from mpicomp.means import CodedMean, DenseMean, Mean, pieces_of
from mpicomp.state import POSITIONS, Configured
from mpicomp.tensors import DICT, Tensor, describe

_SAMPLE = 1000


class Replica(Configured):
    """Parameters of this rank that are one vector: anchor, pseudo-gradient and momentum, one tensor after the other.

    tensors: of one dtype, on one device. parameters: the caller's arrays by name, which are
    written to. Parameters in bfloat16 are vectors in float32.
    """

    layout = POSITIONS
    state: ClassVar = dict.fromkeys(("anchor", "velocity", "delta"), (-np.inf, np.inf))

    def __init__(
        self,
        tensors: Sequence[Tensor],
        parameters: ByName,
        momentum: float,
    ) -> None:
        self.tensors = tensors
        self.momentum = momentum
        self._is_sent = False
        edges = [0, *accumulate(tensor.size for tensor in tensors)]
        self._spans = [slice(first, end) for first, end in pairwise(edges)]
        length = edges[-1]
        dtype = tensors[0].dtype
        xp = tensors[0].xp
        self.delta: Array = xp.zeros(length, dtype)
        self.anchor: Array = xp.zeros(length, dtype)
        self.velocity: Array | None = None
        if momentum:
            self.velocity = xp.zeros(length, accumulation_dtype(dtype))
        # The memory of the parameters, as they were found last, and the same as vectors
        # in C order: views where possible, else copies.
        self.memory: list[Array] = []
        self._thetas: list[Array] = []
        self.find_parameters(parameters)
        self.take_anchor()

    def take_anchor(self) -> None:
        """Take the parameters that were found last as the anchor."""
        for span, theta in zip(self._spans, self._thetas, strict=True):
            self.anchor[span] = theta

    def find_parameters(self, parameters: ByName) -> None:
        """Store the parameters' current memory; raises for an array that no longer fits."""
        self.memory = [
            tensor.writable(parameters[tensor.name], tensor.name, writable_memory)
            for tensor in self.tensors
        ]
        self._thetas = [_vector(memory) for memory in self.memory]

    def send(self) -> dict[str, Array]:
        """Return the pseudo-gradients by tensor, which are part of the state until `receive`."""
        self._is_sent = True
        return self.by_tensor(self.delta)

    def receive(self) -> None:
        """End the exchange of what was sent, whatever became of it."""
        self._is_sent = False

    @property
    def is_changed(self) -> bool:
        """Whether any value is not as it was at the start of the round, after `subtract`; stops at the first one."""
        return has_nonzero(self.delta)

    def changed(self, names: Collection[str]) -> set[str]:
        """Return which of the named tensors are not as they were at the start of the round, after `subtract`."""
        pairs = zip(self.tensors, self._spans, strict=True)
        return {
            tensor.name
            for tensor, span in pairs
            if tensor.name in names and has_nonzero(self.delta[span])
        }

    def by_tensor(self, array: Array) -> dict[str, Array]:
        """Return the parts of one of the vectors, by name: views in the shapes of the tensors."""
        pairs = zip(self.tensors, self._spans, strict=True)
        return {
            tensor.name: array[span].reshape(tensor.shape) for tensor, span in pairs
        }

    def subtract(self, parameters: ByName) -> None:
        """Compute the pseudo-gradient, theta at the start - theta: the former is the anchor, rounded to bfloat16."""
        self.find_parameters(parameters)
        start = self.anchor
        if any(memory.dtype == np.uint16 for memory in self.memory):
            start = start.copy()
            for memory, span in zip(self.memory, self._spans, strict=True):
                start[span] = _rounded(start[span], memory)
        kernels_for(self.delta).add_parts(start, 1, self._thetas, self.delta, sign=-1)

    def end_round(
        self, mean: Mean, rate: float, *, nesterov: bool, delayed: bool
    ) -> None:
        """Take the outer step, and continue from the new anchor; if delayed, with the progress since the start."""
        is_plain = self.velocity is None and not delayed
        if rate and is_plain and isinstance(mean, CodedMean):
            anchors = [self.anchor[span] for span in self._spans]
            mean.writer(self._thetas, onto=(anchors, -rate))()
            self._write_thetas()
            return
        parts = [*zip(self.memory, self._spans, self._thetas, strict=True)]
        kernels = kernels_for(self.anchor)
        for memory, span, theta in parts if delayed else []:
            for piece in pieces_of(theta.size):
                part = theta[piece]
                start = _rounded(self.anchor[span][piece], memory)
                kernels.add_scaled(part, 1, start, part, sign=-1)
            # In this order of additions the result is 0 where there is no progress.
            kernels.add(theta, self.delta[span], theta)
        if rate:
            self._move(mean, rate, nesterov=nesterov)
        if not delayed:
            self.write_anchor()
            return
        for _, span, theta in parts:
            kernels.add(theta, self.anchor[span], theta)
        self._write_thetas()

    def _write_thetas(self) -> None:
        for memory, theta in zip(self.memory, self._thetas, strict=True):
            _write(theta, memory)

    def write_anchor(self) -> None:
        """Write the anchor to the parameters that were found last."""
        for span, theta in zip(self._spans, self._thetas, strict=True):
            theta[...] = self.anchor[span]
        self._write_thetas()

    def _move(self, mean: Mean, rate: float, *, nesterov: bool) -> None:
        """Take the outer step."""
        for part, piece in mean.pieces(self.delta):
            anchor = self.anchor[piece]
            if self.velocity is None:
                part.add_to(anchor, -rate)
                continue
            velocity = self.velocity[piece]
            kernels_for(velocity).multiply(velocity, self.momentum, velocity)
            part.add_to(velocity, 1.0)
            factor = rate
            if nesterov:
                part.add_to(anchor, -rate)
                factor *= self.momentum
            DenseMean(velocity).add_to(anchor, -factor)

    def sample(self) -> Array:
        """Return up to 2,000 values of each parameter that was found last, as it is now, in host memory."""
        return _sample(self.memory)

    def sample_anchor(self) -> Array:
        """Return the same values of the anchor."""
        return _sample([self.anchor[span] for span in self._spans])

    def held(self) -> dict[str, Any]:
        delta = self.delta if self._is_sent else None
        return {"anchor": self.anchor, "velocity": self.velocity, "delta": delta}

    def take(self, values: ByName) -> None:
        """Take checked values, of a replica with momentum, or of one without."""
        own = {"anchor": self.anchor, "velocity": self.velocity}
        if values["delta"] is not None:
            own["delta"] = self.delta
        for name, array in own.items():
            kinds = [getattr(one, "dtype", None) for one in (values[name], array)]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"the state of {self.tensors[0].name!r} has {kinds[0]} as {name}: expected {kinds[1]}; make the "
                    "loop with the parameters and the momentum with which it was saved"
                )
        for name, array in own.items():
            if array is not None:
                setattr(self, name, to_device_of(values[name], array))
        self._is_sent = "delta" in own


class Distances(NamedTuple):
    """Squares of distances between parameters; their sums over the ranks tell whether a step goes on from a mean.

    to_before, to_written: from the parameters after the first step behind a round, to
    those before the round wrote the mean, and to the mean. Where optimisers go on from
    the mean, the former is larger: over the ranks, the changes that the mean made add
    up to almost nothing, so that a step in a common direction does not undo them.
    first_to_end, first_to_start: from the parameters after the first step of that round,
    to those at its end, and at its start. If one step does most of a round, as with
    LBFGS, steps end near `to_before` without copies as well.
    """

    to_before: float
    to_written: float
    first_to_end: float
    first_to_start: float


class Trial:
    """Samples by which to tell whether the first step behind a round goes on from what the round has written.

    An optimiser that keeps copies of the parameters goes on from these, and writes
    them. Make it after the first step of a round, call `begin_write` and `end_write`
    around what the round writes, and `distances` after the next step.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._start = np.concatenate([replica.sample_anchor() for replica in replicas])
        self._first = self._values()  # after the first step from the start
        # The values before and after the writes of a round.
        self._before = self._first
        self._written = self._first
        # Whether a round has written, and no step after it was measured.
        self.is_due = False

    def begin_write(self) -> None:
        """Take the values that the round is about to overwrite."""
        self._before = self._values()

    def end_write(self) -> None:
        """Take the values that the round has written."""
        self._written = self._values()
        self.is_due = True

    def distances(self) -> Distances:
        """Return the distances of this rank, after the first step behind a round; that step begins the next trial."""
        now = self._values()
        differences = (
            now - self._before,
            now - self._written,
            self._first - self._before,
            self._first - self._start,
        )
        self._start = self._written
        self._first = now
        self.is_due = False
        return Distances(*[float(np.vdot(one, one)) for one in differences])

    def _values(self) -> Array:
        return np.concatenate([replica.sample() for replica in self._replicas])


def check_same_memory(arrays: ByName, again: ByName) -> None:
    """Raise ValueError if a function returned parameters in other memory when it was asked again.

    arrays, again: what it returned, all of which is alive.
    """
    for tensor in describe(arrays, DICT):
        places = [
            address(tensor.writable(given[tensor.name], tensor.name, writable_memory))
            for given in (arrays, again)
        ]
        if tensor.size and places[0] != places[1]:
            raise ValueError(
                f"the function of the parameters returns {tensor.name} in other memory whenever it is called, so that "
                "what a round writes is lost: expected the arrays that the program trains, no copies; make the copies "
                "once, and write each step to them, as by copy[...] = new"
            )


def untied(arrays: ByName) -> dict[str, str]:
    """Return for each parameter the name of the first one with the same memory: its own, unless the two are tied.

    Raises TypeError or ValueError for arrays that cannot be exchanged or written to, or
    that overlap in memory.
    """
    names: dict[Any, str] = {}  # by memory
    first: dict[str, str] = {}
    thetas = []
    for tensor in describe(arrays, DICT):
        theta = tensor.writable(arrays[tensor.name], tensor.name, writable_memory)
        memory: Any = tensor.name
        if theta.size:
            memory = (address(theta), theta.nbytes, theta.dtype)
        first[tensor.name] = names.setdefault(memory, tensor.name)
        if first[tensor.name] == tensor.name:
            thetas.append(theta)
    check_separate(thetas)
    return first


def check_separate(memory: Sequence[Array]) -> None:
    """Raise ValueError if two parameters that are not tied overlap."""
    try:
        check_apart(memory)
    except ValueError:
        raise ValueError(
            "two parameters share a part of their memory: expected separate arrays, or one array under two names"
        ) from None


def _sample(arrays: Sequence[Array]) -> Array:
    """Return up to 2,000 values of each array, one after the other, in float64 and in host memory."""
    samples = []
    for array in arrays:
        values = array.reshape(-1)[:: max(1, array.size // _SAMPLE)]
        samples.append(to_numpy(_vector(values)).astype(np.float64))
    return np.concatenate(samples)


def _vector(memory: Array) -> Array:
    """Return a parameter as a vector in C order: a view where possible, else a copy; bfloat16 becomes float32."""
    if memory.dtype == np.uint16:
        memory = (memory.astype(np.uint32, order="C") << 16).view(np.float32)
    return memory.reshape(-1)


def _rounded(values: Array, memory: Array) -> Array:
    """Return values as a parameter stores them: in a copy rounded to bfloat16 (ties to even), else unchanged."""
    if memory.dtype != np.uint16:
        return values
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).view(np.float32)


def _write(theta: Array, memory: Array) -> None:
    """Write a vector to a parameter, if it is not a view of it; allocates little memory."""
    if memory.dtype == np.uint16:
        for piece in pieces_of(theta.size):
            theta[piece] = _rounded(theta[piece], memory)
        bits = theta.view(np.uint32)
        bits >>= 16
        theta = bits
    elif memory.flags.c_contiguous:
        return
    memory[...] = theta.reshape(memory.shape)
