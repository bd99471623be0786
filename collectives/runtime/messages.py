"""Messages between two ranks, and what a collective waits on.

A message is one contiguous buffer of whole 64-byte lines. The receiver learns its size from a matched probe, so no size
is sent ahead. The exception is a long message: it is sent in pieces whose counts fit a C int, after a size header of 8
bytes (no whole line, so it cannot be confused with a message).

In a bidirectional exchange both ranks send long messages in the same step. MPI lets a long message leave when its
receiver asks for it (clear to send). Over TCP a clear-to-send can queue behind the sender's own payload (head-of-line
blocking), which serialises the two directions. Both ranks therefore send a size header first, post their sends when the
peer's size header has arrived, and only then their receives. That takes down to 0.58 of the time over TCP
(docs/performance.md, "Bidirectional exchange").

A collective waits on a `Pending`: `wait` blocks inside MPI, which leaves the core to others; `test` looks once. In a
step that both sends and receives, wait for the arrival first: a large send ends only when its peer receives, and the
peer may be in the same step.
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

_SIZE = np.dtype(np.int64)
LINE = 64  # bytes
PIECE = 1 << 23  # bytes: longer messages are sent in pieces, so that copies from a device overlap with sending
BIDIRECTIONAL = 1 << 17  # bytes: from here on a size header is sent first in a bidirectional exchange


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
    """MPI requests that only have to complete, such as those of a message that is sent; it keeps the buffers alive.

    after: an arrival and a function that starts further requests, which is called once that arrival is known, before it
    is received; wait for the arrival first.
    """

    def __init__(
        self,
        *requests: "MPI.Request",
        keeping: Any = None,
        after: "tuple[Arrival, Callable[[], list[MPI.Request]]] | None" = None,
    ) -> None:
        self._requests, self._keeping, self._start = requests, keeping, after and after[1]
        if after is not None:
            after[0].when_known = self._started

    def test(self) -> bool:
        """See `Pending.test`."""
        return self._start is None and all([request.Test() for request in self._requests])

    def wait(self) -> None:
        """See `Pending.wait`."""
        assert self._start is None, "a message that leaves after an arrival was waited for before that arrival"
        for request in self._requests:
            request.Wait()

    def _started(self) -> None:
        assert self._start is not None
        self._requests, self._start = (*self._requests, *self._start()), None


class Arrival:
    """A message to be received, of a size that only its sender knows; `buffer` holds it once it is complete."""

    when_known: Callable[[], None] | None = None  # called once its size is known, before it is received
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
        """Begin to receive what was probed: a message, or the size header of a long one."""
        comm, source, tag = self._envelope
        nbytes = status.Get_count(_byte())
        headed = nbytes == _SIZE.itemsize
        if headed:
            said = np.empty(1, _SIZE)
            message.Recv(said)
            nbytes = int(said[0])
            if nbytes < LINE or nbytes % LINE:
                raise DamagedMessageError(f"received a damaged message: a size header of {nbytes} bytes")
        if self.when_known is not None:
            self.when_known()
            self.when_known = None  # it keeps a buffer
        room = self._room(nbytes)
        if not headed:
            return deque([(message.Irecv(in_bytes(room)), slice(0, nbytes))])
        return deque([(comm.Irecv(in_bytes(room[part]), source, tag), part) for part in pieces(nbytes)])

    def _room(self, nbytes: int) -> Buffer:
        """Return the buffer that MPI is to fill."""
        self.buffer = np.empty(nbytes, np.uint8)
        return self.buffer

    def _landed(self, part: slice) -> None:
        """Take note that a part of that buffer is filled."""


def send_size(comm: "MPI.Comm", nbytes: int, dest: int, tag: int) -> "MPI.Request":
    """Start to send the size header of a long message."""
    return comm.Isend(np.array([nbytes], _SIZE), dest, tag)


def send_pieces(comm: "MPI.Comm", buffer: Buffer, dest: int, tag: int) -> "list[MPI.Request]":
    """Start to send a buffer in its pieces; each request keeps what MPI reads alive."""
    parts = [buffer] if buffer.size <= PIECE else [buffer[part] for part in pieces(buffer.size)]
    return [comm.Isend(in_bytes(part), dest, tag) for part in parts]


def pieces(nbytes: int) -> list[slice]:
    """Return the pieces of a message; one, if it is short."""
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
