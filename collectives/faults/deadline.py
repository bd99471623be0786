"""Deadlines: a rank that waits too long gives up, notifies the others, and raises an error that names absent ranks.

Off unless asked for (`configure`). The clock runs while a rank waits inside the library, and starts anew whenever
something moves. A rank that gives up sends every other rank a notice of what it waits for, and awaits theirs: those
that wait as well give up at once and answer. So the error names the ranks that did not respond; where all did, it says
who waits for whom, as where ranks call different collectives that deadlock (`state.Faults`).

After that the library no longer uses the communicator: calls on it raise at once, on a late rank as soon as it makes
one. Other communicators stay usable. A late rank may find all that it needs and return a result where the others
raised: it cannot be notified in time.
"""

import time

import numpy as np

from collectives.faults import ulfm
from collectives.runtime.link import Link
from collectives.runtime.messages import LINE, Pending, new_status

GRACE = 1.0  # seconds in which the others may answer; no longer than the timeout


def exchange_notices(link: Link, notice: str, timeout: float | None, abandoned: list[Pending]) -> None:
    """Send a notice to all other ranks, and receive theirs, until all that may send one did, or the time is up.

    abandoned: is given the messages, which MPI may own for as long as their receivers are absent.
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


def has_notice(link: Link) -> bool:
    """Return whether a notice of another rank has arrived."""
    from mpi4py import MPI

    try:
        return link.comm.Iprobe(MPI.ANY_SOURCE, link.notice_tag)
    except MPI.Exception as error:  # a rank died: what waits for it raises, or the deadline passes
        if not ulfm.is_failure(error):
            raise
        return False


def receive_notice(link: Link) -> bool:
    """Receive the notice of another rank, where one has arrived; return whether one has."""
    from mpi4py import MPI

    status = new_status()
    if not has_notice(link) or not link.comm.Iprobe(MPI.ANY_SOURCE, link.notice_tag, status):
        return False
    arrival = link.receive(status.Get_source(), link.notice_tag)
    arrival.wait()
    link.faults.receive(arrival.source, arrival.buffer.tobytes().decode())
    return True
