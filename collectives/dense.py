"""Dense allreduce by MPI, the baseline, with the interface of the others. Costs: docs/contributing/costs.md.

The call signatures are compared first: MPI does not detect a mismatch, but corrupts
memory or hangs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from collectives.calls.call import Call, Comm, Prepared, Sum
from collectives.calls.collective import collective
from collectives.runtime import staging
from collectives.runtime.group import Group
from collectives.runtime.link import Link
from collectives.runtime.messages import Steps
from collectives.runtime.progress import continue_on_callers_thread
from mpicomp.arrays import Array
from mpicomp.arrays.device import namespace, on_device
from mpicomp.arrays.frameworks import like, to_values
from mpicomp.arrays.values import converted


@collective(Sum, takes=np.ndarray)
def dense_allreduce(array: Any, comm: "Comm") -> Call[Any]:
    """Sum an array over all ranks by MPI's own allreduce, the baseline.

    The array is copied first; arrays on a device are summed in pinned host memory. float16
    is sent as float32, as MPI has no type for it. MPI decides whether all ranks get the same
    bits; with Open MPI and MPICH they do.

    Args:
        array: this rank's summand, of any shape; float16, float32 or float64, of one size and
            dtype on all ranks; of NumPy, CuPy or a kind that supports DLPack.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.

    Returns:
        A new array of the same kind, shape and dtype, with the sum.

    Raises:
        TypeError: `array` of this rank has a wrong type; other ranks raise CollectiveError.
        ValueError: `array` of this rank is on another device than CuPy's current one; likewise.
        CollectiveError: another rank's array is bad, or sizes or dtypes differ.

    >>> dense_allreduce(gradient, comm).tolist()
    [0.5, -3.0, 0.25, 2.0]
    """
    return Call(array, comm, prepare=prepared)


dense_iallreduce = dense_allreduce.nonblocking


def prepared(array: Any, compared: Mapping[str, Any], link: Link) -> Prepared:
    """Return a copy of the values of an array, for `mpi`; raises TypeError or ValueError."""
    values = to_values(array)
    return copied(values, array, compared, length=values.size)


def copied(
    values: Array, original: Any, compared: Mapping[str, Any], **form: Any
) -> Prepared:
    """Return a copy of values, for `mpi`, whose sum becomes an array like `original`. form: length and width."""
    kind = np.promote_types(values.dtype, np.float32)
    if on_device(values):
        copy = staging.to_pinned(
            namespace(values).ascontiguousarray(values.astype(kind, copy=False))
        )
    else:
        copy = np.array(values, kind, order="C")
    place = values.reshape(-1)[:0]
    return Prepared(
        copy,
        place,
        compared=compared,
        own={"place": place},
        finish=partial(like, original=original),
        **form,
    )


@dense_allreduce.algorithm(compares_calls=True)
def mpi(array: Array, group: Group, place: Array, **compared: Any) -> Steps[Any]:
    """Compare the call signatures, and sum the arrays by MPI; the sum has the dtype and the device of `place`."""
    group.join_queue()
    mine = array.reshape(-1)
    # The result is allocated first, so that a rank without memory for it breaks off
    # before MPI's own sum.
    total = staging.pinned_like(mine) if on_device(place) else np.empty_like(mine)
    yield from group.compare_calls()
    yield from group.reduce(mine, total)
    if on_device(place):
        yield from continue_on_callers_thread()
        total = staging.to_device(total)
    return converted(total, place.dtype).reshape(array.shape)
