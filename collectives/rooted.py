"""Sparse reduce and broadcast: the two halves of the server pattern.

Source: binomial trees as in R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005.
Costs: docs/contributing/costs.md; most ranks communicate with few others in the tree, so call
signatures are compared first.

Differences from the paper: any root and any number of ranks; vectors of unequal size; a
mismatch raises everywhere.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from collectives.calls.call import (
    NOTHING,
    Call,
    Codec,
    Comm,
    Prepared,
    Sum,
    part_of_sum,
    sound,
)
from collectives.calls.collective import collective
from collectives.runtime.group import Group
from collectives.runtime.link import Link
from collectives.runtime.messages import Steps
from collectives.runtime.patterns import add, hand_down, reduce_up
from mpicomp.patches import Patch
from mpicomp.settings import to_integer
from mpicomp.vector import SparseVector

C = TypeVar("C", SparseVector, Patch)

_FOR_PATCHES = (
    "out is for a patch, got a SparseVector: expected no out; use vector.add_to(array)"
)


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


def of_root(
    content: Any, compared: Mapping[str, Any], link: Link, *, out: Any
) -> Prepared:
    """Return the root's vector or patch, with which other ranks compare no length and no dtype.

    On other ranks it is ignored, except for its device.
    """
    patch = None
    device = content.values if isinstance(content, SparseVector) else NOTHING.like
    vector = SparseVector.empty(0, like=device)
    if link.rank == compared["root"]:
        if isinstance(content, Patch):
            patch = content
        elif out is not None:
            raise ValueError(_FOR_PATCHES)
        else:
            vector = sound(content, compared, link).payload
    own = {"out": out, "patch": patch}
    return Prepared(vector, vector.values, None, compared=compared, own=own)


def _vectors_alone(result: Any) -> Sum:
    """Promise that all ranks have one vector; a patch has a digest of its own."""
    if isinstance(result, Patch):
        return Sum([])
    return Sum(result)


@collective(promise=_vectors_alone, checks={"root": to_root})
def sparse_bcast(
    vector: C | None,
    comm: "Comm",
    root: int = 0,
    *,
    algorithm: Literal["auto", "tree"] = "auto",
    codec: Codec = "auto",
    out: Any = None,
) -> Call[C]:
    """Broadcast the root's vector, or its patch of weights, to all ranks.

    Args:
        vector: on the root a vector of any length and dtype, or a `mpicomp.Patch`. On other
            ranks it is ignored, except for its device, on which a vector is placed; it may
            be None, or an exception if the rank failed.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        root: the rank whose vector is sent; the same on all ranks.
        algorithm: "auto" or "tree", of a vector. A patch is sent in pieces along a chain.
        codec: format of the messages of a vector, as in `sparse_allreduce`.
        out: this rank's weights, to which a patch is applied, as by `Patch.apply`: on all
            ranks that give them, or, with an error on all ranks, on none. None: it is
            returned only.

    Returns:
        The root's vector or patch, the same bits on every rank; on the root a copy of the
        vector.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: an argument of this rank has a wrong value, or its `out` is of another
            version than the patch changes; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    >>> vector = TopK(k=2).compress(gradient) if comm.rank == 0 else None
    >>> sparse_bcast(vector, comm, root=0).indices.tolist()
    [1, 3]
    """
    prepare = partial(of_root, out=out)
    return Call(vector, comm, algorithm, codec, {"root": root}, prepare)


sparse_ibcast = sparse_bcast.nonblocking


@sparse_reduce.algorithm()
def tree(vector: SparseVector, group: Group, root: int) -> Steps[SparseVector | None]:
    """Sum over a binomial tree to the root."""
    total, _ = yield from reduce_up((vector, 0), group, add, root)
    return total if group.rank == root else None


@sparse_bcast.algorithm(name="tree", compares_calls=True)
def handed_down(
    vector: SparseVector,
    group: Group,
    root: int,
    out: Any = None,
    patch: Patch | None = None,
) -> Steps[SparseVector | Patch]:
    """Broadcast a vector over a binomial tree, or a patch in pieces; the calls are compared with its size."""
    count = patch.nbytes if patch else int(out is not None)
    parts = yield from group.gather(group.nothing, count)
    nbytes = parts[root][1]
    if not nbytes:
        if any([count for _, count in parts]):
            group.fail(ValueError(_FOR_PATCHES))
        return (yield from hand_down(vector, group, root))
    with group.raise_on_all():
        message = patch.message if patch else np.empty(nbytes, np.uint8)
    yield from group.compare_calls()
    yield from group.relay(message, root)
    with group.raise_on_all():
        patch = patch or Patch.from_bytes(message)
        write = patch.writer(out) if out is not None else None
    yield from group.compare_calls()
    # No rank has failed, so all ranks can write.
    if write is not None:
        write()
    return patch
