"""Declaration of a collective: what it takes and gives, as data, its algorithms, and its two forms.

    @collective(to_sum=...)
    def name_of_it(vector, comm, *, algorithm="auto", codec="auto") -> Call[Result]:
        return Call(vector, comm, algorithm, codec)

    @name_of_it.algorithm()
    def an_algorithm(vector, group): ...

An algorithm is read with this file, `Group` and `mpicomp.vector` alone:
`collectives.calls.start` checks and starts the calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial, update_wrapper
from inspect import cleandoc, signature
from typing import Any, Generic, ParamSpec, TypeVar, get_args

from collectives.calls.call import Call, ToSum
from collectives.calls.start import start
from collectives.runtime.engine import Request
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.vector import SparseVector

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# A function of the vector, the group, and the collective's own arguments by name.
Algorithm = Callable[..., Steps[Any]]

COLLECTIVES: dict[str, "Collective[Any, Any]"] = {}


@dataclass(frozen=True)
class Declaration:
    """What a collective takes and gives; a decorator of the function that returns its `Call`.

    to_sum: for a collective that gives every rank the sum: returns its result as a
    `Sum`. counting: the arguments with which it counts votes; none if it cannot.
    takes: what it sums: SparseVector; np.ndarray, dense arrays; or these and Correction, of which it returns the sum
    in few bits. own_share(length, rank, size): returns the first index and the end of the
    range that a rank sums itself, and so does not send; None: it sends all.

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
    takes: type[Any] = SparseVector
    own_share: Callable[[int, int, int], tuple[int, int]] | None = None
    promise: ToSum | None = None
    compare: Callable[[Group], Steps[None]] = Group.compare_calls
    checks: Mapping[str, Callable[[Any, int], Any]] = field(default_factory=dict)

    def __call__(self, call: Callable[P, Call[T]]) -> "Collective[P, T]":
        """Declare a collective."""
        declared = Collective(call, self)
        if self.promised and not declared.name.startswith("_"):
            COLLECTIVES[declared.name] = declared
        return declared

    @cached_property
    def takes_arrays(self) -> bool:
        """Whether it sums all values of dense arrays."""
        return self.takes is not SparseVector

    @cached_property
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
        # Names of the algorithms that run no code of the user.
        self.unattended: set[str] = set()
        # The signature shows the result, and not the Call.
        shown = signature(call)
        (result,) = get_args(shown.return_annotation) or (Any,)
        self.__signature__ = shown.replace(return_annotation=result)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the collective to its end."""
        try:
            return start(self, args, kwargs).result()  # type: ignore[no-any-return]
        finally:
            # An error among the arguments, its traceback and this frame would form a
            # reference cycle.
            del args, kwargs

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Request[T]:
        """Start it, for a caller that waits at once, or calls `Request.in_background`."""
        return start(self, args, kwargs)

    @cached_property
    def nonblocking(self) -> Callable[P, Request[T]]:
        """Return the nonblocking form, a function with its own name and documentation."""

        def begin(*args: P.args, **kwargs: P.kwargs) -> Request[T]:
            request = start(self, args, kwargs)
            request.in_background()
            return request

        update_wrapper(begin, self.call)
        begin.__name__ = begin.__qualname__ = self.name.replace("_", "_i", 1)
        _, heading, rest = cleandoc(self.call.__doc__ or "").partition("Args:\n")
        arguments, *_ = rest.split("\n\n")
        begin.__doc__ = (
            f"Start `{self.name}` with these arguments and return its `Request`.\n\n"
            "Do not change the arguments' arrays before it has ended.\n\n"
            f"{heading}{arguments}\n"
        )
        shown = self.__signature__.replace(return_annotation="Request")
        vars(begin)["__signature__"] = shown
        vars(begin)["collective"] = self
        return begin

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
            self._note_owner(name or function.__name__, function)
            self.algorithms[name or function.__name__] = run
            return function

        return declare

    def auto(self, function: Algorithm) -> Algorithm:
        """Declare the algorithm of "auto"."""
        self.automatic = function
        self._note_owner("auto", function)
        return function

    def _note_owner(self, name: str, function: Algorithm) -> None:
        """Note whether an algorithm, which may replace another of its name, runs code of the library only."""
        self.unattended.discard(name)
        if _is_of_library(self.call) and _is_of_library(function):
            self.unattended.add(name)


def _is_of_library(function: Callable[..., Any]) -> bool:
    if isinstance(function, partial):
        function = function.func
    return function.__module__.startswith("collectives.")
