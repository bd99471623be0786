"""Messages between two ranks, and what a collective waits on.

A message is one contiguous buffer of whole 64-byte lines. Counting in lines keeps MPI's count a C int up to 128 GiB.
The receiver learns the size from a matched probe, so no size travels ahead of a message. A long one from a device may
come in pieces (`staging`): then a message of 8 bytes, which no whole line is, says how long they are together.

What a collective waits on is a `Pending`: `wait` blocks inside MPI, which leaves the core to others; `test` looks once.
In a step that both sends and receives, wait for the arrival first: a large send ends only when its peer receives, and
the peer may be in the same step.
"""

from collections import deque
from collections.abc import Generator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

Buffer = NDArray[np.uint8]
T = TypeVar("T")

LINE = 64  # bytes
PIECE = 1 << 23  # bytes of a message that comes in pieces: in that time a copy from the device overlaps with sending


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


class Arrival:
    """A message on its way in, of a size that only its sender knows yet; `buffer` holds it once it is complete."""

    def __init__(self, comm: "MPI.Comm", source: int, tag: int) -> None:
        self.buffer: Buffer = np.empty(0, np.uint8)
        self.source = source
        self._envelope = comm, source, tag
        self._awaited: deque[tuple[MPI.Request, slice]] | None = None  # pieces under way; None before it is matched

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
        """Begin to receive what was probed: a message, or the announcement of one that comes in pieces."""
        from mpi4py import MPI

        lines, (comm, source, tag) = status.Get_count(_line_type()), self._envelope
        if lines != MPI.UNDEFINED:
            whole = slice(0, lines * LINE)
            return deque([(message.Irecv(in_lines(self._room(lines * LINE))), whole)])
        announced = np.empty(1, np.int64)
        message.Recv(announced)
        room, parts = self._room(int(announced[0])), pieces(int(announced[0]))
        return deque([(comm.Irecv(in_lines(room[part]), source, tag), part) for part in parts])

    def _room(self, nbytes: int) -> Buffer:
        """Return the buffer that MPI is to fill."""
        self.buffer = np.empty(nbytes, np.uint8)
        return self.buffer

    def _landed(self, part: slice) -> None:
        """Take note that a part of that buffer is filled."""


def pieces(nbytes: int) -> list[slice]:
    """Return the parts of a message that comes in pieces; one, if it is short."""
    return [slice(start, min(start + PIECE, nbytes)) for start in range(0, nbytes, PIECE)]


@cache
def _line_type() -> "MPI.Datatype":
    from mpi4py import MPI

    return MPI.BYTE.Create_contiguous(LINE).Commit()


def in_lines(buffer: Buffer) -> list[Any]:
    """Return what MPI takes for a buffer of whole lines."""
    return [buffer, buffer.size // LINE, _line_type()]


@cache
def _probed() -> "MPI.Status":
    """Return the place for what is read before the next probe: to make one takes as long as a look."""
    return new_status()


def new_status() -> "MPI.Status":
    """Return a place where MPI says what a message is like."""
    from mpi4py import MPI

    return MPI.Status()
