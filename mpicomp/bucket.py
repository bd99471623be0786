"""A bucket: the tensors that are one vector of an exchange, one after the other, with compressors and feedback.

A named tensor is a segment of its own: its entries compete with each other only. A
list, or one array, is one segment.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array, address, adjacent, kernels_for, like, to_values
from mpicomp.bases import Basis, runs
from mpicomp.compressors import Compressor
from mpicomp.compressors.selection import Selection
from mpicomp.feedback import Feedback
from mpicomp.tensors import ALONE, Tensor, spans_of, spread
from mpicomp.vector import SparseVector, split

Mean = SparseVector | Array


class Compressed(NamedTuple):
    """What a step sends of a bucket.

    corrected: the gradient with the residual added. sent: the selected entries; None if
    all values are sent. own: entries of them that this rank sums itself. is_gradient:
    `corrected` is the caller's own array.
    """

    corrected: Array
    sent: SparseVector | None
    own: int
    is_gradient: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """Number and bytes of the entries to send."""
        if self.sent is None:
            return self.corrected.size, self.corrected.nbytes
        entries = self.sent.nnz - self.own
        return entries, self.sent.nbytes * entries // max(self.sent.nnz, 1)


class Bucket:
    """Tensors that are one vector: constant, but for the state that outlives a step.

    names: of the segments: [ALONE] for one, else those of the tensors. compressors: one
    for each segment. dense: the vector is sent as an array. basis: in which each
    segment is compressed, and its residual kept; None for none. alignment: tensors
    begin at multiples of it, with zeros between them, as at a block with one scale.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        compressors: Sequence[Compressor],
        feedback: Feedback,
        *,
        dense: bool = False,
        basis: Basis | None = None,
        alignment: int = 1,
    ) -> None:
        self.names = names
        self.tensors = tensors
        self.feedback = feedback
        self.dense = dense
        self.basis = basis
        self.spans = spans_of(tensors, alignment)
        self.length = self.spans[-1].stop if tensors else 0  # in values
        self.bounds = [*(span.start for span in self.spans), self.length]
        # between the tensors; made where there are some
        self._zeros: Array | None = None
        if self.length > sum(tensor.size for tensor in tensors):
            self._zeros = tensors[0].xp.zeros(alignment, tensors[0].dtype)
        is_alone = list(names) == [ALONE]
        self.edges = [0, self.length] if is_alone else self.bounds
        shown = [None] if is_alone else names
        self.selection = Selection(shown, self.edges, compressors)
        self.names_of_tensors = [tensor.name for tensor in tensors]
        # of a list of arrays that are one segment, or of coefficients in the basis
        self._buffer: Array | None = None

    def gradient(self, arrays: Mapping[str, Any]) -> list[Array]:
        """Return the gradients, by tensor name, as one vector for each segment, in the basis if there is one.

        A tensor without an array counts as zero. Raises TypeError or ValueError for a
        bad gradient.
        """
        vectors = self.feedback.vectors(self.tensors, arrays)
        if self._zeros is not None:
            vectors = spread(vectors, self.spans, self._zeros)
        if len(self.names) == 1:
            whole = adjacent(vectors)
            if whole is None:
                whole = np.concatenate(vectors, out=self._buffer_for_values())
            vectors = [whole]
        return vectors if self.basis is None else self._forward(vectors, self.basis)

    def compress(self, gradient: Sequence[Array], own: tuple[int, int]) -> Compressed:
        """Return the entries to send of a gradient and the residual. own: a range of which all values are sent."""
        if own[0] == own[1]:
            corrected, sent = self.feedback.compress(self.selection, *gradient)
        else:
            corrected = self.feedback.correct(*gradient)
            sent = self.selection.select_outside(corrected, *own, gradient)
        is_gradient = address(corrected) == address(gradient[0])
        return Compressed(corrected, sent, own[1] - own[0], is_gradient)

    def correct(self, gradient: Sequence[Array]) -> Compressed:
        """Return all values of a gradient and the residual; raises ValueError if one is not finite."""
        corrected = self.feedback.correct(*gradient)
        self.selection.check_finite(corrected)
        is_gradient = address(corrected) == address(gradient[0])
        return Compressed(corrected, None, 0, is_gradient)

    def _forward(self, gradient: Sequence[Array], basis: Basis) -> list[Array]:
        """Return the coefficients of a gradient in a basis, by segment, in a buffer of the bucket."""
        out = self._buffer_for_values()
        values = adjacent(gradient)
        if values is None:
            values = np.concatenate(gradient, out=out)
        for run in runs(self.edges, basis.chunk):
            basis.forward(values[run], out[run])
        return [out[first:end] for first, end in pairwise(self.edges)]

    def _buffer_for_values(self) -> Array:
        if self._buffer is None:
            first = self.tensors[0]
            self._buffer = first.xp.empty(self.length, first.dtype)
        return self._buffer

    def values(self, mean: Mean) -> Array:
        """Return the values of a mean of coefficients, as a new array."""
        assert self.basis is not None, "without a basis a mean has values"
        values = mean.to_dense() if isinstance(mean, SparseVector) else mean.copy()
        for run in runs(self.edges, self.basis.chunk):
            self.basis.inverse(values[run], values[run])
        return values

    def outputs(self, outs: Mapping[str, Any]) -> dict[str, Array]:
        """Return the output buffers, by tensor name, as writable vectors; raises TypeError or ValueError for others."""
        given = (
            [(tensor, outs.get(tensor.name)) for tensor in self.tensors] if outs else []
        )
        return {
            each.name: each.writable(out, f"out for {each.name}")
            for each, out in given
            if out is not None
        }

    def dense_results(
        self, mean: Mean, given: Mapping[str, Array]
    ) -> tuple[dict[str, Any], list[tuple[Array, Mean]]]:
        """Return new arrays by tensor name, and what is to be written to the buffers that are given."""
        if isinstance(mean, SparseVector) and mean.nnz == mean.length:
            mean = mean.values
        if not given:
            whole: Any = mean
            if isinstance(mean, SparseVector):
                whole = self.tensors[0].xp.zeros(self.length, mean.dtype)
                kernels_for(whole).scatter(whole, mean.indices, mean.values)
            pairs = zip(self.tensors, self.spans, strict=True)
            return {
                tensor.name: tensor.wrap(whole[span].reshape(tensor.shape))
                for tensor, span in pairs
            }, []
        buffers = [given.get(tensor.name) for tensor in self.tensors]
        joined = None
        if len(given) == len(buffers) and self._zeros is None:
            joined = adjacent([*given.values()])
        if joined is not None:
            return {}, [(joined, mean)]
        results = {}
        writes = list[tuple[Array, Mean]]()
        for tensor, buffer, part in zip(
            self.tensors, buffers, self.parts(mean), strict=True
        ):
            if buffer is None:
                results[tensor.name] = tensor.wrapped(
                    part.to_dense() if isinstance(part, SparseVector) else part
                )
            else:
                writes.append((buffer, part))
        return results, writes

    def parts(self, mean: Mean) -> Sequence[Mean]:
        """Return the part of a mean that belongs to each tensor."""
        if isinstance(mean, SparseVector):
            return split(mean, self.bounds)
        return [mean[span] for span in self.spans]

    def check_finite(self, arrays: Mapping[str, Any], kind: type[ValueError]) -> None:
        """Raise an error of this type if a gradient has a NaN or an infinity; one pass over them."""
        for tensor in self.tensors:
            if (array := arrays.get(tensor.name)) is not None:
                flat = tensor.flatten(array)
                try:
                    kernels_for(flat).raise_not_finite(flat)
                except ValueError as error:
                    where = "" if tensor.name == ALONE else f"in {tensor.name}: "
                    raise kind(f"{where}{error}") from None

    def ahead(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the points at which to evaluate the next gradient, by name; see `Feedback.ahead`."""
        given = [parameters[tensor.name] for tensor in self.tensors]
        values = [to_values(each) for each in given]
        whole = self.feedback.ahead(
            np.concatenate([each.reshape(-1) for each in values])
        )
        rows = zip(
            self.tensors, np.split(whole, self.bounds[1:-1]), values, given, strict=True
        )
        return {
            tensor.name: like(part.reshape(value.shape), original)
            for tensor, part, value, original in rows
        }

    def reset(self) -> None:
        """Clear the residuals, and the compressors' information about positions."""
        self.selection.reset()
        self.feedback.reset()


def write_mean(buffer: Array, mean: Mean) -> None:
    """Write a mean to an output buffer."""
    if isinstance(mean, SparseVector):
        kernels = kernels_for(buffer)
        kernels.clear(buffer)
        kernels.scatter(buffer, mean.indices, mean.values)
    else:
        np.copyto(buffer, mean, casting="same_kind")
