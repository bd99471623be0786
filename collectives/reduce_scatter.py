"""Sparse reduce-scatter: every rank gets the sum on its share of the index space.

Source: the split phase of SparCML (C. Renggli et al., SC 2019, arXiv 1802.08021).
Costs: docs/contributing/costs.md.

Invariant: an owner adds the parts of its share in rank order, so every run has the same
bits.

Differences from the paper: the parts are sent to their owners directly in one step,
with their sizes in the headers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from collectives.calls.call import Call, Codec, Comm, Prepared, part_of_sum, sound
from collectives.calls.collective import collective
from collectives.planning.partition import Bounds, cut, equal_bounds, given_bounds
from collectives.runtime.group import Group, Part, vectors_of
from collectives.runtime.link import Link
from collectives.runtime.messages import Steps
from mpicomp.vector import SparseVector, add_up


@collective(promise=part_of_sum)
def sparse_reduce_scatter(
    vector: SparseVector,
    comm: "Comm",
    *,
    algorithm: Literal["auto", "split"] = "auto",
    partition: Literal["equal"] | Sequence[int] = "equal",
    codec: Codec = "auto",
) -> Call[SparseVector]:
    """Sum the vectors of all ranks, and return on each rank its share of the sum.

    Args:
        vector: this rank's summand, of numbers or of rows, with any number of entries; one
            length n, width and dtype on all ranks.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        algorithm: "auto" or "split".
        partition: the shares, the same on all ranks. "equal": rank r of P has the indices
            n r // P <= index < n (r + 1) // P. Or P + 1 bounds from 0 to n: rank r has
            bounds[r] <= index < bounds[r + 1].
        codec: format of the messages, as in `sparse_allreduce`.

    Returns:
        A vector of length n with the entries of this rank's share; indices do not change.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: an argument of this rank has a wrong value; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    >>> share = sparse_reduce_scatter(TopK(k=2).compress(gradient), comm)
    >>> share.indices.tolist()
    [1, 3]
    """
    return Call(
        vector, comm, algorithm, codec, {"partition": partition}, prepare=divided
    )


sparse_ireduce_scatter = sparse_reduce_scatter.nonblocking


def divided(vector: Any, compared: Mapping[str, Any], link: Link) -> Prepared:
    """Return the vector if it is valid, and the bounds of the partition, which the ranks compare as text."""
    prepared = sound(vector, compared, link)
    partition = compared["partition"]
    if not isinstance(partition, str):
        bounds = given_bounds(partition, vector.length, link.size)
        text = {"partition": " ".join(map(str, bounds))}
        return prepared._replace(compared=text, own={"bounds": bounds})
    if partition != "equal":
        raise ValueError(
            f"partition is {partition!r}: expected 'equal' or {link.size + 1} bounds"
        )
    return prepared


@sparse_reduce_scatter.algorithm(compares_calls=True)
def split(
    vector: SparseVector, group: Group, partition: str, bounds: Bounds = ()
) -> Steps[SparseVector]:
    """Sum every share on its owner; see the module. bounds: those of `partition`, unless that is "equal"."""
    equal = equal_bounds(vector.length, group.size)
    return (yield from sum_of_share(vector, group, bounds or equal))


def sum_of_share(
    vector: SparseVector, group: Group, bounds: Bounds
) -> Steps[SparseVector]:
    """Send every owner its part, and add up the parts of this rank's share."""
    parts = yield from scatter(vector, group, bounds)
    return add_up(vectors_of(parts))


def scatter(vector: SparseVector, group: Group, bounds: Bounds) -> Steps[list[Part]]:
    """Send every owner its part; return the parts of this rank's share, each with its sender's number of entries.

    With fewer shares than ranks, the last ranks own nothing.
    """
    parts = cut(vector, bounds)
    parts += [group.nothing] * (group.size - len(parts))
    return (yield from group.all_to_all(parts, vector.nnz))
