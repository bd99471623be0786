"""GradientExchange: correct, compress, reduce, put back.

The collective is an argument, so this package knows nothing of MPI: a collective takes (vector, comm) and returns the
sum as a SparseVector, or (sum, rejected) as a global top-k does, or (sum, votes), or a list of every rank's vector as
an allgather does; or a Request for one of these. In place of the vector it takes an exception, which it raises here and
reports to the other ranks: that is how a rank whose gradient is bad keeps its peers from waiting for ever.

A `Pipeline` is what one vector goes through on this rank, a `Bucket` is pipelines in one message, and `layout` says
which tensors go where.
"""

from mpicomp.exchange.exchange import GradientExchange
from mpicomp.exchange.statistics import Statistics

__all__ = ["GradientExchange", "Statistics"]
