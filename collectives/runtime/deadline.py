"""Deadlines: the notices of ranks that waited too long (docs/reliability.md, "Deadlines").

A rank that gives up sends all others a notice of the ranks it waits for, and receives
theirs: ranks that wait too give up at once and answer, also those that wait on another
communicator. So the error names the ranks that did not respond, or, if all did, which
rank waits for which (`state.Faults`).
"""

from typing import TYPE_CHECKING

import numpy as np

from collectives.faults import ulfm
from collectives.faults.state import Faults
from collectives.runtime.messages import (
    LINE,
    Arrival,
    Pending,
    Sending,
    notice_tag,
    probed,
    send_pieces,
)

if TYPE_CHECKING:
    from mpi4py import MPI

# Seconds in which the other ranks may answer, and no longer than the timeout.
GRACE = 1.0


def send_notices(faults: Faults, notice: str, abandoned: list[Pending]) -> None:
    """Send a notice to all other ranks, without waiting.

    abandoned: the messages are appended to it, as MPI may own them while their
    receivers are absent.
    """
    comm = faults.comm
    text = notice.encode()
    message = np.frombuffer(text.ljust(-(-len(text) // LINE) * LINE), np.uint8)
    for rank in range(comm.size):
        try:
            if rank != comm.rank:
                abandoned.append(
                    Sending(*send_pieces(comm, message, rank, notice_tag()))
                )
        except Exception as error:
            if not ulfm.is_failure(error):
                raise
            faults.identify(ulfm.known_dead(comm))


def has_notice(faults: Faults, status: "MPI.Status | None" = None) -> bool:
    """Return whether another rank's notice has arrived."""
    from mpi4py import MPI

    comm = faults.comm
    try:
        return bool(comm.Iprobe(MPI.ANY_SOURCE, notice_tag(), status))
    # A rank died: operations that wait for it raise, or the deadline passes.
    except MPI.Exception as error:
        if not ulfm.is_failure(error):
            raise
        return False


def receive_notice(faults: Faults) -> bool:
    """Receive another rank's notice, if one has arrived; return whether it has."""
    status = probed()
    if not has_notice(faults, status):
        return False
    comm = faults.comm
    arrival = Arrival(comm, status.Get_source(), notice_tag())
    arrival.wait()
    faults.receive(arrival.source, arrival.buffer.tobytes().decode())
    return True
