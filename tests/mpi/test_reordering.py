"""Every algorithm over a transport that delays, reorders and splits messages: the same bits as over the plain one."""

from functools import partial

import numpy as np
import pytest
from cases import (
    assert_equal,
    bits,
    butterfly_sum,
    contribution,
    contributions,
    select,
    window,
)
from disorder import Disordered, over

from collectives import (
    CollectiveError,
    GradientExchange,
    SupportPlan,
    allreduce,
    configure,
    dense_allreduce,
    dense_iallreduce,
    gtopk_allreduce,
    gtopk_iallreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_iallgather,
    sparse_iallreduce,
    sparse_reduce,
    sparse_reduce_scatter,
)
from collectives.runtime.link import link_if_any
from mpicomp import ErrorFeedback, SparseVector, TopK

K = 12
ALGORITHMS = ("auto", *allreduce.ALGORITHMS)

pytestmark = [pytest.mark.exactly(size) for size in (2, 3, 4, 5, 7, 8)]


@pytest.mark.parametrize("pattern", ["random", "unequal", "one_holds_all"])
def test_every_sum_is_that_of_the_oracle(comm, pattern):
    vector, every = (
        contribution(pattern, comm.rank, comm.size),
        contributions(pattern, comm.size),
    )
    dense = [window(each) for each in every]
    total, root = sum(dense), comm.size // 2
    with over(Disordered, comm, seed=comm.size) as rough:
        for name in ALGORITHMS:
            assert_equal(sparse_allreduce(vector, rough, algorithm=name), total)
        assert [bits(part) for part in sparse_allgather(vector, rough)] == [
            bits(each) for each in every
        ]
        share = sparse_reduce_scatter(vector, rough)
        np.testing.assert_array_equal(sum(comm.allgather(window(share))), total)
        reduced = sparse_reduce(vector, rough, root)
        if comm.rank == root:
            assert_equal(reduced, total)
        assert_equal(sparse_bcast(reduced, rough, root), total)
        plan = SupportPlan.union(vector, rough)
        np.testing.assert_array_equal(
            plan.allreduce(window(vector)[plan.indices]), total[plan.indices]
        )
        np.testing.assert_array_equal(dense_allreduce(window(vector), rough), total)


@pytest.mark.parametrize("pattern", ["random", "ties"])
def test_every_gtopk_is_that_of_the_oracle_and_loses_nothing(comm, pattern):
    vector = contribution(pattern, comm.rank, comm.size)
    dense = [window(each) for each in contributions(pattern, comm.size)]
    expected = {
        "recursive_doubling": butterfly_sum(dense, [K] * comm.size),
        "exact": select(sum(dense), K),
    }
    with over(Disordered, comm, seed=comm.size) as rough:
        for name in gtopk_allreduce.algorithms:
            result, rejected = gtopk_allreduce(vector, rough, K, algorithm=name)
            assert bits(result) == bits(
                gtopk_allreduce(vector, comm, K, algorithm=name)[0]
            )
            if name in expected:
                assert_equal(result, expected[name])
            np.testing.assert_array_equal(
                window(result) + sum(comm.allgather(window(rejected))), sum(dense)
            )


def test_several_in_flight_overtake_each_other(comm):
    """Started alike, completed in another order on each rank; the transport reorders across them as well."""
    vector = contribution("random", comm.rank, comm.size)
    total = sum(window(each) for each in contributions("random", comm.size))
    with over(Disordered, comm, seed=7) as rough:
        for turn in range(2):
            starts = [
                *(
                    partial(sparse_iallreduce, algorithm=name)
                    for name in ALGORITHMS[turn::2]
                ),
                sparse_iallgather,
                partial(gtopk_iallreduce, k=K),
                lambda vector, comm: dense_iallreduce(window(vector), comm),
            ]
            requests = [start(vector, rough) for start in starts]
            for place in np.random.default_rng([turn, comm.rank]).permutation(
                len(requests)
            ):
                requests[place].wait()
            for request in requests[:-3]:
                assert_equal(request.wait(), total)
            np.testing.assert_array_equal(requests[-1].wait(), total)
        mine = link_if_any(rough)
        assert not mine.outbox
        assert not mine.heard, "messages that nobody received"
        assert mine.cut, "no message was split"
        assert any(comm.allgather(mine.overtaken)), "no message overtook another one"


def test_an_exchange_has_the_same_bits_as_over_the_plain_transport(comm):
    def gradient(step):
        return (
            np.random.default_rng([step, comm.rank])
            .standard_normal(3000)
            .astype(np.float32)
        )

    with over(Disordered, comm, seed=3) as rough:
        for collective in (gtopk_allreduce, sparse_iallreduce):
            ways = [
                GradientExchange(each, TopK(0.02), ErrorFeedback(), collective)
                for each in (comm, rough)
            ]
            for step in range(3):
                plain, disordered = (
                    way({"weight": gradient(step)})["weight"] for way in ways
                )
                assert plain.tobytes() == disordered.tobytes()


def test_bad_arguments_and_deadlines_work_in_disorder(comm):
    vector = contribution("random", comm.rank, comm.size)
    with over(Disordered, comm, seed=5) as rough:
        for name in ALGORITHMS:
            bad = SparseVector([1, 2], [1.0, np.nan], 240)
            with pytest.raises(
                ValueError if comm.rank == 0 else CollectiveError, match="is nan"
            ):
                sparse_allreduce(
                    bad if comm.rank == 0 else vector.__class__([1], [1.0], 240),
                    rough,
                    algorithm=name,
                )
        configure(timeout=20)
        try:
            assert sparse_allreduce(vector, rough).nnz
        finally:
            configure(timeout=None)
