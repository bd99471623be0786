"""One vector in one step on this rank: compressed, received, and committed or rolled back.

Invariant: before `commit` no state that outlives the step changes, except compressors, whose earlier attributes are in
`snapshots`. `commit` writes to allocated memory, and swaps: it cannot fail, except in the conversion of means to
another library's arrays.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for
from mpicomp.compressors.base import check_selected
from mpicomp.feedback import TwoWay
from mpicomp.pipeline import Pipeline
from mpicomp.vector import SparseVector, split

Array = NDArray[Any]
Arrays = Mapping[str, Any]  # of any kind, by name


class Transfer:
    """A pipeline in one step: owns the arrays of its vector until the step ends."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.snapshots = [(compressor, compressor.snapshot()) for compressor in pipeline.compressors]
        self._downlink: TwoWay | None = None  # on the root, once it has compressed the mean
        self._homes: list[Array] = []  # the gradients' own arrays, where they hold the residual
        self._changes: list[tuple[Array, SparseVector]] = []  # to be added to these
        self._means: list[SparseVector] = []  # one for each tensor, unless all values are there
        self._given: list[Any] = [None] * len(pipeline.tensors)  # the caller's output buffers
        self._outs: list[Array | None] = [None] * len(pipeline.tensors)  # these as vectors

    def take(self, arrays: Arrays, outs: Arrays, refused: type[ValueError] | None) -> None:
        """Store views of this rank's gradients and output buffers, by name; raises if one is bad.

        refused: the error for NaN or infinity; None: the compressor raises its own.
        """
        pipeline = self.pipeline
        self._gradient = pipeline.flatten(arrays)
        for place, tensor in enumerate(pipeline.tensors):
            if (out := outs.get(tensor.name)) is not None:
                self._outs[place] = tensor.writable(out, f"out for {tensor.name}")
                self._given[place] = out
            if pipeline.feedback.in_place:
                self._homes.append(tensor.residual_in(arrays.get(tensor.name)))
        if refused is not None:
            pipeline.check_finite(self._gradient, refused)

    @property
    def written(self) -> list[Array]:
        """The caller's arrays that `commit` writes to."""
        return [*self._homes, *(out for out in self._outs if out is not None)]

    def compress(self) -> SparseVector:
        """Return the entries to send; raises if the compressor's result is not valid."""
        pipeline = self.pipeline
        with pipeline.named():
            self._corrected, self._sent = pipeline.feedback.compress(self._gradient, pipeline.compressor)
            check_selected(self._sent, self._gradient, pipeline.compressor)
        return self._sent

    def compress_mean(self, mean: SparseVector) -> SparseVector:
        """Return the mean as compressed by the downlink; on the root of a server exchange only."""
        self._downlink = self.pipeline.downlink
        with self.pipeline.named():
            return mean if self._downlink is None else self._downlink.compress_mean(mean)

    def receive(self, mean: SparseVector, rejected: SparseVector | None, votes: Array | None, *, sparse: bool) -> None:
        """Prepare to commit the mean (or sum), the entries rejected, and the fraction of votes for each entry.

        sparse: the mean is returned as SparseVectors.
        """
        pipeline, feedback = self.pipeline, self.pipeline.feedback
        if sparse and feedback.has_dense_result:
            raise ValueError(f"{type(feedback).__name__} returns a dense gradient: expected sparse=False")
        if sparse and any(given is not None for given in self._given):
            raise ValueError("got out= and sparse=True: a sparse mean is returned, and not written to an array")
        if pipeline.compressor.observes:
            pipeline.compressor.observe(mean, votes)
        self._mean, self._rejected, self._sparse = mean, rejected, sparse
        for changes in feedback.settle(self._corrected, self._sent, rejected, self._mean):
            self._changes += zip(self._homes, split(changes, pipeline.bounds), strict=True)
        if not feedback.has_dense_result and (sparse or self._mean.nnz < pipeline.bounds[-1]):
            self._means = split(self._mean, pipeline.bounds)
        self._dense = [] if sparse else self._buffers()

    def commit(self) -> dict[str, Any]:
        """Keep the entries that were not sent, and return the caller's results by name."""
        pipeline = self.pipeline
        pipeline.feedback.commit()
        if self._downlink is not None:
            self._downlink.commit()
        for home, changes in self._changes:
            kernels_for(home).scatter_add(home, changes.indices, changes.values)
        if self._sparse:
            return dict(zip([tensor.name for tensor in pipeline.tensors], self._means, strict=True))
        self._write_means(pipeline.feedback.result(self._mean))
        return self._returned(self._dense)

    def skip(self, *, sparse: bool) -> dict[str, Any]:
        """Return the results of a skipped step by name: NaN, or with `sparse` empty vectors."""
        if sparse:
            return {each.name: each.nothing for each in self.pipeline.tensors}
        buffers = self._buffers()
        for buffer in buffers:
            buffer.fill(np.nan)
        return self._returned(buffers)

    def _buffers(self) -> list[Array]:
        """Return the caller's output buffers as vectors, or new arrays of zeros."""
        pairs = zip(self.pipeline.tensors, self._outs, strict=True)
        return [tensor.xp.zeros(tensor.size, tensor.dtype) if out is None else out for tensor, out in pairs]

    def _returned(self, buffers: Sequence[Array]) -> dict[str, Any]:
        """Return the results by name: the caller's buffers, or new arrays of the kinds of the gradients."""
        rows = zip(self.pipeline.tensors, buffers, self._given, strict=True)
        return {each.name: each.wrap(new.reshape(each.shape)) if given is None else given for each, new, given in rows}

    def _write_means(self, result: SparseVector | Array) -> None:
        """Write the feedback's result, a sparse mean or a dense array, to the output buffers."""
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
