"""A fault of one rank within a step: all ranks keep the step, or all raise and nothing has changed."""

import ctypes
import gc
import resource
import sys
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import compressed_sum, is_last, state_of

from collectives import (
    CollectiveError,
    GradientExchange,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_iallreduce,
)
from mpicomp import (
    Compressor,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    StepAhead,
    TopK,
)
from mpicomp.feedback import InPlaceErrorFeedback

pytestmark = pytest.mark.small_groups

LENGTH = 60
COLLECTIVES = [gtopk_allreduce, sparse_allgather, sparse_allreduce]
every_collective = pytest.mark.parametrize("collective", COLLECTIVES)


def gradient(rank, step, length=LENGTH):
    return np.random.default_rng([step, rank]).standard_normal(length)


def named(rank, step):
    return {
        "weight": gradient(rank, step, 50),
        "bias": gradient(rank, step, 7),
        "second": gradient(rank, step, 40),
    }


@contextmanager
def all_raise(comm, exchange, error, match, *arrays, culprit=None):
    """Check that all ranks raise, the last one or `culprit` its own error, and that neither state nor arrays change."""
    before, given, steps = (
        state_of(exchange),
        [array.copy() for array in arrays],
        exchange.steps,
    )
    mine = is_last(comm) if culprit is None else comm.rank == culprit
    with pytest.raises(error if mine else CollectiveError, match=match):
        yield
    assert state_of(exchange) == before
    assert exchange.steps == steps
    for array, then in zip(arrays, given, strict=True):
        np.testing.assert_array_equal(array, then)


def takes_a_step(comm, exchange, gradients):
    """Check that a step works, with the same bits on all ranks."""
    mean = exchange(gradients)
    means = mean.values() if isinstance(mean, dict) else [mean]
    assert len(set(comm.allgather(b"".join(array.tobytes() for array in means)))) == 1


def raising(calls_before, calls, lengths=()):
    """Return a collective that makes some calls; with `lengths` of vectors, the last rank raises between them."""

    def collective(vector, comm):
        total = vector
        for number in range(calls):
            is_due = is_last(comm) and getattr(vector, "length", 0) in lengths
            if is_due and number == calls_before:
                raise ZeroDivisionError("mine")
            total = sparse_allreduce(vector, comm)
        if calls_before == calls and is_last(comm) and total.length in lengths:
            raise ZeroDivisionError("mine")
        return total

    return collective


@pytest.mark.parametrize(
    ("calls_before", "calls"), [(0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]
)
@pytest.mark.parametrize("lengths", [(50,), (40,), (50, 40)])
def test_a_collective_of_ones_own_that_raises_on_one_rank_between_its_calls(
    comm, calls_before, calls, lengths
):
    raises = list(lengths)
    collective = raising(calls_before, calls, raises)
    exchange = GradientExchange(
        comm, TopK(k=9), collective=collective, small=10, bucket_nbytes=1
    )
    raises.clear()
    takes_a_step(comm, exchange, named(comm.rank, 0))
    raises.extend(lengths)
    with all_raise(comm, exchange, ZeroDivisionError, "mine"):
        exchange(named(comm.rank, 1))
    raises.clear()
    takes_a_step(comm, exchange, named(comm.rank, 2))


def test_a_collective_of_ones_own_that_raises_what_it_is_passed(comm):
    """A rank that failed calls nothing then, and the others have called."""

    def collective(vector, comm):
        if isinstance(vector, Exception):
            raise vector
        return sparse_allreduce(vector, comm)

    exchange = GradientExchange(comm, TopK(k=9), collective=collective)
    takes_a_step(comm, exchange, gradient(comm.rank, 0))
    wrong = gradient(comm.rank, 1)
    if is_last(comm):
        wrong[3] = np.nan
    with all_raise(comm, exchange, ValueError, "nan"):
        exchange(wrong)
    takes_a_step(comm, exchange, gradient(comm.rank, 2))


# A rank without memory.

LARGE, SLACK = 10_000_000, 2**24  # 80 MB are more than malloc keeps for itself (64 MB)


def limit_memory():
    """Let this process have little more memory than it has."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages, (_, hard) = (
        int(Path("/proc/self/statm").read_text().split()[0]),
        resource.getrlimit(resource.RLIMIT_AS),
    )
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + SLACK, hard)
    )


@contextmanager
def limit_restored():
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.exactly(2)
@pytest.mark.parametrize(
    "feedback",
    [
        ErrorFeedback,
        pytest.param(partial(ErrorFeedback, in_place=True), marks=pytest.mark.slow),
    ],
)
def test_a_rank_without_memory_for_its_result(comm, feedback):
    """From before the step on, and after the sum arrived; an output buffer or a sparse mean needs no such memory."""
    short = False

    def collective(vector, comm):
        total = sparse_allreduce(vector, comm)
        if short and is_last(comm):
            limit_memory()
        return total

    exchange = GradientExchange(comm, TopK(k=20), feedback(), collective)
    home, out = np.zeros(LARGE), np.zeros(LARGE)
    home[:: LARGE // 100] = 1 + comm.rank
    exchange(home)
    with all_raise(comm, exchange, MemoryError, "", home), limit_restored():
        if is_last(comm):
            limit_memory()
        exchange(home)
    short = True
    with all_raise(comm, exchange, MemoryError, "", home), limit_restored():
        exchange(home)
    with limit_restored():
        exchange(home, out=out)
    assert exchange.steps == 2
    with limit_restored():
        assert exchange(home, sparse=True).nnz
    short = False
    takes_a_step(comm, exchange, home)


@pytest.mark.unchecked("makes accounts in the memory that is missing")
@pytest.mark.parametrize("form", ["array", "dict"])
def test_an_allocation_that_fails_after_the_sums_arrived(comm, form, monkeypatch):
    exchange = GradientExchange(comm, TopK(k=9), small=10, bucket_nbytes=1)
    gradients = {"array": gradient, "dict": named}[form]
    exchange(gradients(comm.rank, 0))
    size = {"array": LENGTH, "dict": 40}[form]

    def without_memory(allocate, shape, *kind, **settings):
        if np.prod(shape) == size:
            raise MemoryError(f"no room for {size} values")
        return allocate(shape, *kind, **settings)

    mine = gradients(comm.rank, 1)
    with (
        all_raise(comm, exchange, MemoryError, f"no room for {size} values"),
        monkeypatch.context() as patch,
    ):
        if is_last(comm):
            for name in ("empty", "zeros"):
                allocate = getattr(np, name)
                patch.setattr(np, name, partial(without_memory, allocate))
        exchange(mine)
    takes_a_step(comm, exchange, mine)


def test_an_allocation_that_fails_before_a_sum_in_few_bits(comm, monkeypatch):
    """The sum has not been started on this rank: it contributes the error."""
    exchange = GradientExchange(comm, bits=4, feedback=NoFeedback())
    allocate = np.empty_like
    exchange(gradient(comm.rank, 0))

    def without_memory(array, *more, **settings):
        if array.size == LENGTH:
            raise MemoryError("no room")
        return allocate(array, *more, **settings)

    mine = gradient(comm.rank, 1)
    with (
        all_raise(comm, exchange, MemoryError, "no room"),
        monkeypatch.context() as patch,
    ):
        if is_last(comm):
            patch.setattr(np, "empty_like", without_memory)
        exchange(mine)
    takes_a_step(comm, exchange, mine)


ALLOCATORS = "empty", "zeros", "empty_like", "zeros_like", "concatenate", "full"


class Exhausted:
    """NumPy's functions that make arrays; the one of a number raises, outside of messages."""

    def __init__(self, patch):
        self.left = None
        for name in ALLOCATORS:
            patch.setattr(np, name, partial(self.call, getattr(np, name)))

    def call(self, function, *args, **more):
        if self.left is not None and not self._is_sending():
            self.left -= 1
            if self.left < 0:
                raise MemoryError("none left")
        return function(*args, **more)

    def _is_sending(self):
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("collectives.runtime"):
                return True
            frame = frame.f_back
        return False


@pytest.mark.exactly(2)
@pytest.mark.parametrize("form", ["list", "dict"])
@pytest.mark.parametrize(
    "feedback", [ErrorFeedback, partial(ErrorFeedback, in_place=True), NoFeedback]
)
@pytest.mark.parametrize(
    "sent", [{"compressor": TopK(k=9), "small": 10}, {"bits": 4}], ids=["topk", "bits"]
)
def test_memory_that_ends_anywhere_leaves_all_of_a_step_or_none(
    comm, form, feedback, sent, monkeypatch
):
    """The n-th array of a step cannot be allocated on one rank: for each n until there are fewer."""
    exchange = GradientExchange(comm, feedback=feedback(), **sent)

    def gradients(step):
        arrays = named(comm.rank, step)
        return arrays if form == "dict" else list(arrays.values())

    exchange(gradients(0))
    assert failures_of(comm, exchange, lambda: gradients(1), monkeypatch) >= 3


@pytest.mark.exactly(2)
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_memory_that_ends_in_a_step_whose_sum_leaves_the_range(comm, form, monkeypatch):
    """All ranks skip it, or all raise."""
    exchange = GradientExchange(comm, TopK(k=9), average=False, nonfinite="skip")
    mine = np.full(LENGTH, 4e4, np.float16)
    exchange(mine / 4)
    is_sparse = form == "sparse"
    assert failures_of(comm, exchange, mine.copy, monkeypatch, is_sparse) > 2
    assert exchange.skipped == 1


def failures_of(comm, exchange, gradients, monkeypatch, sparse=False):
    """Return how many allocations of a step can fail on one rank; check that all ranks raise then, and keep nothing."""
    exhausted = Exhausted(monkeypatch)
    raised = True
    failures = 0
    while raised:
        before, steps = state_of(exchange), exchange.steps
        mine = gradients()
        exhausted.left = failures if is_last(comm) else None
        error = None
        try:
            exchange(mine, sparse=sparse)
        except (MemoryError, CollectiveError) as caught:
            error = caught
        exhausted.left = None
        raised = error is not None
        assert comm.allgather(raised) == [raised] * comm.size
        if raised:
            assert isinstance(error, MemoryError) is is_last(comm)
            assert state_of(exchange) == before
            assert exchange.steps == steps
        failures += raised
    return failures


def test_an_error_that_is_its_own_cause(comm):
    class Circular(TopK):
        def select(self, correction, bounds):
            error = ValueError("of itself")
            raise error from error

    exchange = GradientExchange(comm, Circular(k=2) if is_last(comm) else TopK(k=2))
    with pytest.raises(
        ValueError if is_last(comm) else CollectiveError, match="of itself"
    ):
        exchange(gradient(comm.rank, 0))


# Floating-point errors and warnings that raise on one rank.


def strict(on):
    """Have floating-point errors and warnings raise, on some ranks."""
    return np.errstate(all="raise") if on else nullcontext()


@every_collective
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_values_that_underflow_raise_on_no_rank(comm, collective, dtype):
    least, whole = (
        np.finfo(dtype).smallest_subnormal,
        np.random.default_rng([comm.rank, 3]).integers(-9, 10, LENGTH),
    )
    tiny = (whole * least).astype(dtype)
    for feedback in (
        ErrorFeedback,
        partial(ErrorFeedback, in_place=True),
        partial(MomentumCorrection, 0.9),
        partial(StepAhead, 0.1, 0.9),
    ):
        ways = [
            GradientExchange(comm, TopK(k=9), feedback(), collective) for _ in range(2)
        ]
        plain, raising = ways[:2]
        for _ in range(3):
            expected = plain(tiny.copy())
            with strict(comm.rank == 0), warnings.catch_warnings():
                if comm.rank == 0:
                    warnings.simplefilter("error")
                assert raising(tiny.copy()).tobytes() == expected.tobytes()
        assert state_of(raising) == state_of(plain)


@pytest.mark.unchecked("refuses sums that are not finite")
@pytest.mark.at_least(2)
@every_collective
def test_a_sum_that_overflows_is_an_overflow_error_on_all_ranks_also_where_such_errors_raise(
    comm, collective
):
    exchange = GradientExchange(
        comm, TopK(k=9), ErrorFeedback(), collective, average=False
    )
    exchange(gradient(comm.rank, 0).astype(np.float32))
    before = state_of(exchange)
    with (
        strict(comm.rank == 0),
        pytest.raises(
            OverflowError, match="the sum over the ranks leaves the range of"
        ),
    ):
        exchange(np.full(LENGTH, 3e38, np.float32))
    assert state_of(exchange) == before
    takes_a_step(comm, exchange, gradient(comm.rank, 1).astype(np.float32))


# What leaves its range, and errors of a compressor or a feedback.


class Failing:
    fault = None

    def prepare_residual(self, correction, sent, rejected=None):
        write = super().prepare_residual(correction, sent, rejected)
        if self.fault:
            raise self.fault
        return write


class Settling(Failing, ErrorFeedback):
    pass


class SettlingInPlace(Failing, InPlaceErrorFeedback):
    pass


class Observing(TopK):
    fault, seen = None, 0

    def observe(self, aggregate, votes=None):
        self.seen += 1
        if self.fault:
            raise self.fault


class FailingTopK(TopK):
    fault = None

    def select(self, correction, bounds):
        if self.fault:
            raise self.fault
        return super().select(correction, bounds)


PARTS = {
    "feedback": lambda: {"feedback": Settling()},
    "feedback in place": lambda: {"feedback": SettlingInPlace()},
    "observe": lambda: {"compressor": Observing(k=9)},
    "compress": lambda: {"compressor": FailingTopK(k=9)},
    "compressed sum": lambda: {"collective": compressed_sum(FailingTopK(k=5))},
}


def odd_one(settings, bucket, name):
    if name == "compressed sum":
        return settings["collective"].keywords["compressor"]
    return (
        bucket.feedback
        if name.startswith("feedback")
        else bucket.selection.runs[-1].compressor
    )


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("form", ["array", "dict"])
def test_a_part_that_raises_on_one_rank(comm, name, form):
    """Whatever it raises; of named tensors that of the last one, when those before are settled."""
    for collective in (gtopk_allreduce, sparse_iallreduce)[
        : 1 if name == "compressed sum" else 2
    ]:
        settings = {
            "compressor": TopK(k=9),
            "collective": collective,
            "small": 10,
        } | PARTS[name]()
        exchange = GradientExchange(comm, **settings, bucket_nbytes=1)
        gradients = {"array": gradient, "dict": named}[form]
        exchange(gradients(comm.rank, 0))
        bucket = [each for each in exchange._buckets if not each.dense][-1]
        odd, culprit = odd_one(settings, bucket, name), comm.size - 1
        for fault in (
            MemoryError("none left"),
            KeyError("absent"),
            FloatingPointError("underflow"),
        ):
            mine = gradients(comm.rank, 1)
            arrays = mine.values() if form == "dict" else [mine]
            odd.fault = fault if comm.rank == culprit else None
            with all_raise(
                comm,
                exchange,
                type(fault),
                str(fault.args[0]),
                *arrays,
                culprit=culprit,
            ):
                exchange(mine)
            odd.fault = None
            seen = getattr(odd, "seen", None)
            assert seen in (None, 1), (
                "what a compressor remembers of a step that failed is forgotten"
            )
        takes_a_step(comm, exchange, gradients(comm.rank, 1))


@pytest.mark.parametrize(
    "feedback",
    [ErrorFeedback, partial(ErrorFeedback, in_place=True), partial(StepAhead, 0.5)],
)
def test_a_compressor_that_writes_to_what_it_is_given(comm, feedback):
    class Writing(Compressor):
        def compress(self, corrected, *, gradient=None):
            if is_last(comm) and exchange.steps:
                corrected[3] += 1
            return TopK(k=9).compress(corrected)

    exchange = GradientExchange(comm, Writing(), feedback())
    exchange(gradient(comm.rank, 0))
    mine = gradient(comm.rank, 1)
    with all_raise(comm, exchange, ValueError, "read-only", mine):
        exchange(mine)


@pytest.mark.parametrize("form", ["list for an array", "another name", "within a step"])
def test_a_wrong_call_on_one_rank_meets_the_others_whatever_they_call(comm, form):
    exchange = GradientExchange(comm, TopK(k=3), small=0)
    mine = (
        named(comm.rank, 0) if form != "list for an array" else gradient(comm.rank, 0)
    )
    exchange(mine)
    wrong = {
        "list for an array": [mine],
        "another name": {"else": gradient(0, 0)},
        "within a step": mine,
    }[form]
    error = {
        "list for an array": TypeError,
        "another name": KeyError,
        "within a step": RuntimeError,
    }[form]
    if form == "within a step":
        for name, array in mine.items():
            exchange.start(name, array)
    with all_raise_between(comm, exchange, error):
        if is_last(comm):
            exchange(wrong)
        elif form == "within a step":
            exchange.finish()
        else:
            exchange(mine)
    takes_a_step(comm, exchange, mine)


@contextmanager
def all_raise_between(comm, exchange, error):
    with pytest.raises(error if is_last(comm) else CollectiveError):
        yield
    assert len(set(comm.allgather(exchange.steps))) == 1


def test_register_within_a_step_of_one_rank_raises_everywhere(comm):
    exchange, mine = GradientExchange(comm, TopK(k=3)), named(comm.rank, 0)
    if is_last(comm):
        exchange.start("weight", mine["weight"])
    with all_raise_between(comm, exchange, RuntimeError):
        exchange.register(mine)
    exchange.register(mine)
    takes_a_step(comm, exchange, mine)


@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_that_are_written_to_twice_are_refused(comm, in_place):
    a, b = gradient(comm.rank, 0), gradient(comm.rank, 1)
    exchange = GradientExchange(
        comm, TopK(k=3), ErrorFeedback(in_place=in_place), small=0
    )
    exchange({"a": a, "b": b}, sparse=True)
    outs = (
        {"a": b, "b": a} if in_place else {"a": (place := np.empty(LENGTH)), "b": place}
    )
    with all_raise(
        comm,
        exchange,
        ValueError,
        "two arrays share memory that is written to",
        a,
        b,
    ):
        exchange({"a": a, "b": b}, out=outs if is_last(comm) else {})


ERRORS = {
    "KeyboardInterrupt": KeyboardInterrupt("stop"),
    "SystemExit": SystemExit(3),
    "ValueError": ValueError("bad sample"),
    "text": "bad sample",
    "class": ValueError,
    "None": None,
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.at_least(2)
def test_fail_takes_any_exception_and_refuses_anything_else(comm, error, steps):
    """The rank raises it with the traceback that it had; what is no exception becomes a TypeError."""
    exchange = GradientExchange(comm, TopK(0.1))
    gradient = np.ones(2000, np.float32)
    for _ in range(steps):
        exchange(gradient)
    is_exception = isinstance(error, BaseException)
    if not is_last(comm):
        kind = type(error).__name__ if is_exception else "TypeError"
        words = "bad sample" if kind == "ValueError" else kind
        with pytest.raises(CollectiveError, match=words):
            exchange(gradient)
    else:
        try:
            if is_exception:
                raise error
        except BaseException as caught:
            error = caught
        with pytest.raises(type(error) if is_exception else TypeError) as found:
            exchange.fail(error)
        assert not is_exception or found.value is error
        lines = [str(entry.statement).strip() for entry in found.traceback]
        assert not is_exception or "raise error" in lines
    exchange(gradient)
    assert exchange.steps == steps + 1
