"""Raise on every rank, or on none.

What must be the same on all ranks, the `Terms`, travels in the envelope of every message. A rank that sees a
difference, hears of one, or brought a bad argument itself, goes on through the schedule with empty vectors marked as
broken. Every collective's schedule, or the round of terms before it, lets each rank hear of every other, so at its end
all ranks know. Then, and only then, they spend one more allgather on who brought what, and all raise.
"""

import json
from dataclasses import asdict
from typing import Any, TypeVar

from collectives.channel import Channel, payload
from collectives.messages import Buffer, Steps
from collectives.terms import Terms
from mpicomp.errors import CollectiveError

T = TypeVar("T")


def all_or_none(channel: Channel, steps: Steps[T]) -> Steps[T]:
    """Run an operation's steps to their end; then return their result on every rank, or raise on every rank.

    Raises this rank's own error where it brought one, else CollectiveError naming the ranks and what they brought.
    """
    result = yield from steps
    if not channel.broken:
        return result
    blocks = yield from channel.gather_all(_report(channel))
    said = verdict(channel.terms.operation, [json.loads(payload(block).tobytes()) for block in blocks])
    try:
        raise channel.error or CollectiveError(said)
    finally:
        del channel, steps  # else the error, its traceback and this frame hold each other


def verdict(operation: str, reports: list[dict[str, Any]]) -> str:
    """Return the message that names who brought what; `reports` stand in rank order."""
    faults = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
    sound = {rank: report["terms"] for rank, report in enumerate(reports) if not report["error"]}
    for field in Terms.__dataclass_fields__:  # in their order: where the first ones differ, so does what follows
        brought: dict[Any, list[int]] = {}
        for rank, terms in sound.items():
            brought.setdefault(terms[field], []).append(rank)
        if len(brought) > 1 and field == "support":
            faults.append("the supports differ: one on " + ", another on ".join(map(_ranks, brought.values())))
        elif len(brought) > 1:
            who = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in brought.items())
            faults.append(f"{field} must be the same on all ranks, got {who}")
            if field in ("operation", "votes"):
                break
    return f"{operation} raised on all {len(reports)} ranks, nothing was changed. " + ". ".join(faults)


def _report(channel: "Channel") -> Buffer:
    error = channel.error and f"{type(channel.error).__name__}: {_words(channel.error)}"
    text = json.dumps({"terms": asdict(channel.terms), "error": error}).encode()
    return channel.frame(text)


def _words(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # its own fault must not keep the other ranks waiting
        return "(it cannot be printed)"


def _ranks(ranks: list[int]) -> str:
    """Return "rank 3", "ranks 0-2" or "ranks 0, 2, 5": runs of more than two are joined."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown)
