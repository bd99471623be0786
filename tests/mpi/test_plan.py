"""Shared supports."""

import numpy as np
import pytest
from cases import contribution

from collectives import CollectiveError, SupportPlan, traffic
from mpicomp import SparseVector


def values_of(rank, shape, dtype=np.float32):
    return np.random.default_rng([77, rank]).integers(-9, 10, shape).astype(dtype)


def plan_of(comm, length, k, first=0):
    """Return a plan of k consecutive indices, as `SupportPlan.union` makes one of ranks with this support."""
    return SupportPlan(
        SparseVector(np.arange(first, first + k), np.ones(k), length), comm
    )


def check_sums(comm, plan):
    """Check that a plan is the same on all ranks, and that it adds up numbers and rows."""
    assert len(set(comm.allgather(plan.indices.tobytes()))) == 1
    for shape in (plan.indices.shape, (*plan.indices.shape, 3)):
        total = plan.allreduce(values_of(comm.rank, shape))
        assert (total.dtype, total.shape) == (np.float32, shape)
        np.testing.assert_array_equal(
            total, sum(values_of(rank, shape, np.float64) for rank in range(comm.size))
        )


def test_a_plan_of_a_dense_union_has_no_more_indices_than_the_union(comm):
    """What an allreduce sends as dense pieces has every index: a plan must not."""
    mine = np.flatnonzero(np.random.default_rng(comm.rank).random(20_000) < 0.6)
    plan = SupportPlan.union(SparseVector(mine, np.ones(mine.size), 20_000), comm)
    supports = [
        np.flatnonzero(np.random.default_rng(rank).random(20_000) < 0.6)
        for rank in range(comm.size)
    ]
    np.testing.assert_array_equal(plan.indices, np.unique(np.concatenate(supports)))


def test_several_in_flight(comm):
    plans = [
        SupportPlan.union(contribution("random", comm.rank + first, comm.size), comm)
        for first in (0, 7)
    ]
    sums = [
        plan.iallreduce(np.full(plan.indices.size, comm.rank + 1.0)) for plan in plans
    ]
    for plan, request in reversed(list(zip(plans, sums, strict=True))):
        np.testing.assert_array_equal(
            request.wait(), np.full(plan.indices.size, comm.size * (comm.size + 1) / 2)
        )
        check_sums(comm, plan)


def test_take_and_vector_go_between_dense_and_planned(comm):
    plan = plan_of(comm, 50, 5, first=9)
    dense, rows = np.arange(50.0), np.arange(100.0).reshape(50, 2)
    np.testing.assert_array_equal(plan.take(dense), plan.indices)
    np.testing.assert_array_equal(
        plan.vector(plan.take(rows)).to_dense()[plan.indices], rows[plan.indices]
    )
    assert repr(plan) == f"SupportPlan(5 of 50 indices, {comm.size} ranks)"
    np.testing.assert_array_equal(plan.take(dense.reshape(5, 10)), plan.indices)
    with pytest.raises(
        ValueError,
        match=r"array has shape \(49,\): expected 50 values, or rows of them",
    ):
        plan.take(dense[1:])


def test_a_plan_is_its_own(comm):
    """The caller may reuse the buffer that the indices came from."""
    buffer = np.array([3, 5, 8], np.int32)
    vector = SparseVector(buffer, np.ones(3), 100)
    plan = SupportPlan.union(vector, comm)
    buffer[:] = 10, 20, 30
    assert plan.indices.tolist() == [3, 5, 8]
    with pytest.raises(ValueError, match="read-only"):
        plan.indices[0] = 1
    np.testing.assert_array_equal(plan.allreduce(np.ones(3)), [comm.size] * 3)


@pytest.mark.unchecked("sends more")
def test_a_sum_by_a_plan_sends_only_values(comm):
    plan = plan_of(comm, 10**6, 10_000)
    before = traffic(comm).nbytes
    plan.allreduce(np.ones(10_000, np.float32))
    floor = 2 * (comm.size - 1) * 40_000 // comm.size
    assert floor <= traffic(comm).nbytes - before <= floor + 64 * (comm.size - 1)


def test_values_of_another_shape_raise_everywhere(comm):
    plan, culprit = plan_of(comm, 100, 9), comm.size - 1
    for bad in (np.ones(8, np.float32), np.ones((9, 1, 1), np.float32), np.float32(3)):
        values = bad if comm.rank == culprit else np.ones(9, np.float32)
        with pytest.raises(
            ValueError if comm.rank == culprit else CollectiveError,
            match=r"expected \(9,\) or \(9",
        ):
            plan.allreduce(values)


@pytest.mark.at_least(2)
def test_ranks_whose_plans_differ_do_not_add_up_what_does_not_belong_together(comm):
    plans = [plan_of(comm, 100, 9, first) for first in (1, 2)]
    with pytest.raises(
        CollectiveError,
        match=r"support must be the same on all ranks, got .* on rank 0; ",
    ):
        plans[comm.rank == 0].allreduce(np.ones(9))
    with pytest.raises(
        CollectiveError, match="width must be the same on all ranks, got"
    ):
        plans[0].allreduce(np.ones(9) if comm.rank else np.ones((9, 1)))
    with pytest.raises(
        CollectiveError, match="dtype must be the same on all ranks, got"
    ):
        plans[0].allreduce(np.ones(9, np.float32 if comm.rank else np.float64))


@pytest.mark.at_least(2)
def test_plans_of_the_same_indices_in_vectors_of_different_lengths_differ(comm):
    plan = SupportPlan(SparseVector([3, 5], [1.0, 1.0], 9 + (comm.rank == 0)), comm)
    with pytest.raises(
        CollectiveError,
        match=r"support must be the same on all ranks, got .* on rank 0; ",
    ):
        plan.allreduce(np.ones(2))


def test_a_bad_vector_for_a_plan_raises_everywhere(comm):
    bad, culprit = (
        SparseVector(np.array([3, 1, 5], np.int32), np.ones(3), 9),
        comm.size - 1,
    )
    with pytest.raises(
        ValueError if comm.rank == culprit else CollectiveError,
        match="strictly increasing",
    ):
        SupportPlan.union(
            bad if comm.rank == culprit else contribution("random", 0, 1), comm
        )
