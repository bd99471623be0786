"""Declaration of a collective: what it takes and gives, as data, its algorithms, and its two forms.

    @collective(to_sum=...)
    def name_of_it(vector, comm, *, algorithm="auto", codec="auto") -> Call[Result]:
        return Call(vector, comm, algorithm, codec)

    @name_of_it.algorithm()
    def an_algorithm(vector, group): ...

An algorithm is read with this file, `Group` and `mpicomp.vector` alone:
`collectives.runtime.calls` checks and starts the calls, and is imported by the first one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from inspect import cleandoc, signature
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    get_args,
)

from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import is_array, sparse_remedy
from mpicomp.vector import SparseVector

if TYPE_CHECKING:
    from mpi4py.MPI import Comm as Comm

    from collectives.runtime.engine import Request
else:
    Comm = Any

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# (vector, group, and the collective's own arguments by name)
Algorithm = Callable[..., Steps[Any]]

Codec = Literal["auto", "plain", "quick", "smallest"]

NOTHING = SparseVector.empty(0)
COLLECTIVES: dict[str, "Collective[Any, Any]"] = {}


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


def no_share(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return an empty range: every rank sends all of its entries."""
    return 0, 0


@dataclass(frozen=True)
class Declaration:
    """What a collective takes and gives; a decorator of the function that returns its `Call`.

    to_sum: for a collective that gives every rank the sum: returns its result as a
    `Sum`. counting: the arguments with which it counts votes; none if it cannot.
    takes_arrays: sums dense arrays, not vectors. takes_uncoded: takes `mpicomp.few_bits.Uncoded` as well, and then
    returns the sum in few bits. own_share(length, rank, size): returns the first index and the end of the
    range that a rank sums itself, and so does not send.

    promise: returns an algorithm's result as a `Sum` that the debug mode checks: the
    value, a vector or a list of them, is the same on all ranks, and with what was
    rejected on each of them it is the sum; by default `to_sum`. None: the result has no
    vectors. compare: compares the calls of the ranks before an algorithm that needs it,
    over the schedule with which "auto" begins. checks: by name of an argument that all
    ranks share, a function of its value and the number of ranks, which returns the value
    as the algorithms take it, or raises.
    """

    to_sum: ToSum | None = None
    counting: dict[str, Any] = field(default_factory=dict)
    takes_arrays: bool = False
    takes_uncoded: bool = False
    own_share: Callable[[int, int, int], tuple[int, int]] = no_share
    promise: ToSum | None = None
    compare: Callable[[Group], Steps[None]] = Group.compare_calls
    checks: Mapping[str, Callable[[Any, int], Any]] = field(default_factory=dict)

    def __call__(self, call: Callable[P, Call[T]]) -> "Collective[P, T]":
        """Declare a collective."""
        declared = Collective(call, self)
        if self.promised and not declared.name.startswith("_"):
            COLLECTIVES[declared.name] = declared
        return declared

    @property
    def promised(self) -> ToSum | None:
        """The promise that the debug mode checks."""
        return self.promise or self.to_sum


collective = Declaration


class Collective(Generic[P, T]):
    """A collective of this library: a function, its nonblocking form, and its algorithms by name.

    `nonblocking` takes the same arguments and returns a `Request`.
    """

    def __init__(self, call: Callable[P, Call[T]], declaration: Declaration) -> None:
        self.call = call
        self.declaration = declaration
        self.algorithms: dict[str, Algorithm] = {}
        self.automatic: Algorithm | None = None
        update_wrapper(self, call)
        self.name = call.__name__
        # The signature shows the result, and not the Call.
        shown = signature(call)
        (result,) = get_args(shown.return_annotation) or (Any,)
        self.__signature__ = shown.replace(return_annotation=result)
        self.nonblocking: Callable[P, Request[T]] = self.form(None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the collective to its end."""
        try:
            return _calls().start(self, args, kwargs, None).result()  # type: ignore[no-any-return]
        finally:
            # else an error among them, its traceback and this frame hold each other
            del args, kwargs

    def form(self, to_sum: ToSum | None) -> Callable[P, Any]:
        """Return the nonblocking form, whose result is a `Sum` if `to_sum` converts it."""

        def start(*args: P.args, **kwargs: P.kwargs) -> Any:
            return _calls().start(self, args, kwargs, to_sum)

        update_wrapper(start, self.call)
        start.__name__ = start.__qualname__ = self.name.replace("_", "_i", 1)
        _, heading, rest = cleandoc(self.call.__doc__ or "").partition("Args:\n")
        arguments, *_ = rest.split("\n\n")
        start.__doc__ = (
            f"Start `{self.name}` with these arguments and return its `Request`.\n\n"
            "Do not change the arguments' arrays before it has ended.\n\n"
            f"{heading}{arguments}\n"
        )
        shown = self.__signature__.replace(return_annotation="Request")
        vars(start)["__signature__"] = shown
        vars(start)["collective"] = self
        return start

    def __get__(self, owner: Any, kind: Any = None) -> "Collective[P, T]":
        """Act as a function, for `help` too, that does not bind to an object."""
        return self

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<collective {self.name}>"

    def algorithm(
        self, *, name: str = "", compares_calls: bool = False
    ) -> Callable[[F], F]:
        """Return a decorator that declares an algorithm. "auto" is the first one, unless `auto` declares another.

        name: by default that of the function. compares_calls: the schedule itself
        detects ranks with another algorithm or other arguments; otherwise the ranks
        compare their calls first.
        """

        def declare(function: F) -> F:
            def compared(
                vector: SparseVector, group: Group, **arguments: Any
            ) -> Steps[Any]:
                yield from self.declaration.compare(group)
                return (yield from function(vector, group, **arguments))

            run = function if compares_calls else compared
            self.algorithms[name or function.__name__] = run
            return function

        return declare

    def auto(self, function: Algorithm) -> Algorithm:
        """Declare the algorithm of "auto"."""
        self.automatic = function
        return function


@cache
def _calls() -> Any:
    from collectives.runtime import calls

    return calls
