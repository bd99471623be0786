"""Raise on every rank or on none: the call signature, and error notifications.

The header of every message has a digest of the arguments that must be the same on all
ranks. A rank that receives another digest stops, and a rank with a bad argument does
not start: it sends an error notification to every other rank, as its last message, and
receives theirs. In every schedule, or in the round before it, data of every rank reach
every other rank, so all ranks raise; also between two schedules, if one begins with a
message from every rank to every other one, as the exact gTop-k does.
"""

from typing import TypeVar

from collectives.faults.errors import StepSkippedError
from collectives.faults.state import disagreement, report
from collectives.runtime.group import DisagreementError, Group
from collectives.runtime.messages import Steps

T = TypeVar("T")


def run_or_notify(group: Group, steps: Steps[T]) -> Steps[T]:
    """Run an operation to its end; return its result on every rank, or raise on every rank.

    Raises this rank's own error if it has one, else CollectiveError that names the
    ranks and their arguments; StepSkippedError on every rank if gradients that are not
    finite are the only errors. What breaks off on one rank between two rounds, such as
    for lack of memory, is the engine's (`Request`).
    """
    if group.error is None:
        try:
            return (yield from steps)
        except DisagreementError:
            pass
        finally:
            if group.link.queue:
                group.leave_queue()
            while group.landings:
                _, wait = group.landings.pop()
                wait()
    reports = yield from group.exchange_reports(report(group.signature, group.error))
    error: BaseException = disagreement(group.signature["operation"], reports)
    if group.error is not None and not isinstance(error, StepSkippedError):
        error = group.error
    try:
        raise error
    finally:
        # The error, its traceback and this frame would form a reference cycle.
        del group, steps, error
