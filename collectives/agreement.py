"""Raise on every rank, or on none.

What must be the same on all ranks, the `Terms`, travels in the envelope of every message. A rank that sees a difference
stops there, and one that brought a bad argument does not begin: it says to every other rank what it brought, its last
word, and hears theirs. Who waits for a message of such a rank gets its last word at the latest, and stops as well. In
every collective's schedule, or in the round of terms before it, a rank hears of every other one before it ends: so all
ranks know, and all raise.

Two schedules need not meet where one of them begins with a message of every rank to every other one, as the exact
gTop-k does: no rank of the other schedule waits in vain for one of this kind, which has sent to all, and what this one
waits for is a message of the other schedule, or a last word.
"""

import json
from typing import Any, Protocol, TypeVar

from collectives.channel import Channel, DisagreementError
from collectives.messages import Steps
from collectives.terms import Terms
from mpicomp.errors import CollectiveError

T = TypeVar("T")


class Account(Protocol):
    """What the debug mode asks of an operation; see `collectives.checking`."""

    def account(self, result: Any) -> dict[str, Any]:
        """Return this rank's part, in numbers."""
        ...

    def judge(self, accounts: list[dict[str, Any]]) -> None:
        """Raise on all ranks where the parts do not add up."""
        ...


_ALIGNED = (
    "; aligned supports come from CyclicLeader, and from RandomK and BlockRandomK with aligned=True and the same "
    "seed and step on all ranks; for another compressor take sparse_allreduce"
)


def all_or_none(channel: Channel, steps: Steps[T], watch: Account | None = None) -> Steps[T]:
    """Run an operation's steps to their end; then return their result on every rank, or raise on every rank.

    watch: with it the ranks also report what it says of the result, and it may raise.

    Raises this rank's own error where it brought one, else CollectiveError naming the ranks and what they brought.
    """
    if channel.error is None:
        try:
            result = yield from steps
            if watch is not None:
                accounts = yield from channel.gather_texts(json.dumps(watch.account(result)))
                watch.judge([json.loads(account) for account in accounts])
            return result
        except DisagreementError:
            pass
    words = yield from channel.last_words(_report(channel))
    try:
        if channel.error is not None:
            raise channel.error
        raise CollectiveError(verdict(channel.terms.operation, [json.loads(each) for each in words]))
    finally:
        del channel, steps  # else the error, its traceback and this frame hold each other


def verdict(operation: str, reports: list[dict[str, Any]]) -> str:
    """Return the message that names who brought what; `reports` stand in rank order."""
    faults = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
    sound = {rank: report["terms"] for rank, report in enumerate(reports) if not report["error"]}
    for field in Terms._fields:  # in their order: where the first ones differ, so does what follows
        brought: dict[Any, list[int]] = {}
        for rank, terms in sound.items():
            brought.setdefault(terms[field], []).append(rank)
        if len(brought) > 1 and field == "support":
            differ = "the supports differ: one on " + ", another on ".join(map(named_ranks, brought.values()))
            faults.append(differ + (_ALIGNED if operation == "aligned_allreduce" else ""))
        elif len(brought) > 1:
            who = "; ".join(f"{value} on {named_ranks(ranks)}" for value, ranks in brought.items())
            faults.append(f"{field} must be the same on all ranks, got {who}")
            if field in ("operation", "votes"):
                break
    return f"{operation} raised on all {len(reports)} ranks, nothing was changed. " + ". ".join(faults)


def _report(channel: "Channel") -> str:
    error = None if channel.error is None else f"{type(channel.error).__name__}: {_words(channel.error)}"
    return json.dumps({"terms": channel.terms._asdict(), "error": error})


def _words(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # its own fault must not keep the other ranks waiting
        return "(it cannot be printed)"


def named_ranks(ranks: list[int]) -> str:
    """Return "rank 3", "ranks 0-2" or "ranks 0, 2, 5": runs of more than two are joined."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown)
