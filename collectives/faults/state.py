"""State machine of the faults of a communicator: events in, notices and errors out. No MPI, no clock, no I/O.

A bad argument, arguments that differ (`disagreement`) and an interrupt end one
operation on all of its ranks. After the other faults (`Faults`) the library no longer
uses the communicator:

    usable --give_up--> notices are awaited --error--> finished
    usable --die, shrink, free-----------------------> finished

Invariants: the first event on a rank determines its error; later ones change nothing.
All operations in flight and all later ones raise the same text, from the notices that
have arrived when it is first raised.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from collectives.faults.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    DamagedMessageError,
    NotFiniteError,
    RankFailedError,
    StepSkippedError,
)

_ORDER = (
    "If the ranks use their communicators in another order: make and step exchanges, and call collectives, in the same "
    "order on all ranks. "
)
_SAME_ORDER = (
    ": make and step exchanges and loops, and call collectives, in the same order on "
    "all ranks"
)
_REMEDY = "The library no longer uses this communicator: end the job, or continue on another communicator"


class Faults:
    """The faults of one communicator on one rank; the only writer of this state.

    rank, size: this rank, and the number of ranks. comm: the communicator, for the
    functions that send notices on it.
    """

    def __init__(self, rank: int, size: int, comm: Any = None) -> None:
        self.comm = comm
        self._rank = rank
        self._others = set(range(size)) - {rank}
        self._raised_as: type[CollectiveError] | None = None
        # Text of the error; empty as long as notices may change it.
        self._text = ""
        # Notices of the ranks that gave up, by rank, and this rank's own.
        self._notices: dict[int, dict[str, Any]] = {}
        self._doing = ""
        self._dead = set[int]()

    @property
    def finished(self) -> bool:
        """Whether operations in flight and later ones raise `error`."""
        return self._raised_as is not None

    @property
    def awaited(self) -> set[int]:
        """The ranks whose notices may still arrive; none once the error has been raised."""
        if self._rank not in self._notices or self._text:
            return set()
        return self._others - self._notices.keys() - self._dead

    def give_up(
        self,
        operation: str,
        round_number: int,
        awaiting: Iterable[int],
        *,
        waited: float = 0.0,
        damage: str | None = None,
        elsewhere: bool = False,
    ) -> str | None:
        """Stop using the communicator; return the notice for every other rank, None if it is finished already.

        round_number: 0 before the first message. awaiting: the ranks whose messages
        this rank waits for. waited: seconds, after a deadline. damage: a description of
        the damaged message, if there is one. elsewhere: this rank waits on another
        communicator, and answers.
        """
        if self.finished:
            return None
        self._raised_as = CollectiveTimeoutError
        mine = {
            "operation": operation,
            "round": round_number,
            "for": sorted(awaiting),
            "waited": waited,
            "elsewhere": elsewhere,
        }
        self._notices[self._rank] = {**mine, "damage": damage}
        return json.dumps(self._notices[self._rank])

    def receive(self, source: int, notice: str) -> None:
        """Store the notice of another rank."""
        self._notices[source] = json.loads(notice)

    def die(self, doing: str) -> None:
        """Stop using the communicator, as a rank died. doing: the interrupted operation, for the text."""
        if not self.finished:
            self._raised_as = RankFailedError
            self._doing = doing

    def identify(self, dead: Iterable[int]) -> None:
        """Store the ranks that MPI reports as dead: they send no notice."""
        self._dead |= set(dead)

    def shrink(self) -> None:
        """Stop using the communicator, as the ranks continue on another one."""
        if not self.finished:
            self._raised_as = RankFailedError
            self._text = "the communicator was shrunk: use the one that shrink returned"

    def free(self, operation: str) -> None:
        """Stop using the communicator, as it is freed with `operation` in flight."""
        if not self.finished:
            self._raised_as = CollectiveError
            self._text = f"the communicator was freed with {operation} in flight: complete requests first"

    def error(self) -> CollectiveError:
        """Return the error of every operation on the finished communicator; it names the ranks at fault."""
        assert self._raised_as is not None, "the communicator is usable"
        self._text = self._text or self._described()
        return self._raised_as(self._text)

    def _described(self) -> str:
        """Return the text of the error, and determine its type: if any rank found damage, all ranks raise that."""
        if self._raised_as is RankFailedError:
            who = named_ranks(self._dead) if self._dead else "a rank"
            remedy = (
                "collectives.shrink(comm) returns a communicator of the ranks that live"
            )
            return f"{self._doing}: {who} died. The library no longer uses this communicator: {remedy}"
        damage = [
            f"rank {rank}: {notice['damage']}"
            for rank, notice in sorted(self._notices.items())
            if notice["damage"]
        ]
        if not damage:
            elsewhere = any(notice["elsewhere"] for notice in self._notices.values())
            order = _ORDER if elsewhere else ""
            return f"{self._reason()}; {self._absent()}. {order}{_REMEDY}"
        self._raised_as = DamagedMessageError
        mine = self._notices[self._rank]
        return f"{mine['operation']} stopped in round {mine['round']}. {'; '.join(damage)}. {_REMEDY}"

    def _reason(self) -> str:
        """Return the reason for giving up: this rank waited too long, or another rank did."""
        mine = self._notices[self._rank]
        operation = mine["operation"]
        where = f"in round {mine['round']}, waiting for {_named(mine['for'])}"
        if mine["waited"]:
            timed_out = f"{operation} timed out after {mine['waited']:.3g} s"
            return f"{timed_out} {where}" if mine["round"] else timed_out
        expired = [rank for rank, notice in self._notices.items() if notice["waited"]]
        for_this = [
            rank for rank in expired if self._rank in self._notices[rank]["for"]
        ]
        who = named_ranks(for_this or expired) if expired else "another rank"
        others = f"{who} timed out{self._after('after')}"
        if for_this:
            others += f", waiting for rank {self._rank}"
        if mine["elsewhere"]:
            return f"this rank waited in {operation}{_elsewhere(mine)}: {others}"
        if mine["round"]:
            return f"{operation} stopped {where}: {others}"
        return f"{operation} was called on rank {self._rank} after the deadline of the others: {others}"

    def _absent(self) -> str:
        """Return the ranks that sent no notice; if all did, which rank waits for which."""
        texts = [f"{named_ranks(self._dead)} died"] if self._dead else []
        if absent := self._others - self._notices.keys() - self._dead:
            texts.append(
                f"{named_ranks(absent)} did not respond{self._after('within')}"
            )
        return ", ".join(texts) or "all ranks responded: " + "; ".join(
            f"rank {rank} waits in round {notice['round']} of {notice['operation']} for {_named(notice['for'])}"
            + _elsewhere(notice)
            for rank, notice in sorted(self._notices.items())
            # A rank that called after the deadline waits for no rank.
            if any(notice[key] for key in ("waited", "for", "round", "elsewhere"))
        )

    def _after(self, word: str) -> str:
        longest = max(notice["waited"] for notice in self._notices.values())
        return f" {word} {longest:.3g} s" if longest else ""


def report(
    call: Mapping[str, Any], error: BaseException | None, *, broken: bool = False
) -> str:
    """Return the report of a failed operation that a rank sends to all others: its arguments, or its own error.

    broken: the rank broke off in the middle of the schedule, and some ranks may have
    the result.
    """
    text = None if error is None else _words(error)
    skip = isinstance(error, NotFiniteError)
    return json.dumps(
        {"call": dict(call), "error": text, "skip": skip, "broken": broken}
    )


def disagreement(
    operation: str, reports: Sequence[Mapping[str, Any]]
) -> CollectiveError:
    """Return the error of ranks without an error of their own: it names who contributed what.

    reports: the contents of `report` of all ranks, in rank order. The error names the
    first argument that differs, as later ones then differ too. StepSkippedError, which
    all ranks raise, if `NotFiniteError` is the only error.
    """
    faults = []
    broken = []
    skips = 0
    sound = {}
    for rank, contents in enumerate(reports):
        if contents["error"] is None:
            sound[rank] = contents["call"]
            continue
        faults.append(f"rank {rank}: {contents['error']}")
        skips += contents["skip"]
        if contents["broken"]:
            broken.append(faults[-1])
    if broken:
        return CollectiveError(
            f"{operation} broke off in the middle of its rounds: {'; '.join(broken)}. Ranks that had ended it have "
            "the result: the next operation on the communicator raises on all ranks"
        )
    for name in {name: None for call in sound.values() for name in call}:
        if who := differing((rank, call.get(name)) for rank, call in sound.items()):
            faults.append(f"{name} must be the same on all ranks, got {who}")
            if name == "operation":
                faults[-1] += _SAME_ORDER
                break
    text = (
        f"{operation} raised on all {len(reports)} ranks, nothing was changed. "
        + ". ".join(faults)
    )
    if skips == len(faults) > 0:
        return StepSkippedError(text)
    return CollectiveError(text)


def differing(values: Iterable[tuple[int, Any]]) -> str:
    """Return the values of the ranks, such as "5 on ranks 0, 2; 6 on rank 1", if they differ, else an empty text."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    named = [
        f"{value} on {named_ranks(its_ranks)}" for value, its_ranks in ranks.items()
    ]
    return "; ".join(named) if len(named) > 1 else ""


def named_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", "ranks 0-2" or "ranks 0, 2, 5": runs of three or more are abbreviated."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    ]
    word = "rank" if [len(run) for run in runs] == [1] else "ranks"
    return f"{word} {', '.join(shown)}"


def _named(ranks: list[int]) -> str:
    # Without awaited ranks the rank waits for its own message to be sent, or for MPI's
    # own reduction.
    return named_ranks(ranks) if ranks else "MPI"


def _elsewhere(notice: Mapping[str, Any]) -> str:
    return " on another communicator" if notice["elsewhere"] else ""


def _words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        # A fault in the error's own text must not keep the other ranks waiting.
        return f"{type(error).__name__}: (it cannot be printed)"
