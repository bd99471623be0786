"""GradientExchange: correct, compress, reduce, put back.

The collective is an argument, so this file knows nothing of MPI: a collective takes (vector, comm) and returns the sum
as a SparseVector, or (sum, rejected) as a global top-k does, or a list of every rank's vector as an allgather does. In
place of the vector it takes an exception, which it raises here and reports to the other ranks: that is how a rank whose
gradient is bad keeps its peers from waiting for ever.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import like, to_values, to_vector
from mpicomp.compressors import Compressor
from mpicomp.feedback import Feedback
from mpicomp.vector import SparseVector, add_up

Collective = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Statistics:
    """What one call did on this rank. Times in seconds; entries as counts (received: of the sum, or of all parts)."""

    length: int
    sent: int
    received: int
    rejected: int
    compress_seconds: float
    communicate_seconds: float
    restore_seconds: float


class GradientExchange:
    """Exchange gradients between the ranks of `comm`: what each rank hands over comes back as the ranks' mean.

    comm: any mpi4py intracommunicator. compressor: picks what travels. feedback: keeps the rest; one object for each
    exchange. collective: `gtopk_allreduce`, `sparse_allgather`, `sparse_allreduce`, or anything that gives every rank
    the same sum, all keyword arguments bound (`functools.partial`). average: divide the sum by the number of ranks.

    The object holds the residual, so use one for each model (or each tensor), and the same calls on every rank.
    `statistics` tells what the last call did.
    """

    def __init__(
        self, comm: Any, compressor: Compressor, feedback: Feedback, collective: Collective, *, average: bool = True
    ) -> None:
        _check_part("comm", comm, ("size",), "an mpi4py communicator")
        _check_part("compressor", compressor, ("compress",), "a compressor such as TopK(density=0.01)")
        _check_part("feedback", feedback, ("correct", "keep", "result"), "ErrorFeedback() or NoFeedback()")
        _check_part("collective", collective, ("__call__",), "a collective such as gtopk_allreduce")
        self.comm, self.compressor, self.feedback = comm, compressor, feedback
        self.collective, self.average = collective, average
        self.statistics: Statistics | None = None

    def __call__(self, gradient: Any) -> Any:
        """Return the mean over the ranks of what travelled of `gradient`, as the same kind of array.

        gradient: one array of any shape, or a list or tuple of arrays of one dtype (then a list comes back), in main
        memory; see `mpicomp.arrays` for the kinds; the same shapes, in the same order, and dtype on every rank (the
        total length and the dtype are compared). The arrays of a list are exchanged as one vector: their entries
        compete with each other for the places.

        Raises ValueError or TypeError for a bad gradient here, `CollectiveError` on the other ranks; OverflowError on
        all of them when the sum leaves the range of the dtype. The residual is then as it was before the call.
        """
        began = perf_counter()
        try:
            flat, shapes = _flatten(gradient)
            corrected = self.feedback.correct(flat)
            vector = self.compressor.compress(corrected, gradient=flat)
        except Exception as error:
            self._fail_everywhere(error)
        compressed = perf_counter()
        total, received, rejected = _settle(self.collective(vector, self.comm))
        reduced = perf_counter()
        values = _finite(total.values / self.comm.size if self.average else total.values, flat.dtype)
        self.feedback.keep(corrected, vector, rejected)
        result = self.feedback.result(SparseVector(total.indices, values, total.length))
        self.statistics = Statistics(
            length=vector.length,
            sent=vector.nnz,
            received=received,
            rejected=rejected.nnz if rejected is not None else 0,
            compress_seconds=compressed - began,
            communicate_seconds=reduced - compressed,
            restore_seconds=perf_counter() - reduced,
        )
        return _restore(result, gradient, shapes)

    def _fail_everywhere(self, error: Exception) -> NoReturn:
        """Take part in the collective as a failed rank: it raises `error` here and CollectiveError on the others."""
        traceback = error.__traceback__
        try:
            self.collective(error, self.comm)
        except Exception as raised:
            if raised is not error:
                raise
        try:
            raise error.with_traceback(traceback)
        finally:  # else the error, its traceback and the frames hold each other, and the gradient with them
            del error, traceback


def _check_part(name: str, part: Any, attributes: tuple[str, ...], expected: str) -> None:
    if isinstance(part, type):
        raise TypeError(f"{name} is the class {part.__name__}: expected an object, {expected}")
    if not all(hasattr(part, attribute) for attribute in attributes):
        raise TypeError(f"{name} is {part!r}: expected {expected}")


def _flatten(gradient: Any) -> tuple[NDArray[Any], list[tuple[int, ...]]]:
    """Return one contiguous vector (a view of a single array, a concatenated copy of several), and the shapes."""
    if not isinstance(gradient, list | tuple):
        values = to_values(gradient)
        return to_vector(values), [values.shape]
    if not gradient:
        raise ValueError("got an empty list: expected at least one array")
    parts = [_member(place, array) for place, array in enumerate(gradient)]
    if len({part.dtype for part in parts}) > 1:
        raise TypeError(f"got arrays of {sorted({str(part.dtype) for part in parts})}: expected one dtype in a list")
    return np.concatenate([part.reshape(-1) for part in parts]), [part.shape for part in parts]


def _member(place: int, array: Any) -> NDArray[Any]:
    """Return the view of one array of a list; what is raised says which one it is."""
    try:
        return to_values(array)
    except TypeError as error:
        raise TypeError(f"item {place} of the list: {error}") from error


def _restore(flat: NDArray[Any], gradient: Any, shapes: list[tuple[int, ...]]) -> Any:
    """Return `flat` cut into the shapes of `gradient`, and as its kind of arrays."""
    if not isinstance(gradient, list | tuple):
        return like(flat.reshape(shapes[0]), gradient)
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [like(part.reshape(shape), array) for part, shape, array in zip(parts, shapes, gradient, strict=True)]


def _settle(outcome: Any) -> tuple[SparseVector, int, SparseVector | None]:
    """Return the sum, the entries that came, and what was rejected, from what a collective returned.

    Several parts are added up in rank order. float16 becomes float32 first, so that it is rounded once, and a mean may
    be in range where the sum is not.
    """
    result, rejected = outcome if isinstance(outcome, tuple) else (outcome, None)
    parts = result if isinstance(result, list) else [result]
    if not all(isinstance(part, SparseVector) for part in parts):
        raise TypeError(
            f"the collective returned {type(result).__name__}: expected a SparseVector, with what was "
            "rejected, or a list of them; give one that blocks, such as gtopk_allreduce"
        )
    wide = np.promote_types(parts[0].dtype, np.float32)
    total = add_up([SparseVector(part.indices, part.values.astype(wide, copy=False), part.length) for part in parts])
    return total, sum(part.nnz for part in parts), rejected


def _finite(mean: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `mean` as `dtype`. All ranks have the same bits of it, so all raise or none, with no message."""
    with np.errstate(over="ignore"):
        result = mean.astype(dtype, copy=False)
    if not np.isfinite(result).all():
        raise OverflowError(
            f"the sum over the ranks leaves the range of {dtype}: scale the gradients down, or use float32"
        )
    return result
