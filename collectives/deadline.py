"""Deadlines: a rank that waits too long gives up, tells the others, and says who did not come.

Off unless asked for (`configure`). The clock runs while a rank waits inside the library, and starts anew whenever
something moves. A rank that gives up sends each other rank a notice of what it waits for, and listens for theirs: those
that wait as well give up at once and answer. So the error names the ranks that sent none; where all did, it says who
waits in what, as where ranks call different collectives that do not meet.

After that the library's duplicate of the communicator is revoked: calls on the communicator raise at once, on a rank
that comes later as soon as it looks. Other communicators are as good as before. A rank that is late may find all that
it needs and return a result where the others raised: nobody can tell it in time.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.failure import is_failure
from collectives.messages import LINE, Buffer
from collectives.transport import Endpoint
from mpicomp.errors import DamagedMessageError

_REVOKED = "The communicator is revoked for this library: end the job, or go on with another communicator"
GRACE = 1.0  # seconds in which the others may answer; no longer than the timeout


def give_up(endpoint: Endpoint, mine: dict[str, Any], waited: float, timeout: float) -> None:
    """Revoke the endpoint, receive the notices of other ranks that give up, and leave the error's text there.

    mine: the operation and round in which this rank waits, and the ranks that it waits for; or the damage it met with.
    """
    mine = {**mine, "waited": waited}
    text = json.dumps(mine).encode()
    notice = np.frombuffer(text.ljust(-(-len(text) // LINE) * LINE), np.uint8)
    others = [rank for rank in range(endpoint.size) if rank != endpoint.rank]
    _tell(endpoint, others, notice, endpoint.notice_tag)
    heard, end = {endpoint.rank: mine}, time.monotonic() + min(GRACE, timeout)
    while len(heard) < endpoint.size and time.monotonic() < end:
        arrived = endpoint.notice()
        if arrived is None:
            time.sleep(1e-3)
        else:
            heard[arrived[0]] = json.loads(arrived[1].tobytes())
    endpoint.gave_up = heard.keys() - {endpoint.rank}
    endpoint.revoked = _verdict(endpoint.rank, heard, [rank for rank in others if rank not in heard], timeout)
    if any("damage" in each for each in heard.values()):
        endpoint.revoked_as = DamagedMessageError


def meet_those_that_gave_up(endpoint: Endpoint, end: float) -> None:
    """Tell the others that this rank is done, and wait until those that gave up as well are, or for the time `end`."""
    others = [rank for rank in range(endpoint.size) if rank != endpoint.rank]  # one may have heard of fewer than it did
    _tell(endpoint, others, np.zeros(LINE, np.uint8), endpoint.saved_tag)
    arrivals = [endpoint.receive(rank, endpoint.saved_tag) for rank in sorted(endpoint.gave_up)]
    while not all([arrival.test() for arrival in arrivals]) and time.monotonic() < end:
        time.sleep(1e-3)
    endpoint.abandoned += arrivals


def _tell(endpoint: Endpoint, ranks: Sequence[int], message: Buffer, tag: int) -> None:
    for rank in ranks:
        try:
            endpoint.abandoned.append(endpoint.send(message, rank, tag))
        except Exception as error:
            if not is_failure(error):  # the dead need not be told
                raise


def _verdict(own: int, heard: dict[int, dict[str, Any]], silent: list[int], timeout: float) -> str:
    mine = heard[own]
    damage = [f"rank {rank}: {each['damage']}" for rank, each in heard.items() if "damage" in each]
    if damage:
        return f"{mine['operation']} gave up in round {mine['round']}. " + ". ".join(damage) + ". " + _REVOKED
    said = _reason(own, heard, timeout)
    if silent:
        said += f"Silent: {_named(silent)}. "
    else:
        said += "No rank is silent: " + "; ".join(
            f"rank {rank} waits in round {each['round']} of {each['operation']} for {_named(each['for'])}"
            for rank, each in sorted(heard.items())
        )
        said += ". "
    return said + _REVOKED


def _reason(own: int, heard: dict[int, dict[str, Any]], timeout: float) -> str:
    """Return why this rank gives up: it waited too long itself, or other ranks did, for this rank or for another."""
    mine, others = heard[own], [rank for rank in sorted(heard) if rank != own]
    longest = max((heard[rank]["waited"] for rank in others), default=0.0)
    if not mine["round"]:  # it had not sent a message yet
        return (
            f"{mine['operation']} was called too late on rank {own}: {_named(others)} had given up waiting for this "
            f"rank after {longest:.3g} s. "
        )
    said = f"{mine['operation']} gave up after {mine['waited']:.3g} s in round {mine['round']}"
    said += f", waiting for {_named(mine['for'])}"
    if mine["waited"] > timeout or not others:
        return f"{said}. "
    for_this = [rank for rank in others if own in heard[rank]["for"]]
    if for_this:
        return f"{said}: {_named(for_this)} had given up waiting for this rank (rank {own}) after {longest:.3g} s. "
    return f"{said}: {_named(others)} had given up, after {longest:.3g} s. "


def _named(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks) if ranks else "MPI"
