"""Messages between two ranks, and what a collective waits on.

A message is one contiguous buffer of whole 64-byte lines. The receiver learns the size from a matched probe, so no size
travels ahead of a message but of a long one: that comes in pieces, whose counts fit a C int, after an announcement, a
message of 8 bytes, which no whole line is.

Long messages that cross, between two ranks in one step, are both announced, and then *sent before they are received*.
MPI lets a long message go when its receiver asks for it. Where what asks stands behind a rank's own data in the
socket, one message waits for the other; so a rank keeps its own until it knows of the peer's (`Reply`), and offers its
own before it asks for that. It takes down to 0.58 of the time over TCP (docs/performance.md, "Messages that cross").

What a collective waits on is a `Pending`: `wait` blocks inside MPI, which leaves the core to others; `test` looks once.
In a step that both sends and receives, wait for the arrival first: a large send ends only when its peer receives, and
the peer may be in the same step.
"""

from collections import deque
from collections.abc import Callable, Generator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpicomp.errors import DamagedMessageError

if TYPE_CHECKING:
    from mpi4py import MPI

Buffer = NDArray[np.uint8]
T = TypeVar("T")

_ANNOUNCEMENT = np.dtype(np.int64)
LINE = 64  # bytes
PIECE = 1 << 23  # bytes: what is longer comes in pieces, so that copies from a device overlap with sending
CROSSING = 1 << 17  # bytes: what is longer and crosses another message waits until that one is known


class Pending(Protocol):
    """Something of MPI's that a collective waits on."""

    def test(self) -> bool:
        """Look once, without waiting, and say whether it is complete."""
        ...

    def wait(self) -> None:
        """Wait inside MPI until it is complete."""
        ...


Steps = Generator[tuple[Pending, ...], None, T]  # a collective: it yields what it waits on, and returns its result


class Sending:
    """Something of MPI's that only has to end, such as a message on its way out; it keeps the buffers alive."""

    def __init__(self, *requests: "MPI.Request", keeping: Any = None) -> None:
        self._requests, self._keeping = requests, keeping

    def test(self) -> bool:
        """See `Pending.test`."""
        return all([request.Test() for request in self._requests])

    def wait(self) -> None:
        """See `Pending.wait`."""
        for request in self._requests:
            request.Wait()


class Reply(Sending):
    """A message that leaves once the arrival from its receiver is known, before that is received.

    leave: starts to send it.
    """

    def __init__(
        self, announcement: "MPI.Request", leave: "Callable[[], list[MPI.Request]]", arrival: "Arrival"
    ) -> None:
        super().__init__(announcement)
        self._leave, self._left = leave, False
        arrival.answer = self._go

    def _go(self) -> None:
        self._requests, self._left = (*self._requests, *self._leave()), True

    def test(self) -> bool:
        """See `Pending.test`."""
        return self._left and super().test()

    def wait(self) -> None:
        """See `Pending.wait`; after the arrival."""
        assert self._left, "a message that answers another one was waited for before that one"
        super().wait()


class Arrival:
    """A message on its way in, of a size that only its sender knows yet; `buffer` holds it once it is complete."""

    answer: Callable[[], None] | None = None  # what is to be done when it is known, before it is received
    buffer: Buffer = np.empty(0, np.uint8)

    def __init__(self, comm: "MPI.Comm", source: int, tag: int) -> None:
        self.source = source
        self._envelope = comm, source, tag
        self._awaited: deque[tuple[MPI.Request, slice]] | None = None  # pieces under way; None before it is matched

    def awaited(self) -> list[int]:
        """Return the rank that it comes from, while it has not come."""
        return [] if self.test() else [self.source]

    def test(self) -> bool:
        """See `Pending.test`."""
        comm, source, tag = self._envelope
        if self._awaited is None:
            status = _probed()
            message = comm.Improbe(source, tag, status)
            if message is None:
                return False
            self._awaited = self._matched(message, status)
        while self._awaited and self._awaited[0][0].Test():
            self._landed(self._awaited.popleft()[1])
        return not self._awaited

    def wait(self) -> None:
        """See `Pending.wait`."""
        comm, source, tag = self._envelope
        if self._awaited is None:
            status = _probed()
            self._awaited = self._matched(comm.Mprobe(source, tag, status), status)
        while self._awaited:
            self._awaited[0][0].Wait()
            self._landed(self._awaited.popleft()[1])

    def _matched(self, message: "MPI.Message", status: "MPI.Status") -> "deque[tuple[MPI.Request, slice]]":
        """Begin to receive what was probed: a message, or the announcement of a long one."""
        comm, source, tag = self._envelope
        nbytes = status.Get_count(_byte())
        announced = nbytes == _ANNOUNCEMENT.itemsize
        if announced:
            said = np.empty(1, _ANNOUNCEMENT)
            message.Recv(said)
            nbytes = int(said[0])
            if nbytes < LINE or nbytes % LINE:
                raise DamagedMessageError(f"a message arrived damaged: it was announced with {nbytes} bytes")
        if self.answer is not None:
            self.answer()
            self.answer = None  # it keeps a buffer
        room = self._room(nbytes)
        if not announced:
            return deque([(message.Irecv(in_bytes(room)), slice(0, nbytes))])
        return deque([(comm.Irecv(in_bytes(room[part]), source, tag), part) for part in pieces(nbytes)])

    def _room(self, nbytes: int) -> Buffer:
        """Return the buffer that MPI is to fill."""
        self.buffer = np.empty(nbytes, np.uint8)
        return self.buffer

    def _landed(self, part: slice) -> None:
        """Take note that a part of that buffer is filled."""


def announce(comm: "MPI.Comm", nbytes: int, dest: int, tag: int) -> "MPI.Request":
    """Start to tell a rank how long the message will be that comes in pieces."""
    return comm.Isend(np.array([nbytes], _ANNOUNCEMENT), dest, tag)


def leave(comm: "MPI.Comm", buffer: Buffer, dest: int, tag: int) -> "list[MPI.Request]":
    """Start to send a buffer in its pieces; each request keeps what MPI reads alive."""
    parts = [buffer] if buffer.size <= PIECE else [buffer[part] for part in pieces(buffer.size)]
    return [comm.Isend(in_bytes(part), dest, tag) for part in parts]


def pieces(nbytes: int) -> list[slice]:
    """Return the parts in which a message travels; one, if it is short."""
    return [slice(start, min(start + PIECE, nbytes)) for start in range(0, max(nbytes, 1), PIECE)]


def in_bytes(buffer: Buffer) -> list[Any]:
    """Return what MPI takes for a buffer of bytes, without a look at what it is made of."""
    return [buffer, _byte()]


@cache
def _byte() -> "MPI.Datatype":
    from mpi4py import MPI

    return MPI.BYTE


@cache
def _probed() -> "MPI.Status":
    """Return the place for what is read before the next probe: to make one takes as long as a look."""
    return new_status()


def new_status() -> "MPI.Status":
    """Return a place where MPI says what a message is like."""
    from mpi4py import MPI

    return MPI.Status()
