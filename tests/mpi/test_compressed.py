"""Compressed allreduce: each owner compresses its share of the sum; and exchanges by it."""

import numpy as np
import pytest
from cases import (
    LENGTH,
    PATTERNS,
    RandomK,
    assert_equal,
    assert_same_bits,
    bits,
    compressed_sum,
    contribution,
    contributions,
    for_each,
    window,
)
from cases import select as largest

from collectives import (
    CollectiveError,
    GradientExchange,
    compressed_allreduce,
    compressed_iallreduce,
    traffic,
)
from mpicomp import (
    AggregationAware,
    ChunkedTopK,
    Dense,
    Quantised,
    SIDCo,
    SparseVector,
    TopK,
)


def shares(length, size):
    return [
        slice(length * rank // size, length * (rank + 1) // size)
        for rank in range(size)
    ]


def oracle(dense, k):
    """Return the k largest of each share of the sum of dense vectors."""
    total = sum(dense)
    return np.concatenate(
        [largest(total[share], k) for share in shares(total.size, len(dense))]
    )


@pytest.mark.every_size
@for_each(pattern=PATTERNS, k=[1, 10, LENGTH])
def test_the_sum_is_compressed_conserved_and_the_same_everywhere(comm, pattern, k):
    dense = [window(vector) for vector in contributions(pattern, comm.size)]
    mine = contribution(pattern, comm.rank, comm.size)
    before = bits(mine)
    result, rejected = compressed_allreduce(mine, comm, TopK(k=k))
    assert bits(mine) == before
    assert_same_bits(comm, result)
    assert_equal(result, oracle(dense, k))
    rejected.validate()
    own = window(rejected)
    np.testing.assert_array_equal(window(result) + sum(comm.allgather(own)), sum(dense))
    share = shares(LENGTH, comm.size)[comm.rank]
    assert not np.delete(own, np.arange(share.start, share.stop)).any(), (
        "only of its own share"
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "compressor", [Dense(), ChunkedTopK(k=2, chunk=8), Quantised(Dense(), "sign")]
)
def test_every_dtype_and_kind_of_compressor(comm, dtype, compressor):
    total = sum(
        window(vector) for vector in contributions("random", comm.size, dtype=dtype)
    ).astype(dtype)
    expected = np.concatenate(
        [
            compressor.compress(total[each]).to_dense()
            for each in shares(LENGTH, comm.size)
        ]
    )
    mine = contribution("random", comm.rank, comm.size, dtype=dtype)
    result, rejected = compressed_allreduce(mine, comm, compressor)
    assert result.dtype == rejected.dtype == dtype
    assert_same_bits(comm, result)
    np.testing.assert_array_equal(result.to_dense(), expected)
    share = shares(LENGTH, comm.size)[comm.rank]
    np.testing.assert_array_equal(
        rejected.to_dense()[share], (total - expected.astype(dtype))[share]
    )


@pytest.mark.parametrize("length", [0, 1, 5])
def test_lengths_with_fewer_values_than_ranks(comm, length):
    mine = SparseVector.from_dense(np.arange(1.0, length + 1))
    result, rejected = compressed_allreduce(mine, comm, TopK(k=1))
    kept = sum(comm.allgather(rejected.to_dense()))
    np.testing.assert_array_equal(
        result.to_dense() + kept, comm.size * np.arange(1.0, length + 1)
    )


def test_two_runs_of_real_numbers_and_several_in_flight_give_the_same_bits(comm):
    vectors = [
        SparseVector.from_dense(
            np.random.default_rng([comm.rank, n]).standard_normal(LENGTH)
        )
        for n in range(3)
    ]
    expected = [compressed_allreduce(vector, comm, TopK(k=3)) for vector in vectors]
    started = [compressed_iallreduce(vector, comm, TopK(k=3)) for vector in vectors]
    for request, (result, rejected) in reversed([*zip(started, expected, strict=True)]):
        again = request.wait()
        assert (bits(again[0]), bits(again[1])) == (bits(result), bits(rejected))


@pytest.mark.at_least(2)
def test_a_rank_sends_its_entries_and_its_share_of_the_result(comm):
    """Of the ranks' disjoint entries, so that the exact sum has P times as many."""
    n, k = 4000 * comm.size, 100 * comm.size
    entries = np.arange(comm.rank, n, n // k)[:k]
    vector = SparseVector(
        entries, np.random.default_rng(comm.rank).standard_normal(k), n
    )
    before = traffic(comm).nbytes
    compressed_allreduce(vector, comm, TopK(k=100), codec="plain")
    messages = comm.size - 1 + (comm.size - 1).bit_length()
    assert traffic(comm).nbytes - before <= 2 * (
        comm.size - 1
    ) * 100 * 12 * 1.1 + 128 * (messages + comm.size)


@pytest.mark.parametrize(
    ("compressor", "said"),
    [
        (
            RandomK(k=3),
            r"compressor is RandomK.*, which keeps a state between calls: expected a compressor of a sum",
        ),
        (SIDCo(0.1), "which keeps a state"),
        (AggregationAware(0.1), "which keeps a state"),
        (Quantised(RandomK(k=3), "sign"), "which keeps a state"),
        (TopK, r"compressor is the class TopK: expected an object such"),
    ],
)
def test_a_compressor_with_a_state_is_refused(comm, compressor, said):
    with pytest.raises(TypeError, match=said):
        compressed_allreduce(
            contribution("random", comm.rank, comm.size), comm, compressor
        )


@pytest.mark.at_least(2)
def test_other_settings_on_one_rank_raise_on_all(comm):
    vector = contribution("random", comm.rank, comm.size)
    with pytest.raises(
        CollectiveError, match=r"compressor must be the same.*TopK\(k=3\) on rank"
    ):
        compressed_allreduce(vector, comm, TopK(k=3 if comm.rank else 4))
    exchange = GradientExchange(
        comm, TopK(k=5), collective=compressed_sum(TopK(k=3 if comm.rank else 4))
    )
    with pytest.raises(CollectiveError, match="compressor must be the same"):
        exchange(np.ones(LENGTH))


class Wider(TopK):
    def compress(self, corrected, *, gradient=None):
        return super().compress(np.float64(corrected))


def test_a_compressor_that_returns_another_dtype_is_named(comm):
    vector = contribution("random", comm.rank, comm.size)
    with pytest.raises(
        ValueError, match=r"Wider.* returned .*: expected float32 numbers of length"
    ):
        compressed_allreduce(vector, comm, Wider(k=3))


@pytest.mark.at_least(2)
def test_a_sum_out_of_range_raises_on_its_owner_and_on_all_others(comm):
    vector = SparseVector([0], np.array([60_000], np.float16), LENGTH)
    error = OverflowError if comm.rank == 0 else CollectiveError
    with pytest.raises(
        error, match="the sum over the ranks leaves the range of float16"
    ):
        compressed_allreduce(vector, comm, TopK(k=1))


# In an exchange.


def integers(rank, step, length=LENGTH):
    return (
        np.random.default_rng([step, rank])
        .integers(-99, 100, length)
        .astype(np.float32)
    )


def test_an_exchange_follows_the_rule_of_the_paper_with_a_share_of_the_server_on_each_rank(
    comm,
):
    """The server's residual is that of the owner; a rank contributes all of its own share, and k entries outside."""
    exchange = GradientExchange(
        comm, TopK(k=9), average=False, collective=compressed_sum(TopK(k=2))
    )
    residuals, places = (
        [np.zeros(LENGTH) for _ in range(comm.size)],
        shares(LENGTH, comm.size),
    )
    for step in range(4):
        contributed = []
        for rank, residual in enumerate(residuals):
            corrected = residual + integers(rank, step)
            outside = corrected.copy()
            outside[places[rank]] = 0
            sent = largest(outside, 9)
            sent[places[rank]] = corrected[places[rank]]
            residuals[rank] = corrected - sent
            contributed.append(sent)
        expected = oracle(contributed, 2)
        for residual, share in zip(residuals, places, strict=True):
            residual[share] = (sum(contributed) - expected)[share]
        np.testing.assert_array_equal(exchange(integers(comm.rank, step)), expected)
        np.testing.assert_array_equal(exchange.feedback.residual, residuals[comm.rank])
        outside = LENGTH - (places[comm.rank].stop - places[comm.rank].start)
        assert exchange.statistics.sent == min(9, outside)


def test_a_value_that_is_not_finite_in_the_own_share_is_named(comm):
    exchange = GradientExchange(
        comm, TopK(k=3), collective=compressed_sum(TopK(k=3)), small=0
    )
    gradients = {"a": np.ones(100), "b": np.ones(100)}
    exchange(gradients)
    first = 200 * comm.rank // comm.size
    bad = {name: array.copy() for name, array in gradients.items()}
    name, place = ("a", first) if first < 100 else ("b", first - 100)
    bad[name][place] = np.inf
    with pytest.raises(ValueError, match=rf"in {name}: values\[{place}\] is inf"):
        exchange(bad)
    exchange(gradients)
