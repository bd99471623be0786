"""Declaration of a collective: its algorithms, its two forms, its promise, and the checks before it starts.

    @collective(promise=...)
    def name_of_it(vector, comm, *, algorithm="auto", codec="auto") -> Call[Result]:
        return Call(vector, comm, algorithm, codec)

    @name_of_it.algorithm
    def an_algorithm(vector, group): ...

All checks of the caller's arguments run in one `try`, before any message: if one
raises, the rank does not start, but notifies the others, and `run_or_notify` raises on
every rank. Only a bad `comm` raises at once, as there is nobody to notify.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from inspect import cleandoc, signature
from typing import (
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    overload,
)

from collectives.agreement import debug
from collectives.agreement.first_call import link_of
from collectives.agreement.notification import run_or_notify
from collectives.runtime import engine
from collectives.runtime.engine import Request
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import DTYPE_NAMES, is_array, sparse_remedy
from mpicomp.codec import CODECS
from mpicomp.settings import LARGEST, to_bool, to_choice, to_integer
from mpicomp.vector import SparseVector

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
# (vector, group, and the collective's own arguments by name)
Algorithm = Callable[..., Steps[Any]]
Promise = Callable[[Any], tuple[list[Any], list[Any]]] | None
Compare = Callable[[Group], Steps[None]]
Prepare = Callable[["Call[Any]", int], SparseVector]

Codec = Literal["auto", "plain", "quick", "smallest"]

NOTHING = SparseVector.empty(0)
COLLECTIVES: dict[str, "Collective[Any, Any]"] = {}

_COMM = "comm: an mpi4py intracommunicator; all its ranks call, in the same order."
_CODEC = """
codec: the format of vectors in messages: "plain", "quick" (also a range or a bitmap), "smallest" (all
formats of `mpicomp.codec`, none of which loses a bit), or "auto": "smallest" between nodes, else "quick". Ranks may
choose different codecs."""
_RAISES = """
Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError on
every rank if arguments that must be the same differ. TypeError at once if `comm` is not an intracommunicator.
"""


def sound(call: "Call[Any]", size: int) -> SparseVector:
    """Return the vector if it is a SparseVector whose entries are in order, in range and finite; raise otherwise."""
    vector = call.contribution
    if not isinstance(vector, SparseVector):
        raise TypeError(
            f"vector is {type(vector).__name__}: expected a SparseVector{_remedy(vector)}"
        )
    vector.validate()
    return vector


def _remedy(vector: Any) -> str:
    if remedy := sparse_remedy(vector):
        return f"; {remedy}"
    if is_array(vector):
        return ", not a dense array: SparseVector.from_dense(array) has all of it, TopK(0.01).compress(array) a part"
    return " (see SparseVector.from_entries)"


def on_every_rank(result: Any) -> tuple[list[Any], list[Any]]:
    """Promise that a result (a vector, a list, or a vector with votes) is the same on every rank; see `collective`."""
    result = result[:1] if isinstance(result, tuple) else result
    return (list(result) if isinstance(result, list | tuple) else [result]), []


@dataclass
class Call(Generic[T]):
    """The arguments of a rank's call of a collective.

    contribution: the rank's input; or an exception, if the rank failed before: this
    rank raises it, and the others CollectiveError. arguments: of the algorithms by
    name, the same on all ranks; integers and votes are checked. own: those of this
    rank's algorithm that are not compared. prepare: a function of the call, whose
    arguments it may change, and the number of ranks; returns the vector, or raises.
    finish: converts the result of the algorithm to that of the call. follow: take
    length and dtype from the root; other ranks' contribution is ignored except for its
    device. operation: the name in errors, if it is not that of the collective.
    """

    contribution: Any
    comm: Any
    algorithm: Any = "auto"
    codec: Any = "auto"
    arguments: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    prepare: Prepare = sound
    finish: Callable[[Any], Any] | None = None
    follow: bool = False
    operation: str = ""


class Collective(Generic[P, T]):
    """A collective of this library: a function, its nonblocking form, and its algorithms by name.

    `nonblocking` takes the same arguments and returns a `Request`. gives_sum: every
    rank gets the sum, in some form, so `GradientExchange` can use the collective.
    takes_arrays: the sum is of dense arrays, not of vectors.
    """

    def __init__(
        self,
        call: Callable[P, Call[T]],
        promise: Promise,
        compare: Compare,
        *,
        gives_sum: bool,
        takes_arrays: bool,
    ) -> None:
        self.promise, self.gives_sum, self.takes_arrays, self._compare = (
            promise,
            gives_sum,
            takes_arrays,
            compare,
        )
        self._call = call
        self.algorithms: dict[str, Algorithm] = {}
        self.automatic: Algorithm | None = None
        update_wrapper(self, call)
        self.name = call.__name__
        codec = [_CODEC] if "codec" in signature(call).parameters else []
        self.__doc__ = "\n".join(
            [cleandoc(call.__doc__ or ""), "", _COMM, *codec, _RAISES]
        )
        (result,) = get_args(signature(call).return_annotation) or (Any,)
        self.__signature__ = signature(call).replace(return_annotation=result)

        def nonblocking(*args: P.args, **kwargs: P.kwargs) -> Request[T]:
            return self._start(self._called(args, kwargs))

        head, _, tail = self.name.partition("_")
        self.nonblocking: Callable[P, Request[T]] = update_wrapper(nonblocking, call)
        vars(nonblocking)["__signature__"] = signature(call).replace(
            return_annotation=Request
        )
        vars(nonblocking)["collective"] = self
        nonblocking.__name__ = nonblocking.__qualname__ = f"{head}_i{tail}"
        nonblocking.__doc__ = (
            f"Start `{self.name}` with these arguments and return its Request.\n\n"
            "Do not change the arguments' arrays before it has ended.\n"
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the collective to its end."""
        try:
            return self._start(self._called(args, kwargs)).result()
        finally:
            # else an error among them, its traceback and this frame hold each other
            del args, kwargs

    def __get__(self, owner: Any, kind: Any = None) -> "Collective[P, T]":
        """Act as a function, for `help` too, that does not bind to an object."""
        return self

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<collective {self.name}>"

    @overload
    def algorithm(
        self, function: F, *, name: str = "", compares_calls: bool = False
    ) -> F: ...

    @overload
    def algorithm(
        self, *, name: str = "", compares_calls: bool = False
    ) -> Callable[[F], F]: ...

    def algorithm(
        self, function: Any = None, *, name: str = "", compares_calls: bool = False
    ) -> Any:
        """Declare an algorithm; a decorator. "auto" is the first one, unless `auto` declares another.

        name: by default that of the function. compares_calls: the schedule itself
        detects ranks with another algorithm or other arguments; otherwise the ranks
        compare their calls first.
        """
        if function is None:
            return partial(self.algorithm, name=name, compares_calls=compares_calls)
        self.algorithms[name or function.__name__] = (
            function if compares_calls else partial(_compared, self._compare, function)
        )
        return function

    def auto(self, function: Algorithm) -> Algorithm:
        """Declare the algorithm of "auto"."""
        self.automatic = function
        return function

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[T]:
        """Return the call; if a keyword is unknown or an argument is missing, with that error as the contribution."""
        try:
            return self._call(*args, **kwargs)
        except Exception as error:
            comm = kwargs.get(
                "comm", next((each for each in args if hasattr(each, "Get_attr")), None)
            )
            if comm is None:
                raise
            return Call(error.with_traceback(None), comm)

    def _start(self, call: Call[T]) -> Request[T]:
        link = link_of(call.comm, call.operation or self.name)
        vector = NOTHING
        error: BaseException | None = (
            call.contribution if isinstance(call.contribution, Exception) else None
        )
        name, codec = call.algorithm, call.codec
        try:
            if name != "auto":
                to_choice("algorithm", name, ["auto", *self.algorithms])
            if codec != "auto":
                to_choice("codec", codec, ["auto", *CODECS])
            _check_arguments(call.arguments, link.size)
            if error is None and not (
                call.follow and link.rank != call.arguments["root"]
            ):
                vector = call.prepare(call, link.size)
        # whatever it is, also an interrupt: the other ranks must be notified
        except BaseException as raised:
            # its frames would hold the vector
            error = raised.with_traceback(None) if error is None else error
        if error is not None:
            vector, name, codec, call.arguments, call.own = (
                NOTHING,
                "auto",
                "auto",
                {},
                {},
            )
        if name == "auto" and self.automatic is None:
            name = next(iter(self.algorithms))
        compared = {
            "operation": call.operation or self.name,
            "algorithm": name,
            **call.arguments,
        }
        if not call.follow:
            compared |= {
                "length": vector.length,
                "dtype": DTYPE_NAMES[vector.dtype],
                "width": vector.width,
            }
        like = (
            call.contribution
            if call.follow and isinstance(call.contribution, SparseVector)
            else vector
        )
        run = (
            self.automatic
            if name == "auto" and self.automatic is not None
            else self.algorithms[name]
        )
        with engine.of_process():
            group = Group(link, compared, error, codec=codec, like=like.values)
            unstarted: Steps[Any] = (_ for _ in ())
            steps = (
                run(vector, group, **call.arguments, **call.own)
                if error is None
                else unstarted
            )
            if link.checked:
                steps = debug.checked(
                    group, steps, call.own.get("array", vector), self.promise
                )
            else:
                steps = run_or_notify(group, steps)
            return engine.of_process().start(
                steps if call.finish is None else _finished(steps, call.finish), group
            )


def collective(
    promise: Promise = on_every_rank,
    *,
    compare: Compare = Group.compare_calls,
    gives_sum: bool = False,
    takes_arrays: bool = False,
) -> Callable[[Callable[P, Call[T]]], Collective[P, T]]:
    """Return a decorator that turns a function that returns a `Call` into a collective.

    promise: a function of an algorithm's result that returns two lists, which the debug
    mode checks: the vectors that are the same on all ranks, and those that are this
    rank's part of the sum. None: the result has no vectors, and the collective is not
    in `COLLECTIVES`. compare: compares the calls of the ranks before an algorithm that
    needs it, over the schedule with which "auto" begins. gives_sum, takes_arrays: see
    `Collective`.
    """

    def declare(call: Callable[P, Call[T]]) -> Collective[P, T]:
        declared = Collective(
            call, promise, compare, gives_sum=gives_sum, takes_arrays=takes_arrays
        )
        if promise is not None and not declared.name.startswith("_"):
            COLLECTIVES[declared.name] = declared
        return declared

    return declare


def nonblocking_sum(function: Any) -> Callable[[Any, Any], Any]:
    """Return the nonblocking form of a collective of this library, with bound arguments; other functions unchanged.

    Raises TypeError for an object that is not callable, and for a collective that does
    not give every rank the sum.
    """
    if isinstance(function, partial):
        return partial(
            nonblocking_sum(function.func), *function.args, **function.keywords
        )
    if not callable(function) or isinstance(function, type):
        raise TypeError(
            f"collective is {function!r}: expected a collective such as sparse_allreduce"
        )
    known = declared_by(function)
    if known is None:
        return function  # type: ignore[no-any-return]
    if not known.gives_sum:
        raise TypeError(
            f"collective is {function.__name__}, which does not give every rank the sum: expected sparse_allreduce, "
            "gtopk_allreduce, sparse_allgather, or with Dense() quantised_allreduce or dense_allreduce"
        )
    return known.nonblocking


def declared_by(function: Any) -> "Collective[Any, Any] | None":
    """Return the collective of this library behind a function, its nonblocking form or bound arguments; else None."""
    while isinstance(function, partial):
        function = function.func
    known = (
        function
        if isinstance(function, Collective)
        else getattr(function, "collective", None)
    )
    return known if isinstance(known, Collective) else None


def with_votes(function: Any) -> Any:
    """Return a collective whose result contains the number of senders of each entry, with bound arguments.

    That is `sparse_allreduce` with votes=True, or `sparse_allgather`, whose vectors are
    counted; other functions than collectives of this library are returned unchanged.
    Raises ValueError for other collectives.
    """
    known = declared_by(function)
    if known is None or get_origin(signature(known).return_annotation) is list:
        return function
    if "votes" in signature(known).parameters:
        return partial(function, votes=True)
    raise ValueError(
        f"{known.name} does not count the ranks that sent an entry, which average='contributors' takes: "
        "expected sparse_allreduce or sparse_allgather"
    )


def _compared(
    compare: Compare,
    algorithm: Algorithm,
    vector: SparseVector,
    group: Group,
    **arguments: Any,
) -> Steps[Any]:
    yield from compare(group)
    return (yield from algorithm(vector, group, **arguments))


def _finished(steps: Steps[Any], finish: Callable[[Any], T]) -> Steps[T]:
    return finish((yield from steps))


def _check_arguments(arguments: dict[str, Any], size: int) -> None:
    """Convert integer arguments to Python's; TypeError or ValueError for other or out-of-range values."""
    if "votes" in arguments:
        arguments["votes"] = to_bool("votes", arguments["votes"])
    for name, least, most in (("k", 1, LARGEST), ("root", 0, size - 1)):
        if name in arguments:
            remedy = (
                "; from a density take max(1, round(density * length))" if least else ""
            )
            arguments[name] = to_integer(
                name, arguments[name], least, most, remedy=remedy
            )
