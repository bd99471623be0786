"""Vectors of rows in the exact collectives."""

from functools import partial

import numpy as np
import pytest
from cases import LENGTH, PATTERNS, assert_same_bits, bits, contribution, contributions, for_each

from collectives import (
    allreduce,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_reduce,
    sparse_reduce_scatter,
)
from mpicomp import CollectiveError, SparseVector

FACTORS = np.array([1, -2, 3])


def rows(vector):
    """Return a vector whose row at an index is 1, -2 and 3 times what stands there."""
    return SparseVector(vector.indices, np.multiply.outer(vector.values, FACTORS).astype(vector.dtype), vector.length)


def expected(pattern, size, **case):
    return sum(rows(vector).to_dense() for vector in contributions(pattern, size, **case))


@pytest.mark.parametrize("algorithm", ["auto", *allreduce.ALGORITHMS])
@for_each(case=[*((pattern, np.float32) for pattern in PATTERNS), ("random", np.float16), ("ties", float)])
def test_the_exact_sum_of_rows(comm, algorithm, case):
    pattern, dtype = case
    total = sparse_allreduce(rows(contribution(pattern, comm.rank, comm.size, dtype=dtype)), comm, algorithm=algorithm)
    total.validate()
    assert (total.width, total.dtype) == (3, dtype)
    assert_same_bits(comm, total)
    np.testing.assert_array_equal(total.to_dense(), expected(pattern, comm.size, dtype=np.float64))


def test_rows_in_the_other_collectives(comm):
    mine, whole = rows(contribution("unequal", comm.rank, comm.size)), expected("unequal", comm.size)
    theirs = [rows(vector) for vector in contributions("unequal", comm.size)]
    assert [bits(part) for part in sparse_allgather(mine, comm)] == [bits(vector) for vector in theirs]
    shares = comm.allgather(sparse_reduce_scatter(mine, comm).to_dense())
    np.testing.assert_array_equal(sum(shares), whole)
    total = sparse_reduce(mine, comm, root=comm.size - 1)
    total = sparse_bcast(total, comm, root=comm.size - 1)
    np.testing.assert_array_equal(total.to_dense(), whole)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("collective", [sparse_allgather, sparse_allreduce, sparse_reduce_scatter, sparse_reduce])
def test_widths_that_differ_raise_everywhere(comm, collective):
    width = 4 if comm.rank == 1 else 3
    vector = SparseVector([1, 5], np.ones((2, width), np.float32), LENGTH)
    with pytest.raises(CollectiveError, match=r"width must be the same on all ranks, got 3 on rank.*; 4 on rank 1"):
        collective(vector, comm)
    plain = SparseVector([1, 5], np.ones(2, np.float32), LENGTH)
    with pytest.raises(CollectiveError, match="width must be the same on all ranks, got"):
        collective(plain if comm.rank == 1 else vector, comm)


@pytest.mark.parametrize("algorithm", ["auto", "tree", "exact"])
def test_gtopk_does_not_take_rows(comm, algorithm):
    bad, culprit = rows(contribution("random", comm.rank, comm.size)), comm.size - 1
    call = partial(gtopk_allreduce, comm=comm, k=5, algorithm=algorithm)
    with pytest.raises(ValueError if comm.rank == culprit else CollectiveError, match="vector has rows of 3 values"):
        call(bad if comm.rank == culprit else contribution("random", 0, 1))
