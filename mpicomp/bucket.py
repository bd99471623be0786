"""A bucket: the tensors that are one vector of an exchange, one after the other, with compressors and feedback.

A named tensor is a segment of its own: its entries compete with each other only. A
list, or one array, is one segment.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import (
    Array,
    ByName,
    adjacent,
    check_finite,
    concatenated,
    converted,
    flat,
    like,
    to_values,
    widened_values,
)
from mpicomp.bases import Basis, Coefficients, runs
from mpicomp.coded import CodedSum, Uncoded
from mpicomp.compressors import Compressor
from mpicomp.compressors.base import Summands, write_sum
from mpicomp.compressors.selection import Selection
from mpicomp.feedback import Feedback
from mpicomp.tensors import ALONE, Tensor, device_arrays
from mpicomp.vector import SparseVector, check_range

Mean = SparseVector | Array | CodedSum
Written = CodedSum | Coefficients | SparseVector  # by its `writer`
Write = Callable[[], None]  # allocates nothing, and cannot fail


class Compressed(NamedTuple):
    """What a step sends of a bucket.

    corrected: the gradient with the residual added; the buffer for it, of what is still
    to be coded. sent: the selected entries; or all values, as an array or to be coded.
    own: entries of them that this rank sums itself.
    """

    corrected: Array
    sent: SparseVector | Array | Uncoded
    own: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Number and bytes of the entries to send."""
        if not isinstance(self.sent, SparseVector):
            return self.corrected.size, self.corrected.nbytes
        entries = self.sent.nnz - self.own
        return entries, self.sent.nbytes * entries // max(self.sent.nnz, 1)


class Bucket:
    """Tensors that are one vector: constant, but for the state that outlives a step.

    names: of the segments: [ALONE] for one, else those of the tensors. compressors: one
    for each segment. dense: the vector is sent as an array. basis: in which each
    segment is compressed, and its residual kept; None for none.
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
    ) -> None:
        self.names = names
        self.tensors = tensors
        self.feedback = feedback
        self.dense = dense
        self.basis = basis
        self.bounds = [0, *accumulate(tensor.size for tensor in tensors)]
        self.length = self.bounds[-1]  # in values
        is_alone = list(names) == [ALONE]
        self.edges = [0, self.length] if is_alone else self.bounds
        shown = [None] if is_alone else names
        self.selection = Selection(shown, self.edges, compressors)
        self.names_of_tensors = [tensor.name for tensor in tensors]
        # of a list of arrays that are one segment
        self._buffer: Array | None = None

    def gradient(self, arrays: ByName) -> Sequence[Array]:
        """Return the gradients, by tensor name, as vectors; by segment if there is a basis.

        A tensor without an array counts as zero. Raises TypeError or ValueError for a
        bad gradient.
        """
        vectors = self.feedback.vectors(self.tensors, arrays)
        if self.basis is None:
            return vectors
        # coefficients of float16 may be out of its range
        return self._by_segment([widened_values(vector) for vector in vectors])

    def compress(self, gradient: Sequence[Array], own: tuple[int, int]) -> Compressed:
        """Return the entries to send of a gradient and the residual. own: a range of which all values are sent."""
        corrected, summands = self._summands(gradient)
        if own[0] == own[1]:
            return Compressed(corrected, self.selection.select(corrected, summands))
        sent = self.selection.select_outside(corrected, summands, *own)
        return Compressed(corrected, sent, own[1] - own[0])

    def correct(self, gradient: Sequence[Array]) -> Compressed:
        """Return all values of a gradient and the residual; raises ValueError if one is not finite."""
        corrected, summands = self._summands(gradient)
        write_sum(summands, corrected)
        self.selection.check_finite(corrected)
        return Compressed(corrected, corrected)

    def code(self, gradient: Sequence[Array], arrays: ByName) -> Compressed:
        """Return all values of a gradient and the residual, to be coded; each tensor in blocks of its own.

        arrays: the gradients by tensor name, of which an error names one.
        """
        corrected, uncoded = self.feedback.uncoded(*gradient, basis=self.basis)
        check = partial(self._check_values, arrays)
        values = uncoded.parts, uncoded.errors, uncoded.residual, uncoded.decay
        return Compressed(corrected, Uncoded(*values, check))

    def _check_values(self, arrays: ByName, values: Array) -> None:
        """Raise ValueError that names a value that is not finite, of a gradient rather than a coefficient."""
        if self.basis is not None:
            self.check_finite(arrays, ValueError)
        self.selection.check_finite(values)

    def _summands(self, gradient: Sequence[Array]) -> tuple[Array, Summands | None]:
        """Return the vector to compress of a gradient, and what it is the sum of."""
        by_segment = self._by_segment(gradient)
        return self.feedback.summands(*by_segment, basis=self.basis)

    def _by_segment(self, vectors: Sequence[Array]) -> Sequence[Array]:
        """Return vectors of the tensors as one for each segment."""
        if len(self.names) > 1:
            return vectors
        joined = adjacent(vectors)
        if joined is None:
            joined = self._buffer = concatenated(vectors, self._buffer)
        return [joined]

    def out_of_basis(self, mean: Mean) -> Mean | Coefficients:
        """Return a mean of coefficients as one of values; of a sparse one, they are transformed where they are written.

        Raises OverflowError for values out of range.
        """
        assert self.basis is not None, "without a basis a mean has values"
        dtype = self.tensors[0].dtype
        is_by_tensor = len(self.edges) == len(self.bounds)
        if isinstance(mean, SparseVector) and is_by_tensor and mean.dtype == dtype:
            return Coefficients(mean, self.basis, self.edges)
        values = dense(mean)
        if values is mean:
            values = mean.copy()
        for run in runs(self.edges, self.basis.chunk):
            self.basis.inverse(values[run], values[run])
        values = converted(values, dtype)
        check_range(values, "mean out of the basis")
        return values

    def outputs(self, outs: ByName) -> dict[str, Array]:
        """Return the output buffers, by tensor name, as writable vectors; raises TypeError or ValueError for others.

        On a device they may have the shapes of the tensors.
        """
        if outs and (found := device_arrays(self.tensors, outs)):
            return dict(zip(self.names_of_tensors, found, strict=True))
        pairs = (
            [(tensor, outs.get(tensor.name)) for tensor in self.tensors] if outs else []
        )
        return {
            tensor.name: tensor.writable(out, f"out for {tensor.name}")
            for tensor, out in pairs
            if out is not None
        }

    def dense_results(
        self, mean: Mean | Coefficients, outs: Mapping[str, Array]
    ) -> tuple[dict[str, Any], list[Write]]:
        """Return new arrays by tensor name, and functions that write to them and to the buffers that are given."""
        if isinstance(mean, SparseVector) and mean.nnz == mean.length:
            mean = mean.values
        missing = [tensor for tensor in self.tensors if tensor.name not in outs]
        # what is rounded is copied, and has to have its values now
        if any([tensor.is_rounded for tensor in missing]):
            mean = dense(mean)
        values: Any = mean
        if isinstance(mean, Written):
            if not missing:
                return {}, [mean.writer([*outs.values()])]
            values = self.tensors[0].xp.empty(self.length, mean.dtype)
        results = {}
        parts = []
        writes = list[Write]()
        for tensor, (first, end) in zip(
            self.tensors, pairwise(self.bounds), strict=True
        ):
            part = outs.get(tensor.name)
            if part is None:
                part = values[first:end]
                results[tensor.name] = tensor.wrapped(part)
            elif not isinstance(mean, Written):
                value = values[first:end]
                writes.append(
                    partial(np.copyto, flat(part), value, casting="same_kind")
                )
            parts.append(part)
        if isinstance(mean, SparseVector) and not outs:
            parts = [values]
        if isinstance(mean, Written):
            writes.append(mean.writer(parts))
        return results, writes

    def check_finite(self, arrays: ByName, kind: type[ValueError]) -> None:
        """Raise an error of this type if a gradient has a NaN or an infinity; one pass over them."""
        for tensor in self.tensors:
            if (array := arrays.get(tensor.name)) is not None:
                vector = tensor.flatten(array)
                try:
                    check_finite(vector)
                except ValueError as error:
                    where = "" if tensor.name == ALONE else f"in {tensor.name}: "
                    raise kind(f"{where}{error}") from None

    def ahead(self, parameters: ByName) -> dict[str, Any]:
        """Return the points at which to evaluate the next gradient, by name; see `Feedback.ahead`."""
        arrays = [parameters[tensor.name] for tensor in self.tensors]
        values = [to_values(array) for array in arrays]
        point = self.feedback.ahead(
            np.concatenate([value.reshape(-1) for value in values])
        )
        rows = zip(
            self.tensors,
            np.split(point, self.bounds[1:-1]),
            values,
            arrays,
            strict=True,
        )
        return {
            tensor.name: like(part.reshape(value.shape), original)
            for tensor, part, value, original in rows
        }

    def reset(self) -> None:
        """Clear the residuals, and the compressors' information about positions."""
        self.selection.reset()
        self.feedback.reset()


def dense(mean: Mean | Coefficients) -> Array:
    """Return all values of a mean, as an array."""
    if isinstance(mean, CodedSum | Coefficients):
        return mean.to_array()
    return mean.to_dense() if isinstance(mean, SparseVector) else mean
