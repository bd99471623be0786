"""The parameters of this rank in local steps: the anchor, the pseudo-gradient, and the outer step.

`collectives.outer` defines them, and exchanges the pseudo-gradients. This module has the arithmetic of one rank. The
methods called after the exchange (`cut_progress`, `move`, `go_on`) must not fail on one rank alone: they write to
allocated memory, and allocate only buffers of bounded size.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, address, beside, check_apart, kernels_for, on_device, to_numpy
from mpicomp.feedback.base import wide
from mpicomp.feedback.momentum_correction import euclidean_norm
from mpicomp.tensors import DICT, Tensor, describe
from mpicomp.vector import SparseVector

_PIECE = 2**18  # values: the arithmetic after the exchange allocates no more than this at once


class Replica:
    """Parameters of this rank that are one vector: anchor, pseudo-gradient and momentum, one tensor after the other.

    tensors: of one dtype, on one device. given: the caller's arrays by name, which are written to. host: keep anchor
    and momentum in host memory.
    """

    def __init__(self, tensors: Sequence[Tensor], given: Mapping[str, Any], momentum: float, *, host: bool) -> None:
        self.tensors = tensors
        self._given = [given[tensor.name] for tensor in tensors]
        bounds = [0, *accumulate(tensor.size for tensor in tensors)]
        self._spans = [slice(*span) for span in pairwise(bounds)]
        dtype, xp = tensors[0].dtype, tensors[0].xp
        self.delta: Array = xp.empty(bounds[-1], dtype)
        self.deltas = self.by_tensor(self.delta)
        self.anchor: Array = (np if host else xp).empty(bounds[-1], dtype)
        momentums = (np if host else xp).zeros(bounds[-1], wide(dtype)) if momentum else None
        self.velocity: Array | None = momentums
        self.scales = np.ones(len(tensors))  # by which clip multiplied the pseudo-gradients
        self.look()
        for span, theta in zip(self._spans, self._thetas, strict=True):
            self.anchor[span] = to_numpy(theta) if host else theta

    def look(self) -> None:
        """Store views of the parameters' current memory; raises for an array that no longer fits."""
        pairs = zip(self.tensors, self._given, strict=True)
        self._thetas = [tensor.writable(array, tensor.name) for tensor, array in pairs]

    def by_tensor(self, array: Array) -> dict[str, Array]:
        """Return the parts of one of the vectors, by name: views in the shapes of the tensors."""
        pairs = zip(self.tensors, self._spans, strict=True)
        return {tensor.name: array[span].reshape(tensor.shape) for tensor, span in pairs}

    def subtract(self) -> None:
        """Compute the pseudo-gradient, anchor - theta."""
        self.look()
        kernels_for(self.delta).add_parts(self._anchor_beside(), 1, self._thetas, self.delta, sign=-1)
        self.scales[:] = 1

    def norms(self) -> list[float]:
        """Return the norm of each pseudo-gradient; NaN or infinity if a value is, which the exchange reports."""
        parts = [self.delta[span] for span in self._spans]
        return [euclidean_norm(part) if part.size else 0.0 for part in parts]

    def clip(self, norms: Sequence[float], everyone: Sequence[Sequence[float]]) -> None:
        """Scale each pseudo-gradient down to the median of the finite norms above 0.

        norms: those of this rank; everyone: of every rank, in rank order.
        """
        for place, (norm, others) in enumerate(zip(norms, zip(*everyone, strict=True), strict=True)):
            limit = float(np.median([each for each in others if 0 < each < math.inf] or [0.0]))
            if limit < norm < math.inf:
                self.scales[place] = limit / norm
                self.delta[self._spans[place]] *= limit / norm

    def cut_progress(self) -> None:
        """Subtract from theta its value at the time of the pseudo-gradient."""
        for span, theta, scale in zip(self._spans, self._thetas, self.scales.tolist(), strict=True):
            if scale != 1:
                self.delta[span] /= scale
            theta += self.delta[span]
        anchor = self._anchor_beside()
        for span, theta in zip(self._spans, self._thetas, strict=True):
            theta -= anchor[span]

    def move(self, mean: SparseVector | Array, rate: float, momentum: float, *, nesterov: bool) -> None:
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
        anchor = self._anchor_beside() if progress else self.anchor
        for span, theta in zip(self._spans, self._thetas, strict=True):
            if progress:
                theta += anchor[span]
            else:
                copy(anchor[span], theta)

    def arrays(self, *, in_flight: bool) -> dict[str, Array]:
        """Return the arrays to save as "part/tensor", not copied: vectors, and the scales as numbers."""
        vectors = {"anchor": self.anchor} | ({} if self.velocity is None else {"momentum": self.velocity})
        vectors |= {"delta": self.delta} if in_flight else {}
        names = [tensor.name for tensor in self.tensors]
        rows = zip(names, self._spans, strict=True)
        found = {f"{part}/{name}": array[span] for name, span in rows for part, array in vectors.items()}
        numbers = {f"scale/{name}": self.scales[place : place + 1].reshape(()) for place, name in enumerate(names)}
        return found | (numbers if in_flight else {})

    def _anchor_beside(self) -> Array:
        """Return the anchor on the parameters' device, copied to the pseudo-gradient's buffer if it is elsewhere."""
        if on_device(self.anchor) == on_device(self.delta):
            return self.anchor
        copy(self.anchor, self.delta)
        return self.delta


def untied(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return for each parameter the name of the first one with the same memory: its own, unless the two are tied.

    Raises TypeError or ValueError for arrays that cannot be exchanged or written to, or that overlap in memory.
    """
    found: dict[Any, str] = {}  # by memory
    first: dict[str, str] = {}
    thetas = []
    for tensor in describe(arrays, DICT):
        theta = tensor.writable(arrays[tensor.name], tensor.name)
        memory = (address(theta), theta.nbytes, theta.dtype) if theta.size else tensor.name
        first[tensor.name] = found.setdefault(memory, tensor.name)
        if first[tensor.name] == tensor.name:
            thetas.append(theta)
    try:
        check_apart(thetas)
    except ValueError:
        raise ValueError(
            "two parameters share a part of their memory: expected separate arrays, or one array under two names"
        ) from None
    return first


def _add(vector: SparseVector | Array, scale: float, array: Array) -> None:
    """Add `scale` times a vector to an array, possibly on another device, in pieces, to allocate little memory."""
    if not isinstance(vector, SparseVector):
        for piece in _pieces(array.size):
            part = beside(vector[piece], array)
            array[piece] += part if scale == 1 else (part * part.dtype.type(scale)).astype(array.dtype, copy=False)
        return
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
