"""Raise on every rank or on none: the call signature, and error notifications.

The header of every message has a digest of the arguments that must be the same on all
ranks. A rank that receives another digest stops, and a rank with a bad argument does
not start: it sends an error notification to every other rank, as its last message, and
receives theirs. In every schedule, or in the round before it, data of every rank reach
every other rank, so all ranks raise; also between two schedules, if one begins with a
message from every rank to every other one, as the exact gTop-k does.
"""

from typing import TypeVar

from collectives.agreement.state import disagreement, report
from collectives.runtime.group import DisagreementError, Group
from collectives.runtime.messages import Steps
from mpicomp.errors import CollectiveError, StepSkippedError

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
            while group.landings:
                _, wait = group.landings.pop()
                wait()
    reports = yield from group.notify(report(group.signature, group.error))
    error = _error_of(group, reports)
    try:
        raise error
    finally:
        # else the error, its traceback and this frame hold each other
        del group, steps, error


def _error_of(group: Group, reports: list[str]) -> BaseException:
    """Return the error to raise: this rank's own, or what the ranks report."""
    operation = group.signature["operation"]
    error: Exception = disagreement(operation, reports)
    if group.broken:
        broken = "; ".join(
            f"rank {rank}: {text}" for rank, text in group.broken.items()
        )
        error = CollectiveError(
            f"{operation} broke off in the middle of its rounds: {broken}. Ranks that had ended it have the result: "
            "the next operation on the communicator raises on all ranks"
        )
    if group.error is None or isinstance(error, StepSkippedError):
        return error
    return group.error
