"""Selections that look at what the ranks did together: by the last aggregate, or by a seed."""

from functools import partial

import numpy as np
import pytest

from collectives import GradientExchange, sparse_allreduce
from mpicomp import AggregationAware, ErrorFeedback


def test_each_tensor_of_a_bucket_hears_of_its_own_votes(comm):
    settings = (
        AggregationAware(k=2, metric="votes"),
        ErrorFeedback(),
        partial(sparse_allreduce, votes=True),
    )
    exchange = GradientExchange(comm, *settings, small=0)
    gradient = np.zeros(20)
    gradient[[comm.rank, 19]] = 4, 5
    exchange({"forth": gradient, "back": gradient[::-1]})
    state = exchange.state_dict()
    forth, back = (state[f"{name}/compressor.0._history"] for name in ("forth", "back"))
    assert forth[19] == 1
    np.testing.assert_allclose(forth[: comm.size], 1 / comm.size)
    np.testing.assert_array_equal(back, forth[::-1])


@pytest.mark.at_least(2)
def test_votes_that_do_not_come_raise_everywhere_and_nothing_is_lost(comm):
    def collective(vector, comm):
        return sparse_allreduce(vector, comm)

    exchange = GradientExchange(
        comm, AggregationAware(k=2, metric="votes"), ErrorFeedback(), collective
    )
    with pytest.raises(ValueError, match="votes is None: expected a share for each"):
        exchange(np.arange(5.0) + comm.rank)
    assert exchange.feedback.residual is None
