"""Error averaging: the residuals of all ranks are replaced by their mean."""

import numpy as np
import pytest

from collectives import CollectiveError, GradientExchange, average_residuals
from mpicomp import ErrorFeedback, NoFeedback, StepAhead, TopK

pytestmark = pytest.mark.small_groups

SHAPES = {"a": 50, "b": 7, "c": 2000}


def gradients(rank, step):
    return {
        name: np.random.default_rng([step, rank]).integers(-99, 100, n) * 1.0
        for name, n in SHAPES.items()
    }


def residuals(comm, exchange):
    return comm.allgather([bucket.feedback.residual for bucket in exchange.buckets])


@pytest.mark.parametrize("feedback", [ErrorFeedback, lambda: StepAhead(0.5, 0.5)])
def test_all_ranks_have_the_mean_of_the_residuals(comm, feedback):
    """The sum over the ranks stays, bitwise where the number of ranks is a power of two."""
    exchange = GradientExchange(comm, TopK(k=3), feedback(), small=10)
    average_residuals(exchange)  # before the first step there is nothing to average
    with pytest.raises(TypeError, match="exchange is NoneType: expected a Gradient"):
        average_residuals(None)
    exchange(gradients(comm.rank, 0))
    before = residuals(comm, exchange)
    average_residuals(exchange)
    for place, mine in enumerate(zip(*residuals(comm, exchange), strict=True)):
        expected = sum(each[place] for each in before) / comm.size
        for residual in mine:
            np.testing.assert_array_equal(residual, expected)
    exchange(gradients(comm.rank, 1))


def test_without_a_residual_nothing_happens(comm):
    exchange = GradientExchange(comm, TopK(k=3), NoFeedback())
    exchange(gradients(comm.rank, 0))
    before = exchange.state_dict()
    average_residuals(exchange)
    assert repr(exchange.state_dict()) == repr(before)


def test_a_mean_may_be_in_range_where_the_sum_of_halves_is_not(comm):
    exchange = GradientExchange(comm, TopK(k=1), StepAhead(1.0))
    gradient = np.zeros(1 + comm.size, np.float16)
    gradient[0], gradient[1 + comm.rank] = 40_000, 60_000
    exchange(gradient)
    average_residuals(exchange)
    assert exchange.feedback.residual.tolist() == [40_000] + [0] * comm.size


@pytest.mark.at_least(2)
@pytest.mark.unchecked("refuses sums that are not finite")
def test_a_sum_out_of_range_raises_on_all_ranks_and_changes_nothing(comm):
    exchange = GradientExchange(comm, TopK(k=1), StepAhead(1.0))
    gradient = np.zeros(1 + comm.size)
    gradient[0], gradient[1 + comm.rank] = 1e308, 1.5e308
    exchange(gradient)
    before = exchange.feedback.residual.tobytes()
    with pytest.raises(
        OverflowError, match="mean of the residuals leaves the range of float64"
    ):
        average_residuals(exchange)
    assert exchange.feedback.residual.tobytes() == before


def test_an_error_in_a_later_bucket_raises_on_all_and_changes_nothing(
    comm, monkeypatch
):
    exchange = GradientExchange(comm, TopK(k=3), small=10)
    exchange(gradients(comm.rank, 0))
    before, last = residuals(comm, exchange), exchange.buckets[0].feedback

    def without_memory(residual):
        raise MemoryError("no room")

    if is_last := comm.rank == comm.size - 1:
        monkeypatch.setattr(last, "replace_residual", without_memory)
    with pytest.raises(MemoryError if is_last else CollectiveError, match="no room"):
        average_residuals(exchange)
    monkeypatch.undo()
    np.testing.assert_equal(residuals(comm, exchange), before)
    average_residuals(exchange)
    exchange(gradients(comm.rank, 1))


def test_a_rank_within_a_step_raises_on_all(comm):
    exchange = GradientExchange(comm, TopK(k=3), small=10)
    exchange(gradients(comm.rank, 0))
    if is_last := comm.rank == comm.size - 1:
        exchange.start("b", gradients(comm.rank, 1)["b"])
    with pytest.raises(
        RuntimeError if is_last else CollectiveError, match="a step is in progress"
    ):
        average_residuals(exchange)
