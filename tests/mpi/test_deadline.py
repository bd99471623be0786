"""A rank that waits too long gives up, on every rank that waits, and says who did not come."""

import os
import re
import signal
import time

import numpy as np
import pytest
from cases import assert_equal, contribution, contributions, window
from mpi4py import MPI

from collectives import (
    CollectiveTimeoutError,
    GradientExchange,
    compressed_allreduce,
    configure,
    dense_allreduce,
    gtopk_allreduce,
    gtopk_iallreduce,
    quantised_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_iallreduce,
    sparse_reduce,
    sparse_reduce_scatter,
)
from collectives.calls.call import Call
from collectives.calls.collective import collective
from collectives.runtime import deadline
from mpicomp import SparseVector, TopK

TIMEOUT = 0.4
AFTER = r"after the deadline of the others: ranks? .* timed out after 0\.\d+ s"
COLLECTIVES = {
    "sparse_allgather": sparse_allgather,
    "sparse_allreduce": sparse_allreduce,
    "split_allgather": lambda vector, comm: sparse_allreduce(
        vector, comm, algorithm="split_allgather"
    ),
    "sparse_reduce_scatter": sparse_reduce_scatter,
    "gtopk_allreduce": gtopk_allreduce,
    "compressed_allreduce": lambda vector, comm: compressed_allreduce(
        vector, comm, TopK(k=1)
    ),
    "exact": lambda vector, comm: gtopk_allreduce(vector, comm, algorithm="exact"),
    "sparse_reduce": sparse_reduce,
    "sparse_bcast": sparse_bcast,
    "dense_allreduce": lambda vector, comm: dense_allreduce(np.ones(4), comm),
    "quantised_allreduce": lambda vector, comm: quantised_allreduce(np.ones(4), comm),
}
# of their kind: the schedules of the others are waited for by the same code
QUICK = "sparse_allreduce", "exact", "sparse_bcast", "dense_allreduce"


@pytest.fixture
def own(comm):
    """A communicator of its own, on which the library has made its duplicate: it is revoked, and not freed."""
    if comm == MPI.COMM_NULL:
        yield comm
        return
    duplicate = comm.Dup()
    # the first calls take longer than the timeout where ranks share cores
    for each in comm, duplicate:
        sparse_allreduce(SparseVector([1], [1.0], 4), each)
    configure(timeout=TIMEOUT)
    yield duplicate
    configure(timeout=None)


@pytest.mark.exactly(2)
@pytest.mark.exactly(3)
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in COLLECTIVES
    ],
)
def test_a_rank_that_does_not_come_is_named_by_all_that_wait(comm, own, name):
    """And when it comes it raises as well, at once; so does every later call."""
    culprit, vector = comm.size - 1, SparseVector([1, 2], [1.0, 2.0], 4)
    if comm.rank != culprit:
        began = time.monotonic()
        with pytest.raises(
            CollectiveTimeoutError,
            match=rf"in round \d, waiting.*rank {culprit} did not respond",
        ):
            COLLECTIVES[name](vector, own)
        assert time.monotonic() - began >= TIMEOUT
    comm.Barrier()
    if comm.rank == culprit:
        late = rf" was called on rank {culprit} {AFTER}.*: end the job"
        with pytest.raises(CollectiveTimeoutError, match=late):
            COLLECTIVES[name](vector, own)
    with pytest.raises(
        CollectiveTimeoutError, match="no longer uses this communicator"
    ):
        sparse_allgather(vector, own)
    assert len(sparse_allgather(vector, comm)) == comm.size, (
        "another communicator is as good as before"
    )


@pytest.mark.exactly(4)
def test_ranks_that_wait_for_each_other_are_told_who_waits_in_what(comm, own):
    """As they would if there were a fault in a schedule: rank 0 sends nothing, and waits for what nobody sends."""

    @collective()
    def _faulty(vector, comm):
        return Call(vector, comm, operation="sparse_allgather")

    @_faulty.algorithm(compares_calls=True)
    def dissemination(vector, group):
        for _ in range(2):
            vector, _ = yield from group.receive(1)
        return vector

    said = (
        r"all ranks responded: rank 0 waits in round \d of sparse_allgather for rank 1"
    )
    with pytest.raises(CollectiveTimeoutError, match=said):
        (sparse_allgather if comm.rank else _faulty)(
            contribution("random", comm.rank, comm.size), own
        )


@pytest.mark.exactly(3)
@pytest.mark.exactly(8)
@pytest.mark.parametrize("pause", [0.1, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_rank_that_is_merely_slow_is_waited_for(comm, own, pause):
    """The clock starts anew whenever something moves, and stands still outside of the library."""
    for _ in range(3):
        if comm.rank == comm.size - 1:
            time.sleep(pause)
        total = sparse_allreduce(contribution("random", comm.rank, comm.size), own)
        assert_equal(
            total, sum(window(vector) for vector in contributions("random", comm.size))
        )
    request = sparse_iallreduce(contribution("random", comm.rank, comm.size), own)
    time.sleep(1.5 * TIMEOUT)
    assert_equal(
        request.wait(),
        sum(window(vector) for vector in contributions("random", comm.size)),
    )


@pytest.mark.exactly(3)
def test_all_that_is_in_flight_on_the_communicator_ends(comm, own):
    vector = contribution("random", comm.rank, comm.size)
    if comm.rank < 2:
        requests = [sparse_iallreduce(vector, own), gtopk_iallreduce(vector, own)]
        for request in requests:
            with pytest.raises(CollectiveTimeoutError, match="rank 2 did not respond"):
                request.wait()
            assert request.test()
    comm.Barrier()


@pytest.mark.exactly(3)
def test_an_interrupt_while_notices_are_awaited_leaves_no_operation_waiting(
    comm, own, monkeypatch
):
    def interrupted(faults):
        raise KeyboardInterrupt

    if comm.rank == 0:
        request = sparse_iallreduce(contribution("random", comm.rank, comm.size), own)
        monkeypatch.setattr(deadline, "receive_notice", interrupted)
        with pytest.raises(KeyboardInterrupt):
            request.wait()
        for _ in range(2):
            with pytest.raises(
                CollectiveTimeoutError, match="ranks 1, 2 did not respond"
            ):
                request.wait()
    comm.Barrier()


@pytest.mark.exactly(2)
@pytest.mark.exactly(5)
def test_the_first_call_on_a_communicator_names_operation_and_absent_ranks(comm):
    """The absent rank comes late: it raises at once, and so does every later call. Another communicator is usable."""
    fresh, absent = comm.Dup(), comm.size - 1
    sparse_allgather(SparseVector.empty(1), comm)
    configure(timeout=TIMEOUT)
    try:
        time.sleep(0.5 * TIMEOUT * (comm.rank == 1))
        if comm.rank != absent:
            said = rf"^sparse_allgather, the first call .* 0\.\d+ s; rank {absent} did not respond within 0\.\d+ s"
            for _ in range(2):
                with pytest.raises(CollectiveTimeoutError, match=said):
                    sparse_allgather(SparseVector.empty(1), fresh)
        comm.Barrier()
        if comm.rank == absent:
            said = rf"^sparse_allreduce, .* was called on rank {absent} {AFTER}"
            with pytest.raises(CollectiveTimeoutError, match=said):
                sparse_allreduce(SparseVector.empty(1), fresh)
        assert len(sparse_allgather(SparseVector.empty(1), comm)) == comm.size
    finally:
        configure(timeout=None)
    comm.Barrier()


@pytest.mark.exactly(3)
def test_a_first_call_that_a_rank_never_makes_leaves_communicators_to_be_made(comm):
    """Open MPI makes them in an order of its own, and a duplication that is never completed blocks those after it."""
    first, second = comm.Dup(), comm.Dup()
    configure(timeout=TIMEOUT)
    try:
        if comm.rank < 2:
            with pytest.raises(CollectiveTimeoutError, match="the first call"):
                sparse_allgather(SparseVector.empty(1), first)
    finally:
        configure(timeout=None)
    comm.Barrier()
    third = second.Dup()
    assert len(sparse_allgather(SparseVector.empty(1), third)) == comm.size


@pytest.mark.exactly(2)
@pytest.mark.exactly(5)
@pytest.mark.parametrize("is_first_call", [True, False])
def test_communicators_that_are_used_in_another_order_are_said_to_be(
    comm, is_first_call
):
    """Two models, an exchange and a communicator for each: the last rank steps them in another order.

    A step is kept on all ranks, or raises on all; that in which the first ranks wait raises.
    """
    exchanges = [GradientExchange(comm.Dup(), TopK(k=1)) for _ in range(2)]
    sparse_allgather(SparseVector.empty(1), comm)
    gradient = np.ones(4, np.float32)
    if not is_first_call:
        for exchange in exchanges:
            exchange(gradient)
    configure(timeout=TIMEOUT)
    said = (
        r"rank \d waits in .* on another communicator.* communicators in another order"
    )
    raised = {}
    try:
        for number in (1, 0) if comm.rank == comm.size - 1 else (0, 1):
            raised[number] = ""
            try:
                exchanges[number](gradient)
            except CollectiveTimeoutError as error:
                raised[number] = str(error)
        comm.Barrier()
    finally:
        configure(timeout=None)
    each = [comm.allgather(raised[number]) for number in range(2)]
    assert all(all(texts) or not any(texts) for texts in each)
    assert any(all(re.search(said, text) for text in texts) for texts in each), each
    assert len(sparse_allgather(SparseVector.empty(1), comm)) == comm.size


@pytest.mark.exactly(2)
def test_a_communicator_that_was_freed_is_not_listened_to(comm):
    """Neither one that had no call yet, nor one whose exchanges were stepped."""
    freed = [comm.Dup() for _ in range(2)]
    exchanges = [GradientExchange(each, TopK(k=1)) for each in freed]
    exchanges[0](np.ones(4, np.float32))
    for each in freed:
        each.Free()
    fresh = comm.Dup()
    configure(timeout=TIMEOUT)
    try:
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="rank 1 did not respond"):
                sparse_allgather(SparseVector.empty(1), fresh)
        comm.Barrier()
    finally:
        configure(timeout=None)


@pytest.mark.exactly(2)
def test_the_time_in_which_a_rank_was_stopped_does_not_count(comm, own):
    """SIGSTOP, as by `scontrol suspend`: rank 0 waits, and is stopped for longer than its deadline."""
    pid, vector = comm.bcast(os.getpid()), SparseVector([1], [1.0], 4)
    configure(timeout=2 * TIMEOUT)
    if comm.rank == 1:
        time.sleep(0.25 * TIMEOUT)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3 * TIMEOUT)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.25 * TIMEOUT)  # rank 0 looks at its clock
    assert len(sparse_allgather(vector, own)) == 2
    comm.Barrier()
