"""Selections that look at what the ranks did together: by the last aggregate, or by a seed."""

from functools import partial

import numpy as np
import pytest

from collectives import GradientExchange, aligned_allreduce, sparse_allreduce
from mpicomp import AggregationAware, CollectiveError, ErrorFeedback, Quantised, RandomK, SparseVector


def test_an_exchange_tells_the_compressor_who_voted(comm):
    compressor = Quantised(AggregationAware(k=2, metric="votes"), "float16")
    exchange = GradientExchange(comm, compressor, ErrorFeedback(), partial(sparse_allreduce, votes=True))
    gradient = np.zeros(20)
    gradient[[comm.rank, 19]] = 4, 5
    exchange(gradient)
    bonus = compressor.compressor._bonus
    assert bonus[19] == 1
    np.testing.assert_allclose(bonus[: comm.size], 1 / comm.size)


def test_each_tensor_of_a_bucket_hears_of_its_own_votes(comm):
    settings = AggregationAware(k=2, metric="votes"), ErrorFeedback(), partial(sparse_allreduce, votes=True)
    exchange = GradientExchange(comm, *settings, small=0)
    gradient = np.zeros(20)
    gradient[[comm.rank, 19]] = 4, 5
    exchange({"forth": gradient, "back": gradient[::-1]})
    forth, back = (each._bonus for each in exchange.compressors.values())
    assert forth[19] == 1
    np.testing.assert_allclose(forth[: comm.size], 1 / comm.size)
    np.testing.assert_array_equal(back, forth[::-1])


@pytest.mark.at_least(2)
def test_votes_that_do_not_come_raise_everywhere_and_nothing_is_lost(comm):
    def collective(vector, comm):
        return sparse_allreduce(vector, comm)

    exchange = GradientExchange(comm, AggregationAware(k=2, metric="votes"), ErrorFeedback(), collective)
    with pytest.raises(ValueError, match="votes is None: expected a share for each"):
        exchange(np.arange(5.0) + comm.rank)
    assert exchange.feedback.residual is None


def test_supports_that_differ_raise_everywhere(comm):
    if comm.size == 1:
        assert aligned_allreduce(SparseVector([0], [2.0], 9), comm).values.tolist() == [2]
        return
    said = r"the supports differ: one on rank 0, another on rank.*; aligned supports come from RandomK with"
    with pytest.raises(CollectiveError, match=said):
        aligned_allreduce(SparseVector([int(comm.rank > 0)], [1.0], 9), comm)


@pytest.mark.parametrize("width", [None, 2])
def test_aligned_vectors_are_summed(comm, width):
    shape = (3,) if width is None else (3, width)
    total = aligned_allreduce(SparseVector([1, 5, 8], np.full(shape, comm.rank + 1.0, np.float16), 9), comm)
    assert total.indices.tolist() == [1, 5, 8]
    assert total.dtype == np.float16
    np.testing.assert_array_equal(total.values, np.full(shape, comm.size * (comm.size + 1) / 2))


def test_random_positions_need_no_indices(comm):
    exchange = GradientExchange(comm, RandomK(k=10, aligned=True), ErrorFeedback(), aligned_allreduce, average=False)
    given, applied = np.zeros(100), np.zeros(100)
    for step in range(5):
        gradients = [np.random.default_rng([step, rank]).integers(-3, 4, 100) for rank in range(comm.size)]
        given += sum(gradients)
        applied += exchange(gradients[comm.rank].astype(np.float64))
    owed = sum(comm.allgather(exchange.feedback.residual))
    np.testing.assert_array_equal(applied + owed, given)
