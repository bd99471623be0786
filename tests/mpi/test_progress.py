"""Operations in flight end while a rank computes: facts by counts and states, never by times."""

import os
import signal
import time
from functools import partial
from threading import get_ident

import numpy as np
import pytest
from cases import (
    LENGTH,
    assert_equal,
    bits,
    contribution,
    contributions,
    declare_gathering,
    window,
)
from mpi4py import MPI

from collectives import (
    allreduce,
    compressed_iallreduce,
    dense_iallreduce,
    gtopk_iallreduce,
    quantised_iallreduce,
    sparse_allreduce,
    sparse_iallgather,
    sparse_iallreduce,
)
from collectives.calls.call import Call, Sum
from collectives.calls.collective import COLLECTIVES, collective
from collectives.faults.errors import CollectiveError
from collectives.runtime.progress import reason_off
from mpicomp import TopK

pytestmark = pytest.mark.skipif(
    reason_off() is not None, reason=f"no progress: {reason_off()}"
)
# bytes of a message beyond what MPI sends before its receiver asks for it
LONG = 1 << 20


def ends(reached, patience=60):
    """Return whether a condition becomes true, while this rank calls nothing of the library or of MPI."""
    deadline = time.monotonic() + patience
    while not reached() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return reached()


def ends_computing(request, patience=60):
    """Return whether a request ends while this rank runs Python without a pause."""
    deadline = time.monotonic() + patience
    while not request.done and time.monotonic() < deadline:
        sum(range(1000))
    return request.done


@pytest.mark.parametrize("start", [
    sparse_iallreduce,
    partial(sparse_iallreduce, algorithm="split_allgather"),
    partial(sparse_iallreduce, algorithm="dense_mpi"),
    sparse_iallgather,
    partial(gtopk_iallreduce, k=LENGTH),
    partial(gtopk_iallreduce, k=LENGTH, algorithm="tree"),
    partial(gtopk_iallreduce, k=LENGTH, algorithm="exact"),
])  # fmt: skip
def test_a_request_ends_without_a_call(comm, start):
    """All of its rounds."""
    vectors = contributions("random", comm.size)
    request = start(vectors[comm.rank], comm)
    assert ends(lambda: request.done)
    result = request.wait()
    if isinstance(result, list):
        assert [bits(part) for part in result] == [bits(vector) for vector in vectors]
    else:
        total = result[0] if isinstance(result, tuple) else result
        assert_equal(total, sum(window(vector) for vector in vectors))


def test_a_request_ends_beside_a_loop_of_python(comm):
    request = sparse_iallreduce(
        contribution("random", comm.rank, comm.size),
        comm,
        algorithm="recursive_doubling",
    )
    assert ends_computing(request)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("call", ["Barrier", "Allreduce", "Recv"])
def test_calls_of_mpi_end_with_operations_in_flight(comm, fresh, call):
    """Rank 0 waits for the operations first, the others after their call of MPI: without progress, a deadlock."""
    values = np.full(LONG, 1.0 + comm.rank, np.float32)
    requests = [
        quantised_iallreduce(values, fresh, bits=8),
        gtopk_iallreduce(
            contribution("random", comm.rank, comm.size), fresh, k=9, algorithm="tree"
        ),
        dense_iallreduce(values, fresh),
    ]
    if comm.rank == 0:
        for request in requests:
            request.wait()
    if call == "Barrier":
        comm.Barrier()
    elif call == "Allreduce":
        comm.Allreduce(MPI.IN_PLACE, np.ones(1))
    elif comm.rank == 0:
        for rank in range(1, comm.size):
            comm.Send(np.ones(1), rank)
    else:
        comm.Recv(np.empty(1), 0)
    total, rejected = requests[0].wait()
    assert (requests[2].wait() == sum(range(1, comm.size + 1))).all()
    np.testing.assert_allclose(
        comm.allreduce(rejected.astype(np.float64)) + total,
        sum(range(1, comm.size + 1)),
        rtol=1e-6,
    )


def threads_of(comm):
    """Return a collective of the user whose algorithm stores the threads that it runs in, and that list."""
    threads = []

    def in_order(vector, group):
        threads.append(get_ident())
        parts = yield from group.gather(vector)
        threads.append(get_ident())
        total = sum(window(part) for part, _ in parts)
        yield from group.gather(vector)
        threads.append(get_ident())
        return total

    def of_ones_own(vector, comm, algorithm="auto", codec="auto"):
        return Call(vector, comm, algorithm, codec)

    declared = collective(Sum)(of_ones_own)
    del COLLECTIVES["of_ones_own"]
    declared.algorithm()(in_order)
    return declared, threads


def test_an_algorithm_of_the_user_runs_in_the_thread_that_calls(comm):
    declared, threads = threads_of(comm)
    vectors = contributions("random", comm.size)
    request = declared.nonblocking(vectors[comm.rank], comm)
    beside = sparse_iallreduce(vectors[comm.rank], comm)
    assert ends(lambda: beside.done)
    assert not request.done or comm.size == 1
    total = sum(window(vector) for vector in vectors)
    np.testing.assert_array_equal(request.wait(), total)
    assert set(threads) == {get_ident()}


def test_an_algorithm_of_the_user_leaves_the_others_to_the_thread(comm, monkeypatch):
    declare_gathering(monkeypatch)
    vectors = contributions("random", comm.size)
    request = gtopk_iallreduce(vectors[comm.rank], comm, k=LENGTH)
    assert ends(lambda: request.done)
    request.wait()


class Witness(TopK):
    """A compressor of the user, which stores the threads that it runs in."""

    threads = []

    def select(self, *given):
        self.threads.append(get_ident())
        return super().select(*given)


def test_a_compressor_of_the_user_runs_in_the_thread_that_calls(comm):
    Witness.threads.clear()
    vectors = contributions("random", comm.size)
    request = compressed_iallreduce(vectors[comm.rank], comm, Witness(k=LENGTH))
    beside = sparse_iallreduce(vectors[comm.rank], comm)
    assert ends(lambda: beside.done)
    assert_equal(request.wait()[0], sum(window(vector) for vector in vectors))
    assert set(Witness.threads) == {get_ident()}


@pytest.mark.at_least(2)
@pytest.mark.unchecked("ends it on all ranks")
def test_an_error_is_kept_until_the_user_waits(comm, fresh, monkeypatch):
    """Of a step of the schedule, on one rank: no memory."""
    culprit = comm.rank == 0
    add_up = allreduce.add_up

    def without_memory(parts):
        raise MemoryError("no room for the sum")

    if culprit:
        monkeypatch.setattr(allreduce, "add_up", without_memory)
    vectors = contributions("random", comm.size)
    request = sparse_iallreduce(vectors[comm.rank], fresh, algorithm="allgather")
    assert ends(lambda: request.done)
    monkeypatch.setattr(allreduce, "add_up", add_up)
    for _ in range(2):
        if culprit:
            with pytest.raises(MemoryError, match="no room for the sum"):
                request.wait()
        else:
            request.wait()
    with pytest.raises(CollectiveError, match="was lost on rank 0 by MemoryError"):
        sparse_allreduce(vectors[comm.rank], fresh)
    again = sparse_iallreduce(vectors[comm.rank], fresh, algorithm="allgather")
    assert ends(lambda: again.done)
    assert_equal(again.wait(), sum(window(vector) for vector in vectors))


@pytest.mark.at_least(2)
def test_arguments_that_differ_raise_in_wait_on_all_ranks(comm):
    vector = contribution("random", comm.rank, comm.size)
    request = gtopk_iallreduce(vector, comm, k=1 + comm.rank)
    assert ends(lambda: request.done)
    with pytest.raises(CollectiveError, match="k must be the same on all ranks"):
        request.wait()


@pytest.mark.at_least(2)
@pytest.mark.unchecked("ends it on all ranks")
def test_what_is_no_exception_ends_the_operation_and_not_the_thread(
    comm, fresh, monkeypatch
):
    def leaves(parts):
        monkeypatch.setattr(allreduce, "add_up", add_up)
        raise SystemExit

    add_up = allreduce.add_up
    if comm.rank == 0:
        monkeypatch.setattr(allreduce, "add_up", leaves)
    vectors = contributions("random", comm.size)
    request = sparse_iallreduce(vectors[comm.rank], fresh, algorithm="allgather")
    assert ends(lambda: request.done)
    if comm.rank == 0:
        with pytest.raises(CollectiveError, match="was interrupted in round"):
            request.wait()
    with pytest.raises(CollectiveError, match="was lost on rank 0 by SystemExit"):
        sparse_allreduce(vectors[comm.rank], fresh)
    again = sparse_iallreduce(vectors[comm.rank], fresh)
    assert ends(lambda: again.done)


@pytest.mark.parametrize("call", ["wait", "test", "start", "free"])
def test_what_the_garbage_collector_runs_in_the_thread_cannot_disturb_it(
    comm, monkeypatch, call
):
    """A finaliser that uses the library within a step of the schedule: it is refused; it may free the communicator."""
    own = comm.Dup()
    user = get_ident()
    vectors = contributions("random", comm.size)
    add_up = allreduce.add_up
    refused = []

    def finalises(parts):
        if get_ident() != user and not refused:
            try:
                if call == "free":
                    own.Free()
                elif call == "start":
                    sparse_iallreduce(vectors[comm.rank], own)
                else:
                    getattr(request, call)()
                refused.append("")
            except RuntimeError as error:
                refused.append(str(error))
        return add_up(parts)

    monkeypatch.setattr(allreduce, "add_up", finalises)
    request = sparse_iallreduce(vectors[comm.rank], own, algorithm="allgather")
    assert ends(lambda: request.done)
    if comm.size == 1:
        own.Free()
    elif call == "free":
        assert ends(lambda: refused)  # It has ended before `Free` returns.
        assert refused == [""]
        with pytest.raises(CollectiveError, match="freed"):
            request.wait()
    else:
        assert "two threads" in refused[0]
        assert_equal(request.wait(), sum(window(vector) for vector in vectors))
        own.Free()


@pytest.mark.at_least(2)
def test_signals_are_delivered_to_the_thread_of_the_user(comm, monkeypatch):
    """While the operation of a rank that started it too early is in flight."""
    threads = []
    before = signal.signal(
        signal.SIGUSR1, lambda number, frame: threads.append(get_ident())
    )
    try:
        vector = contribution("random", comm.rank, comm.size)
        if comm.rank == 0:
            request = sparse_iallreduce(vector, comm)
            for _ in range(20):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(1e-3)
            comm.Barrier()
        else:
            comm.Barrier()
            request = sparse_iallreduce(vector, comm)
        assert ends(lambda: request.done)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert threads == ([get_ident()] * 20 if comm.rank == 0 else [])
