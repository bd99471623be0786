"""The link of a communicator: the library's duplicate of it, the tags, and the settings agreed by all ranks.

Only this module and `staging` distinguish host arrays, device arrays with a CUDA-aware MPI, and staged ones.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from collectives.faults.state import Faults
from collectives.faults.ulfm import is_failure, on_death, warn_of_detector
from collectives.launcher import torchrun_warning
from collectives.runtime import cuda_aware, messages, staging, waiting
from collectives.runtime.messages import Arrival, Pending, Sending, mpi, send_size
from collectives.schedule import group_sizes
from mpicomp import checking, threads
from mpicomp.arrays import Buffer, on_device

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
FIRST = ", the first call on the communicator,"
Agree = Callable[["MPI.Intracomm", tuple[int, ...], float], Any]  # (comm, each rank's node, crowding), collective

_PIECE = 2**30  # values of an MPI reduction: a count has to fit a C int


class Turn:
    """An operation's turn to call MPI's own collectives, which all ranks must start in the same order.

    A context manager: the next operation's turn begins when the context ends.
    """

    def __init__(self, queue: "deque[Turn]") -> None:
        self._queue = queue
        queue.append(self)

    def test(self) -> bool:
        """See `Pending.test`."""
        return self._queue[0] is self

    def wait(self) -> None:
        """Check that it is this operation's turn, as it must be with no other one in flight."""
        assert self.test(), "an operation that is in flight alone has to wait for its turn"

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *raised: object) -> None:
        if self in self._queue:  # what reserved the turn leaves it too
            self._queue.remove(self)


@dataclass
class Traffic:
    """The number and the bytes of the messages that this rank has sent over a communicator."""

    messages: int = 0
    nbytes: int = 0


class Link:
    """The library's own duplicate of a communicator, made at its first use, cached on it and freed with it.

    choice: the result of `agree` when the link was created; its meaning is the caller's. gathered: the kinds of sums
    whose last call on this rank gathered all vectors; ranks may differ in it, after an error on one of them.
    """

    def __init__(self, comm: "MPI.Intracomm", duplicate: "MPI.Intracomm", agree: Agree) -> None:
        from mpi4py import MPI

        _keep_pages()
        self.comm = duplicate
        self.nodes = _first_ranks(duplicate)
        self.node_sizes = group_sizes(self.nodes)
        warn_of_detector(self.nodes, comm.rank)
        self.backs_off, sharers, crowding = waiting.of_the_ranks(duplicate, self.nodes)
        threads.share(sharers)
        self.direct = cuda_aware.agreed(duplicate)
        self.choice = agree(duplicate, self.nodes, crowding)
        self.gathered: set[tuple[Any, ...]] = set()
        self.checked = _checked(duplicate)  # the debug mode: see `collectives.faults.debug`
        self.rank, self.size = comm.rank, comm.size
        self.traffic = Traffic()
        self.turns: deque[Turn] = deque()
        self.notice_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)  # MPI promises at least 32767
        self._next_tag = 0
        self.faults = Faults(comm.rank, comm.size)
        self.on_free: Callable[[Link], None] | None = None  # what to do before the communicator is gone

    def take_tag(self) -> int:
        """Return the tag of the next operation; all ranks start operations in the same order, so their tags agree."""
        tag, self._next_tag = self._next_tag, (self._next_tag + 1) % self.notice_tag
        return tag

    def send(self, buffer: Buffer, dest: int, tag: int, arrival: Arrival | None = None) -> Sending:
        """Start to send a buffer of whole lines; a device buffer after the work queued on its stream.

        arrival: the message from `dest` in the same step, if any; see bidirectional exchange in `messages`.
        """
        self.traffic.messages += 1
        self.traffic.nbytes += buffer.size
        start: Callable[..., list[Any]] = messages.send_pieces
        if on_device(buffer):
            start = partial(staging.send_pieces, direct=self.direct)
        if arrival is not None and buffer.size > messages.BIDIRECTIONAL:
            size = send_size(self.comm, buffer.size, dest, tag)
            return Sending(size, after=(arrival, partial(start, self.comm, buffer, dest, tag)))
        sizes = [send_size(self.comm, buffer.size, dest, tag)] if buffer.size > messages.PIECE else []
        return Sending(*sizes, *start(self.comm, buffer, dest, tag))

    def staged(self, buffer: Any) -> Any:
        """Return a device buffer as MPI accepts it: a copy in host memory, unless MPI is CUDA-aware."""
        return buffer if self.direct else staging.to_pinned(buffer)

    def receive(self, source: int, tag: int, beside: Any = None) -> Arrival:
        """Start to receive a message into a buffer on the device of the array `beside`; None: host memory."""
        if on_device(beside):
            return staging.DeviceArrival(self.comm, source, tag, direct=self.direct)
        return Arrival(self.comm, source, tag)

    def reduce(self, array: NDArray[Any], total: NDArray[Any]) -> Sending:
        """Start MPI's own Allreduce (sum) from `array` to `total`; counted with its lower bound, 2 f n v bytes.

        Not in place: Open MPI then reduces to one rank and broadcasts, which sends a third more from the busiest rank
        at P = 4 than the ring that it uses otherwise.
        """
        self.traffic.messages += 1
        self.traffic.nbytes += 2 * (self.size - 1) * array.nbytes // self.size
        pieces = [slice(start, start + _PIECE) for start in range(0, array.size, _PIECE)]
        requests = [self.comm.Iallreduce(array[piece], total[piece]) for piece in pieces]  # by default MPI.SUM
        return Sending(*requests, keeping=(array, total))


class FirstCall:
    """The ranks of a communicator that has no link yet, as `faults.deadline` needs them; cached on it.

    Its notices are the only messages that the library sends on the caller's own communicator, with the highest tag, and
    only after a deadline: MPI does not tell which ranks a duplication waits for.
    """

    checked = False  # the ranks have not agreed on the debug mode yet

    def __init__(self, comm: "MPI.Intracomm") -> None:
        from mpi4py import MPI

        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.notice_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        self.faults, self.operation = Faults(comm.rank, comm.size), ""

    def send(self, buffer: Buffer, dest: int, tag: int) -> Sending:
        """Start to send a notice."""
        return Sending(*messages.send_pieces(self.comm, buffer, dest, tag))

    def receive(self, source: int, tag: int) -> Arrival:
        """Start to receive a notice."""
        return Arrival(self.comm, source, tag)


def _keep_pages() -> None:
    """Have malloc keep the pages of freed message buffers, up to 64 MiB.

    glibc raises its mmap threshold to the size of the largest block freed so far, up to 32 MiB, and its trim threshold
    to twice that (mallopt(3)). Touching newly mapped pages took a quarter of the time of an exchange of 250,000
    entries.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)  # never touched, so it costs no memory


def _first_ranks(comm: "MPI.Intracomm") -> tuple[int, ...]:
    """Return, for each rank, the first rank on its node (that shares its memory). Collective, blocks."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    first = np.array([comm.rank], np.int64)
    node.Bcast(first)
    node.Free()
    everywhere = np.empty(comm.size, np.int64)
    comm.Allgather(first, everywhere)
    return tuple(everywhere.tolist())


def _checked(comm: "MPI.Intracomm") -> bool:
    """Return whether the debug mode is on. Collective, blocks; ValueError on all ranks if they differ."""
    mine = np.array([checking.asked()])
    everywhere = np.empty(comm.size, np.bool_)
    comm.Allgather(mine, everywhere)
    if len(set(everywhere.tolist())) > 1:
        with_it = [rank for rank, on in enumerate(everywhere.tolist()) if on]
        raise ValueError(
            f"{checking.VARIABLE} is set on ranks {with_it} and not on the others: set it on all ranks or on none "
            "(mpirun -x exports a variable to all ranks)"
        )
    return bool(mine[0])


def check_communicator(comm: Any) -> None:
    """Raise TypeError if `comm` is not an mpi4py intracommunicator, ValueError if it is null."""
    if isinstance(comm, mpi().Intracomm) and comm:
        return
    if isinstance(comm, mpi().Comm) and not comm:
        raise ValueError("comm is MPI.COMM_NULL: expected a communicator that this rank belongs to")
    raise TypeError(f"comm is {type(comm).__name__}: expected an mpi4py intracommunicator such as MPI.COMM_WORLD")


def make_link(comm: Any, operation: str, meet: Callable[[Pending, FirstCall], None], agree: Agree) -> Link:
    """Make the link of a communicator that has none. Collective: waits by `meet`, and calls `agree`.

    operation: of the caller, for the text of errors. Raises ValueError on all ranks for a bad environment variable on
    one (`waiting`, `checking`); the errors of `agree`; RuntimeError under torchrun, whose processes MPI does not
    connect. CollectiveTimeoutError if a rank is absent and there is a timeout: then all later calls on the communicator
    raise the same.
    """
    from mpi4py import MPI

    if wrong := torchrun_warning(MPI.COMM_WORLD.size, os.environ):
        raise RuntimeError(wrong)
    first = attached(comm, _first_key(), lambda: FirstCall(comm))
    if first.faults.finished:
        raise first.faults.error()
    first.operation = operation + FIRST
    duplicate = comm  # until there is one
    try:
        unmade, request = comm.Idup()
        meet(Sending(request), first)  # now all ranks of `comm` are in here, and may block: none waits for a reply
        duplicate = unmade  # to revoke it before would crash Open MPI
        return attached(comm, _link_key(), lambda: _made(comm, duplicate, agree))
    except MPI.Exception as error:
        if not is_failure(error, comm):
            raise
        doing = "the first call on a communicator was interrupted"  # others may wait in either of the two
        raise on_death(Faults(comm.rank, comm.size), doing, comm, duplicate) from None


def _made(comm: "MPI.Intracomm", duplicate: "MPI.Intracomm", agree: Agree) -> Link:
    """Return a new link with a duplicate of the communicator; if that fails, the duplicate is freed."""
    try:
        return Link(comm, duplicate, agree)
    except ValueError:  # on all ranks: what they were to agree on is broken
        duplicate.Free()
        raise


def link_if_any(comm: Any) -> Link | None:
    """Return the link of a communicator; None if it has none."""
    link: Link | None = comm.Get_attr(_link_key())
    return link


def traffic(comm: Any) -> Traffic:
    """Return a copy of the traffic of this library on `comm`, sent by this rank so far; not collective.

    Point-to-point messages are counted exactly. MPI's own allreduce, as in `dense_allreduce`, counts as one message of
    2 (P-1)/P n v bytes, the lower bound for n values of v bytes.

    >>> before = traffic(comm)
    >>> total = sparse_allreduce(TopK(k=2).compress(gradient), comm)
    >>> traffic(comm).nbytes >= before.nbytes
    True
    """
    link = comm.Get_attr(_link_key())
    return Traffic() if link is None else replace(link.traffic)


def attached(comm: "MPI.Comm", key: int, make: Callable[[], T]) -> T:
    """Return the object cached on `comm` under `key`; the first call creates it."""
    there = cast("T | None", comm.Get_attr(key))
    if there is None:
        there = make()
        comm.Set_attr(key, there)
    return there


@cache
def _first_key() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()


@cache
def _link_key() -> int:
    from mpi4py import MPI

    def free(comm: "MPI.Comm", key: int, link: Link) -> None:
        if link.on_free is not None:
            link.on_free(link)
        if not link.faults.finished:  # else messages may be in flight on it, or ranks be dead
            link.comm.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)
