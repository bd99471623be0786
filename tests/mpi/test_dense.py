import numpy as np
import pytest
from cases import for_each

from collectives import dense_allreduce, dense_iallreduce, traffic
from collectives.runtime import link


def contribution(rank, shape, dtype):
    return np.random.default_rng(rank).integers(-9, 10, shape).astype(dtype)


@pytest.mark.every_size
@for_each(
    shape=[(), (0,), (1,), (1000,), (7, 11, 3)],
    dtype=[np.float16, np.float32, np.float64],
)
def test_the_sum_over_the_ranks(comm, shape, dtype):
    mine = np.array(contribution(comm.rank, shape, dtype), order="F")
    total = dense_allreduce(mine, comm)
    expected = sum(contribution(rank, shape, np.float64) for rank in range(comm.size))
    assert total.dtype == dtype
    assert total.shape == shape
    np.testing.assert_array_equal(total, expected)
    np.testing.assert_array_equal(mine, contribution(comm.rank, shape, dtype))


def test_the_array_may_change_once_the_reduction_has_started(comm):
    mine = contribution(comm.rank, 100, np.float32)
    request = dense_iallreduce(mine, comm)
    mine[:] = 99
    np.testing.assert_array_equal(
        request.wait(),
        sum(contribution(rank, 100, np.float64) for rank in range(comm.size)),
    )


def test_all_ranks_get_the_same_bits_on_real_numbers(comm):
    total = dense_allreduce(
        np.random.default_rng(comm.rank).standard_normal(10_000), comm
    )
    assert len(set(comm.allgather(total.tobytes()))) == 1


@pytest.mark.unchecked("sends more")
def test_the_traffic_is_what_the_best_algorithm_sends(comm):
    before = traffic(comm).nbytes
    dense_allreduce(np.zeros(1 << 16, np.float32), comm)
    exact = 2 * (comm.size - 1) * (1 << 18) // comm.size
    assert exact <= traffic(comm).nbytes - before <= exact + 64 * (comm.size - 1)


def test_a_long_array_travels_in_several_pieces(comm, monkeypatch):
    monkeypatch.setattr(link, "_PIECE", 7)
    total = dense_allreduce(contribution(comm.rank, 100, np.float32), comm)
    np.testing.assert_array_equal(
        total, sum(contribution(rank, 100, np.float64) for rank in range(comm.size))
    )
