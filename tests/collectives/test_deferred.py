"""Handlers of signals within a call: they run after it, whenever a signal arrives."""

import _signal
import os
import signal

import pytest

from collectives.faults import interrupts
from collectives.faults.interrupts import FREQUENT, Deferred


class StopError(Exception):
    """Of a signal's handler."""


@pytest.fixture(autouse=True)
def handlers():
    """Have handlers that return, and remove them after the test."""
    before = {number: signal.getsignal(number) for number in FREQUENT}
    for number in FREQUENT:
        signal.signal(number, lambda number, frame: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Raising:
    """The module `_signal`, in which a handler raises once so many handlers have been installed."""

    getsignal = staticmethod(_signal.getsignal)

    def __init__(self, after):
        self.left = after

    def signal(self, number, handler):
        before = _signal.signal(number, handler)
        self.left -= 1
        if self.left == 0:
            raise StopError
        return before


@pytest.mark.parametrize("after", range(1, 2 * len(FREQUENT) + 1))
def test_a_handler_that_raises_while_others_are_exchanged_leaves_all_as_they_were(
    monkeypatch, after
):
    """When a context begins, and when it ends; signals that arrived within it are delivered."""
    delivered = []
    signal.signal(signal.SIGUSR1, lambda number, frame: delivered.append(number))
    before = [*map(signal.getsignal, FREQUENT)]
    is_in_time = after > len(FREQUENT)
    with monkeypatch.context() as patch:
        patch.setattr(interrupts, "_signal", Raising(after))
        with pytest.raises(StopError), Deferred(FREQUENT):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert [*map(signal.getsignal, FREQUENT)] == before
    assert delivered == [signal.SIGUSR1] * is_in_time


@pytest.mark.parametrize("ignored", [[], [signal.SIGINT], [*FREQUENT[:3]]])
def test_an_inner_context_leaves_the_handlers_to_the_outer_one(ignored):
    """Also where SIGINT is ignored, as in a job in the background of a shell without job control."""
    delivered = []
    signal.signal(signal.SIGUSR1, lambda number, frame: delivered.append(number))
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    with Deferred():
        with Deferred(FREQUENT):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert delivered == []
    assert delivered == [signal.SIGUSR1]
