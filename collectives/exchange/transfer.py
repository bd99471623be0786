"""One vector in one step on this rank: compressed, received, and kept or rolled back.

Invariant: until `commit` nothing that outlives the step has changed, but for what a compressor remembers, which
`roll_back` restores. `commit` writes to memory that is allocated, and swaps: it cannot fail, but for the conversion of
means to another library's arrays.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for
from mpicomp.compressors.base import check_selected
from mpicomp.pipeline import Pipeline
from mpicomp.tensors import ALONE
from mpicomp.vector import SparseVector, split

Array = NDArray[Any]


class Transfer:
    """A pipeline at work: owns the arrays of its vector for the length of a step."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._snapshots = [(compressor, compressor.snapshot()) for compressor in pipeline.compressors]
        self._homes: list[Array] = []  # the gradients' own arrays, where they hold the residual
        self._changes: list[tuple[Array, SparseVector]] = []  # to be added to these
        self._means: list[SparseVector] = []  # one for each tensor, unless all values are there

    def take(self, arrays: Mapping[str, Any], outs: Mapping[str, Any]) -> None:
        """Take this rank's gradients and output buffers, by name, as views; raises for what is bad."""
        pipeline = self.pipeline
        self._gradient = pipeline.flatten(arrays)
        self._given = [outs.get(tensor.name) for tensor in pipeline.tensors]
        self._outs: list[Array | None] = []
        for tensor, out in zip(pipeline.tensors, self._given, strict=True):
            self._outs.append(None if out is None else tensor.writable(out, f"out for {tensor.name}"))
            if pipeline.feedback.in_place:
                self._homes.append(tensor.residual_in(arrays.get(tensor.name)))

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that `commit` writes to."""
        return [*self._homes, *(out for out in self._outs if out is not None)]

    def compress(self) -> SparseVector:
        """Return what is sent of the vector; it is checked, as what a compressor returns may be anything."""
        pipeline = self.pipeline
        try:
            self._corrected, self._sent = pipeline.feedback.compress(self._gradient, pipeline.compressor)
            check_selected(self._sent, self._gradient, pipeline.compressor)
        except Exception as error:
            if pipeline.name != ALONE and error.args and isinstance(error.args[0], str):
                error.args = (f"in {pipeline.name}: {error.args[0]}", *error.args[1:])
            raise
        return self._sent

    def receive(self, mean: SparseVector, rejected: SparseVector | None, votes: Array | None, *, sparse: bool) -> None:
        """Take the ranks' mean (or sum), what came back of what was sent, and each entry's share of the votes.

        sparse: the mean is returned as SparseVectors.
        """
        pipeline, feedback = self.pipeline, self.pipeline.feedback
        if sparse and feedback.has_dense_result:
            raise ValueError(f"{type(feedback).__name__} returns a dense gradient: expected sparse=False")
        if sparse and any(given is not None for given in self._given):
            raise ValueError("got out= and sparse=True: a sparse mean is returned, and not written to an array")
        if pipeline.compressor.observes:
            pipeline.compressor.observe(mean, votes)
        self._received, self._rejected, self._sparse = mean, rejected, sparse
        self._mean = mean if pipeline.downlink is None else pipeline.downlink.compress_mean(mean)
        for changes in feedback.settle(self._corrected, self._sent, rejected, self._mean):
            self._changes += zip(self._homes, split(changes, pipeline.bounds), strict=True)
        if not feedback.has_dense_result and (sparse or self._mean.nnz < pipeline.bounds[-1]):
            self._means = split(self._mean, pipeline.bounds)
        if not sparse:
            pairs = zip(pipeline.tensors, self._outs, strict=True)
            self._dense = [tensor.xp.zeros(tensor.size, tensor.dtype) if out is None else out for tensor, out in pairs]

    def commit(self) -> dict[str, Any]:
        """Keep what was not sent, and return what the caller gets, by name."""
        pipeline = self.pipeline
        pipeline.feedback.commit()
        if pipeline.downlink is not None:
            pipeline.downlink.commit()
        for home, changes in self._changes:
            kernels_for(home).scatter_add(home, changes.indices, changes.values)
        names = [tensor.name for tensor in pipeline.tensors]
        if self._sparse:
            return dict(zip(names, self._means, strict=True))
        self._write_means(pipeline.feedback.result(self._mean))
        rows = zip(pipeline.tensors, self._dense, self._given, strict=True)
        means = [tensor.wrap(out.reshape(tensor.shape)) if given is None else given for tensor, out, given in rows]
        return dict(zip(names, means, strict=True))

    def roll_back(self) -> None:
        """Be as before the step."""
        for compressor, snapshot in self._snapshots:
            compressor.restore(snapshot)

    def _write_means(self, result: SparseVector | Array) -> None:
        """Write what the feedback returns, the mean or a dense array, to the output buffers."""
        if isinstance(result, SparseVector) and not self._means:
            result = result.values
        for place, (first, end) in enumerate(pairwise(self.pipeline.bounds)):
            out = self._dense[place]
            if not isinstance(result, SparseVector):
                np.copyto(out, result[first:end], casting="same_kind")
                continue
            if self._given[place] is not None:  # a new one is zero
                kernels_for(out).clear(out)
            kernels_for(out).scatter(out, self._means[place].indices, self._means[place].values)
