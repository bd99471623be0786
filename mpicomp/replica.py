"""A parameter of this rank in local steps: the anchor, the pseudo-gradient, and the outer step.

`collectives.outer` defines them, and exchanges the pseudo-gradients. This module has the arithmetic of one rank. The
methods called after the exchange (`cut_progress`, `move`, `go_on`) must not fail on one rank alone: they write to
allocated memory, and allocate only buffers of bounded size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpicomp.arrays import Array, address, beside, check_apart, namespace, on_device, to_numpy
from mpicomp.feedback.base import wide
from mpicomp.feedback.momentum_correction import euclidean_norm
from mpicomp.tensors import DICT, Tensor, describe
from mpicomp.vector import SparseVector

_PIECE = 2**18  # values: the arithmetic after the exchange allocates no more than this at once


@dataclass
class Replica:
    """A parameter of this rank: the caller's array, the anchor, the pseudo-gradient and the momentum, as vectors."""

    tensor: Tensor
    given: Any
    theta: Array  # a view of what was given
    anchor: Array  # beside theta, or in host memory
    delta: Array  # beside theta
    velocity: Array | None  # beside the anchor; None without momentum
    scale: Array = field(default_factory=lambda: np.ones(()))  # by which clip multiplied the pseudo-gradient

    @property
    def shaped_delta(self) -> Array:
        """The pseudo-gradient in the shape of the parameter."""
        return self.delta.reshape(self.tensor.shape)

    def look(self) -> None:
        """Store a view of the parameter's current memory; raises for an array that no longer fits."""
        self.theta = self.tensor.writable(self.given, self.tensor.name)

    def subtract(self) -> None:
        """Compute the pseudo-gradient, anchor - theta."""
        self.look()
        np.subtract(self._anchor_beside(), self.theta, out=self.delta)
        self.scale[...] = 1

    def norm(self) -> float:
        """Return the norm of the pseudo-gradient; NaN or infinity if a value is, which the exchange reports."""
        return euclidean_norm(self.delta) if self.delta.size else 0.0

    def clip(self, norm: float, norms: Sequence[float]) -> None:
        """Scale the pseudo-gradient down to the median of the finite norms above 0."""
        limit = float(np.median([each for each in norms if 0 < each < math.inf] or [0.0]))
        if limit < norm < math.inf:
            self.scale[...] = limit / norm
            self.delta *= limit / norm

    def cut_progress(self) -> None:
        """Subtract from theta its value at the time of the pseudo-gradient."""
        if self.scale != 1:
            self.delta /= float(self.scale)
        self.theta += self.delta
        self.theta -= self._anchor_beside()

    def move(self, mean: SparseVector, rate: float, momentum: float, *, nesterov: bool) -> None:
        """Take the outer step of the anchor."""
        if self.velocity is None:
            _add(mean, -rate, self.anchor)
            return
        self.velocity *= momentum
        _add(mean, 1.0, self.velocity)
        if nesterov:
            _add(mean, -rate, self.anchor)
        factor = rate * momentum if nesterov else rate
        for piece in _pieces(self.anchor.size):
            self.anchor[piece] -= factor * self.velocity[piece]

    def go_on(self, *, progress: bool) -> None:
        """Continue from the anchor, plus theta if that is the progress since the exchange started."""
        if progress:
            self.theta += self._anchor_beside()
        else:
            copy(self.anchor, self.theta)

    def arrays(self, *, in_flight: bool) -> dict[str, Array]:
        """Return the arrays to save, not copied."""
        momentum = {} if self.velocity is None else {"momentum": self.velocity}
        return {"anchor": self.anchor} | momentum | ({"delta": self.delta, "scale": self.scale} if in_flight else {})

    def _anchor_beside(self) -> Array:
        """Return the anchor on the parameter's device, copied to the pseudo-gradient's buffer if it is elsewhere."""
        if on_device(self.anchor) == on_device(self.delta):
            return self.anchor
        copy(self.anchor, self.delta)
        return self.delta


def replicas(arrays: Mapping[str, Any], momentum: float, *, host: bool) -> dict[str, Replica]:
    """Return the replica of each parameter, by name: the same object for tied ones.

    Raises TypeError or ValueError for arrays that cannot be exchanged or written to, or that overlap in memory.
    """
    found: dict[Any, Replica] = {}  # by memory
    named: dict[str, Replica] = {}
    for tensor in describe(arrays, DICT):
        theta = tensor.writable(arrays[tensor.name], tensor.name)
        memory = (address(theta), theta.nbytes, theta.dtype) if theta.size else tensor.name
        if memory not in found:
            anchor = np.array(to_numpy(theta)) if host else theta.copy()
            velocity = namespace(anchor).zeros(theta.size, wide(theta.dtype)) if momentum else None
            found[memory] = Replica(tensor, arrays[tensor.name], theta, anchor, theta.copy(), velocity)
        named[tensor.name] = found[memory]
    try:
        check_apart([each.theta for each in found.values()])
    except ValueError:
        raise ValueError(
            "two parameters share a part of their memory: expected separate arrays, or one array under two names"
        ) from None
    return named


def _add(vector: SparseVector, scale: float, array: Array) -> None:
    """Add `scale` times a vector to an array, possibly on another device, in pieces, to allocate little memory."""
    for piece in _pieces(vector.nnz):
        indices, values = beside(vector.indices[piece], array), beside(vector.values[piece], array)
        signed = SparseVector(indices, values if scale > 0 else -values, vector.length)
        signed.add_to(array, abs(scale))  # which does without a product where that is 1


def _pieces(size: int) -> Iterator[slice]:
    return (slice(first, first + _PIECE) for first in range(0, size, _PIECE))


def copy(source: Array, target: Array) -> None:
    """Copy an array to another one of its dtype and shape, also between host and device, without allocation there."""
    if on_device(target) and not on_device(source):
        target.set(source)  # type: ignore[attr-defined]
    else:
        target[...] = source
