"""A switch in user space whose links lose, double, hold back and delay frames: where the kernel has no sch_netem.

    python impairing.py CONTROL P '{"loss": 0.01, ...}'    started by testbed.py, in the namespace of the switch

A frame meets the faults of one link, that of the host which sent it, and then leaves by
the port at which its receiver was last seen. What happens to the n-th frame of a link
follows from a seed and the number of its host. Each connection to the Unix socket
CONTROL is answered with the counts of each link so far, in JSON.

Times are in seconds, shares between 0 and 1. A frame that is held back waits up to HOLD
longer than the others; whether one overtakes it depends on what follows, so `reordered`
counts the frames that did leave behind a later one, for whatever reason: jitter
reorders too, as that of netem.
"""

import errno
import heapq
import json
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

HOLD = 2e-3
# bytes of the longest frame, and frames that are read from a port at a time
FRAME, BURST = 2048, 32
# bytes between the kernel and this program, a port and direction: nothing is lost by
# accident
QUEUE = 64_000_000
ANY_PROTOCOL = 0x0003  # ETH_P_ALL
SOL_PACKET, PACKET_STATISTICS, PACKET_IGNORE_OUTGOING = 263, 6, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
# what the shaped queue of a port, or its socket, says when there is no room
FULL = errno.ENOBUFS, errno.EAGAIN


@dataclass(frozen=True)
class Faults:
    """What a link does to the frames that its host sends."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0  # share of frames that are held back
    delay: float = 0.0
    # the delay is drawn evenly from delay - jitter to delay + jitter
    jitter: float = 0.0
    seed: int = 0


@dataclass
class Counts:
    """What a link did to the frames that its host sent."""

    frames: int = 0
    dropped: int = 0
    doubled: int = 0
    held: int = 0  # back, behind their delay
    reordered: int = 0
    delayed: int = 0
    overflowed: int = 0  # for want of room in a queue: no fault that was asked for


class ImpairedLink:
    """One link: draws what happens to each frame, and counts it."""

    def __init__(self, number: int, faults: Faults) -> None:
        self.faults, self.counts = faults, Counts()
        self._random = random.Random(f"{faults.seed} {number}")
        self._newest = -1  # number of the latest frame that has left

    def fate(self) -> list[float]:
        """Return after how many seconds the next frame leaves: once, twice, or never."""
        faults, counts, draw = self.faults, self.counts, self._random.random
        # as many for each frame
        lost, doubled, held, jitter, hold = draw(), draw(), draw(), draw(), draw()
        counts.frames += 1
        if lost < faults.loss:
            counts.dropped += 1
            return []
        wait = faults.delay + faults.jitter * (2 * jitter - 1)
        counts.delayed += wait > 0
        if held < faults.reorder:
            counts.held += 1
            wait += HOLD * hold
        counts.doubled += doubled < faults.duplicate
        return [wait] * (1 + (doubled < faults.duplicate))

    def left(self, number: int) -> None:
        """Note that the frame of this number, counted as they came, has left."""
        self.counts.reordered += number < self._newest
        self._newest = max(number, self._newest)


class Switch:
    """The links of P hosts, and of the switch itself at port 0, which has no faults."""

    def __init__(self, size: int, faults: Faults) -> None:
        self.ports = [opened(f"port{number}") for number in range(size + 1)]
        self.links = [
            ImpairedLink(number, faults if number else Faults())
            for number in range(size + 1)
        ]
        self._seen: dict[bytes, int] = {}  # Ethernet address -> port
        # a heap: due, number of the frame, port, frame
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._frames = 0

    def serve(self, control: socket.socket) -> None:
        """Pass frames for ever, and tell who asks what the links did."""
        numbers = {port: number for number, port in enumerate(self.ports)}
        while True:
            wait = (
                max(0.0, self._waiting[0][0] - time.monotonic())
                if self._waiting
                else None
            )
            ready, _, _ = select.select([*self.ports, control], [], [], wait)
            for each in ready:
                if each is control:
                    self._tell(control)
                else:
                    self._take_in(numbers[each])
            self._let_go()

    def _take_in(self, number: int) -> None:
        """Read what is there at a port, and decide over each frame."""
        link, now = self.links[number], time.monotonic()
        for frame in arrived(self.ports[number]):
            self._seen[frame[6:12]] = number
            self._frames += 1
            for wait in link.fate():
                heapq.heappush(self._waiting, (now + wait, self._frames, number, frame))

    def _let_go(self) -> None:
        """Send what is due: to the port of its receiver, or to all others where that is not known."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, order, source, frame = heapq.heappop(self._waiting)
            self.links[source].left(order)
            # a group address is never that of a sender
            port = self._seen.get(frame[:6])
            others = [number for number in range(len(self.ports)) if number != source]
            for number in others if port is None else [port]:
                self._send(number, source, frame)

    def _send(self, number: int, source: int, frame: bytes) -> None:
        try:
            self.ports[number].send(frame)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.links[source].counts.overflowed += 1

    def _tell(self, control: socket.socket) -> None:
        for port, link in zip(self.ports, self.links, strict=True):
            link.counts.overflowed += missed(port)
        asking, _ = control.accept()
        with asking:
            asking.sendall(
                json.dumps([asdict(link.counts) for link in self.links[1:]]).encode()
            )


def opened(device: str) -> socket.socket:
    """Return a socket that gets each frame which comes in at a device, and sends whole frames out of it."""
    # 0: nothing comes before the settings are made
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for direction in SO_SNDBUFFORCE, SO_RCVBUFFORCE:
        port.setsockopt(socket.SOL_SOCKET, direction, QUEUE)
    port.bind((device, ANY_PROTOCOL))
    port.setblocking(False)
    return port


def arrived(port: socket.socket) -> Iterator[bytes]:
    """Yield frames that have come in at a port, so many that the other ports get their turn."""
    for _ in range(BURST):
        try:
            yield port.recv(FRAME)
        except BlockingIOError:
            return


def missed(port: socket.socket) -> int:
    """Return how many frames found no room in the queue of a port since this was asked last."""
    return struct.unpack("II", port.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]


def main(path: str, size: str, faults: str) -> None:
    """Serve until somebody ends this process; say when the ports and the socket are there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.bind(path)
        control.listen()
        switch = Switch(int(size), Faults(**json.loads(faults)))
        print("ready", flush=True)
        switch.serve(control)


if __name__ == "__main__":
    main(*sys.argv[1:])
