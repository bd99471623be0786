"""The call of a collective on one rank, and the sum that it returns.

A collective is a function that returns its `Call`: the arguments, not yet checked.
`collectives.calls.start` checks them and starts the operation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from mpicomp.arrays import is_array, sparse_remedy
from mpicomp.vector import SparseVector

if TYPE_CHECKING:
    from mpi4py.MPI import Comm as Comm
else:
    Comm = Any

T = TypeVar("T")

Codec = Literal["auto", "plain", "quick", "smallest"]

NOTHING = SparseVector.empty(0)


class Sum(NamedTuple):
    """The sum over the ranks as one rank gets it, which a collective of your own returns to `GradientExchange`.

    `value`, with the rejected parts of all ranks, is the sum of what they contributed.

    Args:
        value: a SparseVector or an array, the same on all ranks.
        rejected: what this rank must keep, of the same kind; None if nothing was rejected.
        votes: the number of ranks that sent each entry of `value`; None if not counted.

    >>> def largest(vector, comm):
    ...     return Sum(*gtopk_allreduce(vector, comm, k=1))
    >>> GradientExchange(comm, TopK(k=2), collective=largest)(gradient).tolist()
    [0.0, -3.0, 0.0, 0.0]
    """

    value: Any
    rejected: Any = None
    votes: Any = None


ToSum = Callable[[Any], Sum]


def with_rejected(result: tuple[Any, Any]) -> Sum:
    """Return the `Sum` of a collective that returns the sum and what this rank must keep."""
    return Sum(*result)


def part_of_sum(result: Any) -> Sum:
    """Promise that the results of all ranks, None on some of them, add up to the sum."""
    return Sum([], result)


def sound(call: "Call[Any]", size: int) -> SparseVector:
    """Return the vector if it is a SparseVector whose entries are in order, in range and finite; raise otherwise."""
    vector = call.contribution
    if not isinstance(vector, SparseVector):
        raise TypeError(
            f"vector is {type(vector).__name__}: expected a SparseVector{_remedy(vector)}"
        )
    if vector is not NOTHING:
        vector.validate()
    return vector


def _remedy(vector: Any) -> str:
    if remedy := sparse_remedy(vector):
        return f"; {remedy}"
    if is_array(vector):
        return ", not a dense array: SparseVector.from_dense(array) has all of it, TopK(0.01).compress(array) a part"
    return " (see SparseVector.from_entries)"


@dataclass
class Call(Generic[T]):
    """The arguments of a rank's call of a collective.

    contribution: the rank's input; or an exception, if the rank failed before: this
    rank raises it, and the others CollectiveError. arguments: of the algorithms by
    name, the same on all ranks. own: those of this rank's algorithm that are not
    compared. prepare: a function of the call, whose arguments it may change, and the
    number of ranks; returns the vector, or raises. finish: converts the result of the
    algorithm to that of the call. follow: take length and dtype from the root; other
    ranks' contribution is ignored except for its device. operation: the name in errors,
    if it is not that of the collective.
    """

    contribution: Any
    comm: Any
    algorithm: Any = "auto"
    codec: Any = "auto"
    arguments: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[["Call[Any]", int], SparseVector] = sound
    finish: Callable[[Any], Any] | None = None
    follow: bool = False
    operation: str = ""
