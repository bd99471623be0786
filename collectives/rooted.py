"""Sparse reduce and broadcast: the two halves of the server pattern.

Source: binomial trees as in R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005.
Costs: docs/contributing/costs.md; most ranks communicate with few others in the tree, so call
signatures are compared first.

Differences from the paper: any root and any number of ranks; vectors of unequal size; a
mismatch raises everywhere.
"""

from typing import Any, Literal

from collectives.runtime.collective import (
    Call,
    Codec,
    Comm,
    Sum,
    collective,
    part_of_sum,
)
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
    """Sum the vectors of all ranks on the root, exactly.

    vector: of numbers or of rows, of one length, width and dtype on all ranks; any
    number of entries, also none. root: the same on all ranks. algorithm: "auto" or
    "tree".

    Returns the sum on the root, and None on the other ranks.

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

    vector: on the root, of any length and dtype. Other ranks' `vector` is ignored,
    except for its device, on which the result is placed; it may be None, or an
    exception if the rank failed. root, algorithm: as of `sparse_reduce`.

    Returns the root's vector on every rank, the same bits; on the root a copy.

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
