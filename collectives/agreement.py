"""Raise on every rank, or on none.

What must be the same on all ranks, the `Terms`, travels in the envelope of every message, so no extra round is spent on
checking it. A rank that sees a difference, hears of one, or brought a bad argument itself, goes on through the schedule
with empty vectors marked as broken. Every collective's schedule lets each rank hear of every other, so at its end all
ranks know. Then, and only then, they spend one more allgather on who brought what, and all raise.
"""

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collectives.transport import Buffer, Pending
from mpicomp.errors import CollectiveError

if TYPE_CHECKING:
    from collectives.channel import Channel

T = TypeVar("T")
Steps = Generator[tuple[Pending, ...], None, T]

# An operation and an algorithm travel as their places here.
OPERATIONS = (
    "sparse_allgather",
    "sparse_allreduce",
    "sparse_reduce_scatter",
    "sparse_reduce",
    "sparse_bcast",
    "gtopk_allreduce",
    "dense_allreduce",
)
ALGORITHMS = (
    "auto",
    "dissemination",
    "allgather",
    "recursive_doubling",
    "split",
    "split_allgather",
    "recursive_halving",
    "dense",
    "tree",
    "exact",
    "mpi",
)


@dataclass(frozen=True)
class Terms:
    """What every rank has to bring alike to one operation; None where the call leaves it open."""

    operation: str
    algorithm: str
    length: int | None
    dtype: str | None
    k: int | None = None
    root: int | None = None


def all_or_none(channel: "Channel", steps: Steps[T]) -> Steps[T]:
    """Run an operation's steps to their end; then return their result on every rank, or raise on every rank.

    Raises this rank's own error where it brought one, else CollectiveError naming the ranks and what they brought.
    """
    result = yield from steps
    if not channel.broken:
        return result
    blocks = yield from channel.gather_all(_report(channel))
    if channel.error is not None:
        raise channel.error
    raise CollectiveError(verdict(channel.terms.operation, [_read(block) for block in blocks]))


def verdict(operation: str, reports: list[dict[str, Any]]) -> str:
    """Return the message that names who brought what; `reports` stand in rank order."""
    faults = [f"rank {rank}: {report['error']}" for rank, report in enumerate(reports) if report["error"]]
    sound = {rank: report["terms"] for rank, report in enumerate(reports) if not report["error"]}
    for field in Terms.__dataclass_fields__:
        brought: dict[Any, list[int]] = {}
        for rank, terms in sound.items():
            brought.setdefault(terms[field], []).append(rank)
        if len(brought) > 1:
            who = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in brought.items())
            faults.append(f"{field} must be the same on all ranks, got {who}")
    return f"{operation} raised on all {len(reports)} ranks, nothing was changed. " + ". ".join(faults)


def _report(channel: "Channel") -> Buffer:
    error = channel.error and f"{type(channel.error).__name__}: {channel.error}"
    text = json.dumps({"terms": asdict(channel.terms), "error": error}).encode()
    return channel.frame(np.frombuffer(text, np.uint8))


def _read(block: Buffer) -> dict[str, Any]:
    from collectives.channel import payload

    report: dict[str, Any] = json.loads(payload(block).tobytes())
    return report


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
