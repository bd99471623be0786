import math

import numpy as np
import pytest
from cases import LENGTH, PATTERNS, assert_equal, assert_same_bits, bits, bring, bring_all, window

from collectives import allreduce, sparse_allreduce, traffic
from collectives.tuning import expected_union
from mpicomp import CollectiveError, SparseVector

ALGORITHMS = list(allreduce.ALGORITHMS)
EXACT = pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])


@EXACT
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_exact_sum_and_the_same_bits_everywhere(comm, pattern, algorithm):
    total = sparse_allreduce(bring(pattern, comm.rank, comm.size), comm, algorithm=algorithm)
    assert_same_bits(comm, total)
    vectors = bring_all(pattern, comm.size)
    assert_equal(total, sum(window(vector) for vector in vectors))
    support = np.unique(np.concatenate([vector.indices for vector in vectors]))
    np.testing.assert_array_equal(total.indices, np.arange(LENGTH) if total.nnz == LENGTH else support)


@EXACT
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(("length", "offset"), [(LENGTH, 0), (2**40, 2**39)], ids=["int32", "int64"])
def test_every_dtype(comm, algorithm, dtype, length, offset):
    if algorithm == "dense" and offset:
        length, offset = LENGTH, 0  # a dense vector of 2^40 values has no room
    case = {"dtype": dtype, "length": length, "offset": offset}
    total = sparse_allreduce(bring("unequal", comm.rank, comm.size, **case), comm, algorithm=algorithm)
    assert total.dtype == dtype
    assert_same_bits(comm, total)
    assert_equal(total, sum(window(vector, offset) for vector in bring_all("unequal", comm.size, **case)), offset)


@EXACT
@pytest.mark.parametrize("length", [0, 1, 3])
def test_lengths_below_the_number_of_ranks(comm, algorithm, length):
    vector = SparseVector(np.arange(length), np.full(length, 1.0 + comm.rank), length)
    total = sparse_allreduce(vector, comm, algorithm=algorithm)
    np.testing.assert_array_equal(total.to_dense(), np.full(length, comm.size * (comm.size + 1) / 2))


@EXACT
def test_two_runs_give_the_same_bits_on_real_numbers(comm, algorithm):
    values = np.random.default_rng(comm.rank).standard_normal(LENGTH).astype(np.float32)
    vector = SparseVector(np.arange(LENGTH), values, LENGTH)
    first, second = (sparse_allreduce(vector, comm, algorithm=algorithm) for _ in range(2))
    assert bits(first) == bits(second)
    assert_same_bits(comm, first)


def bytes_sent(comm, algorithm, vector):
    before = traffic(comm).nbytes
    sparse_allreduce(vector, comm, algorithm=algorithm)
    return traffic(comm).nbytes - before


def spread(rank, length, k):
    """Return k entries at independent random places, so that the ranks' shares of them are even."""
    chosen = np.sort(np.random.default_rng(rank).choice(length, k, replace=False))
    return SparseVector(chosen, np.ones(k, np.float32), length)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("algorithm", ["allgather", "split_allgather", "dense"])
def test_bytes_are_those_of_the_cost_table(comm, algorithm):
    length, k = 2_000_000, 4000  # thin enough for plain indices
    vectors = [spread(rank, length, k) for rank in range(comm.size)]
    union = np.unique(np.concatenate([vector.indices for vector in vectors])).size
    share, entry = (comm.size - 1) / comm.size, 8
    table = {
        "allgather": (comm.size - 1) * k * entry,
        "split_allgather": share * (k + union) * entry,
        "dense": share * (k * entry + length * 4),
    }
    sent = comm.allgather(bytes_sent(comm, algorithm, vectors[comm.rank]))
    assert np.mean(sent) == pytest.approx(table[algorithm], rel=0.05)


@pytest.mark.at_least(8)
def test_split_allgather_is_near_the_lower_bound(comm):
    length, k = 400_000, 4000
    vectors = [spread(rank, length, k) for rank in range(comm.size)]
    union = np.unique(np.concatenate([vector.indices for vector in vectors])).size
    sent = comm.allgather(bytes_sent(comm, "split_allgather", vectors[comm.rank]))
    assert np.mean(sent) <= 1.15 * 8 * (k + union * (comm.size - 2) / comm.size)
    assert union == pytest.approx(expected_union(length, [k] * comm.size), rel=0.01)


@pytest.mark.at_least(2)
def test_a_dense_union_travels_as_a_bitmap_or_a_range(comm):
    """Every second position is taken: 4 bytes of value and 2 bits of map an entry, against 8 bytes in plain form."""
    vector = SparseVector(np.arange(0, 100_000, 2), np.ones(50_000, np.float32), 100_000)
    rounds = math.ceil(math.log2(comm.size))
    sent = max(comm.allgather(bytes_sent(comm, "allgather", vector)))
    assert sent <= (comm.size - 1) * (50_000 * 4 + 100_000 / 8 + 200) + 64 * (comm.size - 1 + rounds)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("mine", ALGORITHMS)
def test_ranks_that_name_different_algorithms_all_raise(comm, mine):
    other = "auto" if mine == "split_allgather" else "split_allgather"
    with pytest.raises(CollectiveError, match="algorithm must be the same on all ranks, got"):
        sparse_allreduce(
            bring("random", comm.rank, comm.size), comm, algorithm=mine if comm.rank == comm.size - 1 else other
        )
