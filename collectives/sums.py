"""What `GradientExchange` needs of a collective: that it gives every rank the sum of sparse vectors, in some form."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.allgather import sparse_allgather, sparse_iallgather
from collectives.allreduce import sparse_allreduce, sparse_iallreduce
from collectives.dense import dense_allreduce, dense_iallreduce
from collectives.gtopk import gtopk_allreduce, gtopk_iallreduce
from collectives.plan import aligned_allreduce, aligned_iallreduce
from collectives.reduce_scatter import sparse_ireduce_scatter, sparse_reduce_scatter
from collectives.rooted import sparse_bcast, sparse_ibcast, sparse_ireduce, sparse_reduce
from mpicomp.arrays import kernels_for, namespace, on_device
from mpicomp.vector import SparseVector, add_up, index_dtype

Collective = Callable[[Any, Any], Any]
Sum = tuple[SparseVector, int, SparseVector | None, NDArray[Any] | None]

NONBLOCKING: dict[Collective, Collective] = {
    sparse_allreduce: sparse_iallreduce,
    sparse_allgather: sparse_iallgather,
    gtopk_allreduce: gtopk_iallreduce,
    aligned_allreduce: aligned_iallreduce,
}
OTHERS = {
    *(dense_allreduce, dense_iallreduce, sparse_bcast, sparse_ibcast, sparse_reduce, sparse_ireduce),
    *(sparse_reduce_scatter, sparse_ireduce_scatter),
}


def nonblocking_sum(collective: Any) -> Collective:
    """Return the nonblocking form of a collective of this library, bound arguments included; another function as it is.

    Raises TypeError for what is no function, and for a collective that does not give every rank the sum.
    """
    if isinstance(collective, partial):
        return partial(nonblocking_sum(collective.func), *collective.args, **collective.keywords)
    if not callable(collective) or isinstance(collective, type):
        raise TypeError(f"collective is {collective!r}: expected a collective such as sparse_allreduce")
    if collective in OTHERS:
        raise TypeError(
            f"collective is {collective.__name__}, which does not give every rank the sum of sparse vectors: expected "
            "sparse_allreduce, gtopk_allreduce or sparse_allgather (for a dense sum: sparse_allreduce with Dense())"
        )
    found: Collective = NONBLOCKING.get(collective, collective)
    return found


def unpack_sum(outcome: Any, *, counting: bool) -> Sum:
    """Return the sum, the number of entries received, what was rejected, and the votes, of what a collective returned.

    outcome: a SparseVector; (sum, rejected) or (sum, votes); a list of every rank's vector, which are added up in rank
    order; or a dense array, the sum of arrays. counting: count the votes in a list. float16 becomes float32 first, so
    that it is rounded once, and a mean may be in range where the sum is not. Raises TypeError for anything else.
    """
    result, more = outcome if isinstance(outcome, tuple) else (outcome, None)
    if isinstance(result, np.ndarray) or on_device(result):
        result = SparseVector(
            kernels_for(result).consecutive(0, result.size, index_dtype(result.size)), result, result.size
        )
    parts = result if isinstance(result, list) else [result]
    if not all(isinstance(part, SparseVector) for part in parts):
        raise TypeError(
            f"the collective returned {type(result).__name__}: expected a SparseVector, with what was rejected or the "
            "votes, a list of them, or a Request for one; give a collective such as gtopk_allreduce"
        )
    rejected, votes = (more, None) if isinstance(more, SparseVector) else (None, more)
    if counting and isinstance(result, list):
        ones = namespace(parts[0].values).ones
        votes = add_up([SparseVector(part.indices, ones(part.nnz), part.length) for part in parts]).values
    wide = np.promote_types(parts[0].dtype, np.float32)
    if len(parts) > 1 or parts[0].dtype != wide:
        parts = [SparseVector(part.indices, part.values.astype(wide, copy=False), part.length) for part in parts]
    return add_up(parts), sum(part.nnz for part in parts), rejected, votes
