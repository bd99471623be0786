"""A bucket: the tensors that are one vector of an exchange, one after the other, with compressors and feedback.

A named tensor is a segment of its own: its entries compete with each other only. A
list, or one array, is one segment.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import is_
from typing import Any

import numpy as np

from mpicomp.arrays import Array, ByName, Dtype, Write
from mpicomp.arrays.device import on_device
from mpicomp.arrays.frameworks import like, to_values
from mpicomp.arrays.memory import (
    address,
    adjacent,
    concatenated,
    flat,
    shaped_views,
    sizes_of,
    views_between,
)
from mpicomp.arrays.values import check_finite, converted
from mpicomp.bases import Basis
from mpicomp.compressors import Compressor
from mpicomp.compressors.selection import Selection
from mpicomp.correction import Correction
from mpicomp.feedback import Feedback, InPlaceErrorFeedback, StepAhead
from mpicomp.means import DenseMean, SparseMean, Written
from mpicomp.state import Configured
from mpicomp.tensors import ALONE, Tensor, plain_vectors
from mpicomp.vector import SparseVector


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
        self.tensors = tuple(tensors)
        self.feedback = feedback
        self.dense = dense
        self.basis = basis
        # Whether the gradients' own arrays hold the residual.
        self.in_place = isinstance(feedback, InPlaceErrorFeedback)
        self.bounds = [0, *accumulate(sizes_of(tensors))]
        self.length = self.bounds[-1]  # in values
        is_alone = list(names) == [ALONE]
        self.edges = [0, self.length] if is_alone else self.bounds
        shown = [None] if is_alone else names
        self.selection = Selection(shown, self.edges, compressors)
        self.names_of_tensors = [tensor.name for tensor in tensors]
        # Other objects with a state of these tensors, by name; see `Layout.parts`.
        self.parts: dict[str, Configured] = {}
        # The arrays of a list are one segment.
        self._buffer: Array | None = None

    @property
    def dtype(self) -> Dtype:
        """The dtype of the vector to compress; coefficients of float16, which may be out of range, are float32."""
        dtype = self.tensors[0].dtype
        return dtype if self.basis is None else np.promote_types(dtype, np.float32)

    def correct(
        self, vectors: list[Array], arrays: ByName, takes: type[Any] = SparseVector
    ) -> Correction:
        """Return what may be sent of the gradients, which `vectors` returned of arrays by name.

        takes: what is to be summed; see `payload`.
        """
        if self.basis is not None:
            vectors = [converted(vector, self.dtype) for vector in vectors]
        is_by_tensor = self.in_place or (takes is Correction and self.basis is None)
        if len(self.names) == 1 and not is_by_tensor:
            joined = adjacent(vectors)
            if joined is None:
                joined = self._buffer = concatenated(vectors, self._buffer)
            vectors = [joined]
        correction = self.feedback.correct(*vectors, basis=self.basis)
        if takes is not Correction:
            return correction
        out = correction.out
        if address(out) == address(vectors[0]):
            out = np.empty_like(out)  # for the errors
        check = partial(self.check_corrected, arrays)
        return correction._replace(out=out, check=check)

    def payload(
        self, correction: Correction, takes: type[Any], share: tuple[int, int]
    ) -> Any:
        """Return what is sent: selected entries (a SparseVector), all values (an array), or these to be coded.

        takes: the type of it. share: see `Selection.select`.
        """
        if takes is SparseVector:
            return self.selection.select(correction, share)
        if takes is Correction:
            if self.basis is None or correction.residual is None:
                return correction
            parts = views_between(correction.add(), self.edges)
            return correction._replace(parts=parts, residual=None)
        values = correction.add()
        self.selection.check_finite(values)
        return values

    def check_corrected(self, arrays: ByName, corrected: Array) -> None:
        """Raise ValueError that names a value of a gradient that is not finite, OverflowError if only a sum is not."""
        try:
            self.selection.check_finite(corrected)
        except ValueError as error:
            self.check_finite(arrays, ValueError)
            where, _, _ = str(error).partition(": expected")
            raise OverflowError(
                f"the gradient plus the residual leaves the range of {corrected.dtype} ({where}): scale the gradients "
                "down, take a wider dtype, or reset() the residual"
            ) from None

    def vectors(
        self, arrays: ByName, outs: ByName
    ) -> tuple[list[Array], dict[str, Array]]:
        """Return the gradients as vectors, and the output buffers of `outputs`, which may be the gradients.

        Vectors are views where possible; zeros for a tensor without a gradient. On a
        device they may have the shapes of the tensors: kernels take them as vectors.
        """
        if self.in_place:
            return self._homes(arrays), self.outputs(outs)
        plain = plain_vectors(self.tensors, arrays)
        vectors = plain or [
            tensor.flatten(arrays.get(tensor.name)) for tensor in self.tensors
        ]
        names = self.names_of_tensors
        if plain and all(map(is_, map(arrays.get, names), map(outs.get, names))):
            return vectors, dict(zip(names, plain, strict=True))
        return vectors, self.outputs(outs)

    def _homes(self, arrays: ByName) -> list[Array]:
        """Return the gradients as writable vectors; raises ValueError for one that cannot hold the residual."""
        for tensor in self.tensors:
            if arrays.get(tensor.name) is None:
                raise ValueError(
                    f"{tensor.name} has no gradient, whose array holds the residual (in_place): pass zeros"
                )
        return [
            tensor.writable(arrays[tensor.name], tensor.name) for tensor in self.tensors
        ]

    def outputs(self, outs: ByName) -> dict[str, Array]:
        """Return the output buffers, by tensor name, as writable vectors; raises TypeError or ValueError for others."""
        if not outs:
            return {}
        buffers = plain_vectors(self.tensors, outs)
        if buffers:
            return dict(zip(self.names_of_tensors, buffers, strict=True))
        return {
            tensor.name: tensor.writable(outs[tensor.name], f"out for {tensor.name}")
            for tensor in self.tensors
            if tensor.name in outs
        }

    def dense_results(
        self, mean: Written, outs: Mapping[str, Array], *, is_sign: bool
    ) -> tuple[dict[str, Any], Write]:
        """Return new arrays by tensor name, and a function that writes to them and to the buffers that are given.

        is_sign: of the signs of the mean.
        """
        if self.basis is not None:
            mean = mean.out_of(self.basis, self.edges, self.tensors[0].dtype)
        if is_sign:
            mean = mean.signs()
        if self.basis is not None and len(self.edges) < len(self.bounds):
            mean = DenseMean(mean.values())
        if isinstance(mean, SparseMean) and mean.count == self.length:
            mean = DenseMean(mean.vector.values)
        if len(outs) == len(self.tensors):
            return {}, mean.writer([*outs.values()])
        missing = [tensor for tensor in self.tensors if tensor.name not in outs]
        # A tensor that is copied needs its values now.
        if any([tensor.is_copied for tensor in missing]):
            mean = DenseMean(mean.values())
        memory = mean.memory()
        shapes = [tensor.shape for tensor in self.tensors]
        parts = shaped_views(memory, self.bounds, shapes)
        views = dict(zip(self.names_of_tensors, parts, strict=True))
        results = {tensor.name: tensor.wrap(views[tensor.name]) for tensor in missing}
        vectors: Any = {**views, **outs}.values()
        # Kernels on a device accept any shape.
        if not on_device(memory):
            vectors = map(flat, vectors)
        write = mean.writer if outs else partial(mean.filler, memory)
        return results, write([*vectors])

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
        """Return the points at which to evaluate the next gradient, by name, if they are not the parameters."""
        if not isinstance(self.feedback, StepAhead):
            return {}
        values = {name: to_values(parameters[name]) for name in self.names_of_tensors}
        point = self.feedback.ahead(
            np.concatenate([value.reshape(-1) for value in values.values()])
        )
        parts = views_between(point, self.bounds)
        return {
            name: like(part.reshape(value.shape), parameters[name])
            for (name, value), part in zip(values.items(), parts, strict=True)
        }

    def reset(self) -> None:
        """Clear the residuals, and the compressors' information about positions."""
        self.selection.reset()
        self.feedback.reset()
