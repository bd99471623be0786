import numpy as np
import pytest
from cases import (
    LENGTH,
    PATTERNS,
    assert_equal,
    assert_same_bits,
    contribution,
    contributions,
    for_each,
    window,
)

from collectives import CollectiveError, allreduce, sparse_allreduce

ALGORITHMS = list(allreduce.ALGORITHMS)
EXACT = pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])


@pytest.mark.every_size
@EXACT
@for_each(pattern=PATTERNS)
def test_the_exact_sum_and_the_same_bits_everywhere(comm, pattern, algorithm):
    total = sparse_allreduce(
        contribution(pattern, comm.rank, comm.size), comm, algorithm=algorithm
    )
    assert_same_bits(comm, total)
    vectors = contributions(pattern, comm.size)
    assert_equal(total, sum(window(vector) for vector in vectors))
    support = np.unique(np.concatenate([vector.indices for vector in vectors]))
    np.testing.assert_array_equal(
        total.indices, np.arange(LENGTH) if total.nnz == LENGTH else support
    )


@pytest.mark.at_least(2)
@pytest.mark.parametrize("mine", ALGORITHMS)
def test_ranks_that_name_different_algorithms_all_raise(comm, mine):
    other = "auto" if mine == "split_allgather" else "split_allgather"
    with pytest.raises(
        CollectiveError, match="algorithm must be the same on all ranks, got"
    ):
        sparse_allreduce(
            contribution("random", comm.rank, comm.size),
            comm,
            algorithm=mine if comm.rank == comm.size - 1 else other,
        )
