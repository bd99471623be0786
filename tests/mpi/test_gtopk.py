import math

import numpy as np
import pytest
from cases import LENGTH, PATTERNS, assert_equal, assert_same_bits, bits, bring, bring_all, butterfly_sum, window

from collectives import gtopk_allreduce, traffic
from mpicomp import SparseVector


def check(comm, mine, k, dense, offset=0):
    """Run gTop-k and check all that it promises; `dense` are all ranks' inputs."""
    result, rejected = gtopk_allreduce(mine, comm, k)
    counts = [np.count_nonzero(vector) if k is None else k for vector in dense]
    assert result.nnz <= max(counts)
    assert_same_bits(comm, result)
    assert_equal(result, butterfly_sum(dense, counts), offset)
    rejected.validate()
    kept = comm.allgather(window(rejected, offset))
    np.testing.assert_array_equal(window(result, offset) + sum(kept), sum(dense))  # nothing is lost
    return result, rejected


@pytest.mark.parametrize("k", [None, 0, 1, 10, 37, LENGTH])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_sum_is_conserved_and_the_same_everywhere(comm, pattern, k):
    dense = [window(vector) for vector in bring_all(pattern, comm.size)]
    check(comm, bring(pattern, comm.rank, comm.size), k, dense)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_k_beyond_the_union_gives_the_exact_sum_and_rejects_nothing(comm, pattern):
    result, rejected = gtopk_allreduce(bring(pattern, comm.rank, comm.size), comm, k=2**40)
    assert_equal(result, sum(window(vector) for vector in bring_all(pattern, comm.size)))
    assert rejected.nnz == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(("length", "offset"), [(LENGTH, 0), (2**40, 2**39)], ids=["int32", "int64"])
def test_every_dtype(comm, dtype, length, offset):
    case = {"dtype": dtype, "length": length, "offset": offset}
    dense = [window(vector, offset) for vector in bring_all("random", comm.size, **case)]
    result, _ = check(comm, bring("random", comm.rank, comm.size, **case), 12, dense, offset)
    assert result.dtype == dtype


def test_two_runs_give_the_same_bits_on_real_numbers(comm):
    values = np.random.default_rng(comm.rank).standard_normal(LENGTH)
    vector = SparseVector(np.arange(LENGTH), values, LENGTH)
    first, second = (gtopk_allreduce(vector, comm, 20) for _ in range(2))
    assert bits(first[0]) == bits(second[0])
    assert bits(first[1]) == bits(second[1])
    assert_same_bits(comm, first[0])


def test_the_inputs_are_left_alone(comm):
    vector = bring("random", comm.rank, comm.size)
    before = bits(vector)
    gtopk_allreduce(vector, comm, 5)
    assert bits(vector) == before


def test_what_is_dropped_is_spread_over_the_ranks(comm):
    """Of 30 P disjoint entries 30 stay; a rank keeps 1/2 of 30, 1/4, ... round by round, and 30 more if it folded."""
    positions = np.arange(30) * comm.size + comm.rank
    vector = SparseVector(positions, np.ones(30, np.float32), 30 * comm.size)
    _, rejected = gtopk_allreduce(vector, comm, 30)
    counts = comm.allgather(rejected.nnz)
    assert sum(counts) == 30 * (comm.size - 1)
    assert max(counts) <= (30 if comm.size & (comm.size - 1) == 0 else 60)


def test_rounds_and_bytes_are_those_of_the_cost_table(comm):
    k = 1000
    vector = SparseVector(np.arange(k) * comm.size + comm.rank, np.ones(k, np.float32), k * comm.size)
    before = traffic(comm)
    gtopk_allreduce(vector, comm, k)
    after = traffic(comm)
    core = 1 << (comm.size.bit_length() - 1)
    in_core, folds = comm.rank < core, comm.rank % core < comm.size - core
    rounds = int(math.log2(core)) * in_core + folds
    assert after.messages - before.messages == rounds
    assert rounds * k * 8 <= after.nbytes - before.nbytes <= rounds * (k * 8 + 64 + 63)
