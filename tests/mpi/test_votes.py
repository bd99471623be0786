"""Sums that carry how many ranks contributed each entry."""

import numpy as np
import pytest
from cases import assert_equal, contribution, contributions, for_each, window

from collectives import CollectiveError, allreduce, sparse_allreduce
from mpicomp import SparseVector


def votes_of(vectors):
    """Return how many of the vectors have an entry, at each index of their union."""
    return np.unique(
        np.concatenate([vector.indices for vector in vectors]), return_counts=True
    )


@pytest.mark.every_size
@pytest.mark.parametrize("algorithm", ["auto", *allreduce.ALGORITHMS])
@for_each(pattern=["random", "unequal", "one_holds_all", "cancelling"])
def test_an_allreduce_counts_who_brought_an_entry(comm, pattern, algorithm):
    vectors = contributions(pattern, comm.size)
    total, votes = sparse_allreduce(
        vectors[comm.rank], comm, algorithm=algorithm, votes=True
    )
    assert_equal(total, sum(window(vector) for vector in vectors))
    union, counts = votes_of(vectors)
    np.testing.assert_array_equal(total.indices[votes > 0], union)
    np.testing.assert_array_equal(votes[votes > 0], counts)
    if algorithm != "dense_mpi":
        assert votes.all(), "an entry that no rank contributed"
    assert votes.dtype == np.int64


@pytest.mark.parametrize("width", [1, 3])
def test_rows_are_counted_too(comm, width):
    rows = SparseVector([comm.rank, 20], np.arange(2.0 * width).reshape(2, width), 30)
    total, votes = sparse_allreduce(rows, comm, votes=True)
    assert total.values.shape == (comm.size + 1, width)
    assert votes.tolist() == [1] * comm.size + [comm.size]
    np.testing.assert_array_equal(total.values[-1], comm.size * rows.values[1])


@pytest.mark.at_least(2)
def test_votes_on_some_ranks_only_raise_everywhere(comm):
    vector = contribution("random", comm.rank, comm.size)
    with pytest.raises(
        CollectiveError,
        match="votes must be the same on all ranks, got False on rank 0; True on",
    ):
        sparse_allreduce(vector, comm, votes=comm.rank > 0, algorithm="split_allgather")
    with pytest.raises(
        TypeError if comm.rank == 0 else CollectiveError,
        match="votes is 1: expected True or False",
    ):
        sparse_allreduce(vector, comm, votes=1 if comm.rank == 0 else True)
