"""Deadlines: a rank that waits too long notifies the others, and raises an error that names the absent ranks.

Off unless set by `configure`. The clock runs while a rank waits inside the library. It restarts when a message moves,
and when this rank itself did not run (SIGSTOP, `scontrol suspend`, a frozen cgroup). A rank that gives up sends all
others a notice of the ranks it waits for, and receives their notices: ranks that wait too give up at once and answer.
So the error names the ranks that did not respond. If all did, as in a deadlock of different collectives, it lists which
rank waits for which (`state.Faults`).

Then the library no longer uses the communicator: all later calls on it raise at once. Other communicators stay usable.
A late rank may have received all its messages, and return a result although the others raised. In the first call on a
communicator the notices are sent on that communicator (`runtime.link.FirstCall`).
"""

import math
import time
from typing import TypeAlias

import numpy as np

from collectives.faults import ulfm
from collectives.runtime.link import FirstCall, Link
from collectives.runtime.messages import LINE, Pending, new_status

Ranks: TypeAlias = Link | FirstCall

GRACE = 1.0  # seconds in which the others may answer; no longer than the timeout
_PAUSE = 0.1  # seconds between two looks at a clock, at most, where ranks share cores


class Clock:
    """Seconds that this rank has waited since a message moved.

    timeout: of the deadline, in seconds; None for none. If two readings are more than half of it apart, and more than a
    pause, this rank did not run in between.
    """

    def __init__(self, timeout: float | None) -> None:
        self._gap = max((timeout or math.inf) / 2, _PAUSE)
        self.restart()

    def restart(self) -> None:
        """Count from now on: a message moved."""
        self._began = self._looked = time.monotonic()

    def waited(self) -> float:
        """Read the clock; return the seconds."""
        now, before = time.monotonic(), self._looked
        if now - before > self._gap:
            self._began = now
        self._looked = now
        return now - self._began


def exchange_notices(link: Ranks, notice: str, timeout: float | None, abandoned: list[Pending]) -> None:
    """Send a notice to all other ranks, and receive theirs, until all awaited ones have arrived or the time is up.

    abandoned: the messages are appended to it, as MPI may own them while their receivers are absent.
    """
    text = notice.encode()
    message = np.frombuffer(text.ljust(-(-len(text) // LINE) * LINE), np.uint8)
    for rank in range(link.size):
        try:
            if rank != link.rank:
                abandoned.append(link.send(message, rank, link.notice_tag))
        except Exception as error:
            if not ulfm.is_failure(error):
                raise
            link.faults.identify(ulfm.known_dead(link.comm))
    end = time.monotonic() + min(GRACE, timeout or GRACE)
    while link.faults.awaited and time.monotonic() < end:
        if not receive_notice(link):
            time.sleep(1e-3)


def has_notice(link: Ranks) -> bool:
    """Return whether another rank's notice has arrived."""
    from mpi4py import MPI

    try:
        return link.comm.Iprobe(MPI.ANY_SOURCE, link.notice_tag)
    except MPI.Exception as error:  # a rank died: what waits for it raises, or the deadline passes
        if not ulfm.is_failure(error):
            raise
        return False


def receive_notice(link: Ranks) -> bool:
    """Receive another rank's notice, if one has arrived; return whether it has."""
    from mpi4py import MPI

    status = new_status()
    if not has_notice(link) or not link.comm.Iprobe(MPI.ANY_SOURCE, link.notice_tag, status):
        return False
    arrival = link.receive(status.Get_source(), link.notice_tag)
    arrival.wait()
    link.faults.receive(arrival.source, arrival.buffer.tobytes().decode())
    return True
