"""Ctrl-C within a step: a first SIGINT is delivered after it, so that the rank stays in step with the others."""

import _signal  # type: ignore[import-not-found]  # `signal.signal` converts enumerations: 3 us in place of 0.3
import threading
from collections.abc import Callable
from functools import wraps
from signal import SIGINT
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def defer_interrupt(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose calls deliver a SIGINT when they end; a second one at once, to leave a call that waits.

    In other threads than the main one, and without a Python handler, it only calls the function.
    """

    @wraps(function)
    def deferring(*args: P.args, **kwargs: P.kwargs) -> T:
        handler = _signal.getsignal(SIGINT)
        if not callable(handler) or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        deferred: list[Any] = []

        def defer(number: int, frame: Any) -> None:
            if deferred:
                deferred.clear()
                handler(number, frame)
            else:
                deferred[:] = number, frame

        _signal.signal(SIGINT, defer)
        try:
            return function(*args, **kwargs)
        finally:
            _signal.signal(SIGINT, handler)
            if deferred:
                handler(*deferred)

    return deferring
