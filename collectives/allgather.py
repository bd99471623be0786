"""Sparse allgather: every rank gets every rank's vector.

Source: J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms
for all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11),
1997: the dissemination allgather, for any number of ranks. Costs: docs/contributing/costs.md.
Invariant: see `schedule.dissemination`.

Differences from the paper: parts may differ in size and be empty; headers contain the
sizes, so no round exchanges them, and several parts are sent as one message.
"""

from typing import Literal

from collectives.calls.call import Call, Codec, Comm, Sum
from collectives.calls.collective import collective
from collectives.runtime.group import Group, vectors_of
from collectives.runtime.messages import Steps
from mpicomp.vector import SparseVector, add_up, widened


def added_up(parts: list[SparseVector]) -> Sum:
    """Return the sum of the vectors, added in rank order; float16 in float32, so that it is rounded once."""
    return Sum(add_up([widened(part) for part in parts]))


@collective(added_up, promise=Sum)
def sparse_allgather(
    vector: SparseVector,
    comm: "Comm",
    *,
    algorithm: Literal["auto", "dissemination"] = "auto",
    codec: Codec = "auto",
) -> Call[list[SparseVector]]:
    """Gather the vectors of all ranks on all ranks.

    Args:
        vector: this rank's vector, of numbers or of rows, with any number of entries; one
            length, width and dtype on all ranks.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        algorithm: "auto" or "dissemination".
        codec: format of the messages, as in `sparse_allreduce`.

    Returns:
        A list with one SparseVector a rank, in rank order, the same bits on every rank.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: an argument of this rank has a wrong value; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    >>> parts = sparse_allgather(TopK(k=2).compress(gradient), comm)
    >>> [part.indices.tolist() for part in parts]
    [[1, 3]]
    """
    return Call(vector, comm, algorithm, codec)


sparse_iallgather = sparse_allgather.nonblocking


@sparse_allgather.algorithm(compares_calls=True)
def dissemination(vector: SparseVector, group: Group) -> Steps[list[SparseVector]]:
    """Send all blocks held so far over doubling distances; see the module."""
    parts = vectors_of((yield from group.gather(vector)))
    parts[group.rank] = vector.copy()  # `gather` returns the vector itself
    return parts
