"""Drive collectives to their end, or leave them in flight.

A collective is a generator that yields the tuple of things it waits on. The driver resumes it when all of them are
complete. An operation that is alone waits inside MPI, unless ranks share cores (`waiting`); when several are in flight,
waiting for one drives them all (the peer may wait for another one first), and the core is given away between two rounds
of polling: ranks that poll without a pause starve each other when there are more ranks than cores.

The operations in flight are a property of the process, as in MPI itself: their list is cached on MPI.COMM_SELF. So is
the time after which a rank that waits gives up (`deadline`); with one, it polls.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from inspect import GEN_CLOSED, getgeneratorstate
from threading import Lock
from typing import Any, Generic, TypeVar

from collectives import deadline, failure
from collectives.channel import Channel, LastWords
from collectives.messages import Arrival, Pending, Steps
from collectives.transport import Endpoint, attached
from collectives.waiting import asked_timeout, seconds
from mpicomp.errors import CollectiveError, CollectiveTimeoutError, DamagedMessageError, RankFailedError

T = TypeVar("T")

_NO_NAP, _SHORTEST_NAP, _LONGEST_NAP = 1e-3, 2e-6, 2e-4  # seconds


class Request(Generic[T]):
    """A collective in flight. Its first messages leave when it is made; `test` and `wait` move it on.

    Requests may be completed in any order, and have to be completed: a peer may depend on this rank's part. They move
    on inside calls of this library only: complete them before a call of MPI that waits for the other ranks.
    """

    def __init__(self, steps: Steps[T], channel: Channel, engine: "Engine") -> None:
        self._steps, self._engine = steps, engine
        self.endpoint, self.operation, self._round = channel.endpoint, channel.terms.operation, 0
        self._brought = channel.error  # this rank's own, which says nothing of the communicator
        self._pending: tuple[Pending, ...] = ()
        self._result: T
        self._error: Exception | None = None
        self.done = False
        self.advance()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, which `wait` raises."""
        return self._error is not None

    def test(self) -> bool:
        """Move every operation in flight on without waiting; return whether this one has ended, well or not."""
        if not self.done:
            self._engine.poll()
        return self.done

    def wait(self) -> T:
        """Wait for the end and return the result, or raise what the collective raises; may be called again."""
        if not self.done:
            self._engine.finish(self)
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            del self  # else the error, its traceback and this frame hold each other

    def advance(self, *, block: bool = False) -> bool:
        """Resume the collective if what it waits on is complete, or with `block` once it is; return whether it was."""
        try:
            if not self._complete(block):
                return False
            self._pending = next(self._steps)
            self._round += 1
        except StopIteration as end:
            self._result, self.done = end.value, True
        except Exception as error:
            if isinstance(error, DamagedMessageError) and error is not self._brought:
                self._engine.give_up(self.endpoint, {**self.waits(), "damage": str(error)}, 0.0)
                return True
            self._steps.close()
            if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
                error = error.__cause__  # a rank brought it as its own error, and a generator cannot raise it
            if error is not self._brought and failure.is_failure(error, self.endpoint.comm):
                error = self._rank_failed()
            deeper = error.__traceback__ and error.__traceback__.tb_next  # this frame would hold what holds the error
            self._error, self.done = error.with_traceback(deeper), True
        except BaseException:  # an interrupt: between two rounds it leaves the operation as it was
            if getgeneratorstate(self._steps) == GEN_CLOSED:
                where = f"{self.operation} was interrupted in round {self._round} on this rank"
                self.fail(CollectiveError(f"{where}, and cannot go on: the other ranks may wait for it"))
            raise
        return True

    def _complete(self, block: bool) -> bool:
        """Look at all that it waits on, and so move it on, or wait for it; return whether it is complete."""
        if block:
            for one in self._pending:
                one.wait()
            return True
        self._pending = tuple([one for one in self._pending if not one.test()])
        return not self._pending

    def _rank_failed(self) -> Exception:
        """Return what is raised when a rank has died; MPI may still own the buffers of what is in flight."""
        endpoint = self.endpoint
        endpoint.abandoned += self._pending
        if endpoint.revoked is None:
            doing = f"{self.operation} was interrupted in round {self._round}"
            endpoint.revoked, endpoint.revoked_as = failure.found(endpoint.comm, doing), RankFailedError
        return endpoint.refusal()

    def waits(self) -> dict[str, Any]:
        """Return in which operation and round it waits, and for which ranks."""
        ranks = {rank for one in self._pending if isinstance(one, Arrival | LastWords) for rank in one.awaited()}
        return {"operation": self.operation, "round": self._round, "for": sorted(ranks)}

    def fail(self, error: Exception) -> None:
        """End with an error, whatever is still in flight."""
        self._steps.close()
        self.endpoint.abandoned += self._pending
        self._error, self.done = error, True


class OneThread:
    """The place inside the library, as a context; RuntimeError where another thread is there."""

    def __init__(self) -> None:
        self._taken = Lock()

    def __enter__(self) -> None:
        if not self._taken.acquire(blocking=False):
            raise RuntimeError("two threads are inside the library: call collectives from one thread at a time")

    def __exit__(self, *raised: object) -> None:
        self._taken.release()


class Engine:
    """The operations that this process has in flight, over all communicators, in the order of their start.

    timeout: seconds that a rank waits while nothing moves; None for ever.
    """

    def __init__(self) -> None:
        self._in_flight: list[Request[Any]] = []
        self._abandoned: list[Pending] = []  # what nobody waits for any more: MPI still owns its buffers
        self.timeout = asked_timeout()
        self._one_thread = OneThread()

    def start(self, steps: Steps[T], channel: Channel) -> Request[T]:
        """Put a collective in flight; CollectiveTimeoutError where the communicator is revoked."""
        if self._listens(channel.endpoint) and channel.endpoint.revoked is None and channel.endpoint.heard_notice():
            self.give_up(channel.endpoint, {"operation": channel.terms.operation, "round": 0, "for": []}, 0.0)
        if channel.endpoint.revoked is not None:
            raise channel.endpoint.refusal()
        with self._one_thread:
            request = Request(steps, channel, self)
            if not request.done:
                self._in_flight.append(request)
                channel.endpoint.on_free = self.freed
        return request

    def poll(self) -> bool:
        """Move every operation on that can move, and return whether one did."""
        return self._advance(self._in_flight)

    def finish(self, request: Request[Any]) -> None:
        """Return when `request` has ended."""
        if self._listens(request.endpoint) or request.endpoint.naps:
            self.poll_until(lambda: request.done, request.endpoint)
        while not request.done:
            if self._in_flight == [request]:
                self._advance([request], block=True)
            else:
                self.poll_until(lambda: request.done or self._in_flight == [request])

    def wait_for(self, pending: Pending) -> None:
        """Return when `pending` is complete; the operations in flight go on meanwhile."""
        if not self._in_flight and self.timeout is None:
            pending.wait()
            return
        try:
            self.poll_until(pending.test)
        except CollectiveTimeoutError:
            self._abandoned.append(pending)
            raise

    def poll_until(self, reached: Callable[[], bool], endpoint: Endpoint | None = None) -> None:
        """Poll, and give the core away after every round in which nothing moved; give up when that lasts too long.

        The core is yielded first, as most messages come soon and the shortest nap takes longer than a round of polling.
        """
        nap, moved = _SHORTEST_NAP, time.monotonic()
        while not reached():
            if self.poll():
                nap, moved = _SHORTEST_NAP, time.monotonic()
            else:
                waited = time.monotonic() - moved
                self._watch(endpoint, waited)
                if waited < _NO_NAP:
                    os.sched_yield()
                else:
                    time.sleep(nap)
                    nap = min(2 * nap, _LONGEST_NAP)

    def _listens(self, endpoint: Endpoint) -> bool:
        """Return whether this rank polls, and so hears when another one gives up."""
        return self.timeout is not None or endpoint.checked

    def _watch(self, endpoint: Endpoint | None, waited: float) -> None:
        """Give up where it is time to, or another rank has."""
        late = self.timeout is not None and waited > self.timeout
        if endpoint is None:
            if late:
                raise CollectiveTimeoutError(f"waited {waited:.3g} s for all ranks to make their first call")
        elif late or (self._listens(endpoint) and endpoint.heard_notice()):
            first = next(request for request in self._in_flight if request.endpoint is endpoint)
            self.give_up(endpoint, first.waits(), waited)

    def give_up(self, endpoint: Endpoint, mine: dict[str, Any], waited: float) -> None:
        """End all operations on an endpoint."""
        deadline.give_up(endpoint, mine, waited, self.timeout or deadline.GRACE)
        self.end_all(endpoint)

    def end_all(self, endpoint: Endpoint) -> None:
        """End all operations on an endpoint that is revoked."""
        for request in [request for request in self._in_flight if request.endpoint is endpoint]:
            request.fail(endpoint.refusal())
        self._in_flight = [request for request in self._in_flight if not request.done]

    def freed(self, endpoint: Endpoint) -> None:
        """End what is in flight on an endpoint whose communicator is being freed: MPI lets go of it later."""
        left = [request for request in self._in_flight if request.endpoint is endpoint]
        if left:
            endpoint.revoked = f"the communicator was freed with {left[0].operation} in flight: complete requests first"
            endpoint.revoked_as = CollectiveError
            self.end_all(endpoint)
            self._abandoned += endpoint.abandoned

    def _advance(self, requests: list[Request[Any]], *, block: bool = False) -> bool:
        with self._one_thread:
            try:
                moved = [request.advance(block=block) for request in requests]
            finally:
                self._in_flight = [request for request in self._in_flight if not request.done]
        return any(moved)


def configure(*, timeout: float | None) -> None:
    """Set how long a rank waits inside the library while nothing moves before it gives up; the same on all ranks.

    timeout: seconds above 0, longer than the longest message takes; None, the default, for ever. The environment
    variable MPICOMP_TIMEOUT sets it at the start. A rank that gives up raises `CollectiveTimeoutError`, and so do those
    that wait with it; see `collectives.deadline`. With a timeout a rank polls instead of waiting inside MPI.

    Raises ValueError for another value.
    """
    _engine().timeout = seconds(timeout, "timeout")


def start(steps: Steps[T], channel: Channel) -> Request[T]:
    """Put a collective in flight in this process."""
    return _engine().start(steps, channel)


def wait_for(pending: Pending) -> None:
    """Wait for something of MPI's while the operations of this process go on."""
    _engine().wait_for(pending)


def end_all(endpoint: Endpoint) -> None:
    """End all operations of this process on an endpoint that is revoked."""
    _engine().end_all(endpoint)


def _engine() -> Engine:
    from mpi4py import MPI

    return attached(MPI.COMM_SELF, _engine_key(), Engine)


@cache
def _engine_key() -> int:
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()
