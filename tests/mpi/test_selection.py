"""Selections by what the ranks did together: the last aggregate."""

import numpy as np

from collectives import GradientExchange
from mpicomp import AggregationAware, ErrorFeedback


def test_each_tensor_of_a_bucket_gets_its_own_part_of_the_aggregate(comm):
    exchange = GradientExchange(comm, AggregationAware(k=2), ErrorFeedback(), small=0)
    gradient = np.zeros(20)
    gradient[[comm.rank, 19]] = 4, 5
    exchange({"forth": gradient, "back": gradient[::-1]})
    state = exchange.state_dict()
    forth, back = (state[f"{name}/compressor/0._history"] for name in ("forth", "back"))
    np.testing.assert_array_equal(forth[: comm.size], 1)
    np.testing.assert_array_equal(forth[comm.size : 19], 0)
    assert forth[19] == 1
    np.testing.assert_array_equal(back, forth[::-1])
