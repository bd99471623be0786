"""Sparse reduce and broadcast: the two halves of the server pattern.

Source: binomial trees as in R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005.
Costs: docs/contributing/costs.md; most ranks communicate with few others in the tree, so call
signatures are compared first.

Differences from the paper: any root and any number of ranks; vectors of unequal size; a
mismatch raises everywhere.
"""

from typing import Any, Literal

from collectives.calls.call import Call, Codec, Comm, Sum, part_of_sum
from collectives.calls.collective import collective
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from collectives.runtime.patterns import add, hand_down, reduce_up
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector


def to_root(root: Any, size: int) -> int:
    """Return the root as an integer of Python's; raises if no rank has this number."""
    return to_integer("root", root, 0, size - 1)


@collective(promise=part_of_sum, checks={"root": to_root})
def sparse_reduce(
    vector: SparseVector,
    comm: "Comm",
    root: int = 0,
    *,
    algorithm: Literal["auto", "tree"] = "auto",
    codec: Codec = "auto",
) -> Call[SparseVector | None]:
    """Sum the vectors of all ranks on the root; no entry of the union is dropped.

    Args:
        vector: this rank's summand, of numbers or of rows, with any number of entries; one
            length, width and dtype on all ranks.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        root: the rank that gets the sum; the same on all ranks.
        algorithm: "auto" or "tree".
        codec: format of the messages, as in `sparse_allreduce`.

    Returns:
        The sum on the root, None on the other ranks.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: an argument of this rank has a wrong value; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    >>> total = sparse_reduce(TopK(k=2).compress(gradient), comm, root=0)
    >>> total.indices.tolist() if comm.rank == 0 else total
    [1, 3]
    """
    return Call(vector, comm, algorithm, codec, {"root": root})


sparse_ireduce = sparse_reduce.nonblocking


@collective(promise=Sum, checks={"root": to_root})
def sparse_bcast(
    vector: SparseVector | None,
    comm: "Comm",
    root: int = 0,
    *,
    algorithm: Literal["auto", "tree"] = "auto",
    codec: Codec = "auto",
) -> Call[SparseVector]:
    """Broadcast the root's vector to all ranks.

    Args:
        vector: on the root a vector of any length and dtype. On other ranks it is ignored,
            except for its device, on which the result is placed; it may be None, or an
            exception if the rank failed.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        root: the rank whose vector is sent; the same on all ranks.
        algorithm: "auto" or "tree".
        codec: format of the messages, as in `sparse_allreduce`.

    Returns:
        The root's vector, the same bits on every rank; on the root a copy.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: an argument of this rank has a wrong value; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    >>> vector = TopK(k=2).compress(gradient) if comm.rank == 0 else None
    >>> sparse_bcast(vector, comm, root=0).indices.tolist()
    [1, 3]
    """
    return Call(vector, comm, algorithm, codec, {"root": root}, follow=True)


sparse_ibcast = sparse_bcast.nonblocking


@sparse_reduce.algorithm()
def tree(vector: SparseVector, group: Group, root: int) -> Steps[SparseVector | None]:
    """Sum over a binomial tree to the root."""
    total, _ = yield from reduce_up((vector, 0), group, add, root)
    return total if group.rank == root else None


sparse_bcast.algorithm(name="tree")(hand_down)
