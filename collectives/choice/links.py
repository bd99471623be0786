"""The links between nodes, as the choice takes them: latency and rate, named, given or measured.

`measured` sends a few messages between the first ranks of neighbouring nodes, one pair beside the other, and takes the
slowest pair. It takes milliseconds. Both figures are rounded to powers of 10 times those of 1 Gbit/s, about as coarsely
as formulas are right: two runs over the same links get the same figures, hence the same algorithms and bits, unless a
link is close to the middle between two powers. MPICOMP_NETWORK, read on rank 0, determines the figures instead.
"""

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from collectives.choice.formulas import Cost

if TYPE_CHECKING:
    from mpi4py import MPI

VARIABLE = "MPICOMP_NETWORK"
OWN_LATENCY = 10e-6  # seconds that this library spends on a message
MESSAGE, MERGED = 8e-6, 3e-9  # seconds of a further message of a round, and of a merged entry
LATENCY_INSIDE, BYTE_INSIDE = 5e-6, 1.5e-10  # seconds of a message, and of a byte, inside a node
SWITCH = 50e-6  # seconds of a round, for each rank that shares a core: the others wait for it
STEP = 10.0  # measured figures are rounded to powers of it
SHORT_TRIPS, TRIPS = 20, 3  # round trips of a short message, and of each longer one
LONG_ENOUGH = 1e-3  # seconds of a message from which no longer one is sent
SHORTEST, LONGEST, GROWTH = 1 << 16, 1 << 24, 4  # bytes of the messages that measure the rate
_OWN = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit(?::(\d+(?:\.\d+)?)(ns|us|ms|s))?")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_PAYLOAD = 0.944  # of the bits on a link; the rest are headers and gaps of TCP over Ethernet
TAG = 0  # nothing else has been sent on the library's duplicate by then


@dataclass(frozen=True)
class Links:
    """Links between nodes. latency: seconds of a short message. rate: bytes a second of the link of a node."""

    latency: float
    rate: float

    def constants(self, ranks: int, crowding: float = 1.0) -> Cost:
        """Return the constants (see `formulas.seconds`) of messages that `ranks` ranks of a node send at once."""
        return self.latency + OWN_LATENCY, MESSAGE, ranks / self.rate, MERGED * crowding

    def rounded(self) -> "Links":
        """Return the links with both figures at powers of `STEP` times those of 1 Gbit/s."""
        near = NETWORKS["1gbit"]
        return Links(near.latency * _power(self.latency / near.latency), near.rate * _power(self.rate / near.rate))


NETWORKS = {
    "100mbit": Links(100e-6, 11.8e6),
    "1gbit": Links(40e-6, 118e6),
    "10gbit": Links(20e-6, 1.18e9),
    "25gbit": Links(10e-6, 2.95e9),
    "100gbit": Links(2e-6, 12e9),
    "hdr": Links(1.5e-6, 24e9),
}


def inside(crowding: float) -> Cost:
    """Return the constants (see `formulas.seconds`) of messages inside a node.

    crowding: ranks that share a core; below 1 a rank copies and adds so much faster than one core, as a GPU does.
    """
    if crowding <= 1:
        return OWN_LATENCY + LATENCY_INSIDE, MESSAGE, BYTE_INSIDE * crowding, MERGED * crowding
    return SWITCH * crowding, SWITCH / 2 * crowding, BYTE_INSIDE * crowding, MERGED * crowding


def links_of(text: str) -> Links:
    """Return the links of a named network, or of a rate with or without a delay: "25gbit", "10gbit:50us".

    Without a delay: that of the fastest named network with TCP that is not faster, or of the slowest one. Raises
    ValueError for other texts.

    >>> links_of("10gbit:50us")
    Links(latency=5e-05, rate=1180000000.0)
    """
    if text in NETWORKS:
        return NETWORKS[text]
    found = _OWN.fullmatch(text.lower())
    if found is None or not float(found[1]) > 0:
        raise ValueError(
            f"got {text!r}: expected one of {', '.join(NETWORKS)}, or a rate, with or without a delay: 10gbit:50us"
        )
    rate = float(found[1]) * _UNITS[found[2]] / 8 * _PAYLOAD
    if found[3]:
        return Links(float(found[3]) * _UNITS[found[4]], rate)
    known = [each for name, each in NETWORKS.items() if name.endswith("bit")]
    return Links(next((each.latency for each in reversed(known) if each.rate <= rate), known[0].latency), rate)


def agreed_links(comm: "MPI.Intracomm", nodes: Sequence[int]) -> Links:
    """Return the links between the nodes: those that MPICOMP_NETWORK names on rank 0, else `measured`. Collective.

    nodes: the first rank of each rank's node. Raises ValueError on all ranks for a bad MPICOMP_NETWORK.
    """
    text = comm.bcast(os.environ.get(VARIABLE, ""))
    if not text:
        return measured(comm, nodes) if len(set(nodes)) > 1 else NETWORKS["1gbit"]
    try:
        return links_of(text)
    except ValueError as error:
        raise ValueError(f"the environment variable {VARIABLE} is not a network: {error}") from None


def measured(comm: "MPI.Intracomm", nodes: Sequence[int]) -> Links:
    """Return the links between the nodes, rounded, the same on all ranks. Collective, blocks.

    nodes: the first rank of each rank's node, of at least two nodes. Each second node is measured with the one before.
    """
    from mpi4py import MPI

    firsts, mine, slowest = sorted(set(nodes)), np.zeros(2), np.empty(2)
    if comm.rank in firsts:
        place = firsts.index(comm.rank)
        if place % 2:
            _echo(comm, firsts[place - 1])
        elif place + 1 < len(firsts):
            mine[:] = _timed(comm, firsts[place + 1])
    comm.Allreduce(mine, slowest, MPI.MAX)
    return Links(float(slowest[0]), 1 / float(slowest[1])).rounded()


def _timed(comm: "MPI.Intracomm", partner: int) -> tuple[float, float]:
    """Return the seconds of a short message and of a byte, measured with a rank that runs `_echo`."""
    latency = _trip(comm, partner, 1, SHORT_TRIPS)
    nbytes = SHORTEST
    while (taken := _trip(comm, partner, nbytes, TRIPS)) < LONG_ENOUGH and nbytes < LONGEST:
        nbytes *= GROWTH
    comm.Send(np.empty(0, np.uint8), partner, TAG)
    return latency, max(taken - latency, taken / 2) / nbytes


def _trip(comm: "MPI.Intracomm", partner: int, nbytes: int, trips: int) -> float:
    """Return half of the fastest of some round trips: what delayed the others was not the link."""
    buffer, times = np.zeros(nbytes, np.uint8), []
    for _ in range(trips):
        start = time.perf_counter()
        comm.Send(buffer, partner, TAG)
        comm.Recv(buffer, partner, TAG)
        times.append(time.perf_counter() - start)
    return max(1e-9, min(times) / 2)


def _echo(comm: "MPI.Intracomm", partner: int) -> None:
    """Send back what the partner sends, until that is empty."""
    from mpi4py import MPI

    nbytes, status = 1, MPI.Status()
    while nbytes:
        comm.Probe(partner, TAG, status)
        buffer = np.empty(nbytes := status.Get_count(MPI.BYTE), np.uint8)
        comm.Recv(buffer, partner, TAG)
        if nbytes:
            comm.Send(buffer, partner, TAG)


def _power(ratio: float) -> float:
    """Return the power of `STEP` that is nearest to a positive ratio."""
    return float(STEP ** round(math.log(ratio, STEP)))
