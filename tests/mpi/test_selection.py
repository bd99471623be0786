"""Selections that look at what the ranks did together: by the last aggregate, or by a leader in turn."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from cases import noisy_gradients
from mpi4py import MPI

from collectives import (
    CyclicLeader,
    GradientExchange,
    aligned_allreduce,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_iallreduce,
    sparse_reduce,
    traffic,
)
from mpicomp import AggregationAware, CollectiveError, ErrorFeedback, Quantised, RandomK, SparseVector, TopK


class Server:
    """The server pattern as a collective: reduce to the root, and out again; counts what the root sends for the sum."""

    def __init__(self, votes):
        self.votes, self.nbytes = votes, []

    def __call__(self, vector, comm):
        total = sparse_reduce(vector, comm, votes=self.votes)
        total, votes = total if self.votes and comm.rank == 0 else (total, None)
        before = traffic(comm).nbytes
        total = sparse_bcast(total, comm, codec="plain")  # so that an entry has the same bytes at any density
        self.nbytes.append(traffic(comm).nbytes - before)
        if not self.votes:
            return total
        counts = SparseVector(total.indices, votes.astype(np.float16), total.length) if comm.rank == 0 else None
        return total, sparse_bcast(counts, comm).values.astype(int)


def sent_by_the_root(comm, compressor, votes=False, rounds=60, length=50_000):
    """Return the mean bytes of the aggregate that leave the root in the last 10 rounds, and the mean union."""
    server, unions = Server(votes), []
    exchange = GradientExchange(comm, compressor, ErrorFeedback(), server)
    for _, gradient in zip(range(rounds), noisy_gradients(comm.rank, length), strict=False):
        unions.append(np.count_nonzero(exchange(gradient)))
    return np.mean(server.nbytes[-10:]), np.mean(unions[-10:])


@pytest.mark.exactly(16)
def test_the_roots_bytes_fall_with_the_union(comm):
    """From about 12 k entries to under 6 k, and the bytes on the wire by the same ratio."""
    k = 500
    plain_bytes, plain_union = sent_by_the_root(comm, TopK(k=k))
    assert 11 * k < plain_union < 13 * k
    for metric, weight in (("support", 1.0), ("recency", 1.0), ("votes", 4.0)):
        aware = AggregationAware(k=k, metric=metric, weight=weight)
        nbytes, union = sent_by_the_root(comm, aware, votes=metric == "votes")
        assert union < 6 * k
        if comm.rank == 0:
            assert nbytes / plain_bytes == pytest.approx(union / plain_union, rel=0.1)


@pytest.mark.parametrize(
    "collective", [partial(sparse_allreduce, votes=True), sparse_allgather], ids=["allreduce", "allgather"]
)
def test_an_exchange_tells_the_compressor_who_voted(comm, collective):
    compressor = Quantised(AggregationAware(k=2, metric="votes"), "float16")
    exchange = GradientExchange(comm, compressor, ErrorFeedback(), collective)
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


def test_votes_are_counted_where_a_compressor_needs_them_and_refused_where_nobody_does(comm):
    """Where the exchange is made, not in the first step."""
    compressor = AggregationAware(k=2, metric="votes")
    exchange = GradientExchange(comm, compressor)
    exchange(np.arange(5.0) + comm.rank)
    assert compressor._bonus.any()
    for given in compressor, Quantised(compressor, "sign"):
        with pytest.raises(ValueError, match="compressed_allreduce does not count the ranks that sent an entry"):
            GradientExchange(comm, given, downlink=TopK(k=1))
        with pytest.raises(ValueError, match="gtopk_allreduce does not count the ranks that sent an entry"):
            GradientExchange(comm, given, collective=gtopk_allreduce)


def test_leaders_take_turns(comm):
    """In each step all ranks send what stands at the indices that one of them picked."""
    exchange = GradientExchange(comm, CyclicLeader(comm, k=3), ErrorFeedback(), aligned_allreduce, average=False)
    given, applied = np.zeros(60), np.zeros(60)
    residuals = [np.zeros(60) for _ in range(comm.size)]
    for step in range(2 * comm.size + 1):
        gradients = [np.random.default_rng([step, rank]).permutation(60) - 20.0 for rank in range(comm.size)]
        corrected = [residual + gradient for residual, gradient in zip(residuals, gradients, strict=True)]
        chosen = TopK(k=3).compress(corrected[step % comm.size]).indices
        total = exchange(gradients[comm.rank])
        expected = np.zeros(60)
        expected[chosen] = sum(corrected)[chosen]
        np.testing.assert_array_equal(total, expected)
        given, applied = given + sum(gradients), applied + total
        for residual in corrected:
            residual[chosen] = 0
        residuals = corrected
        np.testing.assert_array_equal(exchange.feedback.residual, residuals[comm.rank])
    np.testing.assert_array_equal(applied + sum(residuals), given)


def test_only_the_leaders_indices_travel(comm):
    exchange = GradientExchange(comm, CyclicLeader(comm, k=1000), ErrorFeedback(), aligned_allreduce)
    gradient = np.random.default_rng(comm.rank).standard_normal(100_000).astype(np.float32)
    exchange(gradient)  # in the first step the ranks meet before they talk
    before = traffic(comm).nbytes
    exchange(gradient)
    sent = comm.allreduce(traffic(comm).nbytes - before)
    least = (comm.size - 1) * 4000 + 2 * (comm.size - 1) * 4000  # k indices to each, and the values by an allreduce
    lines = 64 * comm.size * (comm.size + 3) * 2
    assert least <= sent <= least + lines + (comm.size - 1) * 128


@pytest.mark.parametrize("culprit", ["the leader", "another rank"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("fault", ["not finite", "another size", "no array"])
def test_a_bad_gradient_on_one_rank(comm, culprit, wrapped, fault):
    """Every rank raises, no residual changes, and the next step is as if nothing had happened."""
    culprit = 0 if culprit == "the leader" else comm.size - 1
    compressor = CyclicLeader(comm, k=3)
    exchange = GradientExchange(
        comm, Quantised(compressor, "float16") if wrapped else compressor, ErrorFeedback(), aligned_allreduce
    )
    gradient = np.random.default_rng(comm.rank).standard_normal(60)
    for _ in range(comm.size):
        exchange(gradient)
    before = exchange.feedback.residual.copy()
    bad = {"not finite": np.full(60, np.nan), "another size": np.ones(61), "no array": "gradient"}[fault]
    with pytest.raises((ValueError, TypeError) if comm.rank == culprit else CollectiveError):
        exchange(bad if comm.rank == culprit else gradient)
    np.testing.assert_array_equal(exchange.feedback.residual, before)
    assert compressor.step == comm.size
    total = exchange(gradient)
    assert len(set(comm.allgather(total.tobytes()))) == 1


@pytest.mark.parametrize("culprit", ["the leader", "another rank"])
def test_a_call_that_a_rank_did_not_complete_is_not_counted(comm, culprit):
    culprit = 0 if culprit == "the leader" else comm.size - 1
    leader, sound = CyclicLeader(comm, k=3), np.arange(9.0)
    with pytest.raises(ValueError if comm.rank == culprit else CollectiveError, match="nan"):
        leader.compress(sound * np.nan if comm.rank == culprit else sound)
    assert comm.allgather(leader.step) == [0] * comm.size
    leader.compress(sound)
    assert (leader.step, deepcopy(leader).step) == (1, 1)


def of_sum(leader, residual, gradient):
    return leader.compress_segments(np.empty(9), [0, 9], summands=(residual, 1.0, [gradient]))


@pytest.mark.parametrize("culprit", ["the leader", "another rank"])
@pytest.mark.parametrize("call", ["compress", "compress_segments"])
def test_a_leaders_call_raises_on_all_ranks_or_on_none(comm, culprit, call):
    """Also where a rank failed before, and contributes its error."""
    culprit = comm.rank == (0 if culprit == "the leader" else comm.size - 1)
    leader, sound = CyclicLeader(comm, k=3), np.arange(9.0)
    gradient = np.full(9, np.nan) if culprit else sound
    with pytest.raises(ValueError if culprit else CollectiveError, match=r"values\[0\] is nan"):
        leader.compress(gradient) if call == "compress" else of_sum(leader, sound, gradient)
    with pytest.raises(OverflowError if culprit else CollectiveError, match="before this"):
        leader.compress(OverflowError("before this") if culprit else sound)
    assert leader.step == 0
    vector = of_sum(leader, sound, sound)
    assert (vector.indices.tolist(), vector.values.tolist(), leader.step) == ([6, 7, 8], [12, 14, 16], 1)


def test_a_leader_is_a_compressor_with_a_state_and_without_a_communicator_in_its_settings(comm):
    leader = Quantised(CyclicLeader(comm, 0.5), "float16")
    assert leader.communicates
    assert repr(leader.compressor) == "CyclicLeader(density=0.5)"
    leader.compress(np.arange(9.0))
    twin = deepcopy(leader)
    twin.load_state_dict(leader.state_dict())
    assert (twin.compressor.step, twin.compressor.comm) == (1, comm)
    for bad in (-1, 0.5, [1], np.nan):
        with pytest.raises(ValueError, match=r"as 1\.step: expected an integer from 0"):
            twin.load_state_dict({"1.step": np.array(bad)})


@pytest.mark.exactly(1)
def test_a_leader_without_a_communicator_is_refused(comm):
    with pytest.raises(ValueError, match=r"comm is MPI\.COMM_NULL: expected a communicator"):
        CyclicLeader(MPI.COMM_NULL, 0.5)
    with pytest.raises(TypeError, match="comm is float: expected an mpi4py intracommunicator"):
        CyclicLeader(0.5)


@pytest.mark.parametrize("talks", ["first", "second"])
def test_where_a_compressor_of_a_bucket_communicates_a_bad_tensor_raises_everywhere(comm, talks):
    def choose(name, shape):
        return CyclicLeader(comm, k=3) if name == talks else TopK(k=3)

    exchange = GradientExchange(comm, choose, ErrorFeedback(), sparse_iallreduce, small=0)
    tensors, culprit = {"first": np.arange(9.0) + comm.rank, "second": np.arange(9.0)}, comm.rank == comm.size - 1
    exchange(tensors)
    exchange.start("second", tensors["second"])
    exchange.start("first", np.full(9, np.nan) if culprit else tensors["first"])
    with pytest.raises(ValueError if culprit else CollectiveError, match="nan"):
        exchange.finish()
    total = exchange(tensors)
    assert len(set(comm.allgather(total["first"].tobytes()))) == 1


@pytest.mark.at_least(2)
def test_lengths_that_differ_raise_everywhere(comm):
    exchange = GradientExchange(comm, CyclicLeader(comm, k=3), ErrorFeedback(), aligned_allreduce)
    with pytest.raises(CollectiveError, match="the same tensors: 'gradient' is float64 of 60 values on rank 0, and"):
        exchange(np.arange(1.0, 61 if comm.rank == 0 else 51))


def test_supports_that_differ_raise_everywhere(comm):
    if comm.size == 1:
        assert aligned_allreduce(SparseVector([0], [2.0], 9), comm).values.tolist() == [2]
        return
    said = r"the supports differ: one on rank 0, another on rank.*; aligned supports come from CyclicLeader, and"
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
    exchange = GradientExchange(
        comm, RandomK(k=10, seed=1, aligned=True), ErrorFeedback(), aligned_allreduce, average=False
    )
    given, applied = np.zeros(100), np.zeros(100)
    for step in range(5):
        gradients = [np.random.default_rng([step, rank]).integers(-3, 4, 100) for rank in range(comm.size)]
        given += sum(gradients)
        applied += exchange(gradients[comm.rank].astype(np.float64))
    owed = sum(comm.allgather(exchange.feedback.residual))
    np.testing.assert_array_equal(applied + owed, given)
