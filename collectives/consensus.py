"""Agree on an object, or on whether a step succeeded: what ranks do beside the collectives proper.

Rounds: 2 ceil(lg P) of small messages for an object, those of MPI's allreduce of one number for a step. Objects are
sent by the library's own messages, and whether a step failed is MPI's sum on the library's copy of the communicator: so
deadlines hold for both, and a rank's error reaches all ranks.
"""

import json
from contextlib import suppress
from typing import Any

import numpy as np

from collectives import failure, recovery
from collectives.channel import Channel, DisagreementError, Offer
from collectives.messages import Steps
from collectives.operation import NOTHING, begin
from mpicomp.errors import CollectiveError


def gather_objects(value: Any, comm: Any, operation: str) -> list[Any]:
    """Return every rank's value, in rank order, on all ranks.

    value: what JSON can hold; or an exception, which is raised here, and CollectiveError that names it on the others.
    operation: what this is called in errors; ranks that call another operation raise CollectiveError.
    """
    gathered: list[Any] = []

    def gather(offer: Offer, channel: Channel) -> Steps[list[Any]]:
        yield from channel.agree()
        texts = yield from channel.gather_texts(json.dumps(value))
        gathered.extend(map(json.loads, texts))
        return []

    contribution: Any = value if isinstance(value, Exception) else NOTHING
    try:
        begin(operation, {"gather": gather}, contribution, comm, "auto").wait()
    finally:
        value = contribution = None  # an error, its traceback and this frame would hold each other
    return gathered


def check_same(what: str, given: list[dict[str, str]]) -> None:
    """Raise CollectiveError where what the ranks gave, by name, is not the same; alike on all that have it."""
    for rank, theirs in enumerate(given):
        for name in given[0] | theirs:
            first, here = given[0].get(name, "missing"), theirs.get(name, "missing")
            if first != here:
                raise CollectiveError(
                    f"all ranks must have the same {what}: {name!r} is {first} on rank 0, and {here} on rank {rank}"
                )


def raise_together(error: Exception | None, comm: Any, operation: str) -> None:
    """Raise on all ranks where one has an error: that error on its own rank, CollectiveError on the others.

    All ranks have completed the same collectives: so MPI's own sum of who failed is enough, which is faster than
    messages that say what each rank calls. Those follow where the sum is not zero.
    """
    failed = np.array([error is not None], np.float32)

    def compare(offer: Offer, channel: Channel) -> Steps[list[Any]]:
        with channel.turn() as turn:
            yield (turn,)
            reduction = channel.endpoint.reduce(failed)
        yield (reduction,)
        if reduction.total[0]:
            channel.error = error
            raise DisagreementError
        return []

    try:
        begin(operation, {"compare": compare}, NOTHING, comm, "auto").wait()
    finally:
        error = None  # it, its traceback and this frame would hold each other


def agree_to_keep(error: Exception | None, comm: Any, operation: str) -> None:
    """Return on all ranks that live, where none has an error and none died; else raise on all of them."""
    if not failure.survives():
        raise_together(error, comm, operation)
    elif not recovery.agree(error is None, comm):
        try:
            raise error or CollectiveError(
                f"{operation}: a rank died, or failed, before the step was kept: the step is undone on all ranks"
            )
        finally:
            del error


def note_failure(error: Exception, comm: Any, operation: str, *, known: bool) -> None:
    """Take part in `agree_to_keep` with a step that failed here, and raise nothing: the error itself says more.

    known: to all ranks, as a collective raised it; then they wait for each other only where MPI survives a death.
    """
    with suppress(Exception):
        if failure.survives():
            recovery.agree(False, comm)
        elif not known:
            raise_together(error, comm, operation)
