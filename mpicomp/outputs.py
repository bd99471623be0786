"""Outputs: the arrays that the means of a bucket are written to: the caller's buffers, or new ones."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array, adjacent, kernels_for
from mpicomp.tensors import Tensor
from mpicomp.vector import SparseVector, split


class Outputs:
    """The output buffers of one step, by tensor. `write` allocates nothing: `prepare` has done it.

    tensors: of one vector, with these bounds. outs: the caller's buffers by name; the others are new. Raises TypeError
    or ValueError for a bad buffer.
    """

    def __init__(self, tensors: Sequence[Tensor], bounds: Sequence[int], outs: Mapping[str, Any]) -> None:
        self._tensors, self._bounds = tensors, bounds
        self.given = [outs.get(tensor.name) for tensor in tensors]
        pairs = zip(tensors, self.given, strict=True)
        self._vectors = [None if out is None else each.writable(out, f"out for {each.name}") for each, out in pairs]
        self._buffers: list[Array] = []
        self._parts: list[SparseVector] = []  # of a sparse mean, where the buffers are not adjacent
        self._whole: Array | None = None  # all buffers as one vector

    @property
    def is_given(self) -> bool:
        """Whether the caller gave a buffer."""
        return any(out is not None for out in self.given)

    @property
    def written(self) -> list[Array]:
        """The caller's buffers as vectors."""
        return [out for out in self._vectors if out is not None]

    def prepare(self, result: SparseVector | Array | None) -> None:
        """Allocate what `write` needs for a result, which may become the output itself; None: it is not known yet."""
        if not self.is_given:
            length, first = self._bounds[-1], self._tensors[0]
            fresh = not isinstance(result, SparseVector) and result is not None
            whole: Any = result if fresh else first.xp.zeros(length, first.dtype)
            self._whole, self._buffers = whole, [whole[start:end] for start, end in pairwise(self._bounds)]
            return
        pairs = zip(self._tensors, self._vectors, strict=True)
        self._buffers = [tensor.new() if out is None else out for tensor, out in pairs]
        self._whole = adjacent(self._buffers)
        if self._whole is None and isinstance(result, SparseVector) and result.nnz < result.length:
            self._parts = split(result, self._bounds)

    def write(self, result: SparseVector | Array) -> dict[str, Any]:
        """Write a result to the buffers, in one call if they are adjacent, and return them by name."""
        if isinstance(result, SparseVector) and result.nnz == result.length:
            result = result.values
        if self._whole is not None:
            pairs: list[tuple[Array, Any]] = [(self._whole, result)]
        elif isinstance(result, SparseVector):
            pairs = list(zip(self._buffers, self._parts, strict=True))
        else:
            spans = zip(self._buffers, pairwise(self._bounds), strict=True)
            pairs = [(out, result[first:end]) for out, (first, end) in spans]
        for out, part in pairs:
            if isinstance(part, SparseVector):
                if self.is_given:  # a new one is zero
                    kernels_for(out).clear(out)
                kernels_for(out).scatter(out, part.indices, part.values)
            elif part is not out:
                np.copyto(out, part, casting="same_kind")
        return self.results()

    def clear(self) -> dict[str, Any]:
        """Write zeros, and return the results by name."""
        self.prepare(None)
        for buffer in self._buffers:
            buffer.fill(0)
        return self.results()

    def results(self) -> dict[str, Any]:
        """Return the results by name: the caller's buffers, or new arrays of the kinds of the gradients."""
        rows = zip(self._tensors, self._buffers, self.given, strict=True)
        return {each.name: each.wrap(new.reshape(each.shape)) if given is None else given for each, new, given in rows}
