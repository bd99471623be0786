"""Agreement of all ranks on an object, or on whether a step succeeded.

Rounds: 2 ceil(lg P) of small messages for an object; MPI's allreduce of three numbers
for a step. Both are operations of the library: deadlines apply, and the error of a rank
reaches all ranks.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from collectives.calls import recovery
from collectives.calls.call import NOTHING, Call, Prepared
from collectives.calls.collective import collective
from collectives.calls.positions import Position, check_positions
from collectives.faults import ulfm
from collectives.faults.errors import CollectiveError
from collectives.runtime.group import Group
from collectives.runtime.link import Link, link_if_any
from collectives.runtime.messages import Steps
from mpicomp.errors import kept


@collective()
def gather_objects(value: Any, comm: Any, operation: str) -> Call[list[Any]]:
    """Return every rank's value, in rank order, on all ranks.

    value: serialisable as JSON, or an exception, as `Call.contribution`. operation: the
    name in errors; CollectiveError if it differs between ranks.
    """
    return Call(value, comm, prepare=as_it_is, operation=operation)


def as_it_is(value: Any, compared: Mapping[str, Any], link: Link) -> Prepared:
    """Return a value that the ranks do not compare."""
    return Prepared(value, NOTHING.like)


@gather_objects.algorithm()
def _gather(value: Any, group: Group) -> Steps[list[Any]]:
    return (yield from group.gather_objects(value))


def gather_results(call: Callable[[], Any], comm: Any, operation: str) -> list[Any]:
    """Return what `call` returns on each rank, in rank order; an error of one rank raises as in `gather_objects`."""
    return gather_objects(outcome_of(call), comm, operation)


def check_same(what: str, texts: list[dict[str, str]]) -> None:
    """Raise CollectiveError if the texts of the ranks, by name, differ."""
    for rank, theirs in enumerate(texts):
        for name in texts[0] | theirs:
            first = texts[0].get(name, "missing")
            here = theirs.get(name, "missing")
            if first != here:
                raise CollectiveError(
                    f"all ranks must have the same {what}: {name!r} is {first} on rank 0, and {here} on rank {rank}"
                )


class all_or_none:  # noqa: N801
    """A context in which all ranks run a block; if it raises on one of them, or a rank died, all raise at its end.

    A rank whose block raised raises that error, with the block's traceback; the others
    raise CollectiveError. All blocks must have started the same collectives. A rank
    that is interrupted, as by a second Ctrl-C, does not wait: the others raise once it
    calls the library again. operation: the name in errors. position: returns, after the
    block, what this rank is about to complete; where ranks differ in it all raise
    CollectiveError.
    """

    def __init__(
        self, comm: Any, operation: str, position: Callable[[], Position] = Position
    ) -> None:
        self._comm = comm
        self._operation = operation
        self._position = position

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, raised: BaseException | None, traceback: Any) -> None:
        if raised is None or isinstance(raised, Exception):
            try:
                self._agree(raised)
            except Exception as error:
                if error is not raised:
                    raise
                raised.__traceback__ = traceback  # without frames of the agreement
            return
        # The communicator may be finished already.
        with suppress(CollectiveError):
            if not ulfm.survives():
                _raise_together.nonblocking(
                    contributed(raised), self._comm, self._operation, Position()
                )

    def _agree(self, error: Exception | None) -> None:
        comm = self._comm
        operation = self._operation
        # A result that was lost on this rank counts as its error.
        link = link_if_any(comm)
        lost = "" if link is None else link.take_lost()
        if lost and error is None:
            error = CollectiveError(lost)
        here = self._position()
        try:
            if not ulfm.survives():
                _raise_together(error, comm, operation, here)
                return
            sound, same = recovery.agreements_on(comm).agree(
                error is None, _digest(here)
            )
            if not sound:
                raise error or CollectiveError(
                    f"{operation}: a rank died, or failed, before the step was kept: the step is undone on all ranks"
                )
        finally:
            # The error, its traceback and this frame would form a reference cycle.
            error = None
        if not same:
            everyone = gather_objects(here[:2], comm, operation)
            check_positions(operation, everyone, here.remedy)


@collective()
def _raise_together(
    error: Exception | None, comm: Any, operation: str, position: Position
) -> Call[None]:
    return Call((error, position), comm, prepare=as_it_is, operation=operation)


@_raise_together.algorithm(compares_calls=True)
def _agree(outcome: tuple[Exception | None, Position], group: Group) -> Steps[None]:
    """Sum failures and positions by MPI, which is faster than messages; ranks send texts only where there is a reason.

    Positions t of f ranks are equal if and only if f times the sum of t^2 is the square of
    their sum.
    """
    error, position = outcome
    digest = _digest(position)
    mine = total = np.array((error is not None, digest, digest * digest), np.int64)
    if group.size > 1:
        total = np.empty(3, np.int64)
        yield from group.reduce(mine, total)
    failed, linear, square = total.tolist()
    if failed:
        group.fail(error)
    if group.size * square != linear * linear:
        everyone = yield from group.gather_objects(position[:2])
        check_positions(group.signature["operation"], everyone, position.remedy)


def catch_up(
    errors: Sequence[Exception], attempts: int, comm: Any, operation: str
) -> None:
    """Return once all ranks have left the functions of their user, or raise on all if one raised there.

    A rank that raised before it called anything meets the others in their calls, which
    then raise. attempts: the number of functions, and one more. errors: of this rank.
    """
    for attempt in range(attempts):
        try:
            failures = gather_objects(bool(errors), comm, operation)
            break
        except CollectiveError:
            if attempt == attempts - 1:
                raise
    if any(failures):
        causes = (one for one in errors if not isinstance(one, CollectiveError))
        gather_objects(next(causes, None), comm, operation)


def miss(error: Exception, attempts: int, comm: Any, operation: str) -> None:
    """Contribute the error of an interrupt to all attempts of the others to `catch_up`, and wait for none."""
    with suppress(CollectiveError):
        for _ in range(attempts):
            gather_objects.nonblocking(error, comm, operation)


def _digest(position: Position) -> int:
    """Return 24 bits of a hash, so that the sum of squares over 2^14 ranks fits int64."""
    return zlib.crc32(f"{position.state} {position.digests}".encode()) >> 8


def contributed(error: BaseException) -> Exception:
    """Return what a rank contributes for an error: another one for an interrupt, which is of this rank alone."""
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def outcome_of(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or its error, to be contributed."""
    try:
        return function(*args)
    except Exception as error:
        return kept(error)
