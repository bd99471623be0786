"""Dense allreduce: the baseline, MPI's own, with the same shape as the sparse collectives.

Rounds: MPI's, after ceil(lg P) rounds of 64 bytes a rank in which the terms are compared: MPI has no word for a
mismatch, it corrupts or hangs. Bytes sent by a rank: at least 2 (P-1)/P n v for n values of v bytes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives import staging
from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin
from collectives.progress import Request
from mpicomp.arrays import like, namespace, on_device, to_array
from mpicomp.vector import SparseVector

T = TypeVar("T")
Brought = tuple[NDArray[Any], SparseVector]


def dense_allreduce(array: Any, comm: Any) -> Any:
    """Sum an array over all ranks by MPI's own allreduce.

    array: any shape, float16, float32 or float64 (float16 travels as float32, MPI has no type for it), of one size and
    dtype on all ranks; see `mpicomp.arrays` for the kinds. From a device it goes through pinned memory: an MPI that is
    CUDA-aware may, and Open MPI does, add up in main memory too. comm: an mpi4py intracommunicator.

    Returns the sum as a new array of the same kind, shape and dtype. Whether all ranks get the same bits is up to MPI:
    the algorithms of Open MPI and MPICH do give them.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when size or dtype differ. TypeError at once when `comm` is no intracommunicator.
    """
    return dense_iallreduce(array, comm).wait()


def dense_iallreduce(array: Any, comm: Any) -> Request[Any]:
    """Start `dense_allreduce` and return its Request; the array is copied first and may be changed at once."""

    def look(array: Any, terms: dict[str, Any]) -> Brought:
        values = to_array(array)
        return values, SparseVector.empty(values.size, values.dtype)

    return begin_reduction("dense_allreduce", array, comm, look, lambda total: like(total, array))


def begin_reduction(
    operation: str,
    brings: Any,
    comm: Any,
    look: Callable[[Any, dict[str, Any]], Brought],
    back: Callable[[NDArray[Any]], T],
    **terms: Any,
) -> Request[T]:
    """Put a sum by MPI's own allreduce in flight.

    look: returns the values of what this rank brings, and the vector without an entry that stands for them in the
    terms, which it may add to; raises for what is bad. back: makes the result of the sum, of the values' shape and
    dtype.
    """
    copies: list[NDArray[Any]] = []
    places: list[NDArray[Any]] = []

    def copied(brings: Any, terms: dict[str, Any], size: int) -> SparseVector:
        values, outline = look(brings, terms)
        wide = np.promote_types(values.dtype, np.float32)
        if on_device(values):
            copies.append(staging.to_pinned(namespace(values).ascontiguousarray(values.astype(wide, copy=False))))
        else:
            copies.append(np.array(values, wide, order="C"))
        places.append(values.reshape(-1)[:0])
        return outline

    def mpi(offer: Offer, channel: Channel) -> Steps[Any]:
        with channel.turn() as turn:
            yield from channel.agree()
            yield (turn,)
            mine = copies[0].reshape(-1)
            reduction = channel.endpoint.reduce(mine, staging.pinned_like(mine) if on_device(places[0]) else None)
        yield (reduction,)
        total = staging.to_device(reduction.total) if on_device(places[0]) else reduction.total
        return back(total.astype(offer.vector.dtype, copy=False).reshape(copies[0].shape))

    return begin(operation, {"mpi": mpi}, brings, comm, "auto", prepare=copied, sums=copies, **terms)
