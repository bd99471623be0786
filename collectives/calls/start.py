"""Start the call of a collective: check its arguments, describe it for the other ranks, and choose the algorithm.

All checks of the caller's arguments run in one `try`, before any message: if one
raises, the rank does not start, but notifies the others, and `run_or_notify` raises on
every rank. Only a bad `comm` raises at once, as there is nobody to notify.
"""

from collections.abc import Callable
from typing import Any

from collectives.calls import debug
from collectives.calls.call import NOTHING, Call, Prepared
from collectives.calls.first_call import link_of
from collectives.calls.notification import run_or_notify
from collectives.faults.errors import CollectiveError
from collectives.runtime import engine
from collectives.runtime.engine import Request
from collectives.runtime.group import Group
from collectives.runtime.link import Link
from collectives.runtime.messages import Steps
from collectives.runtime.progress import continue_on_callers_thread
from mpicomp.arrays.values import DTYPE_NAMES
from mpicomp.codec import CODECS
from mpicomp.errors import kept
from mpicomp.settings import to_choice, unknown_keyword


def start(
    collective: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Request[Any]:
    """Start a collective with the caller's arguments. collective: a `Collective`, which calls this."""
    try:
        call = collective.call(*args, **kwargs)
    except Exception as raised:
        call = _failed_call(collective, raised, args, kwargs)
    operation = call.operation or collective.name
    link = link_of(call.comm, operation)
    prepared = NOTHING
    error: BaseException | None = None
    if isinstance(call.contribution, Exception):
        error = call.contribution
    else:
        try:
            prepared = _prepared(call, collective, link)
        # The other ranks must be notified of every error, also of an interrupt.
        except BaseException as raised:
            error = kept(raised)
    if error is not None:
        call = call._replace(algorithm="auto", codec="auto")
    name = call.algorithm
    if name == "auto" and collective.automatic is None:
        name = next(iter(collective.algorithms))
    run: Any = collective.algorithms.get(name, collective.automatic)
    with engine.of_process() as own:
        group = Group(
            link,
            _signature(operation, name, prepared),
            error,
            codec=call.codec,
            like=prepared.like,
            runs_user_code=name not in collective.unattended,
        )
        if link.lost:
            group.contribute(CollectiveError(link.take_lost()))
        # A rank with an error runs no steps: it only notifies the others.
        steps: Any = None
        if group.error is None:
            try:
                steps = run(
                    prepared.payload, group, **prepared.compared, **prepared.own
                )
            except BaseException as raised:
                group.contribute(kept(raised))
        if link.checked:
            promise = collective.declaration.promised
            steps = debug.checked(group, steps, prepared, promise)
        else:
            steps = run_or_notify(group, steps)
        if prepared.finish is not None:
            steps = _converted(steps, prepared.finish)
        return own.start(steps, group)


def _failed_call(
    collective: Any,
    error: Exception,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call[Any]:
    """Return a call that contributes the error of an unknown keyword or a missing argument; raise it without a comm."""
    error = unknown_keyword(collective.name, collective.call, kwargs) or error
    communicators = (argument for argument in args if hasattr(argument, "Get_attr"))
    comm = kwargs.get("comm", next(communicators, None))
    if comm is None:
        raise error
    return Call(kept(error), comm)


def _prepared(call: Call[Any], collective: Any, link: Link) -> Prepared:
    """Check the arguments and convert them. Raises TypeError or ValueError."""
    if call.algorithm != "auto":
        to_choice("algorithm", call.algorithm, ["auto", *collective.algorithms])
    if call.codec != "auto":
        to_choice("codec", call.codec, ["auto", *CODECS])
    arguments = call.arguments
    if checks := collective.declaration.checks:
        arguments = dict(arguments)
        for name, check in checks.items():
            arguments[name] = check(arguments[name], link.size)
    return call.prepare(call.contribution, arguments, link)


def _signature(operation: str, algorithm: str, prepared: Prepared) -> dict[str, Any]:
    """Return what must be the same on all ranks."""
    compared = {"operation": operation, "algorithm": algorithm, **prepared.compared}
    if prepared.length is not None:
        compared["length"] = prepared.length
        compared["dtype"] = DTYPE_NAMES[prepared.like.dtype]
        compared["width"] = prepared.width
    return compared


def _converted(steps: Steps[Any], convert: Callable[[Any], Any]) -> Steps[Any]:
    result = yield from steps
    yield from continue_on_callers_thread()
    return convert(result)
