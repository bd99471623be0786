"""Raise on every rank, or on none.

What must be the same on all ranks, the call signature, is in the header of every message, as a digest. A rank that sees
a difference stops there, and one with a bad argument does not begin: it sends an error notification to every other
rank, as its last message, and receives theirs. A rank that waits for a message of such a rank gets its notification at
the latest, and stops as well. In every collective's schedule, or in the round before it, data of every rank reach every
other rank: so all ranks know, and all raise.

Two schedules need not meet where one of them begins with a message of every rank to every other one, as the exact
gTop-k does: no rank of the other schedule waits in vain for one of this kind, which has sent to all, and this one
receives a message of the other schedule, or a notification.
"""

from typing import TypeVar

from collectives.faults.state import disagreement, report
from collectives.runtime.group import DisagreementError, Group
from collectives.runtime.messages import Steps
from mpicomp.errors import StepSkippedError

T = TypeVar("T")


def all_or_none(group: Group, steps: Steps[T]) -> Steps[T]:
    """Run an operation's steps to their end; then return their result on every rank, or raise on every rank.

    Raises this rank's own error where it has one, else CollectiveError naming the ranks and what they contributed; and
    StepSkippedError on every rank where gradients that are not finite are all that is wrong.
    """
    if group.error is None:
        try:
            return (yield from steps)
        except DisagreementError:
            pass
    reports = yield from group.notify(report(group.signature, group.error))
    error: Exception = disagreement(group.signature["operation"], reports)
    try:
        raise error if group.error is None or isinstance(error, StepSkippedError) else group.error
    finally:
        del group, steps, error  # else the error, its traceback and this frame hold each other
