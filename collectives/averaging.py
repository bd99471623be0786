"""Error averaging: the residuals of all ranks are replaced by their mean.

Source: A. Xu, Z. Huo, H. Huang, "Step-ahead error feedback for distributed training with compressed gradient", AAAI
2021 (arXiv 2008.05823), which averages every p steps.

Rounds and bytes: those of a dense allreduce of the gradients, each time.

Invariant: the sum of the residuals over the ranks is unchanged, exactly where additions and the division are exact.
"""

import numpy as np

from collectives.agreement import all_or_none, outcome_of
from collectives.dense import dense_allreduce
from collectives.exchange import GradientExchange
from mpicomp.arrays import Array
from mpicomp.bucket import Bucket
from mpicomp.feedback.base import check_range, wide

OPERATION = "average_residuals"  # what the ranks' agreement is called in errors


def average_residuals(exchange: GradientExchange) -> None:
    """Replace the residual of each tensor by its mean over the ranks; all ranks call it, between two steps.

    Residuals in place belong to the gradients: average those. Raises RuntimeError within a step; OverflowError if a
    sum leaves the range of float32 (float64 for float64), on all ranks, whose residuals are then unchanged; the errors
    of a collective.

    >>> exchange = GradientExchange(comm, TopK(k=2), StepAhead(rate=0.5))
    >>> for step in range(20):
    ...     update = exchange(gradient)
    >>> average_residuals(exchange)
    """
    means: list[Array] = []
    with all_or_none(exchange.comm, OPERATION):
        for bucket in exchange.buckets:
            total = dense_allreduce(outcome_of(_residual, exchange, bucket), exchange.comm)
            total /= exchange.comm.size
            mean = total.astype(bucket.tensors[0].dtype, copy=False) if bucket.tensors else total
            check_range(mean, "mean of the residuals")
            means.append(mean)
    for bucket, mean in zip(exchange.buckets, means, strict=True):
        if mean.size:
            bucket.feedback.load_state_dict(bucket.feedback.state_dict() | {"residual": mean})


def _residual(exchange: GradientExchange, bucket: Bucket) -> Array:
    """Return the residual in the dtype in which residuals are summed; empty without one."""
    if exchange.is_in_step:
        raise RuntimeError("a step is in progress: call finish first")
    residual = bucket.feedback.residual
    return np.empty(0, np.float32) if residual is None else residual.astype(wide(residual.dtype))
