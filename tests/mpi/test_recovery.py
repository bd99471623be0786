"""Continuing with fewer ranks: what needs no rank that dies (see tests/collectives/test_deaths.py for these)."""

import numpy as np
import pytest
from cases import compressed_sum
from mpi4py import MPI

from collectives import (
    CollectiveError,
    CollectiveTimeoutError,
    GradientExchange,
    agree,
    configure,
    gtopk_allreduce,
    shrink,
    sparse_allgather,
    sparse_allreduce,
)
from collectives.calls import recovery
from collectives.faults import ulfm as failure
from mpicomp import ErrorFeedback, SparseVector, TopK


def gradient(rank, step, length=300):
    return (
        np.random.default_rng([rank, step]).integers(-9, 10, length).astype(np.float64)
    )


@pytest.mark.exactly(2)
def test_without_ulfm_the_error_says_what_would_help_and_nothing_is_revoked(comm):
    with pytest.raises(
        RuntimeError,
        match=r"cannot continue after the death of a rank.*Open MPI 5 under.*ulfm",
    ):
        shrink(comm)
    for quorum in (0, comm.size + 1, True, 1.5, "all"):
        with pytest.raises(
            (TypeError, ValueError),
            match=r"quorum is .*: expected an integer.*, or None",
        ):
            shrink(comm, quorum=quorum)
    assert agree(True, comm)
    assert not agree(False, comm)
    assert len(sparse_allgather(SparseVector.empty(1), comm)) == comm.size


@pytest.mark.exactly(3)
@pytest.mark.exactly(5)
@pytest.mark.parametrize("named", [False, True])
def test_an_exchange_goes_on_with_some_of_its_ranks_and_conserves_their_mass(
    comm, named
):
    exchange = GradientExchange(
        comm, TopK(k=9), ErrorFeedback(), gtopk_allreduce, average=False
    )

    def step_of(number):
        mine = gradient(comm.rank, number)
        return exchange({"all": mine})["all"] if named else exchange(mine)

    def kept(ranks):
        state = exchange.state_dict()
        return sum(
            ranks.allgather(
                state[f"{'all' if named else 'gradient'}/feedback/residual"]
            )
        )

    for number in range(3):
        step_of(number)
    some = comm.Split(comm.rank == 1, comm.rank)  # as shrink does, when rank 1 has died
    if comm.rank != 1:
        account = kept(some)
        exchange.continue_on(some)
        for number in range(3, 6):
            account += sum(
                gradient(rank, number) for rank in range(comm.size) if rank != 1
            )
            account -= step_of(number)
        np.testing.assert_array_equal(kept(some), account)
        assert exchange.steps == 6
    some.Free()


@pytest.mark.exactly(3)
def test_shares_of_a_sum_move_and_nothing_is_lost(comm):
    """Rank 1 goes: the others own larger shares than they have errors of."""
    exchange = GradientExchange(
        comm, TopK(k=9), average=False, collective=compressed_sum(TopK(k=3))
    )
    exchange(gradient(comm.rank, 0))
    some = comm.Split(comm.rank == 1, comm.rank)
    if comm.rank != 1:

        def kept():
            return sum(some.allgather(exchange.feedback.residual))

        account = kept()
        exchange.continue_on(some)
        for number in range(1, 4):
            account = (
                account
                + gradient(0, number)
                + gradient(2, number)
                - exchange(gradient(comm.rank, number))
            )
        np.testing.assert_array_equal(kept(), account)
    some.Free()


@pytest.mark.exactly(3)
def test_ranks_that_kept_different_steps_do_not_go_on(comm):
    exchange = GradientExchange(comm, TopK(k=9), ErrorFeedback(), sparse_allreduce)
    alone = comm.Split(comm.rank)
    exchange(gradient(comm.rank, 0))
    if comm.rank == 1:
        exchange.comm = alone
        exchange(gradient(comm.rank, 1))
    with pytest.raises(
        CollectiveError,
        match="load a checkpoint: 'steps kept' is 1 on rank 0, and 2 on rank 1",
    ):
        exchange.continue_on(comm)
    assert exchange.comm is (alone if comm.rank == 1 else comm)
    alone.Free()


@pytest.mark.exactly(2)
def test_ranks_of_which_some_have_registered_nothing_do_not_go_on(comm):
    """As where a rank dies in the first step: some ranks know the tensors then, and others do not."""
    exchange = GradientExchange(comm, TopK(k=9))
    if comm.rank:
        exchange.comm = MPI.COMM_SELF
        exchange.register({"a": np.zeros(3)})
        exchange.comm = comm
    with pytest.raises(
        CollectiveError,
        match="load a checkpoint: 'buckets' is 0 on rank 0, and 1 on rank 1",
    ):
        exchange.continue_on(comm)


@pytest.mark.exactly(3)
def test_a_rank_that_does_not_go_on_keeps_nobody_waiting(comm):
    some, exchange = (
        comm.Dup(),
        GradientExchange(comm, TopK(k=9), ErrorFeedback(), sparse_allreduce),
    )
    exchange(gradient(comm.rank, 0))
    before = exchange.state_dict()
    sparse_allgather(SparseVector.empty(1), some)
    configure(timeout=0.4)
    try:
        if comm.rank < 2:
            with pytest.raises(
                CollectiveTimeoutError, match=r"; ranks? .*2 did not respond"
            ):
                exchange.continue_on(some)
    finally:
        configure(timeout=None)
    comm.Barrier()
    assert exchange.comm is comm
    np.testing.assert_equal(exchange.state_dict(), before)
    exchange(gradient(comm.rank, 1))


@pytest.mark.exactly(2)
@pytest.mark.exactly(3)
def test_where_mpi_survives_deaths_the_ranks_agree_on_every_step(comm, monkeypatch):
    """Here the others find the error in the collective itself; the agreement sees to ranks that are gone by then."""
    asked, answers = (
        [],
        [(True, True), (True, True), (False, True), (False, True), (True, False)],
    )

    class Voted:
        def agree(self, sound, number):
            asked.append(sound)
            return answers[len(asked) - 1]

    exchange = GradientExchange(comm, TopK(k=9), ErrorFeedback(), sparse_allreduce)
    monkeypatch.setattr(failure, "survives", lambda: True)
    monkeypatch.setattr(recovery, "agreements_on", lambda comm: Voted())
    exchange(gradient(comm.rank, 0))
    before = exchange.feedback.residual.copy()
    with pytest.raises((ValueError, CollectiveError), match="nan"):
        exchange(np.full(300, np.nan) if comm.rank == 0 else gradient(comm.rank, 1))
    with pytest.raises(CollectiveError, match="the step is undone on all ranks"):
        exchange(gradient(comm.rank, 1))
    if comm.rank == 0:
        exchange.rescale(1.0)
    with pytest.raises(CollectiveError, match=r"out of step: .* on rank 0"):
        exchange(gradient(comm.rank, 1))
    np.testing.assert_array_equal(exchange.feedback.residual, before)
    # the first one when tensors are registered
    assert asked == [True, True, False, True, True]
    assert exchange.steps == 1
