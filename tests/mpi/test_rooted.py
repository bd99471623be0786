"""Reduce-scatter, reduce and broadcast."""

import numpy as np
import pytest
from cases import (
    LENGTH,
    PATTERNS,
    assert_equal,
    contribution,
    contributions,
    for_each,
    window,
)

from collectives import (
    CollectiveError,
    sparse_bcast,
    sparse_reduce,
    sparse_reduce_scatter,
)
from collectives.planning.partition import equal_bounds
from mpicomp import SparseVector


@pytest.mark.every_size
@for_each(pattern=PATTERNS)
def test_reduce_scatter_gives_every_rank_its_range_of_the_sum(comm, pattern):
    share = sparse_reduce_scatter(contribution(pattern, comm.rank, comm.size), comm)
    expected = sum(window(vector) for vector in contributions(pattern, comm.size))
    first, end = equal_bounds(LENGTH, comm.size)[comm.rank : comm.rank + 2]
    expected[:first] = expected[end:] = 0
    assert share.length == LENGTH
    assert_equal(share, expected)


@pytest.mark.parametrize("collective", [sparse_reduce, sparse_bcast])
def test_a_bad_root_raises_everywhere(comm, collective):
    vector, culprit = contribution("random", comm.rank, comm.size), comm.size - 1
    for bad, error in ((comm.size, ValueError), (-1, ValueError), ("0", TypeError)):
        with pytest.raises(
            error if comm.rank == culprit else CollectiveError,
            match=r"root is .*: expected",
        ):
            collective(vector, comm, root=bad if comm.rank == culprit else 0)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("collective", [sparse_reduce, sparse_bcast])
def test_roots_that_differ_raise_everywhere(comm, collective):
    with pytest.raises(
        CollectiveError, match="root must be the same on all ranks, got 0 on rank"
    ):
        collective(
            contribution("random", comm.rank, comm.size),
            comm,
            root=int(comm.rank == comm.size - 1),
        )


def test_what_only_the_root_brings_is_checked_on_the_root(comm):
    bad = SparseVector(np.array([3, 1, 5], np.int32), np.ones(3), 9)
    with pytest.raises(
        ValueError if comm.rank == 0 else CollectiveError, match="strictly increasing"
    ):
        sparse_bcast(bad if comm.rank == 0 else None, comm)
    with pytest.raises(
        TypeError if comm.rank == 0 else CollectiveError, match="vector is NoneType"
    ):
        sparse_bcast(None, comm)
    with pytest.raises(
        OverflowError if comm.rank == comm.size - 1 else CollectiveError,
        match="overflow",
    ):
        sparse_bcast(
            OverflowError("overflow")
            if comm.rank == comm.size - 1
            else contribution("random", 0, 1),
            comm,
        )
