"""Progress: a thread of the process that advances operations in flight while the rank computes.

It runs where MPI was initialised with MPI_THREAD_MULTIPLE, as its calls of MPI run
beside those of the user, and starts with the first operation that is left in flight.
It does the engine's work only: `continue_on_callers_thread` keeps code of the user, and
work on a device, off it. An error is kept in the request, and raised where the user
waits for it. Signals are delivered to other threads.

The pause between two looks grows with the time in which nothing moves, and with what a
look costs: messages that take long need few looks, and a rank that computes keeps its
core.
"""

import atexit
import os
from _thread import start_new_thread
from collections.abc import Callable
from enum import Enum
from signal import SIG_BLOCK, Signals, pthread_sigmask, valid_signals
from threading import Event, Lock, RLock, local
from time import sleep, thread_time

import numpy as np

from collectives.runtime.messages import Pending, Steps, mpi
from mpicomp.errors import warn
from mpicomp.settings import to_choice

# The value 0 turns the thread off. Ranks may differ in it.
VARIABLE = "MPICOMP_PROGRESS"
_FATAL = {Signals.SIGSEGV, Signals.SIGBUS, Signals.SIGFPE, Signals.SIGILL}


class Look(Enum):
    """What the thread found when it looked at the operations in flight.

    The value: the longest pause after it in seconds, and by what pauses grow.
    """

    MOVED = 5e-5, 1.0
    # A message that arrives is noticed late by at most an eighth of the wait.
    NOTHING_MOVED = 2e-3, 1.125
    # The user is inside the library, or has just started an operation.
    LATER = 5e-3, 2.0
    NOTHING_IN_FLIGHT = 4e-3, 2.0


_SHORTEST, _ = Look.MOVED.value
# Longest pause over the cost of a look, if that is longer.
_SPARING = 32
_NOT_LOOKED_AT = Look.LATER, Look.NOTHING_IN_FLIGHT
# Seconds in which an operation is left to the call that started it, such as an
# exchange.
FIRST = 3e-4
# Seconds without an operation in flight after which the thread waits for one.
_REST = 0.2


class _Here(local):
    """For each thread, whether it is the thread of `Progress`."""

    is_helper = False


_here = _Here()


class Progress:
    """The thread, started by the first `wake`, until `stop`.

    look: advances what is in flight, unless a thread of the user is inside the library;
    raises nothing.
    """

    def __init__(self, look: Callable[[], Look]) -> None:
        self._look = look
        self._is_idle = True  # it waits for `wake`
        self._work = Event()
        self._is_prepared = False
        self._is_stopped = False
        # Lock that the thread holds as long as it lives.
        self._alone = Lock()
        # Lock of a look: no process is forked, and MPI is not ended, within one. It is
        # reentrant for what the garbage collector runs there.
        self._looking = RLock()

    def wake(self) -> None:
        """Notify the thread that an operation was left in flight."""
        if self._is_idle and not self._is_stopped:
            self._work.set()
            if not self._alone.locked():
                self._start()

    def stop(self) -> None:
        """End the thread, at the end of Python or of MPI; operations then advance inside calls only."""
        self._is_stopped = True
        self._work.set()
        with self._looking:  # later looks do nothing
            pass

    def _start(self) -> None:
        if reason_off() is not None:
            self._is_stopped = True
            return
        if not self._is_prepared:
            self._prepare()
        try:
            # A `threading.Thread` waits until its thread runs, for ever if that has no
            # memory.
            start_new_thread(self._run, ())
        except RuntimeError as error:  # the next operation tries again
            warn(f"{error}: messages move inside calls of the library only", depth=3)

    def _prepare(self) -> None:
        """Have the end of Python stop the thread, and no process be forked within a look."""
        self._is_prepared = True
        atexit.register(self.stop)
        os.register_at_fork(
            before=self._looking.acquire,
            after_in_parent=self._looking.release,
            after_in_child=self._looking.release,
        )

    def _run(self) -> None:
        if not self._alone.acquire(False):
            return
        try:
            _here.is_helper = True
            pthread_sigmask(SIG_BLOCK, valid_signals() - _FATAL)
            # As in a step, ranges are checked in place of floating-point errors.
            with np.errstate(all="ignore"):
                while not self._is_stopped:
                    try:
                        self._serve()
                    except BaseException:
                        # Only a lack of memory raises here, as no code of the user
                        # runs.
                        self._work.set()
        finally:
            self._alone.release()

    def _serve(self) -> None:
        """Wait for an operation, and attend to those in flight until nothing has been for some time."""
        self._work.wait()
        self._is_idle = False
        self._work.clear()
        self._attend()
        self._is_idle = True
        # An operation may have been started before `wake` saw that the thread is idle.
        if self._looked() is not Look.NOTHING_IN_FLIGHT:
            self._work.set()

    def _attend(self) -> None:
        """Look again and again, until nothing has been in flight for some time."""
        pause = _SHORTEST
        rested = 0.0
        before = Look.LATER
        while rested < _REST and not self._is_stopped:
            began = thread_time()
            look = self._looked()
            cost = thread_time() - began
            is_busy = look is not Look.NOTHING_IN_FLIGHT
            rested = 0.0 if is_busy else rested + pause
            is_first = look is Look.NOTHING_MOVED and before in _NOT_LOOKED_AT
            if look is Look.MOVED or is_first:
                pause = _SHORTEST
            before = look
            sleep(pause)
            longest, growth = look.value
            pause = min(pause * growth, max(longest, _SPARING * cost))

    def _looked(self) -> Look:
        with self._looking:
            return Look.NOTHING_IN_FLIGHT if self._is_stopped else self._look()


def is_helper() -> bool:
    """Return whether this is the thread of `Progress`."""
    return _here.is_helper


def continue_on_callers_thread() -> Steps[None]:
    """Continue inside a call: what follows runs code of the user, or works on a device."""
    if is_helper():
        yield (Pending(lambda: not is_helper()),)


def check_setting() -> None:
    """Raise ValueError for a setting in the environment that is neither 0 nor 1."""
    setting = os.environ.get(VARIABLE) or "1"
    to_choice(f"the environment variable {VARIABLE}", setting, ("0", "1"))


def reason_off() -> str | None:
    """Return why operations advance inside calls only; None if they advance while the rank computes."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE} is 0"
    names = ("SINGLE", "FUNNELED", "SERIALIZED")
    levels = {getattr(mpi(), f"THREAD_{name}"): name for name in names}
    if level := levels.get(mpi().Query_thread()):
        return (
            f"MPI was initialised with MPI_THREAD_{level}; set mpi4py.rc.thread_level = "
            '"multiple", its default, before MPI is imported'
        )
    return None


def described() -> str:
    """Return whether messages move while the rank computes, and why not."""
    if reason := reason_off():
        return f"messages move inside calls of the library only: {reason}"
    return "messages move while the rank computes"
