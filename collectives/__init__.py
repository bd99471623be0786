"""Communication between ranks: sparse collectives and the gradient exchange. Importing this does not initialise MPI.

Every collective has a nonblocking form, named with MPI's `i`, that returns a `Request`.
Call the library from one thread at a time, and start the operations on a communicator
in the same order on all ranks, as MPI asks of its own. The names in `__all__`, and those
of `collectives.torch` and `collectives.jax`, are public; all others are internal.
"""

from collectives.allgather import sparse_allgather, sparse_iallgather
from collectives.allreduce import sparse_allreduce, sparse_iallreduce
from collectives.calls.call import Sum
from collectives.calls.recovery import agree, shrink
from collectives.calls.replicas import check_replicas
from collectives.compressed import compressed_allreduce, compressed_iallreduce
from collectives.dense import dense_allreduce, dense_iallreduce
from collectives.exchange import GradientExchange
from collectives.exchange.statistics import Statistics
from collectives.faults.errors import (
    CheckError,
    CollectiveError,
    CollectiveTimeoutError,
    DamagedMessageError,
    RankFailedError,
)
from collectives.gtopk import gtopk_allreduce, gtopk_iallreduce
from collectives.local_steps.averaging import average_residuals
from collectives.local_steps.outer import OuterLoop
from collectives.local_steps.redistribution import redistribute_state
from collectives.plan import SupportPlan
from collectives.quantised import quantised_allreduce, quantised_iallreduce
from collectives.reduce_scatter import sparse_ireduce_scatter, sparse_reduce_scatter
from collectives.rooted import (
    sparse_bcast,
    sparse_ibcast,
    sparse_ireduce,
    sparse_reduce,
)
from collectives.runtime.engine import Request, configure
from collectives.runtime.link import Traffic, traffic

__all__ = [
    "CheckError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "DamagedMessageError",
    "GradientExchange",
    "OuterLoop",
    "RankFailedError",
    "Request",
    "Statistics",
    "Sum",
    "SupportPlan",
    "Traffic",
    "agree",
    "average_residuals",
    "check_replicas",
    "compressed_allreduce",
    "compressed_iallreduce",
    "configure",
    "dense_allreduce",
    "dense_iallreduce",
    "gtopk_allreduce",
    "gtopk_iallreduce",
    "quantised_allreduce",
    "quantised_iallreduce",
    "redistribute_state",
    "shrink",
    "sparse_allgather",
    "sparse_allreduce",
    "sparse_bcast",
    "sparse_iallgather",
    "sparse_iallreduce",
    "sparse_ibcast",
    "sparse_ireduce",
    "sparse_ireduce_scatter",
    "sparse_reduce",
    "sparse_reduce_scatter",
    "traffic",
]
