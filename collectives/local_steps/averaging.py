"""Error averaging: the residuals of all ranks are replaced by their mean, by a dense allreduce of each.

Source: A. Xu, Z. Huo, H. Huang, "Step-ahead error feedback for distributed training
with compressed gradient", AAAI 2021 (arXiv 2008.05823), which averages every p steps.

Invariant: the sum of the residuals over the ranks is unchanged, exactly where additions
and the division are exact.
"""

import numpy as np

from collectives.calls.all_or_none import all_or_none, outcome_of
from collectives.dense import dense_allreduce
from collectives.exchange import GradientExchange
from collectives.exchange.exchange import check_between_steps
from collectives.faults.interrupts import defer_interrupt
from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for
from mpicomp.bucket import Bucket
from mpicomp.errors import kept
from mpicomp.feedback.base import accumulation_dtype
from mpicomp.vector import check_range

OPERATION = "average_residuals"  # name of the ranks' agreement in errors


@defer_interrupt
def average_residuals(exchange: GradientExchange) -> None:
    """Replace the residual of each tensor by its mean over the ranks, between two steps.

    Residuals in place belong to the gradients: average those. If it raises, nothing changes.

    Args:
        exchange: the exchange of the residuals; all ranks of its communicator call.

    Raises:
        RuntimeError: a step is in progress.
        OverflowError: on all ranks, if a sum leaves the range of float32 (float64 for float64).
        CollectiveError: the residuals of the ranks do not match.

    Source: A. Xu et al., AAAI 2021 (arXiv 2008.05823).

    >>> exchange = GradientExchange(comm, TopK(k=2), StepAhead(rate=0.5))
    >>> for step in range(20):
    ...     update = exchange(gradient)
    >>> average_residuals(exchange)
    """
    if not isinstance(exchange, GradientExchange):
        raise TypeError(
            f"exchange is {type(exchange).__name__}: expected a GradientExchange"
        )
    buckets = exchange.buckets
    error = None
    writes = []
    with all_or_none(exchange.comm, OPERATION):
        for bucket in buckets:
            # A rank with an error contributes it to the other sums, for which the other
            # ranks wait.
            contribution = error or outcome_of(_residual, exchange, bucket)
            try:
                total = dense_allreduce(contribution, exchange.comm)
                residual = bucket.feedback.residual
                if residual is not None:
                    mean = np.empty_like(residual)
                    kernels_for(mean).quotient(total, exchange.comm.size, mean)
                    check_range(mean, "mean of the residuals")
                    writes.append(bucket.feedback.replace_residual(mean))
            except Exception as raised:
                error = error or kept(raised)
        if error is not None:
            raise error
    for write in writes:
        write()


def _residual(exchange: GradientExchange, bucket: Bucket) -> Array:
    """Return the residual in the dtype in which residuals are summed; empty without one."""
    check_between_steps(exchange)
    residual = bucket.feedback.residual
    if residual is None:
        return np.empty(0, np.float32)
    return residual.astype(accumulation_dtype(residual.dtype))
