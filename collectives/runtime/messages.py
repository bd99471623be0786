"""Messages between two ranks, and the pending operations that a collective waits for.

A message is one contiguous buffer of whole 64-byte lines, of a size that the receiver
gets from a matched probe. A long one is sent in pieces whose counts fit a C int, after
a size header of 8 bytes (less than a line). One that MPI takes from a device's memory
has its first line in the size header as well, which the host then need not copy.

In a bidirectional exchange of long messages a clear-to-send over TCP can queue behind
the sender's own payload, which serialises the two directions. Both ranks therefore send
a size header first, post their sends when the peer's has arrived, and only then their
receives: 0.58 to 1.0 of the time (docs/contributing/measurements.md, "Bidirectional exchange").

In a step that both sends and receives, wait for the arrival first: a large send ends
only when its peer receives, and the peer may be in the same step.
"""

import os
import time
from collections.abc import Callable, Generator, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collectives.faults.errors import DamagedMessageError
from collectives.runtime import staging
from mpicomp.arrays import Buffer
from mpicomp.arrays.device import on_device

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_SIZE = np.dtype(np.int64)
LINE = 64  # bytes
NOTHING: Buffer = np.empty(0, np.uint8)
_PAUSE = 2e-5  # seconds
# Bytes of a piece. Longer messages are sent in pieces, so that copies from a device
# overlap with sending.
PIECE = 1 << 23
# Bytes above which a size header is sent first in a bidirectional exchange.
BIDIRECTIONAL = 1 << 17


class Pending:
    """What a collective waits for: a condition that becomes true, or MPI operations."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def test(self) -> bool:
        """Poll once, without waiting, and return whether it is complete."""
        return self._condition()

    def wait(self) -> None:
        """Wait until it is complete: for operations of MPI's inside MPI."""
        while not self.test():
            time.sleep(_PAUSE)


# A collective: a generator that yields what it waits for, and returns its result.
Steps = Generator[tuple[Pending, ...], None, T]


class Sending(Pending):
    """MPI requests without a result, such as those of a message being sent; keeps their buffers alive.

    after: an arrival, to be waited for first, and a function that starts further
    requests once its size is known.
    """

    def __init__(
        self,
        *requests: "MPI.Request",
        keeping: Any = None,
        after: "tuple[Arrival, Callable[[], list[MPI.Request]]] | None" = None,
    ) -> None:
        self._requests = requests
        self._keeping = keeping
        self._start = after and after[1]
        if after is not None:
            after[0].when_known = self._started

    def test(self) -> bool:
        """See `Pending.test`."""
        return self._start is None and all(
            [request.Test() for request in self._requests]
        )

    def wait(self) -> None:
        """See `Pending.wait`."""
        assert self._start is None, (
            "a message that leaves after an arrival was waited for before that arrival"
        )
        for request in self._requests:
            request.Wait()

    def _started(self) -> None:
        assert self._start is not None
        self._requests = (*self._requests, *self._start())
        self._start = None


class Arrival(Pending):
    """A message to be received, of unknown size; `buffer` contains it once it is complete.

    like: an array on the device of the message; None: host memory. direct: MPI takes
    device pointers, so `buffer` is on that device; else `copy` is, and has the same
    bytes. `line` is its first line, in host memory, if it came ahead.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        source: int,
        tag: int,
        like: Any = None,
        *,
        direct: bool = False,
    ) -> None:
        self.source = source
        # Called once the size of the message is known, before the message is received.
        self.when_known: Callable[[], None] | None = None
        self.buffer: Buffer = NOTHING
        self.copy: Any = None
        self.line: Buffer = NOTHING  # of a size header
        self._comm = comm
        self._tag = tag
        self._like = like
        self._direct = direct
        # The pieces that are being received; None before the message is matched.
        self._awaited: list[tuple[MPI.Request, slice]] | None = None

    def test(self) -> bool:
        """See `Pending.test`."""
        if self._awaited is None:
            message = self._comm.Improbe(self.source, self._tag, probed())
            if message is None:
                return False
            self._awaited = self._matched(message)
        while self._awaited and self._awaited[0][0].Test():
            self._received(self._awaited.pop(0)[1])
        return not self._awaited

    def wait(self) -> None:
        """See `Pending.wait`."""
        if self._awaited is None:
            message = self._comm.Mprobe(self.source, self._tag, probed())
            self._awaited = self._matched(message)
        for request, part in self._awaited:
            request.Wait()
            if self.copy is not None:
                self._received(part)
        self._awaited = []

    def _matched(self, message: "MPI.Message") -> "list[tuple[MPI.Request, slice]]":
        """Start to receive the probed message, or the size header of a long one."""
        nbytes = probed().Get_count(_byte())
        has_header = nbytes % LINE == _SIZE.itemsize
        if has_header:
            header = np.empty(nbytes, np.uint8)
            message.Recv(in_bytes(header))
            nbytes = int(header[: _SIZE.itemsize].view(_SIZE)[0])
            self.line = header[_SIZE.itemsize :]
            if nbytes < LINE or nbytes % LINE:
                raise DamagedMessageError(
                    f"received a damaged message: a size header of {nbytes} bytes"
                )
        if self.when_known is not None:
            self.when_known()
            self.when_known = None  # it keeps a buffer
        self.buffer, self.copy = staging.allocate(
            nbytes, self._like, direct=self._direct
        )
        if not has_header:
            return [(message.Irecv(in_bytes(self.buffer)), slice(0, nbytes))]
        return [
            (
                self._comm.Irecv(in_bytes(self.buffer[part]), self.source, self._tag),
                part,
            )
            for part in pieces(nbytes)
        ]

    def _received(self, piece: slice) -> None:
        if self.copy is not None:
            staging.copy_in(self.buffer[piece], self.copy[piece])


@cache
def notice_tag() -> int:
    """Return the highest tag, which is of notices (`collectives.runtime.deadline`): MPI promises at least 32767."""
    return int(mpi().COMM_WORLD.Get_attr(mpi().TAG_UB) or 32767)


def send_size(
    comm: "MPI.Comm", nbytes: int, line: Buffer, dest: int, tag: int
) -> "MPI.Request":
    """Start to send a size header. line: the first line of the message, or `NOTHING`."""
    size = np.array([nbytes], _SIZE).view(np.uint8)
    return comm.Isend(in_bytes(np.concatenate([size, line])), dest, tag)


def send_pieces(
    comm: "MPI.Comm", buffer: Buffer, dest: int, tag: int, *, direct: bool = False
) -> "list[MPI.Request]":
    """Start to send a buffer in pieces; each request keeps its memory alive.

    direct: MPI takes device pointers; after `staging.first_lines`.
    """
    parts: Iterable[Buffer] = [buffer[part] for part in pieces(buffer.size)]
    if on_device(buffer) and not direct:
        parts = staging.copied_out(parts)
    return [comm.Isend(in_bytes(part), dest, tag) for part in parts]


def pieces(nbytes: int) -> list[slice]:
    """Return the slices of a message that are sent as pieces; one if it is short."""
    return [slice(start, start + PIECE) for start in range(0, max(nbytes, 1), PIECE)]


def in_bytes(buffer: Buffer) -> list[Any]:
    """Return a buffer specification of bytes for mpi4py, which then does not inspect the array."""
    return [buffer, _byte()]


@cache
def mpi() -> Any:
    """Return mpi4py's module MPI, whose import initialises MPI: so at the first call, and not on import.

    Child processes of one of several ranks then do not initialise it, though a worker
    of a DataLoader imports the main module, and mpi4py with it. Raises RuntimeError in
    such a process.
    """
    from mpi4py import MPI

    if not MPI.Is_initialized():
        raise RuntimeError(
            "MPI is not initialised in this process, such as a worker that a rank has started: use the library in the "
            'rank itself, below if __name__ == "__main__"; a child that is to start MPI, such as another mpirun, needs '
            "an environment without MPI4PY_RC_INITIALIZE"
        )
    if MPI.COMM_WORLD.size > 1:
        os.environ.setdefault("MPI4PY_RC_INITIALIZE", "0")
    return MPI


@cache
def _byte() -> "MPI.Datatype":
    return mpi().BYTE  # type: ignore[no-any-return]


@cache
def probed() -> "MPI.Status":
    """Return a status object that every probe reuses: creating one takes as long as a probe."""
    return mpi().Status()  # type: ignore[no-any-return]
