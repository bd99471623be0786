"""A simulated network inside one process: runs the collectives' own generators on any number of ranks, without MPI.

Messages contain their round: one more than the last round in which their sender sent or
received. This counts the rounds of an algorithm. Ranks advance in a random order, by a
seed.

With `rendezvous` a rank waits as inside MPI, for one message after the other. The send
of a message of several lines completes when it is received; a send that follows an
arrival (`messages.Sending`) starts when that arrival's size is known.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.planning.links import NETWORKS, Links
from collectives.planning.schedule import groups
from collectives.runtime.group import Group
from collectives.runtime.link import Traffic
from collectives.runtime.messages import LINE, NOTHING, Steps
from mpicomp.arrays import Buffer


class Network:
    """Ranks and the messages between them; `links` contain the traffic of each rank.

    nodes: the first rank of each rank's node, one node by default. choice: the links
    between nodes, for "auto".
    """

    def __init__(
        self,
        size: int,
        nodes: Iterable[int] | None = None,
        seed: int = 0,
        choice: Links = NETWORKS["1gbit"],
        rendezvous: bool = False,
    ) -> None:
        self.choice = choice
        self.rendezvous = rendezvous
        # Number of times that a receiver first saw a message, or took one.
        self.seen = 0
        # The keys are source, dest and tag.
        self.boxes: defaultdict[tuple[int, int, int], deque[Message]] = defaultdict(
            deque
        )
        # For each Allreduce, the arrays so far; then their sum.
        self.reductions: list[list[NDArray[Any]]] = []
        self.links = [
            SimulatedLink(self, rank, size, tuple(nodes or [0] * size))
            for rank in range(size)
        ]
        self.rng = np.random.default_rng(seed)

    def run(
        self, steps_of: Callable[[int, Group], Steps[Any]], **signature: Any
    ) -> tuple[list[Any], int]:
        """Run steps_of(rank, group) on every rank; return the results, and the number of rounds.

        Raises AssertionError if ranks wait for ever, or messages are left that no rank
        received.
        """
        own: Any = self.links
        signature["operation"] = "simulated"
        groups = [Group(link, signature) for link in own]
        ranks = {rank: steps_of(rank, group) for rank, group in enumerate(groups)}
        pending: dict[int, deque[Any]] = {rank: deque() for rank in ranks}
        results: list[Any] = [None] * len(ranks)
        while ranks:
            moved = False
            before = self.seen
            for rank in self.rng.permutation(list(ranks)).tolist():
                if self.complete(pending[rank]):
                    moved = True
                    link = self.links[rank]
                    link.clock = max(link.clock, link.sent)
                    try:
                        pending[rank] = deque(next(ranks[rank]))
                    except StopIteration as end:
                        results[rank] = end.value
                        del ranks[rank]
            assert moved or self.seen > before, f"ranks {list(ranks)} wait for ever"
        assert not any(self.boxes.values()), "messages that nobody received"
        return results, max(link.clock for link in self.links)

    def complete(self, pending: deque[Any]) -> bool:
        """Return whether a rank can continue."""
        if not self.rendezvous:
            return all([one.test() for one in pending])
        while pending and pending[0].test():
            pending.popleft()
        return not pending


class SimulatedLink:
    """One rank's link to the network; the counterpart of `collectives.runtime.link.Link`."""

    def __init__(
        self, network: Network, rank: int, size: int, nodes: tuple[int, ...]
    ) -> None:
        self.network = network
        self.rank = rank
        self.size = size
        self.nodes = nodes
        self.by_node = groups(nodes)
        self.traffic = Traffic()
        self.tags = 1
        self.queue = list[int]()
        self.reduced = 0
        self.choice = network.choice
        self.taken = dict[tuple[Any, ...], str]()
        self.checked = False
        # The last round that this rank took part in, and the last one that it sent in.
        self.clock = 0
        self.sent = 0

    def take_number(self) -> int:
        """Return the number of the only operation."""
        return 0

    def lines(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Return nothing of each buffer: all are in host memory."""
        return [NOTHING] * len(buffers)

    def send(
        self,
        buffer: Buffer,
        dest: int,
        tag: int,
        arrival: Any = None,
        line: Buffer = NOTHING,
    ) -> "Message":
        """Send a copy of a buffer."""
        self.sent = self.clock + 1
        self.traffic.messages += 1
        self.traffic.nbytes += buffer.size
        long = self.network.rendezvous and buffer.size > LINE
        answered = long and arrival is not None and arrival.source == dest
        message = Message(buffer, self.sent, arrival if answered else None, long)
        self.network.boxes[self.rank, dest, tag].append(message)
        return message

    def receive(self, source: int, tag: int, like: Any = None) -> "SimulatedArrival":
        """Start to receive a message."""
        return SimulatedArrival(
            self, source, self.network.boxes[source, self.rank, tag]
        )

    def reduce(self, array: NDArray[Any], total: NDArray[Any]) -> "Reduction":
        """Start MPI's own allreduce, counted with the lower bound of its bytes."""
        while len(self.network.reductions) <= self.reduced:
            self.network.reductions.append([])
        arrays = self.network.reductions[self.reduced]
        arrays.append(array.copy())
        self.traffic.messages += 1
        self.traffic.nbytes += 2 * (self.size - 1) * array.nbytes // self.size
        self.reduced += 1
        return Reduction(arrays, total, self.size)


class Message:
    """A message. Its send completes at once, or, for several lines with `rendezvous`, when it is received."""

    def __init__(
        self, buffer: Buffer, sent: int, answered: "SimulatedArrival | None", long: bool
    ) -> None:
        self.buffer = buffer.copy()
        self.sent = sent
        self.received = False
        self.answered = answered
        self.long = long

    def test(self) -> bool:
        """See `Pending.test`."""
        return self.received or not self.long


class SimulatedArrival:
    """A message to be received."""

    def __init__(self, link: SimulatedLink, source: int, box: deque[Message]) -> None:
        self.link = link
        self.source = source
        self.box = box
        self.known = False
        self.buffer: Buffer | None = None
        self.copy = None  # on a device: none here
        self.line = NOTHING

    def test(self) -> bool:
        """See `Pending.test`."""
        if self.buffer is None and self.box:
            if not self.known:
                self.known = True
                self.link.network.seen += 1
            message = self.box[0]
            if message.answered is None or message.answered.known:
                self.box.popleft()
                self.link.network.seen += 1
                message.received = True
                self.buffer = message.buffer
                self.link.clock = max(self.link.clock, message.sent)
        return self.buffer is not None


class Reduction:
    """The sum of the arrays of all ranks."""

    def __init__(
        self, arrays: list[NDArray[Any]], total: NDArray[Any], size: int
    ) -> None:
        self.arrays = arrays
        self.total = total
        self.size = size

    def test(self) -> bool:
        """See `Pending.test`."""
        if len(self.arrays) < self.size:
            return False
        if len(self.arrays) == self.size:
            self.arrays.append(sum(self.arrays))  # type: ignore[arg-type]  # once for all ranks
        self.total[:] = self.arrays[-1]
        return True
