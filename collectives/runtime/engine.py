"""The engine: run collectives to their end, or keep them in flight.

A collective is a generator that yields tuples of pending messages; the engine resumes
it when all of them are complete. A single operation waits inside MPI, unless ranks
share cores (`waiting`) or there is a timeout. With several in flight, waiting for one
advances all, as its peer may wait for another one first, and the core is yielded
between two rounds of polling: with more ranks than cores, ranks that poll without a
pause starve each other.

The operations in flight belong to the process, as in MPI, and so does the timeout.

While no thread of the user is inside the library, `progress` has its thread advance
them. One lock passes the state of this module between the two.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from inspect import GEN_RUNNING, getgeneratorstate
from threading import Lock, RLock
from typing import Any, Generic, TypeVar

from collectives.faults import ulfm
from collectives.faults.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    DamagedMessageError,
)
from collectives.faults.interrupts import FREQUENT, Deferred
from collectives.faults.state import Faults, report
from collectives.runtime import deadline
from collectives.runtime.group import Group
from collectives.runtime.link import Link, key_of
from collectives.runtime.messages import Arrival, Pending, Steps, mpi
from collectives.runtime.progress import FIRST, Look, Progress, is_helper
from collectives.runtime.waiting import initial_timeout, seconds
from mpicomp.arrays.device import on_device
from mpicomp.errors import warn

T = TypeVar("T")

# An operation, its round, and the ranks that it waits for.
Waits = tuple[str, int, set[int]]

# Seconds of a round of polling of a rank that runs, at most, where ranks share cores.
_LONGEST_ROUND = 0.1
_NO_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 2e-6, 2e-4  # seconds
# Seconds of a first call after which a rank says what it waits for: ranks may be late
# for good reasons, but in another order they wait for ever.
_LONG = 10.0
# Errors that end an operation while it waits, as it cannot receive what has arrived.
_OF_A_WAIT = DamagedMessageError, MemoryError, RecursionError
# Frames of Python that are added to end an operation, which may have too few left.
_FRAMES = 100
_TWO_THREADS = (
    "two threads are inside the library: call collectives from one thread at a time"
)
_FINALIZED = (
    "MPI.Finalize() was called: call collectives, and wait for requests, before it"
)
_FORKED = (
    "this process was forked from a rank, and MPI counts it as no rank: call collectives in the rank itself, and end "
    "the child with os._exit, as multiprocessing does"
)


class Request(Generic[T]):
    """A collective in flight, whose messages move while the rank computes (docs/mpi.md, "Progress").

    Requests may be completed in any order, and must be completed, as other ranks depend
    on this one; below MPI_THREAD_MULTIPLE before a call of MPI that waits for other
    ranks, as they advance inside calls of this library only.

    >>> request = sparse_iallreduce(TopK(k=2).compress(gradient), comm)
    >>> request.wait().nnz
    2
    """

    def __init__(self, steps: Steps[T], group: Group, engine: "Engine") -> None:
        self._steps = steps
        self._engine = engine
        self._group = group
        self.link = group.link
        self.operation = group.signature["operation"]
        self._round = 0
        self._pending: tuple[Pending, ...] = ()
        self._result: Any = None
        self._error: Exception | None = None
        self.done = False
        # Time from which on the operation may advance without a call.
        self.unattended_from = math.inf

    @property
    def algorithm(self) -> str:
        """The algorithm that runs, or ran; "auto" until it is chosen."""
        return str(self._group.algorithm)

    def in_background(self) -> None:
        """Have it advance while the rank computes, if it can.

        On one rank nothing moves. A device is used, and code of the user runs, inside calls only.
        """
        group = self._group
        if (
            self.done
            or group.runs_user_code
            or group.size == 1
            or on_device(group.like)
        ):
            return
        self.unattended_from = time.monotonic() + FIRST
        self._engine.progress.wake()

    def test(self) -> bool:
        """Advance every operation in flight without waiting; return whether this one has ended, also by an error."""
        if not self.done:
            with Deferred(FREQUENT), self._engine:
                self._engine.advance()
        return self.done

    def wait(self) -> T:
        """Wait for the end, and return the result or raise the collective's error; it may be called again."""
        if not self.done:
            with Deferred(FREQUENT) as signals, self._engine as engine:
                engine.finish(self, signals)
        if self._error is None:
            return self._result  # type: ignore[no-any-return]
        try:
            raise self._error
        finally:
            # The error, its traceback and this frame would form a reference cycle.
            del self

    def result(self) -> T:
        """Return what `wait` does, for a caller that keeps no reference: with an exception the result is lost."""
        try:
            return self.wait()
        except BaseException as error:
            if error is not self._error and error is not self._group.error:
                self.lose(error)
            raise
        finally:
            del self  # as in `wait`

    def lose(self, error: BaseException) -> None:
        """Remember that this rank will not get the result."""
        self.link.lose(
            f"the result of {self.operation}, call {self._group.number} on this communicator, was lost on rank "
            f"{self.link.rank} by {type(error).__name__}, and other ranks may have it; all ranks are in step again now"
        )

    def advance(self, *, block: bool = False) -> bool:
        """Resume the collective if its messages are complete, with `block` once they are; return whether one was."""
        if self.done:  # The fault of another operation ended it.
            return False
        try:
            if block:
                for one in self._pending:
                    one.wait()
            else:
                awaited = len(self._pending)
                self._pending = tuple([one for one in self._pending if not one.test()])
                if self._pending:
                    return len(self._pending) < awaited
        except BaseException as error:
            # Any other error is that of a signal's handler during the wait, and the
            # operation can continue.
            if not isinstance(error, (*_OF_A_WAIT, mpi().Exception)):
                raise
            self._end(error)
            return True
        try:
            self._group.posted.clear()
            self._pending = next(self._steps)
            self._round += 1
        except StopIteration as end:
            self._result = end.value
            self.done = True
        except BaseException as error:
            self._end(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _end(self, error: BaseException) -> None:
        """End with an error of the schedule or of a wait; if only this rank has it, break off."""
        frames = sys.getrecursionlimit()
        sys.setrecursionlimit(frames + _FRAMES)
        try:
            self._end_by(error)
        finally:
            sys.setrecursionlimit(frames)

    def _end_by(self, error: BaseException) -> None:
        is_own = error is self._group.error
        if isinstance(error, DamagedMessageError) and not is_own:
            self._engine.give_up(self.link.faults, self.waits(), damage=str(error))
            return
        self._steps.close()
        if isinstance(error, RuntimeError) and isinstance(
            error.__cause__, StopIteration
        ):
            # A rank contributed StopIteration as its own error, and a generator cannot
            # raise it.
            error = error.__cause__
            is_own = error is self._group.error
        if not is_own and ulfm.is_failure(error, self.link.comm):
            self._engine.abandon(self._pending)
            doing = f"{self.operation} was interrupted in round {self._round}"
            error = ulfm.on_death(self.link.faults, doing)
        elif self._group.is_broken:
            self._engine.discard(self._group)
        elif not (is_own or isinstance(error, CollectiveError)):
            self.lose(error)
            self._group.send_report(report(self._group.signature, error, broken=True))
            self._engine.discard(self._group)
        if not isinstance(error, Exception):
            text = f"{self.operation} was interrupted in round {self._round} on this rank and cannot continue"
            self.fail(
                CollectiveError(f"{text}: the next operation raises on all ranks")
            )
            return
        # This frame refers to the request, and the request to the error: with its
        # traceback they would form a reference cycle.
        deeper = error.__traceback__ and error.__traceback__.tb_next
        self._error = error.with_traceback(deeper)
        self.done = True

    def is_after(self, other: Group) -> bool:
        """Return whether it was started after an operation that broke off."""
        return self.link is other.link and self._group.number > other.number

    def waits(self) -> Waits:
        """Return the operation, the round, and the ranks that it waits for."""
        ranks = {
            message.source
            for message in self._group.posted
            if isinstance(message, Arrival) and not message.test()
        }
        return self.operation, self._round, ranks

    def fail(self, error: Exception) -> None:
        """End with an error, whatever is still in flight."""
        # The garbage collector may free the communicator while the generator runs,
        # which cannot be closed then.
        if getgeneratorstate(self._steps) != GEN_RUNNING:
            self._steps.close()
        self._engine.abandon(self._pending)
        self._error = error
        self.done = True


class Engine:
    """The operations that this process has in flight, over all communicators, in the order of their start.

    timeout: seconds that a rank waits while no message moves; None for ever.
    """

    def __init__(self) -> None:
        self._in_flight: list[Request[Any]] = []
        # Messages for which nobody waits any more, but whose buffers MPI may still own.
        self._abandoned: list[Pending] = []
        self._discarding: list[Group] = []
        # Faults of the communicators on which other ranks may wait for this one.
        self._known: set[Faults] = set()
        self.timeout = initial_timeout()
        # Lock that the thread of the user holds while it is inside the library.
        self._one_thread = Lock()
        # Lock that is held by the thread that works on the operations: that one, or the
        # one of `progress`. It is reentrant, as a signal's handler may free a
        # communicator.
        self._turn = RLock()
        self.progress = Progress(self.look)
        self._refusal = _TWO_THREADS
        # Whether only MPI's main thread may call MPI.
        self._is_funneled = False

    def start(self, steps: Steps[T], group: Group) -> Request[T]:
        """Start a collective; raises the error of a finished communicator (`state.Faults`)."""
        link = group.link
        faults = link.faults
        request = Request(steps, group, self)
        if self._listens(link) and not faults.finished and deadline.has_notice(faults):
            self.give_up(faults, request.waits())
        if faults.finished:
            raise self.error_of(faults, request.waits())
        try:
            request.advance(block=True)  # nothing is pending yet
        except BaseException as error:
            request.lose(error)
            raise
        finally:
            if not request.done:
                self._in_flight.append(request)
            elif self._discarding:
                self._forget([request])
        return request

    def __enter__(self) -> "Engine":
        """Keep other threads out, from before anything is consumed that all ranks count until a wait has ended."""
        if self._is_funneled:
            self.check_thread()
        # Code that the garbage collector runs within a look would resume an operation
        # that is running.
        if is_helper() or not self._one_thread.acquire(False):
            raise RuntimeError(self._refusal)
        try:
            self._turn.acquire()
        except BaseException:
            # A signal's handler has raised.
            self._one_thread.release()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._turn.release()
        self._one_thread.release()

    def check_thread(self) -> None:
        """Raise RuntimeError in a thread that may not call MPI at the level at which MPI was initialised."""
        from mpi4py import MPI

        self._is_funneled = MPI.Query_thread() < MPI.THREAD_SERIALIZED
        if self._is_funneled and not MPI.Is_thread_main():
            raise RuntimeError(
                "MPI was initialised for calls from its main thread only (MPI_THREAD_FUNNELED), and this is another "
                'one: call collectives in the main thread, or set mpi4py.rc.thread_level = "multiple" before MPI is '
                "imported"
            )

    def refuse_forked(self) -> None:
        """Refuse all calls, in the child process of a rank."""
        # The thread that held the lock may not exist in this process.
        self._turn = RLock()
        self._refuse(_FORKED)

    def end(self) -> None:
        """Refuse all calls, at the end of MPI."""
        self.progress.stop()
        key_of.cache_clear()
        self._refuse(_FINALIZED)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self._one_thread.acquire(False)  # for ever

    def finish(self, request: Request[Any], signals: Deferred) -> None:
        """Return when `request` has ended. signals: delivered while no operation advances."""
        link = request.link
        polls = self._listens(link) or link.backs_off
        try:
            while not request.done:
                if not polls and self._is_alone(request):
                    request.advance(block=True)
                else:
                    self._poll(request, signals, polls=polls)
        finally:
            self._drop_ended()

    def _poll(self, request: Request[Any], signals: Deferred, *, polls: bool) -> None:
        """Poll until a request has ended or, unless it `polls` to the end, may wait inside MPI."""
        link = request.link

        def waits() -> Waits:
            first = next(other for other in self._in_flight if other.link is link)
            return first.waits()

        def watch(waited: float) -> None:
            signals.deliver()
            if self._listens(link):
                self._watch(link.faults, waits, waited)

        self.poll_until(
            lambda: request.done or (not polls and self._is_alone(request)), watch
        )

    def _is_alone(self, request: Request[Any]) -> bool:
        return self._in_flight == [request] and not self._discarding

    def wait_for(self, pending: Pending, call: str) -> None:
        """Return when `pending` is complete; meanwhile the operations in flight advance. call: for errors."""

        def watch(waited: float) -> None:
            if self._is_late(waited):
                self.abandon([pending])
                raise CollectiveTimeoutError(
                    f"not all live ranks {call} within {waited:.3g} s"
                )

        if not self._in_flight and self.timeout is None:
            pending.wait()
        else:
            self.poll_until(pending.test, watch)

    def wait_for_ranks(self, pending: Pending, faults: Faults, waits: Waits) -> None:
        """Return when all ranks have made their first call on a communicator; raises on all that wait if one is absent.

        So does a rank that comes after the others gave up: their notices are there.
        """
        warning = f"{waits[0]} has waited for other ranks for {_LONG:g} s"

        def watch(waited: float) -> None:
            nonlocal warning
            if waited > _LONG and warning:
                warn(f"{warning}; MPICOMP_TIMEOUT ends such a wait", depth=9)
                warning = ""
            if self.timeout is not None:
                self._watch(faults, lambda: waits, waited)

        self.poll_until(lambda: faults.finished or pending.test(), watch)
        if not faults.finished:
            watch(0.0)
        if faults.finished:
            self.abandon([pending])
            raise faults.error()

    def poll_until(
        self, reached: Callable[[], bool], watch: Callable[[float], None]
    ) -> None:
        """Poll, and yield the core after every round in which no message moved.

        watch: called after such a round, with the seconds since a message moved;
        raises, or makes `reached` true, after the timeout. Rounds more than half of the
        timeout apart start the seconds anew, as this rank did not run in between. The
        core is first yielded without sleeping: most messages arrive sooner than the
        shortest sleep ends.
        """
        longest = max((self.timeout or math.inf) / 2, _LONGEST_ROUND)
        pause = _SHORTEST_PAUSE
        began = time.monotonic()
        now = began
        while not reached():
            moved = self.advance()
            before = now
            now = time.monotonic()
            if moved or now - before > longest:
                pause = _SHORTEST_PAUSE
                began = now
            if moved:
                continue
            watch(now - began)
            if now - began < _NO_PAUSE:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _listens(self, link: Link) -> bool:
        """Return whether this rank polls, and so detects notices of other ranks."""
        return self.timeout is not None or link.checked

    def _is_late(self, waited: float) -> bool:
        return self.timeout is not None and waited > self.timeout

    def _watch(self, faults: Faults, waits: Callable[[], Waits], waited: float) -> None:
        """Give up if the deadline has passed or another rank has given up; else answer other ranks."""
        if self._is_late(waited):
            self.give_up(faults, waits(), waited=waited)
        elif deadline.has_notice(faults):
            self.give_up(faults, waits())
        else:
            self._answer(faults, waits)

    def give_up(self, faults: Faults, waits: Waits, **why: Any) -> None:
        """Notify the other ranks, receive their notices, and end all operations on a communicator; see `Faults`."""
        notice = faults.give_up(*waits, **why)
        try:
            if notice is not None:
                deadline.send_notices(faults, notice, self._abandoned)
                self._await_notices(faults, waits)
        finally:
            self.end_all(faults)

    def error_of(self, faults: Faults, waits: Waits) -> CollectiveError:
        """Return the error of a call on a finished communicator; await notices first if this rank has only answered."""
        with self._turn:
            self._await_notices(faults, waits)
            return faults.error()

    def _await_notices(self, faults: Faults, waits: Waits) -> None:
        """Receive the notices of the other ranks, until all awaited ones have arrived or the time is up."""
        end = time.monotonic() + min(deadline.GRACE, self.timeout or math.inf)
        while faults.awaited and time.monotonic() < end:
            self._answer(faults, lambda: waits)
            if not deadline.receive_notice(faults):
                time.sleep(1e-3)
        self._answer(faults, lambda: waits)

    def discard(self, group: Group) -> None:
        """Receive and drop the messages of an operation that broke off, until a later one has ended."""
        self._discarding.append(group)

    def _forget(self, ended: list[Request[Any]]) -> None:
        """Stop discarding messages of operations that precede one that has ended: all ranks have left those."""
        self._discarding = [
            group
            for group in self._discarding
            if not any([request.is_after(group) for request in ended])
        ]

    def abandon(self, pending: Iterable[Pending]) -> None:
        """Keep references to abandoned messages, as MPI may still own their buffers."""
        self._abandoned += pending

    def end_all(self, faults: Faults) -> None:
        """End all operations on the communicator with these faults, which is finished."""
        with self._turn:
            for request in self._in_flight:
                if request.link.faults is faults:
                    request.fail(faults.error())
            self._drop_ended()

    def _drop_ended(self) -> None:
        self._in_flight = [one for one in self._in_flight if not one.done]

    def know(self, faults: Faults) -> None:
        """Answer the ranks that wait on a communicator, until `faults` is finished, while this rank waits elsewhere."""
        self._known.add(faults)

    def _answer(self, here: Faults, waits: Callable[[], Waits]) -> None:
        """Answer the ranks that gave up on other communicators than that of `here`, on which this rank waits."""
        for faults in [*self._known]:
            if faults not in self._known:
                # The end of operations on another communicator has freed this one.
                continue
            if faults.finished:
                self._known.remove(faults)
            elif faults is not here and deadline.has_notice(faults):
                notice = faults.give_up(*waits(), elsewhere=True)
                assert notice is not None, "the communicator is usable"
                deadline.send_notices(faults, notice, self._abandoned)
                self.end_all(faults)

    def freed(self, link: Link) -> None:
        """End the operations in flight on a communicator that is being freed; MPI frees it later."""
        with self._turn:
            self._known.discard(link.faults)
            self._discarding = [
                group for group in self._discarding if group.link is not link
            ]
            left = [request for request in self._in_flight if request.link is link]
            if left:
                link.faults.free(left[0].operation)
                self.end_all(link.faults)

    def look(self) -> Look:
        """Advance the operations in flight that need no call; on the thread of `progress`, so it raises nothing."""
        times = [request.unattended_from for request in self._in_flight]
        first = min(times, default=math.inf)
        if first == math.inf:
            return Look.NOTHING_IN_FLIGHT
        now = time.monotonic()
        if first > now or self._one_thread.locked() or not self._turn.acquire(False):
            return Look.LATER
        try:
            moved = self.advance(now)
        except BaseException:
            # The request of an operation keeps the error that ended it.
            moved = True
        finally:
            self._turn.release()
        return Look.MOVED if moved else Look.NOTHING_MOVED

    def advance(self, now: float = math.inf) -> bool:
        """Advance every operation that can advance, and return whether a message was complete.

        now: only those that need no call then.
        """
        try:
            moved = False
            for request in self._in_flight:
                if request.unattended_from <= now:
                    moved |= request.advance()
            if now == math.inf:
                for group in self._discarding:
                    group.discard()
            return moved
        finally:
            if self._discarding:
                self._forget([request for request in self._in_flight if request.done])
            self._drop_ended()


def configure(*, timeout: float | None) -> None:
    """Set the timeout of a wait inside the library during which no message moves; the same on all ranks.

    After it all ranks that wait raise `CollectiveTimeoutError`. With a timeout a rank polls
    instead of waiting inside MPI.

    Args:
        timeout: seconds above 0, longer than the longest message takes; None waits for ever.
            MPICOMP_TIMEOUT is the initial value.

    Raises:
        ValueError: the timeout is out of range.

    >>> configure(timeout=60)
    """
    of_process().timeout = seconds(timeout, "timeout")


@cache
def of_process() -> Engine:
    """Return the engine of this process; as a context manager it keeps other threads out."""
    return Engine()


@cache
def end_with_mpi() -> None:
    """Have MPI.Finalize end the engine, before it ends anything: it frees COMM_SELF first."""
    key = mpi().Comm.Create_keyval(delete_fn=lambda *given: of_process().end())
    mpi().COMM_SELF.Set_attr(key, of_process())


def _after_fork() -> None:
    """Refuse calls in a child forked from a process that had initialised MPI; other children may call the library."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized():
        of_process().refuse_forked()


os.register_at_fork(after_in_child=_after_fork)
