"""Collectives on arrays of a device: what MPI gets, and that the bits are those of the host.

Without a GPU the device is the stand-in's: MPI would die of one of its pointers, and
what was not waited for is poison.
"""

import numpy as np
import pytest
from cases import LENGTH, contribution, for_each
from devices import assert_same, back, there

import collectives
from collectives import (
    CollectiveError,
    SupportPlan,
    allreduce,
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
from collectives.runtime import cuda_aware, messages
from mpicomp import SparseVector
from mpicomp.codec import CODECS

SUMS = "auto", *allreduce.ALGORITHMS
SOME = "random", "empty", "one_holds_all", "unequal"


@pytest.mark.parametrize("algorithm", SUMS)
@for_each(pattern=SOME)
def test_allreduce(comm, cupy, algorithm, pattern):
    mine = contribution(pattern, comm.rank, comm.size)
    total = sparse_allreduce(there(mine, cupy), comm, algorithm=algorithm)
    assert_same(total, sparse_allreduce(mine, comm, algorithm=algorithm))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_codecs_and_dtypes(comm, cupy, codec, dtype):
    mine = contribution("unequal", comm.rank, comm.size, dtype)
    total = sparse_allreduce(there(mine, cupy), comm, codec=codec)
    assert_same(total, sparse_allreduce(mine, comm))


@pytest.mark.parametrize("algorithm", gtopk_allreduce.algorithms)
@for_each(pattern=SOME)
def test_gtopk(comm, cupy, algorithm, pattern):
    mine = contribution(pattern, comm.rank, comm.size)
    results = gtopk_allreduce(there(mine, cupy), comm, 20, algorithm=algorithm)
    for result, expected in zip(
        results, gtopk_allreduce(mine, comm, 20, algorithm=algorithm), strict=True
    ):
        assert_same(result, expected)


def test_the_others(comm, cupy):
    mine = contribution("random", comm.rank, comm.size)
    for part, expected in zip(
        sparse_allgather(there(mine, cupy), comm),
        sparse_allgather(mine, comm),
        strict=True,
    ):
        assert_same(part, expected)
    assert_same(
        sparse_reduce_scatter(there(mine, cupy), comm),
        sparse_reduce_scatter(mine, comm),
    )
    total, expected = (
        sparse_reduce(there(mine, cupy), comm, root=0),
        sparse_reduce(mine, comm, root=0),
    )
    assert (total is None) == (comm.rank > 0)
    if comm.rank == 0:
        assert_same(total, expected)
    assert_same(
        sparse_bcast(there(mine, cupy), comm, root=comm.size - 1),
        sparse_bcast(mine, comm, comm.size - 1),
    )


def test_rows_and_votes(comm, cupy):
    mine = contribution("random", comm.rank, comm.size)
    rows = SparseVector(
        mine.indices, np.stack([mine.values, -mine.values], axis=1), mine.length
    )
    assert_same(sparse_allreduce(there(rows, cupy), comm), sparse_allreduce(rows, comm))
    total, votes = sparse_allreduce(there(mine, cupy), comm, votes=True)
    expected, expected_votes = sparse_allreduce(mine, comm, votes=True)
    assert_same(total, expected)
    np.testing.assert_array_equal(votes.get(), expected_votes)


def test_plans(comm, cupy):
    mine = contribution("same_support", comm.rank, comm.size)
    plan = SupportPlan.union(there(mine, cupy), comm)
    values = cupy.asarray(mine.values)
    np.testing.assert_array_equal(
        plan.allreduce(values).get(),
        SupportPlan.union(mine, comm).allreduce(mine.values),
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dense(comm, cupy, dtype):
    mine = np.arange(60, dtype=dtype).reshape(3, 20) * (comm.rank + 1)
    total = dense_allreduce(cupy.asarray(mine), comm)
    np.testing.assert_array_equal(total.get(), dense_allreduce(mine, comm))
    assert total.dtype == dtype


@pytest.mark.parametrize("algorithm", quantised_allreduce.algorithms)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@for_each(bits=[8, 4, 2, 1])
def test_few_bits(comm, cupy, algorithm, dtype, bits):
    mine = np.random.default_rng(comm.rank).standard_normal((3, 100)).astype(dtype)
    results = quantised_allreduce(
        cupy.asarray(mine), comm, bits, 32, algorithm=algorithm
    )
    for result, expected in zip(
        results,
        quantised_allreduce(mine, comm, bits, 32, algorithm=algorithm),
        strict=True,
    ):
        assert (result.dtype, result.shape) == (dtype, mine.shape)
        assert result.get().tobytes() == expected.tobytes()


def test_few_bits_in_given_arrays(comm, cupy):
    mine, expected = (
        np.arange(60.0) * (comm.rank + 1),
        quantised_allreduce(np.arange(60.0) * (comm.rank + 1), comm),
    )
    total, array = cupy.asarray(mine * 0), cupy.asarray(mine)
    quantised_allreduce(array, comm, out=(total, array))
    for result, wanted in zip((total, array), expected, strict=True):
        assert result.get().tobytes() == wanted.tobytes()
    if comm.rank == 0:
        mine[7] = np.nan
    with pytest.raises(ValueError if comm.rank == 0 else CollectiveError):
        quantised_allreduce(cupy.asarray(mine), comm)


def test_some_ranks_on_a_device_and_some_not(comm, cupy):
    mine = contribution("random", comm.rank, comm.size)
    vector = there(mine, cupy) if comm.rank % 2 else mine
    total, expected = sparse_allreduce(vector, comm), sparse_allreduce(mine, comm)
    if comm.rank % 2:
        total = back(total)
    assert total.values.tobytes() == expected.values.tobytes()


@pytest.mark.parametrize("start", [sparse_iallreduce, gtopk_iallreduce])
def test_several_in_flight(comm, cupy, start):
    mine = [
        contribution(pattern, comm.rank, comm.size)
        for pattern in ("random", "ties", "unequal")
    ]
    requests = [start(there(vector, cupy), comm) for vector in mine]
    for request, vector in reversed(list(zip(requests, mine, strict=True))):
        result, expected = request.wait(), start(vector, comm).wait()
        assert_same(
            *(
                pair[0] if isinstance(pair, tuple) else pair
                for pair in (result, expected)
            )
        )


@pytest.mark.parametrize("pieces", [64, 192])
def test_a_long_message_comes_in_pieces(comm, cupy, pieces, monkeypatch):
    monkeypatch.setattr(messages, "PIECE", pieces)
    mine = contribution("one_holds_all", comm.rank, comm.size)
    before = collectives.traffic(comm)
    assert_same(sparse_allreduce(there(mine, cupy), comm), sparse_allreduce(mine, comm))
    requests = [
        sparse_iallreduce(there(mine, cupy), comm, algorithm=name) for name in SUMS[1:3]
    ]
    total = sparse_allreduce(mine, comm)
    for request in requests:
        assert_same(request.wait(), total)
    assert comm.size == 1 or collectives.traffic(comm).messages > before.messages


@pytest.mark.at_least(2)
def test_a_bad_vector_on_one_rank(comm, cupy):
    mine = contribution("random", comm.rank, comm.size)
    bad = SparseVector(
        mine.indices,
        np.where(mine.indices == mine.indices[3], np.nan, mine.values),
        LENGTH,
    )
    vector = there(bad if comm.rank == 1 else mine, cupy)
    for call in (sparse_allreduce, gtopk_allreduce):
        with pytest.raises(
            ValueError if comm.rank == 1 else CollectiveError,
            match=r"values\[3\] is nan",
        ):
            call(vector, comm)


@pytest.mark.parametrize("setting", ["1", "yes"])
def test_a_wrong_setting_raises_on_all_ranks_before_a_message(
    comm, fresh, setting, monkeypatch
):
    monkeypatch.setattr(cuda_aware, "query", lambda: False)
    monkeypatch.setattr(cuda_aware, "alloc_kinds", lambda: "")
    monkeypatch.setattr(cuda_aware, "trial", lambda: "a trial failed")
    monkeypatch.setenv("MPICOMP_CUDA_AWARE", setting)
    words = (
        "MPICOMP_CUDA_AWARE is .* expected 1 or 0"
        if setting == "yes"
        else "says that it is not CUDA-aware"
    )
    with pytest.raises(ValueError, match=words):
        sparse_allreduce(contribution("random", comm.rank, comm.size), fresh)
    monkeypatch.delenv("MPICOMP_CUDA_AWARE", raising=False)
    assert sparse_allreduce(contribution("random", comm.rank, comm.size), fresh).nnz
