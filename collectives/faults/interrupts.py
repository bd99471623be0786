"""Signals within a call: Python's handlers run after it, so that the rank stays in step with the others.

A handler may raise, and Python runs it between any two calls of C: in the middle of a
step, or when MPI has just returned a message.
"""

import _signal  # type: ignore[import-not-found]  # `signal.signal` converts enumerations: 3 us in place of 0.3
from collections.abc import Callable
from functools import wraps
from signal import SIGINT, Signals, valid_signals
from threading import get_ident, main_thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MAIN = main_thread().ident  # thread in which Python runs handlers
# Signals after which a program cannot go on.
_FATAL = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"}
# Looking at every signal takes a tenth of a short collective.
FREQUENT = tuple(
    int(Signals[name])
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP")
)
_INTERRUPT = int(SIGINT)  # A call converts an enumeration in 0.2 us.
EVERY = tuple(map(int, valid_signals() - {Signals[name] for name in _FATAL}))


class Deferred:
    """A context in which Python's handlers of signals wait for its end, or for `deliver`.

    A second SIGINT is delivered at once, to leave a call that waits. In other threads
    than the main one it does nothing; nor within another such context, unless SIGINT is
    ignored: then signals wait for the end of the outer one, too. numbers: of the signals.
    """

    def __init__(self, numbers: tuple[int, ...] = EVERY) -> None:
        self._numbers = numbers
        self._handlers: dict[int, Any] = {}
        self._waiting: dict[int, Any] = {}  # their frames

    def __enter__(self) -> "Deferred":
        if get_ident() != _MAIN:
            return self
        interrupt = _signal.getsignal(_INTERRUPT)
        if getattr(interrupt, "__func__", None) is Deferred._defer:
            return self
        try:
            for number in self._numbers:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._defer)
        except BaseException:
            # A handler has raised that was not replaced yet.
            self._restore()
            raise
        return self

    def _restore(self) -> None:
        try:
            for number, handler in self._handlers.items():
                _signal.signal(number, handler)
        except BaseException:
            # A handler that was restored has raised.
            self._restore()
            raise

    def _defer(self, number: int, frame: Any) -> None:
        if number == _INTERRUPT and number in self._waiting:
            self._handlers[number](number, frame)
        else:
            self._waiting[number] = frame

    def deliver(self) -> None:
        """Call the handlers of the signals that have arrived; an error of one is raised after the others have run."""
        while self._waiting:
            number, frame = self._waiting.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self.deliver()

    def __exit__(self, *raised: object) -> None:
        if not self._handlers:
            return
        try:
            self._restore()
        finally:
            self.deliver()


def defer_interrupt(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose calls defer every signal that has a Python handler; see `Deferred`."""

    @wraps(function)
    def deferring(*args: P.args, **kwargs: P.kwargs) -> T:
        with Deferred():
            return function(*args, **kwargs)

    return deferring
