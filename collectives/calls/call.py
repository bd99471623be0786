"""The call of a collective on one rank, and the sum that it returns.

A collective is a function that returns its `Call`: the arguments, not yet checked.
`collectives.calls.start` checks them and starts the operation.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from collectives.runtime.link import Link
from mpicomp.arrays import Array
from mpicomp.arrays.frameworks import is_array, sparse_remedy
from mpicomp.vector import SparseVector

if TYPE_CHECKING:
    from mpi4py.MPI import Comm as Comm
else:
    Comm = Any

T = TypeVar("T")

Codec = Literal["auto", "plain", "quick", "smallest"]


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


# A dict is unpacked in half the time of other mappings.
_NO_ARGUMENTS: Mapping[str, Any] = {}


class Prepared(NamedTuple):
    """What an algorithm takes, checked and converted.

    payload: its first argument. like: an array of the dtype and on the device of the
    payload. length, width: with the dtype, and `compared`, they must be the same on all
    ranks; unless the length is None. compared, own: the other arguments by name; those
    of `own` may differ.
    finish: converts the result of the algorithm to that of the call. contributed:
    returns what the payload adds to the sum, for the debug mode; the payload by default.
    """

    payload: Any
    like: Array
    length: int | None = 0
    width: int | None = None
    compared: Mapping[str, Any] = _NO_ARGUMENTS
    own: Mapping[str, Any] = _NO_ARGUMENTS
    finish: Callable[[Any], Any] | None = None
    contributed: Callable[[], Any] | None = None


NOTHING = Prepared(None, SparseVector.empty(0).values)

# A function that checks and converts the contribution and the arguments that all ranks
# share.
Prepare = Callable[[Any, Mapping[str, Any], Link], Prepared]


def sound(vector: Any, compared: Mapping[str, Any], link: Link) -> Prepared:
    """Return a SparseVector whose entries are in order, in range and finite; TypeError or ValueError otherwise."""
    if not isinstance(vector, SparseVector):
        raise TypeError(
            f"vector is {type(vector).__name__}: expected a SparseVector{_remedy(vector)}"
        )
    vector.validate()
    return Prepared(vector, vector.values, vector.length, vector.width, compared)


def _remedy(vector: Any) -> str:
    if remedy := sparse_remedy(vector):
        return f"; {remedy}"
    if is_array(vector):
        return ", not a dense array: SparseVector.from_dense(array) has all of it, TopK(0.01).compress(array) a part"
    return " (see SparseVector.from_entries)"


class Call(NamedTuple, Generic[T]):
    """The arguments of a rank's call of a collective, not yet checked.

    contribution: the rank's input; or an exception, if the rank failed before: this
    rank raises it, and the others CollectiveError. arguments: of the algorithms by
    name, the same on all ranks. prepare: checks and converts them, or raises.
    operation: the name in errors, if it is not that of the collective.
    """

    contribution: Any
    comm: Any
    algorithm: Any = "auto"
    codec: Any = "auto"
    arguments: Mapping[str, Any] = _NO_ARGUMENTS
    prepare: Prepare = sound
    operation: str = ""
