"""What every rank has to bring alike to an operation."""

from dataclasses import dataclass

# An operation and an algorithm travel as their places here.
OPERATIONS = (
    "sparse_allgather",
    "sparse_allreduce",
    "sparse_reduce_scatter",
    "sparse_reduce",
    "sparse_bcast",
    "gtopk_allreduce",
    "dense_allreduce",
)
ALGORITHMS = (
    "auto",
    "dissemination",
    "allgather",
    "recursive_doubling",
    "split",
    "split_allgather",
    "recursive_halving",
    "dense",
    "tree",
    "exact",
    "mpi",
)


@dataclass(frozen=True)
class Terms:
    """What every rank has to bring alike to one operation; None where the call leaves it open."""

    operation: str
    algorithm: str
    length: int | None
    dtype: str | None
    k: int | None = None
    root: int | None = None
