"""What breaks a collective off on one rank: all notice it, nobody waits for ever, and the next call but one works.

Without a deadline: a rank that has lost a result says so in its next call, which raises
on all ranks.
"""

import os
import signal
import time
from asyncio import CancelledError
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from cases import contribution, contributions, is_last, state_of, window

import collectives
from collectives import (
    CollectiveError,
    GradientExchange,
    SupportPlan,
    compressed_allreduce,
    dense_allreduce,
    gtopk_allreduce,
    quantised_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_iallreduce,
    sparse_reduce,
    sparse_reduce_scatter,
)
from collectives.calls.first_call import link_of
from collectives.exchange.step import Step
from collectives.runtime.engine import of_process
from collectives.runtime.group import Group
from collectives.runtime.messages import Arrival
from mpicomp import ErrorFeedback, SparseVector, TopK

pytestmark = pytest.mark.small_groups

LATE = 0.3  # seconds until the others come, while this rank waits inside MPI


class StopError(Exception):
    """Of a signal's handler."""


@pytest.fixture
def handle():
    """Return a function that installs a handler, of SIGALRM unless it says otherwise; it is removed after the test."""
    before = {}

    def install(handler, number=signal.SIGALRM):
        before[number] = signal.signal(number, handler)

    yield install
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(error):
    def handler(number, frame):
        raise error

    return handler


def expect_sum(comm, algorithm="auto"):
    total = sparse_allreduce(
        contribution("random", comm.rank, comm.size), comm, algorithm=algorithm
    )
    expected = sum(window(each) for each in contributions("random", comm.size))
    np.testing.assert_array_equal(window(total), expected)


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    "error", [StopError("enough"), KeyboardInterrupt(), MemoryError()], ids=repr
)
@pytest.mark.parametrize("algorithm", ["auto", "split_allgather"])
def test_a_result_that_a_handler_lost_raises_on_all_in_the_next_call(
    comm, handle, error, algorithm
):
    """The second call is not added to another one of the other ranks, as it was."""
    expect_sum(comm)
    if comm.rank == 0:
        handle(raising(error))
        signal.setitimer(signal.ITIMER_REAL, LATE / 3)
        with pytest.raises(type(error)):
            expect_sum(comm, algorithm)
    else:
        time.sleep(LATE)
        expect_sum(comm, algorithm)
    said = rf"sparse_allreduce, call \d+ .* was lost on rank 0 by {type(error).__name__}, and other ranks may have it"
    with pytest.raises(CollectiveError, match=said):
        dense_allreduce(np.ones(3), comm)
    expect_sum(comm)


@pytest.mark.at_least(2)
def test_a_request_that_a_handler_interrupted_may_be_waited_for_again(comm, handle):
    expect_sum(comm)
    vector = contribution("random", comm.rank, comm.size)
    if comm.rank:
        time.sleep(LATE)
    request = sparse_iallreduce(vector, comm)
    if comm.rank == 0:
        handle(raising(StopError()))
        signal.setitimer(signal.ITIMER_REAL, LATE / 3)
        with pytest.raises(StopError):
            request.wait()
    expected = sum(window(each) for each in contributions("random", comm.size))
    np.testing.assert_array_equal(window(request.wait()), expected)
    expect_sum(comm)


class Interrupted:
    """A lock behind whose release a signal arrives."""

    def __init__(self, lock):
        self.lock = lock

    def acquire(self, *how):
        return self.lock.acquire(*how)

    def release(self):
        self.lock.release()
        signal.raise_signal(signal.SIGALRM)


@pytest.mark.at_least(2)
def test_a_handler_that_raises_in_a_test_leaves_the_library_open(
    comm, handle, monkeypatch
):
    """Else each later call would take this thread for a second one."""
    expect_sum(comm)
    engine = of_process()
    request = None
    if comm.rank == 0:
        request = sparse_iallreduce(contribution("random", 0, comm.size), comm)
        handle(raising(StopError()))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_turn", Interrupted(engine._turn))
            with pytest.raises(StopError):
                request.test()
    comm.Barrier()
    if request is None:
        request = sparse_iallreduce(contribution("random", comm.rank, comm.size), comm)
    request.wait()
    expect_sum(comm)


@pytest.mark.at_least(3)
@pytest.mark.parametrize("algorithm", ["auto", "split_allgather"])
def test_memory_that_ends_for_a_message_breaks_the_operation_off(
    comm, fresh, monkeypatch, algorithm
):
    """Else the ranks that wait for this one's next message would wait until it calls the library again."""
    comm = fresh  # on which notifications to ranks that had ended stay
    expect_sum(comm, algorithm)
    matched = Arrival._matched
    left = [1]

    def short_of_memory(*arguments):
        if left:
            left.clear()
            raise MemoryError("of a message")
        return matched(*arguments)

    if comm.rank == 0:
        monkeypatch.setattr(Arrival, "_matched", short_of_memory)
    raised = None
    try:
        expect_sum(comm, algorithm)
    except (MemoryError, CollectiveError) as error:
        raised = f"{type(error).__name__}: {error}"
    everyone = comm.allgather(raised)
    assert everyone[0] == "MemoryError: of a message"
    assert any("broke off in the middle" in (text or "") for text in everyone[1:])
    with pytest.raises(CollectiveError, match="was lost on rank"):
        expect_sum(comm)
    expect_sum(comm)


def with_frames(left, call):
    """Return the result of a call with this many frames left."""

    def deepest(frames=0):
        try:
            return deepest(frames + 1)
        except RecursionError:
            return frames

    def deeper(frames):
        return deeper(frames - 1) if frames > 0 else call()

    return deeper(deepest() - left)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("left", [14, 16, 18, 20, 24])
def test_a_recursion_that_ends_in_a_collective_breaks_it_off(comm, left):
    """The rank has no frames left to notify the others, and gets some."""
    vector = contribution("random", comm.rank, comm.size)
    fresh = comm.Dup()
    sparse_allreduce(vector, fresh)
    collectives.configure(timeout=5)
    try:
        if comm.rank == 0:
            with suppress(RecursionError):
                with_frames(left, lambda: sparse_allreduce(vector, fresh))
        else:
            with suppress(CollectiveError):
                sparse_allreduce(vector, fresh)
        with suppress(CollectiveError):  # of the result that a rank may have lost
            sparse_allreduce(vector, fresh)
        expect_sum(fresh)
    finally:
        collectives.configure(timeout=None)
    fresh.Free()


def test_a_handler_that_returns_changes_nothing(comm, handle):
    caught = []
    handle(lambda number, frame: caught.append(number))
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    for _ in range(20):
        expect_sum(comm)
        expect_sum(comm, "split_allgather")
    time.sleep(2e-3)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert caught


@pytest.mark.at_least(2)
def test_the_first_call_on_a_communicator_is_whole(comm, fresh, handle):
    if comm.rank == 0:
        handle(raising(StopError()))
        signal.setitimer(signal.ITIMER_REAL, LATE / 3)
        with pytest.raises(StopError):
            link_of(fresh)
    else:
        time.sleep(LATE)
        link_of(fresh)
    expect_sum(fresh)


def calls(comm):
    vector, array = contribution("nested", comm.rank, comm.size), np.ones(300)
    plan = SupportPlan.union(contribution("identical", 0, 1), comm)
    return {
        "gather": partial(sparse_allgather, vector, comm),
        **{
            name: partial(sparse_allreduce, vector, comm, algorithm=name)
            for name in (
                "allgather",
                "recursive_doubling",
                "split_allgather",
                "node_lanes",
            )
        },
        "votes": partial(sparse_allreduce, vector, comm, votes=True),
        **{
            f"gtopk {name}": partial(gtopk_allreduce, vector, comm, 9, algorithm=name)
            for name in ("recursive_doubling", "tree", "exact", "node_leaders")
        },
        "compressed": partial(compressed_allreduce, vector, comm, TopK(k=3)),
        "scatter": partial(sparse_reduce_scatter, vector, comm),
        "reduce": partial(sparse_reduce, vector, comm, comm.size - 1),
        "bcast": partial(sparse_bcast, vector, comm),
        "quantised": partial(quantised_allreduce, array, comm),
        "dense": partial(dense_allreduce, array, comm),
        "plan": partial(plan.allreduce, np.ones(plan.indices.size)),
    }


def outcome(call):
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.at_least(2)
@pytest.mark.parametrize("place", ["pack", "_received"])
@pytest.mark.parametrize("after", range(3))
def test_a_rank_without_memory_between_two_rounds_keeps_nobody_waiting(
    comm, fresh, monkeypatch, place, after
):
    """That rank raises its own error; the others have the result or an error; all raise in the next call."""
    comm = fresh  # on which notifications to ranks that had ended stay
    method = getattr(Group, place)
    for name, call in calls(comm).items():
        for culprit in {0, comm.size - 1}:
            left = [after]

            def failing(group, *args, left=left, **options):
                left[0] -= 1
                if left[0] == -1:
                    raise MemoryError("no room")
                return method(group, *args, **options)

            with monkeypatch.context() as patched:
                if comm.rank == culprit:
                    patched.setattr(Group, place, failing)
                first = comm.allgather(outcome(call))
            failed = comm.bcast(left[0] < 0, culprit)
            assert first[culprit] == (MemoryError if failed else None), (name, first)
            assert set(first) - {MemoryError} <= {None, CollectiveError}, (name, first)
            second = comm.allgather(outcome(call))
            assert set(second) == {CollectiveError if failed else None}, (name, second)
            assert set(comm.allgather(outcome(call))) == {None}, name


@pytest.mark.at_least(2)
def test_tags_that_begin_again_do_not_meet_an_operation_that_broke_off(
    comm, fresh, monkeypatch
):
    vector = SparseVector(np.arange(9), np.ones(9), 9)
    call = partial(sparse_allreduce, vector, fresh, algorithm="split_allgather")
    for _ in range(7):
        call()
    monkeypatch.setattr(link_of(fresh), "tags", 8)

    def failing(group, arrival):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        # It is the eighth operation, with the last tag.
        if fresh.rank == 0:
            patched.setattr(Group, "_received", failing)
        outcome(call)
    assert outcome(call) == CollectiveError
    for _ in range(9):
        assert (call().values == fresh.size).all()


@pytest.mark.at_least(2)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_long_messages_of_an_operation_that_broke_off_are_received(
    comm, fresh, monkeypatch, error
):
    """Their senders wait for that: a megabyte is not sent before it is received."""
    comm = fresh
    size = 300_000
    vector = SparseVector(np.arange(size), np.ones(size), size)
    call = partial(sparse_allreduce, vector, comm, algorithm="split_allgather")
    call()
    received = Group._received

    def failing(group, arrival):
        monkeypatch.setattr(Group, "_received", received)
        raise error

    if comm.rank == 0:
        monkeypatch.setattr(Group, "_received", failing)
        with pytest.raises(error):
            call()
    else:
        assert outcome(call) in (None, CollectiveError)
    assert outcome(call) == CollectiveError
    assert (call().values == comm.size).all()


@pytest.mark.at_least(2)
def test_an_interrupt_while_the_arguments_are_checked_raises_on_all(comm, monkeypatch):
    vector = contribution("random", comm.rank, comm.size)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if comm.rank == 0:
            patched.setattr(SparseVector, "validate", interrupted)
        with pytest.raises(CollectiveError if comm.rank else KeyboardInterrupt):
            sparse_allreduce(vector, comm)
    expect_sum(comm)


SIGNALS = [
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGUSR1,
    signal.SIGINT,
    signal.SIGPROF,
]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize(
    "place", ["_prepare", "_finish", "_prepare_results", "_commit"]
)
def test_every_handler_of_a_signal_runs_after_the_step(
    comm, handle, monkeypatch, number, place
):
    """Also one that raises: the step is kept on all ranks, and the next one is as without it."""
    exchange, twin = (GradientExchange(comm, TopK(k=2)) for _ in range(2))
    gradient = np.arange(8.0) + comm.rank
    method = getattr(Step, place)

    def signalled(*args, **options):
        os.kill(os.getpid(), number)
        return method(*args, **options)

    handle(raising(StopError()), number)
    with monkeypatch.context() as patched:
        if comm.rank == 0:
            patched.setattr(Step, place, signalled)
            with pytest.raises(StopError):
                exchange(gradient)
        else:
            exchange(gradient)
    twin(gradient)
    assert exchange.steps == 1
    np.testing.assert_array_equal(exchange(gradient), twin(gradient))


def test_all_handlers_run_if_the_first_one_raises(comm, handle, monkeypatch):
    exchange, ran, commit = GradientExchange(comm, TopK(k=2)), [], Step._commit

    def signalled(step, *buckets):
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert not ran
        return commit(step, *buckets)

    def handler(number, frame):
        ran.append(number)
        raise StopError

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        handle(handler, number)
    monkeypatch.setattr(Step, "_commit", signalled)
    with pytest.raises(StopError):
        exchange(np.ones(8))
    assert sorted(ran) == sorted([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])


@pytest.mark.at_least(2)
@pytest.mark.parametrize("place", ["pack", "_received"])
def test_a_step_in_which_memory_ends_between_two_rounds_is_undone_on_all(
    comm, fresh, monkeypatch, place
):
    comm = fresh  # on which notifications to ranks that had ended stay
    exchange, twin = (GradientExchange(comm, TopK(0.1)) for _ in range(2))
    gradient = {"weight": np.arange(2000.0) + comm.rank}
    exchange(gradient)
    twin(gradient)
    method, failed = getattr(Group, place), []

    def failing(group, *args, **options):
        failed.append(place)
        monkeypatch.setattr(Group, place, method)
        raise MemoryError("no room")

    if comm.rank == 0:
        monkeypatch.setattr(Group, place, failing)
    got = outcome(partial(exchange, gradient))
    if comm.bcast(bool(failed)):
        assert got is (CollectiveError if comm.rank else MemoryError)
    else:  # its messages need no decoding here
        twin(gradient)
    means = [each(gradient)["weight"] for each in (exchange, twin)]
    np.testing.assert_array_equal(*means)
    assert exchange.steps == twin.steps


@pytest.mark.exactly(2)
@pytest.mark.parametrize("form", ["array", "dict"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, CancelledError])
@pytest.mark.parametrize("place", ["select", "observe", "prepare_residual", "sum"])
def test_an_interrupt_within_a_step_undoes_it_on_all_ranks(
    comm, form, error, place, monkeypatch
):
    """Without a deadline, though the rank leaves the step in the middle of it."""
    ends = False

    def collective(vector, comm):
        total = sparse_allreduce(vector, comm)
        if ends:
            raise error
        return total

    exchange = GradientExchange(
        comm, TopK(k=2), collective=collective, small=0, bucket_nbytes=1
    )
    owner = ErrorFeedback if place == "prepare_residual" else TopK

    def mine(step):
        arrays = [np.full(size, step + comm.rank, np.float32) for size in (5, 7, 9)]
        return arrays[0] if form == "array" else dict(zip("abc", arrays, strict=True))

    def interrupted(self, *values, **more):
        raise error

    exchange(mine(0))
    before = state_of(exchange)
    with monkeypatch.context() as patch:
        ends = is_last(comm) and place == "sum"
        if is_last(comm) and place != "sum":
            patch.setattr(owner, place, interrupted)
        with pytest.raises(error if is_last(comm) else CollectiveError) as raised:
            exchange(mine(1))
    ends = False
    assert error.__name__ in repr(raised.value)
    assert state_of(exchange) == before
    means = exchange(mine(1))
    shared = means if form == "array" else np.concatenate([*means.values()])
    assert len(set(comm.allgather(shared.tobytes()))) == 1
    assert exchange.steps == 2


@pytest.mark.exactly(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, CancelledError])
@pytest.mark.parametrize("name", ["first", "second"])
def test_an_interrupt_while_a_tensor_is_started_undoes_the_step_on_all_ranks(
    comm, error, name, monkeypatch
):
    """Else this rank would start anew, and its first tensor meet the second one of the others."""

    def interrupted(self, *values, **more):
        raise error

    exchange = GradientExchange(comm, TopK(k=2), small=0, bucket_nbytes=1)
    step = {each: np.full(9, comm.rank + 1.0) for each in ("first", "second")}
    exchange(step)
    before = state_of(exchange)

    def take_step():
        for each, gradient in step.items():
            with monkeypatch.context() as patch:
                if is_last(comm) and each == name:
                    patch.setattr(TopK, "select", interrupted)
                exchange.start(each, gradient)
        exchange.finish()

    with pytest.raises(error if is_last(comm) else CollectiveError) as raised:
        take_step()
    assert error.__name__ in repr(raised.value)
    assert state_of(exchange) == before
    means = exchange(step)
    shared = np.concatenate([*means.values()])
    assert len(set(comm.allgather(shared.tobytes()))) == 1
    assert exchange.steps == 2


@pytest.mark.at_least(2)
def test_an_interrupt_while_the_first_gradient_is_looked_at_raises_on_all_ranks(comm):
    class Interrupting:
        def __dlpack_device__(self):
            raise KeyboardInterrupt

    exchange = GradientExchange(comm, TopK(k=5))
    gradient = np.ones(100, np.float32)
    first = Interrupting() if is_last(comm) else gradient
    with pytest.raises(KeyboardInterrupt if is_last(comm) else CollectiveError):
        exchange(first)
    assert np.count_nonzero(exchange(gradient)) == 5
