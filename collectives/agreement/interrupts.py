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

    In other threads than the main one, without a Python handler, and within another
    such call it only calls the function.
    """

    @wraps(function)
    def deferring(*args: P.args, **kwargs: P.kwargs) -> T:
        handler: Any = _signal.getsignal(SIGINT)
        deferred: list[Any] = []

        def defer(number: int, frame: Any) -> None:
            if deferred:
                handler(number, frame)
            else:
                deferred[:] = number, frame

        is_nested = getattr(handler, "__code__", None) is defer.__code__
        if (
            is_nested
            or not callable(handler)
            or threading.current_thread() is not threading.main_thread()
        ):
            return function(*args, **kwargs)
        _signal.signal(SIGINT, defer)
        try:
            return function(*args, **kwargs)
        finally:
            _signal.signal(SIGINT, handler)
            if deferred:
                handler(*deferred)

    return deferring
