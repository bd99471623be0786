"""The library's own way through a communicator: its duplicate, the tags, and what all ranks have agreed on there.

Host arrays, arrays on a device of a CUDA-aware MPI and those that are staged differ here and in `staging` alone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from collectives import cuda_aware, messages, staging, waiting
from collectives.failure import found, is_failure
from collectives.messages import Arrival, Buffer, Pending, Reply, Sending, announce, new_status
from collectives.tuning import agreed_tuner
from mpicomp import checking, threads
from mpicomp.arrays import on_device
from mpicomp.errors import CollectiveError, CollectiveTimeoutError, RankFailedError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Reduction:
    """MPI's own nonblocking Allreduce (sum) from `array` to `total`, a new one, in pieces whose counts fit a C int.

    Not in place: Open MPI then takes a reduction to one rank and a broadcast, which sends a third more from the busiest
    rank at P = 4, where it otherwise takes a ring.
    """

    PIECE = 2**30

    def __init__(self, comm: "MPI.Comm", array: NDArray[Any], total: NDArray[Any]) -> None:
        self._array, self.total = array, total
        pieces = [slice(start, start + self.PIECE) for start in range(0, array.size, self.PIECE)]
        self._requests = [comm.Iallreduce(array[piece], self.total[piece]) for piece in pieces]  # by default MPI.SUM

    def test(self) -> bool:
        """See `Pending.test`."""
        return all([request.Test() for request in self._requests])

    def wait(self) -> None:
        """See `Pending.wait`."""
        for request in self._requests:
            request.Wait()


class Turn:
    """An operation's place among those that call MPI's own collectives, which every rank must start in one order.

    Used as a context: the next operation has its turn when the context is left.
    """

    def __init__(self, queue: "deque[Turn]") -> None:
        self._queue = queue
        queue.append(self)

    def test(self) -> bool:
        """See `Pending.test`."""
        return self._queue[0] is self

    def wait(self) -> None:
        """Check that it is this operation's turn: with no other in flight it must be."""
        assert self.test(), "an operation that is in flight alone has to wait for its turn"

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *raised: object) -> None:
        if self in self._queue:  # what reserved the turn leaves it too
            self._queue.remove(self)


@dataclass
class Traffic:
    """What this rank has sent over one communicator by this library: messages and their bytes."""

    messages: int = 0
    nbytes: int = 0


class Endpoint:
    """The library's own duplicate of a communicator, made at its first use, cached on it and freed with it."""

    def __init__(self, comm: "MPI.Intracomm", duplicate: "MPI.Intracomm") -> None:
        from mpi4py import MPI

        _keep_pages()
        self.comm = duplicate
        self.nodes = _first_ranks(duplicate)
        self.naps, sharers = waiting.sleeps_and_sharers(duplicate, self.nodes)
        threads.share(sharers)
        self.direct = cuda_aware.agreed(duplicate)
        self.tuner = agreed_tuner(duplicate, self.nodes)
        self.checked = _checked(duplicate)  # the debug mode: see `collectives.checking`
        self.rank, self.size = comm.rank, comm.size
        self.traffic = Traffic()
        self.turns: deque[Turn] = deque()
        self.notice_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)  # MPI promises at least 32767
        self.saved_tag = self.notice_tag - 1
        self._next_tag = 0
        self.revoked: str | None = None  # why no operation may start any more
        self.revoked_as: type[CollectiveError] = CollectiveTimeoutError
        self.gave_up: set[int] = set()  # the other ranks that were heard to give up as well
        self.abandoned: list[Pending] = []  # what was in flight then: MPI still owns its buffers
        self.on_free: Callable[[Endpoint], None] | None = None  # what to do before the communicator is gone

    def refusal(self) -> CollectiveError:
        """Return what an operation on this communicator raises, now that it is revoked."""
        return self.revoked_as(self.revoked)

    def take_tag(self) -> int:
        """Return the tag of the next operation; every rank starts its operations in one order, so the tags agree."""
        tag, self._next_tag = self._next_tag, (self._next_tag + 1) % self.saved_tag
        return tag

    def send(self, buffer: Buffer, dest: int, tag: int, arrival: Arrival | None = None) -> Sending:
        """Start to send a buffer of whole lines; from a device, once what was started there on it is done.

        arrival: what comes from `dest` in the same step, if anything does: long messages that cross wait for it.
        """
        self.traffic.messages += 1
        self.traffic.nbytes += buffer.size
        leave = partial(staging.leave, direct=self.direct) if on_device(buffer) else messages.leave
        if arrival is not None and buffer.size > messages.CROSSING:
            leaving = partial(leave, self.comm, buffer, dest, tag)
            return Reply(announce(self.comm, buffer.size, dest, tag), leaving, arrival)
        announced = [announce(self.comm, buffer.size, dest, tag)] if buffer.size > messages.PIECE else []
        return Sending(*announced, *leave(self.comm, buffer, dest, tag))

    def receive(self, source: int, tag: int, beside: Any = None) -> Arrival:
        """Await a message, in a buffer that lives where the array `beside` does; None is main memory."""
        if on_device(beside):
            return staging.awaited(self.direct)(self.comm, source, tag)
        return Arrival(self.comm, source, tag)

    def heard_notice(self) -> bool:
        """Look whether another rank has given up."""
        from mpi4py import MPI

        try:
            return self.comm.Iprobe(MPI.ANY_SOURCE, self.notice_tag)
        except MPI.Exception as error:  # a rank died: what waits for it says so, or the deadline
            if not is_failure(error):
                raise
            return False

    def notice(self) -> tuple[int, Buffer] | None:
        """Return the rank and the words of one that gave up, and has not been heard before; None if there is none."""
        from mpi4py import MPI

        status = new_status()
        if not self.heard_notice() or not self.comm.Iprobe(MPI.ANY_SOURCE, self.notice_tag, status):
            return None
        arrival = self.receive(status.Get_source(), self.notice_tag)
        arrival.wait()
        return arrival.source, arrival.buffer

    def reduce(self, array: NDArray[Any], total: NDArray[Any] | None = None) -> Reduction:
        """Start MPI's own Allreduce of `array`; its traffic is counted as what the best algorithm sends, 2 f n v.

        total: the array to use for the sum, in main memory too.
        """
        self.traffic.messages += 1
        self.traffic.nbytes += 2 * (self.size - 1) * array.nbytes // self.size
        return Reduction(self.comm, array, np.empty_like(array) if total is None else total)


def _keep_pages() -> None:
    """Have malloc keep the pages of freed message buffers, up to 64 MiB.

    glibc raises the size from which it maps memory anew, and twice that as what it keeps, to that of the largest block
    freed so far, up to 32 MiB (mallopt(3)). Touching newly mapped pages took a quarter of the time of an exchange of
    250,000 entries.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)  # never touched, so it costs no memory


def _first_ranks(comm: "MPI.Intracomm") -> tuple[int, ...]:
    """Return, for each rank, the first rank that shares its memory: what tells the nodes apart. Collective, blocks."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    first = np.array([comm.rank], np.int64)
    node.Bcast(first)
    node.Free()
    everywhere = np.empty(comm.size, np.int64)
    comm.Allgather(first, everywhere)
    return tuple(everywhere.tolist())


def _checked(comm: "MPI.Intracomm") -> bool:
    """Return whether the debug mode is on. Collective, blocks; ValueError on all ranks where they differ."""
    mine = np.array([checking.asked()])
    everywhere = np.empty(comm.size, np.bool_)
    comm.Allgather(mine, everywhere)
    if len(set(everywhere.tolist())) > 1:
        with_it = [rank for rank, on in enumerate(everywhere.tolist()) if on]
        raise ValueError(
            f"{checking.VARIABLE} is set on ranks {with_it} and not on the others: set it on all ranks or on none "
            "(mpirun -x hands a variable to all)"
        )
    return bool(mine[0])


def check_communicator(comm: Any) -> None:
    """Raise TypeError when `comm` is no mpi4py intracommunicator, ValueError when it is null."""
    from mpi4py import MPI

    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:  # mpi4py's constant is a Comm, what Split returns is not
        raise ValueError("comm is MPI.COMM_NULL: expected a communicator that this rank belongs to")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is {type(comm).__name__}: expected an mpi4py intracommunicator such as MPI.COMM_WORLD")


def endpoint_of(comm: Any, wait_for: Callable[[Pending], None]) -> Endpoint:
    """Return the endpoint of a communicator. The first call on it is collective, and waits by `wait_for`.

    Raises TypeError when `comm` is no mpi4py intracommunicator, ValueError when it is null; ValueError on all ranks for
    a bad environment variable on any (`waiting`, `checking`); ProfileError, a ValueError, on all ranks when rank 0
    finds a broken profile (see `tuning.agreed_tuner`).
    """
    from mpi4py import MPI

    check_communicator(comm)

    def make() -> Endpoint:
        duplicate = comm  # until there is one
        try:
            unmade, request = comm.Idup()
            wait_for(Sending(request))  # now all ranks of `comm` are in here, and may block: nobody waits for a reply
            duplicate = unmade  # to revoke it before would crash Open MPI
            return _made(comm, duplicate)
        except MPI.Exception as error:
            if not is_failure(error, comm):
                raise
            for each in (comm, duplicate):  # others may wait in either
                said = found(each, "the first call on a communicator was interrupted")
            raise RankFailedError(said) from None

    return attached(comm, _endpoint_key(), make)


def _made(comm: "MPI.Intracomm", duplicate: "MPI.Intracomm") -> Endpoint:
    """Return the endpoint of a communicator with a duplicate; without one, that is freed."""
    try:
        return Endpoint(comm, duplicate)
    except ValueError:  # on all ranks: what they were to agree on is broken
        duplicate.Free()
        raise


def endpoint_if_any(comm: "MPI.Intracomm") -> Endpoint | None:
    """Return the endpoint of a communicator that has one."""
    return cast("Endpoint | None", comm.Get_attr(_endpoint_key()))


def traffic(comm: Any) -> Traffic:
    """Return what this rank has sent over `comm` by this library so far, as a copy; not collective.

    Point-to-point messages are counted as they are. MPI's own allreduce (`dense_allreduce`, say) does not tell: it
    counts as one message of 2 (P-1)/P n v bytes, the least that one of n values of v bytes sends.
    """
    endpoint = comm.Get_attr(_endpoint_key())
    return Traffic() if endpoint is None else replace(endpoint.traffic)


def attached(comm: "MPI.Comm", key: int, make: Callable[[], T]) -> T:
    """Return the object cached on `comm` under `key`, made there first if need be."""
    there = cast("T | None", comm.Get_attr(key))
    if there is None:
        there = make()
        comm.Set_attr(key, there)
    return there


@cache
def _endpoint_key() -> int:
    from mpi4py import MPI

    def free(comm: "MPI.Comm", key: int, endpoint: Endpoint) -> None:
        if endpoint.on_free is not None:
            endpoint.on_free(endpoint)
        if endpoint.revoked is None:  # else messages may be in flight on it, or ranks be dead
            endpoint.comm.Free()

    return MPI.Comm.Create_keyval(delete_fn=free)
