"""GradientExchange: correct, compress, reduce, put back.

The collective is an argument, so this file knows nothing of MPI: a collective takes (vector, comm) and returns the sum
as a SparseVector, or (sum, rejected) as a global top-k does, or a list of every rank's vector as an allgather does. In
place of the vector it takes an exception, which it raises here and reports to the other ranks: that is how a rank whose
gradient is bad keeps its peers from waiting for ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import kernels_for, like, to_host, to_vector
from mpicomp.compressors import Compressor
from mpicomp.feedback import Feedback
from mpicomp.vector import SparseVector

Collective = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Statistics:
    """What one call did on this rank. Times in seconds; entries as counts."""

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
    exchange. collective: `gtopk_allreduce`, `sparse_allgather`, or anything of that shape, all keyword arguments bound
    (`functools.partial`). average: divide the sum by the number of ranks.

    The object holds the residual, so use one for each model (or each tensor), and the same calls on every rank.
    `statistics` tells what the last call did.
    """

    def __init__(
        self, comm: Any, compressor: Compressor, feedback: Feedback, collective: Collective, *, average: bool = True
    ) -> None:
        self.comm, self.compressor, self.feedback = comm, compressor, feedback
        self.collective, self.average = collective, average
        self.statistics: Statistics | None = None

    def __call__(self, gradient: Any) -> Any:
        """Return the mean over the ranks of what travelled of `gradient`, as the same kind of array.

        gradient: one array of any shape, or a list or tuple of arrays of one dtype (then a list comes back), in main
        memory; see `mpicomp.arrays` for the kinds; the same shapes and dtype on every rank. The arrays of a list are
        exchanged as one vector: their entries compete with each other for the places.

        Raises ValueError or TypeError for a bad gradient here, `CollectiveError` on the other ranks; the residual is
        then as it was before the call.
        """
        began = perf_counter()
        try:
            flat = _flatten(gradient)
            corrected = self.feedback.correct(flat)
            vector = self.compressor.compress(corrected, gradient=flat)
        except Exception as error:
            self._fail_everywhere(error)
        compressed = perf_counter()
        total, received, rejected = _settle(self.collective(vector, self.comm))
        reduced = perf_counter()
        self.feedback.keep(corrected, vector, rejected)
        if self.average:
            total /= self.comm.size
        self.statistics = Statistics(
            length=vector.length,
            sent=vector.nnz,
            received=received,
            rejected=rejected.nnz if rejected is not None else 0,
            compress_seconds=compressed - began,
            communicate_seconds=reduced - compressed,
            restore_seconds=perf_counter() - reduced,
        )
        return _restore(total, gradient)

    def _fail_everywhere(self, error: Exception) -> NoReturn:
        """Take part in the collective as a failed rank: it raises `error` here and CollectiveError on the others."""
        self.collective(error, self.comm)
        raise error


def _flatten(gradient: Any) -> NDArray[Any]:
    """Return one contiguous vector: a view of a single array, a concatenated copy of several."""
    if not isinstance(gradient, list | tuple):
        return to_vector(gradient)
    parts = [to_host(array).reshape(-1) for array in gradient]
    if not parts:
        raise ValueError("got an empty list: expected at least one array")
    if len({part.dtype for part in parts}) > 1:
        raise TypeError(f"got arrays of {sorted({str(part.dtype) for part in parts})}: expected one dtype in a list")
    return to_vector(np.concatenate(parts))


def _restore(flat: NDArray[Any], gradient: Any) -> Any:
    """Return `flat` cut into the shapes of `gradient`, and as its kind of arrays."""
    if not isinstance(gradient, Sequence):
        return like(flat.reshape(gradient.shape), gradient)
    ends = np.cumsum([to_host(array).size for array in gradient])
    parts = np.split(flat, ends[:-1])
    return [like(part.reshape(array.shape), array) for part, array in zip(parts, gradient, strict=True)]


def _settle(outcome: Any) -> tuple[NDArray[Any], int, SparseVector | None]:
    """Return the dense sum, the number of entries in it, and what was rejected, from what a collective returned."""
    if isinstance(outcome, list):
        total = np.zeros(outcome[0].length, outcome[0].dtype)
        for part in outcome:  # in rank order: the same bits on every rank
            kernels_for(total).scatter_add(total, part.indices, part.values)
        return total, sum(part.nnz for part in outcome), None
    result, rejected = outcome if isinstance(outcome, tuple) else (outcome, None)
    return result.to_dense(), result.nnz, rejected
