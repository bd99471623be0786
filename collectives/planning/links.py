"""The links between nodes, as the choice takes them: latency and rate, named, given or measured.

docs/collectives.md, "Costs", says when they are measured, and why they are
rounded.
"""

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

# Rounds, further messages in them, bytes and merged entries of the busiest rank.
Cost = tuple[float, float, float, float]
# Seconds of a round, of a further message in it, of a byte, and of a merged entry.
Constants = tuple[float, float, float, float]

VARIABLE = "MPICOMP_NETWORK"
# Constants in seconds; benchmarks/fit_choice.py prints what docs/results/choice-*.json
# gives for those inside a node.
OWN_LATENCY = 10e-6  # Seconds that this library spends on a message between nodes.
# Seconds of a further message of a round, and of a merged entry.
MESSAGE, MERGED = 8e-6, 3e-9
# Seconds of a round, and of a byte, inside a node.
LATENCY_INSIDE, BYTE_INSIDE = 15e-6, 1.5e-10
# Seconds of a round for each further rank that shares a core, as the other ranks wait
# for it.
SWITCH = 50e-6
# Seconds that a bucket of an exchange takes the host.
BUCKET = 4e-4
# How many times as long the messages of a bucket take, at least.
WORTH = 25
# Bytes of a bucket for each rank, at least: headers are then at most 2 % of messages of
# one bit.
SHORTEST_MESSAGE = 20_000
# Measured figures are rounded to powers of this factor.
STEP = 10.0
# Round trips of a short message, and of each longer one.
SHORT_TRIPS, TRIPS = 20, 3
# Seconds of a message from which no longer message is sent.
LONG_ENOUGH = 1e-3
# Bytes of the messages that measure the rate: the shortest and the longest, and the
# factor between two of them.
SHORTEST = 1 << 16
LONGEST = 1 << 24
GROWTH = 4
_OWN = re.compile(
    r"(\d+(?:\.\d+)?) *([kmg])(?:bit(?:/s|ps)?|bps|be)"
    r"(?:: *(\d+(?:\.\d+)?) *(ns|us|ms|s))?"
)
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# Fraction of the bits on a link that are data; the rest are headers and gaps of TCP
# over Ethernet.
_PAYLOAD = 0.944
# Tag of these messages: nothing else has been sent on the library's duplicate by then.
TAG = 0


@dataclass(frozen=True)
class Links:
    """Links between nodes. latency: seconds of a short message. rate: bytes a second of the link of a node.

    crowding: ranks that share a core, on the node with the most; below 1 for ranks
    faster than a core, as a GPU is.
    """

    latency: float
    rate: float
    crowding: float = 1.0

    def between(self, ranks: int) -> Constants:
        """Return the constants of messages that `ranks` ranks of each node send at once."""
        return (
            self.latency + OWN_LATENCY,
            MESSAGE,
            ranks / self.rate,
            MERGED * self.crowding,
        )

    def bucket_nbytes(self, sent: float, ranks: int) -> float:
        """Return the bytes of a bucket of gradients, of each of which so many bytes are sent; infinite for 0.

        A further bucket costs its messages' headers, a round, and the host's time: so
        that messages take `WORTH` times as long.
        """
        start = max(self.latency, BUCKET)
        nbytes = max(WORTH * start * self.rate, ranks * SHORTEST_MESSAGE)
        return nbytes / sent if sent else math.inf

    def inside(self) -> Constants:
        """Return the constants of messages inside a node; a further message takes half as long as a round."""
        start = LATENCY_INSIDE + SWITCH * max(0.0, self.crowding - 1)
        return start, start / 2, BYTE_INSIDE * self.crowding, MERGED * self.crowding


NETWORKS = {
    "100mbit": Links(100e-6, 11.8e6),
    "1gbit": Links(40e-6, 118e6),
    "10gbit": Links(20e-6, 1.18e9),
    "25gbit": Links(10e-6, 2.95e9),
    "100gbit": Links(2e-6, 12e9),
    # InfiniBand with four lanes: 54, 100, 200 and 400 Gbit/s.
    "fdr": Links(1.5e-6, 6.5e9),
    "edr": Links(1.5e-6, 12e9),
    "hdr": Links(1.5e-6, 24e9),
    "ndr": Links(1.5e-6, 48e9),
}


def seconds(cost: Cost, constants: Constants) -> float:
    """Return the seconds of a cost."""
    return float(sum(map(mul, constants, cost)))


def links_of(text: str) -> Links:
    """Return the links of a named network, or of a rate with or without a delay: "25 Gbit/s", "10gbit:50us".

    Without a delay: that of the fastest named network with TCP that is not faster, or
    of the slowest one. Raises ValueError for other texts.

    >>> links_of("10gbit:50us")
    Links(latency=5e-05, rate=1180000000.0, crowding=1.0)
    """
    name = text.strip().lower()
    match = _OWN.fullmatch(name)
    if match and not match[3]:
        name = f"{match[1]}{match[2]}bit"
    if name in NETWORKS:
        return NETWORKS[name]
    if match is None or not float(match[1]) > 0:
        raise ValueError(
            f"got {text!r}: expected one of {', '.join(NETWORKS)}, or a rate, with or without a delay: 10gbit:50us"
        )
    rate = float(match[1]) * _UNITS[match[2]] / 8 * _PAYLOAD
    if match[3]:
        return Links(float(match[3]) * _UNITS[match[4]], rate)
    known = [links for name, links in NETWORKS.items() if name.endswith("bit")]
    return Links(
        next(
            (links.latency for links in reversed(known) if links.rate <= rate),
            known[0].latency,
        ),
        rate,
    )


def agreed_links(
    comm: "MPI.Intracomm", nodes: Sequence[int], crowding: float = 1.0
) -> Links:
    """Return the links between the nodes, the same on all ranks. Collective, blocks.

    These are the links that MPICOMP_NETWORK names, which is the same on all ranks, else
    `measured` ones. nodes: for each rank, the first rank of its node. Raises ValueError
    for a bad MPICOMP_NETWORK.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        links = links_of(text or "1gbit")
    except ValueError as error:
        raise ValueError(
            f"the environment variable {VARIABLE} is not a network: {error}"
        ) from None
    if not text and len(set(nodes)) > 1:
        links = measured(comm, nodes)
    return replace(links, crowding=crowding)


def measured(comm: "MPI.Intracomm", nodes: Sequence[int]) -> Links:
    """Return the links of the slowest pair of neighbouring nodes, rounded, the same on all ranks; as `agreed_links`."""
    from mpi4py import MPI

    firsts = sorted(set(nodes))
    mine = np.zeros(2)
    slowest = np.empty(2)
    number = firsts.index(comm.rank) if comm.rank in firsts else -1
    if number >= 0 and number ^ 1 < len(firsts):
        mine[:] = _timed(comm, firsts[number ^ 1], leads=number % 2 == 0)
    comm.Allreduce(mine, slowest, MPI.MAX)
    return rounded(float(slowest[0]), 1 / float(slowest[1]))


def rounded(latency: float, rate: float) -> Links:
    """Return links with both figures at powers of `STEP` times those of 1 Gbit/s."""
    near = NETWORKS["1gbit"]
    pairs = (latency, near.latency), (rate, near.rate)
    return Links(
        *[
            known * STEP ** round(math.log(figure / known, STEP))
            for figure, known in pairs
        ]
    )


def _timed(comm: "MPI.Intracomm", partner: int, *, leads: bool) -> tuple[float, float]:
    """Return the seconds of a short message and of a byte between two ranks, of which one leads."""
    latency = _trip(comm, partner, 1, SHORT_TRIPS, leads=leads)
    nbytes = SHORTEST
    while (
        taken := _trip(comm, partner, nbytes, TRIPS, leads=leads)
    ) < LONG_ENOUGH and nbytes < LONGEST:
        nbytes *= GROWTH
    return latency, max(taken - latency, taken / 2) / nbytes


def _trip(
    comm: "MPI.Intracomm", partner: int, nbytes: int, trips: int, *, leads: bool
) -> float:
    """Return half of the seconds of the fastest round trip, on the leading rank: other delays made the rest slower."""
    buffer = np.zeros(nbytes, np.uint8)
    fastest = np.full(1, np.inf)
    first: Callable[..., None] = comm.Recv
    second: Callable[..., None] = comm.Send
    if leads:
        first, second = second, first
    for _ in range(trips):
        start = time.perf_counter()
        first(buffer, partner, TAG)
        second(buffer, partner, TAG)
        fastest[0] = min(fastest[0], time.perf_counter() - start)
    first(fastest, partner, TAG)
    return max(1e-9, float(fastest[0]) / 2)
