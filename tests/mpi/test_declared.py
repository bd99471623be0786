"""A collective is declared once: a new algorithm is one function, and is tested against one oracle."""

import numpy as np
import pytest
from cases import contributions, select, window

from collectives import gtopk_allreduce, gtopk_iallreduce
from mpicomp.vector import add_up, top_k, within


def gathering(vector, group, k):
    """Gather all vectors everywhere, add them up, and select: one round of ceil(lg P), and P k entries."""
    parts = yield from group.gather(vector, vector.nnz)
    total = add_up([theirs for theirs, _ in parts])
    result, dropped = top_k(total, max(count for _, count in parts) if k is None else k)
    return result, within(vector, dropped)


@pytest.fixture
def declared(monkeypatch):
    """Declare the algorithm for the time of a test."""
    monkeypatch.setattr(gtopk_allreduce, "algorithms", dict(gtopk_allreduce.algorithms))
    gtopk_allreduce.algorithm(gathering)


@pytest.mark.parametrize("pattern", ["random", "unequal", "disjoint", "empty"])
def test_a_new_algorithm_is_one_function(comm, declared, pattern):
    total = sum(window(vector) for vector in contributions(pattern, comm.size))
    vector = contributions(pattern, comm.size)[comm.rank]
    for outcome in (
        gtopk_allreduce(vector, comm, 3, algorithm="gathering"),
        gtopk_iallreduce(vector, comm, 3, algorithm="gathering").wait(),
    ):
        np.testing.assert_array_equal(window(outcome[0]), select(total, 3))
