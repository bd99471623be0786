"""The link of a communicator: the library's duplicate of it, the tags, and the settings agreed by all ranks.

Only this module and `staging` distinguish host arrays, device arrays with a CUDA-aware
MPI, and staged ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from collectives.faults.state import Faults
from collectives.planning.schedule import groups
from collectives.runtime import messages, staging
from collectives.runtime.messages import (
    Arrival,
    Sending,
    in_bytes,
    mpi,
    notice_tag,
    send_size,
)
from mpicomp.arrays import Buffer
from mpicomp.arrays.device import on_device

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# Kinds of cached objects: the link, and the faults and the barrier of the first call.
LINK = "link"
FAULTS = "faults"
BARRIER = "barrier"
# Values of an MPI reduction, at most: a count has to fit a C int.
_PIECE = 2**30


@dataclass
class Traffic:
    """The number and the bytes of the messages that this rank has sent over a communicator.

    Args:
        messages: number of messages.
        nbytes: their bytes.
    """

    messages: int = 0
    nbytes: int = 0


@dataclass(eq=False)
class Link:
    """The library's own duplicate of a communicator, made at its first use, cached on it and freed with it.

    comm: the duplicate. nodes: for each rank, the first rank on its node. choice:
    by which "auto" chooses. backs_off: this rank polls, and sleeps in between. direct:
    MPI accepts device pointers. checked: the debug mode is on. on_free: called before
    the duplicate is freed. taken: the algorithm of the last sum on this rank, by kinds of
    sums: for what is sent first, and not for the choice, as ranks may differ in it after an
    error on one of them, and a resumed run does.
    """

    comm: "MPI.Intracomm"
    nodes: tuple[int, ...]
    choice: Any
    backs_off: bool
    direct: bool
    checked: bool
    on_free: "Callable[[Link], None]"

    def __post_init__(self) -> None:
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.by_node = groups(self.nodes)
        self.taken: dict[tuple[Any, ...], str] = {}
        self.traffic = Traffic()
        # Numbers of the operations that are to call MPI's own collectives, in order.
        self.queue: list[int] = []
        # Tags of operations, which begin again after the last one.
        self.tags = notice_tag()
        self._number = 0
        self.faults = Faults(self.rank, self.size, self.comm)
        # At most one text, see `lose`. It is in a list, as several threads may take it,
        # and `pop` is atomic.
        self.lost: list[str] = []

    def lose(self, text: str) -> None:
        """Remember that this rank has no result of an operation that the others may have: it is out of step."""
        if self.size > 1:
            self.lost = self.lost or [text]

    def take_lost(self) -> str:
        """Return the text of `lose`, once: the next operation then raises on all ranks; empty if nothing was lost."""
        return self.lost.pop() if self.lost else ""

    def take_number(self) -> int:
        """Return the number of the next operation; all ranks start operations in the same order, so theirs agree."""
        number = self._number
        self._number += 1
        return number

    def lines(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Return the first line of each buffer if MPI takes them from a device's memory, after one wait for its stream.

        All of them are on the device, or none is.
        """
        if self.direct and on_device(buffers[0]):
            return staging.first_lines(buffers)
        return [messages.NOTHING] * len(buffers)

    def send(
        self,
        buffer: Buffer,
        dest: int,
        tag: int,
        arrival: Arrival | None = None,
        line: Buffer = messages.NOTHING,
    ) -> Sending:
        """Start to send a buffer of whole lines; a device buffer after the work queued on its stream.

        arrival: the message that is received in the same step, if any; for one from
        `dest` see bidirectional exchange in `messages`. line: of `lines`, if it is known.
        """
        self.traffic.messages += 1
        self.traffic.nbytes += buffer.size
        if buffer.size <= messages.BIDIRECTIONAL and not on_device(buffer):
            return Sending(self.comm.Isend(in_bytes(buffer), dest, tag))
        if not line.size:
            (line,) = self.lines([buffer])
        header = partial(send_size, self.comm, buffer.size, line, dest, tag)
        start = partial(
            messages.send_pieces, self.comm, buffer, dest, tag, direct=self.direct
        )
        is_long = buffer.size > messages.BIDIRECTIONAL
        if is_long and arrival is not None and arrival.source == dest:
            return Sending(header(), after=(arrival, start))
        if line.size or buffer.size > messages.PIECE:
            return Sending(header(), *start())
        return Sending(*start())

    def discard(self, tag: int) -> bool:
        """Receive a message with this tag from any rank, and drop it; return whether one had arrived."""
        status = messages.probed()
        message = self.comm.Improbe(mpi().ANY_SOURCE, tag, status)
        if message is None:
            return False
        message.Recv(in_bytes(np.empty(status.Get_count(mpi().BYTE), np.uint8)))
        return True

    def receive(self, source: int, tag: int, like: Any = None) -> Arrival:
        """Start to receive a message into a buffer on the device of the array `like`; None: host memory."""
        return Arrival(self.comm, source, tag, like, direct=self.direct)

    def reduce(self, array: NDArray[Any], total: NDArray[Any]) -> Sending:
        """Start MPI's own Allreduce (sum) from `array` to `total`; counted with its lower bound, 2 f n v bytes.

        Not in place: Open MPI then reduces to one rank and broadcasts, which sends a
        third more from the busiest rank at P = 4 than the ring that it uses otherwise.
        """
        self.traffic.messages += 1
        self.traffic.nbytes += 2 * (self.size - 1) * array.nbytes // self.size
        # The default operation is MPI.SUM.
        requests = [
            self.comm.Iallreduce(
                array[start : start + _PIECE], total[start : start + _PIECE]
            )
            for start in range(0, array.size, _PIECE)
        ]
        return Sending(*requests, keeping=(array, total))


def check_communicator(comm: Any) -> None:
    """Raise TypeError if `comm` is not an mpi4py intracommunicator, ValueError if it is null."""
    if isinstance(comm, mpi().Intracomm) and comm:
        return
    if isinstance(comm, mpi().Comm) and not comm:
        raise ValueError(
            "comm is MPI.COMM_NULL: expected a communicator that this rank belongs to, and that is not freed"
        )
    raise TypeError(
        f"comm is {type(comm).__name__}: expected an mpi4py intracommunicator such as MPI.COMM_WORLD"
    )


def link_if_any(comm: Any) -> Link | None:
    """Return the link of a communicator, None if it has none; raises the errors of `check_communicator`."""
    if not isinstance(comm, mpi().Intracomm) or not comm:
        check_communicator(comm)
    link: Link | None = comm.Get_attr(key_of(LINK))
    return link


def faults_of(comm: "MPI.Intracomm") -> Faults:
    """Return the faults of the first call on a communicator, which have no link yet."""
    return attached(comm, FAULTS, lambda: Faults(comm.rank, comm.size, comm))


def traffic(comm: Any) -> Traffic:
    """Return a copy of the traffic of this library on `comm`, sent by this rank so far; not collective.

    MPI's own allreduce, as in `dense_allreduce`, counts as one message of 2 (P-1)/P n v
    bytes, the lower bound for n values of v bytes.

    Args:
        comm: an mpi4py intracommunicator.

    Raises:
        TypeError: `comm` is no communicator.
        ValueError: `comm` is not in use.
        RuntimeError: after MPI.Finalize.

    >>> before = traffic(comm)
    >>> total = sparse_allreduce(TopK(k=2).compress(gradient), comm)
    >>> traffic(comm).nbytes >= before.nbytes
    True
    """
    link = link_if_any(comm)
    return Traffic() if link is None else replace(link.traffic)


def attached(comm: "MPI.Comm", what: str, make: Callable[[], T]) -> T:
    """Return the object of a kind that is cached on `comm`; the first call creates it."""
    there = cast("T | None", comm.Get_attr(key_of(what)))
    if there is None:
        there = make()
        comm.Set_attr(key_of(what), there)
    return there


@cache
def key_of(what: str) -> int:
    """Return the key under which objects of a kind are cached on communicators; RuntimeError after MPI.Finalize."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise RuntimeError("called after MPI.Finalize(): expected a call before it")

    def free(comm: "MPI.Comm", key: int, cached: Any) -> None:
        if isinstance(cached, Faults):
            cached.free("the first call")
        if isinstance(cached, Link):
            cached.on_free(cached)
            # A finished duplicate may have messages in flight or dead ranks, so it is
            # not freed.
            if not cached.faults.finished:
                cached.comm.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)
