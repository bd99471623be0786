"""Several collectives in flight, on one communicator and on several, completed in another order on every rank."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from cases import (
    LENGTH,
    assert_equal,
    assert_same_bits,
    bits,
    contribution,
    contributions,
    window,
)
from mpi4py import MPI

from collectives import (
    CollectiveError,
    allreduce,
    dense_allreduce,
    dense_iallreduce,
    gtopk_allreduce,
    gtopk_iallreduce,
    sparse_allgather,
    sparse_iallgather,
    sparse_iallreduce,
    sparse_ibcast,
    sparse_ireduce,
    sparse_ireduce_scatter,
)
from collectives.calls.first_call import link_of
from collectives.runtime.engine import of_process
from collectives.runtime.progress import Look


def start_all(comm):
    """Start several collectives, on other data each, and return (request, check of its result)."""
    vectors = {
        name: contributions(name, comm.size) for name in ("random", "unequal", "ties")
    }
    sums = {
        name: sum(window(vector) for vector in every) for name, every in vectors.items()
    }

    def check(name, got):
        if isinstance(got, list):
            assert [bits(part) for part in got] == [
                bits(vector) for vector in vectors[name]
            ]
            return
        total = got[0] if isinstance(got, tuple) else got
        np.testing.assert_array_equal(
            total if isinstance(total, np.ndarray) else window(total), sums[name]
        )

    starts = [
        (gtopk_iallreduce, "random", {"k": LENGTH}),
        (dense_iallreduce, "ties", {}),
        (sparse_iallgather, "unequal", {}),
        (sparse_iallreduce, "random", {}),
        (gtopk_iallreduce, "random", {"k": LENGTH, "algorithm": "exact"}),
        (sparse_iallreduce, "ties", {"algorithm": "split_allgather"}),
        (sparse_iallreduce, "ties", {"algorithm": "dense_mpi"}),
        (gtopk_iallreduce, "ties", {"k": LENGTH}),
        (dense_iallreduce, "random", {}),
    ]
    mine = {name: every[comm.rank] for name, every in vectors.items()}
    return [
        (
            start(
                window(mine[name]) if start is dense_iallreduce else mine[name],
                comm,
                **more,
            ),
            partial(check, name),
        )
        for start, name, more in starts
    ]


def shuffled(started, seed):
    return [started[i] for i in np.random.default_rng(seed).permutation(len(started))]


@pytest.mark.parametrize("seed", range(3))
def test_requests_completed_in_another_order_on_every_rank(comm, seed):
    for request, check in shuffled(start_all(comm), [seed, comm.rank]):
        check(request.wait())


def test_test_alone_brings_requests_to_their_end(comm):
    started = start_all(comm)
    deadline = time.monotonic() + 30
    while not all([request.test() for request, _ in started]):
        assert time.monotonic() < deadline
        time.sleep(1e-4)
    for request, check in started:
        check(request.wait())


def test_a_blocking_call_while_others_are_in_flight(comm):
    started = start_all(comm)
    result, _ = gtopk_allreduce(
        contribution("nested", comm.rank, comm.size), comm, LENGTH
    )
    assert_equal(
        result, sum(window(vector) for vector in contributions("nested", comm.size))
    )
    for request, check in reversed(started):
        check(request.wait())


def test_a_failed_operation_between_sound_ones(comm):
    first = gtopk_iallreduce(contribution("random", comm.rank, comm.size), comm, LENGTH)
    bad = gtopk_iallreduce(
        contribution("random", comm.rank, comm.size), comm, k=1 + comm.rank
    )
    dense = dense_iallreduce(np.ones(3 + comm.rank), comm)
    last = sparse_iallgather(contribution("random", comm.rank, comm.size), comm)
    assert len(last.wait()) == comm.size
    if comm.size > 1:
        for request in (bad, dense):
            with pytest.raises(CollectiveError):
                request.wait()
            assert request.test()
    assert_equal(
        first.wait()[0],
        sum(window(vector) for vector in contributions("random", comm.size)),
    )


def test_two_communicators_at_once_waited_for_in_opposite_orders(comm, fresh):
    a, b = (
        gtopk_iallreduce(contribution("random", comm.rank, comm.size), each, 9)
        for each in (comm, fresh)
    )
    one, two = (a, b) if comm.rank % 2 else (b, a)
    assert bits(one.wait()[0]) == bits(two.wait()[0])


def test_a_request_that_is_dropped_still_does_its_part(comm):
    requests = [
        gtopk_iallreduce(contribution("random", comm.rank, comm.size), comm, 9)
        for _ in range(2)
    ]
    if comm.rank == 0:
        del requests[0]
        gc.collect()
    for request in requests:
        assert bits(request.wait()[0]) == bits(requests[-1].wait()[0])
    sparse_allgather(contribution("empty", comm.rank, comm.size), comm)


def test_the_librarys_duplicate_goes_with_the_communicator(comm):
    for _ in range(10):
        fresh = comm.Dup()
        gtopk_allreduce(contribution("empty", comm.rank, comm.size), fresh)
        link = link_of(fresh)
        assert link.comm != MPI.COMM_NULL
        fresh.Free()
        assert link.comm == MPI.COMM_NULL


@pytest.mark.at_least(2)
def test_a_communicator_that_is_freed_with_an_operation_in_flight_takes_no_other_one_with_it(
    comm,
):
    doomed, vector = comm.Dup(), contribution("random", comm.rank, comm.size)
    link_of(doomed)
    left = [
        sparse_iallreduce(vector, doomed, algorithm="recursive_doubling"),
        gtopk_iallreduce(vector, doomed),
    ]
    doomed.Free()
    assert_same_bits(comm, gtopk_allreduce(vector, comm)[0])
    for request in left:
        assert request.test()
        with pytest.raises(
            CollectiveError,
            match="freed with sparse_allreduce in flight: complete requests first",
        ):
            request.wait()


def test_the_first_use_of_a_communicator_while_another_has_an_operation_in_flight(comm):
    """Rank 0 waits for the first operation before it starts the second one; the others after they did."""
    one, other = comm.Dup(), comm.Dup()
    request = gtopk_iallreduce(contribution("random", comm.rank, comm.size), one)
    if comm.rank == 0:
        request.wait()
    parts = sparse_allgather(contribution("ties", comm.rank, comm.size), other)
    assert [bits(part) for part in parts] == [
        bits(vector) for vector in contributions("ties", comm.size)
    ]
    assert_same_bits(comm, request.wait()[0])
    one.Free()
    other.Free()


@pytest.mark.parametrize("known", [True, False], ids=["link", "first call"])
def test_a_second_thread_is_refused_on_one_rank_before_it_is_counted(
    comm, fresh, known
):
    """The ranks then stay in step: the next operations, with tags and turns, end as if nobody had tried."""
    vector = contribution("random", comm.rank, comm.size)
    if known:
        link_of(fresh)
    if comm.rank == 0:
        with of_process(), ThreadPoolExecutor(1) as pool:
            for call in (
                partial(gtopk_iallreduce, vector),
                partial(dense_iallreduce, np.ones(3)),
            ):
                with pytest.raises(
                    RuntimeError, match="two threads are inside the library"
                ):
                    pool.submit(call, fresh).result()
    assert_same_bits(comm, gtopk_allreduce(vector, fresh)[0])
    np.testing.assert_array_equal(dense_allreduce(np.ones(3), fresh), 3 * [comm.size])


def test_traffic_of_the_user_on_the_same_communicator_is_not_touched(comm):
    """The user's own messages, with any tag, do not meet the library's."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = comm.isend("the user's", right, tag=0)
    result, _ = gtopk_allreduce(contribution("random", comm.rank, comm.size), comm, 9)
    assert comm.recv(source=left, tag=0) == "the user's"
    sent.wait()
    assert_same_bits(comm, result)


def test_the_rooted_twins(comm):
    vector = contribution("random", comm.rank, comm.size)
    total = sum(window(each) for each in contributions("random", comm.size))
    reduced, share = (
        sparse_ireduce(vector, comm, root=comm.size - 1),
        sparse_ireduce_scatter(vector, comm),
    )
    handed = sparse_ibcast(vector, comm)
    assert bits(handed.wait()) == bits(contribution("random", 0, comm.size))
    np.testing.assert_array_equal(sum(comm.allgather(window(share.wait()))), total)
    if comm.rank == comm.size - 1:
        assert_equal(reduced.wait(), total)
    else:
        assert reduced.wait() is None


@pytest.mark.at_least(2)
def test_an_interrupt_between_two_rounds_leaves_the_operations_as_they_were(
    comm, monkeypatch
):
    def interrupted(*given):
        raise KeyboardInterrupt

    link_of(comm)
    if comm.rank == 0:
        requests = [
            sparse_iallgather(contribution("random", comm.rank, comm.size), comm)
            for _ in range(2)
        ]
        with monkeypatch.context() as patched:
            patched.setattr(os, "sched_yield", interrupted)
            patched.setattr(time, "sleep", interrupted)  # where a look took long
            with pytest.raises(KeyboardInterrupt):
                requests[0].wait()
        comm.Barrier()
    else:
        comm.Barrier()
        requests = [
            sparse_iallgather(contribution("random", comm.rank, comm.size), comm)
            for _ in range(2)
        ]
    for request in requests:
        assert [bits(part) for part in request.wait()] == [
            bits(each) for each in contributions("random", comm.size)
        ]


@pytest.mark.at_least(2)
@pytest.mark.unchecked("ends it on all ranks")
def test_an_operation_that_an_interrupt_ended_says_so_and_later_ones_go_on(
    comm, fresh, monkeypatch
):
    comm = fresh  # on which a notification to ranks that had ended stays
    # an interrupt is of the thread that calls
    progress = of_process().progress
    monkeypatch.setattr(progress, "_look", lambda: Look.NOTHING_IN_FLIGHT)
    vectors = contributions("random", comm.size)
    add_up, culprit = allreduce.add_up, comm.rank == 0

    def interrupted(parts):
        monkeypatch.setattr(allreduce, "add_up", add_up)
        raise KeyboardInterrupt

    if culprit:
        monkeypatch.setattr(allreduce, "add_up", interrupted)
    request = sparse_iallreduce(vectors[comm.rank], comm, algorithm="allgather")
    if culprit:
        with pytest.raises(KeyboardInterrupt):
            request.wait()
        with pytest.raises(
            CollectiveError, match="sparse_allreduce was interrupted in round"
        ):
            request.wait()
    else:
        assert_equal(request.wait(), sum(window(vector) for vector in vectors))
    with pytest.raises(
        CollectiveError, match="was lost on rank 0 by KeyboardInterrupt"
    ):
        sparse_allgather(vectors[comm.rank], comm)
    total = sparse_iallreduce(vectors[comm.rank], comm, algorithm="allgather").wait()
    assert_equal(total, sum(window(vector) for vector in vectors))
