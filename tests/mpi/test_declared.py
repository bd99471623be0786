"""A collective is declared once: a new algorithm is one function, and is tested against one oracle."""

import numpy as np
import pytest
from cases import contributions, select, window

from collectives import gtopk_allreduce, gtopk_iallreduce
from mpicomp import CheckError, CollectiveError, SparseVector
from mpicomp.vector import add_up, top_k, within


def gathering(vector, group, k):
    """Gather all vectors everywhere, add them up, and select: one round of ceil(lg P), and P k entries."""
    parts = yield from group.gather(vector, vector.nnz)
    total = add_up([theirs for theirs, _ in parts])
    result, dropped = top_k(total, max(count for _, count in parts) if k is None else k)
    return result, within(vector, dropped)


def forgetful(vector, group, k):
    result, rejected = yield from gathering(vector, group, k)
    return result, top_k(rejected, 0)[0]


@pytest.fixture
def declared(monkeypatch):
    """Declare the two algorithms for the time of a test."""
    monkeypatch.setattr(gtopk_allreduce, "algorithms", dict(gtopk_allreduce.algorithms))
    gtopk_allreduce.algorithm(gathering)
    gtopk_allreduce.algorithm(forgetful)


@pytest.mark.parametrize("pattern", ["random", "unequal", "disjoint", "empty"])
def test_a_new_algorithm_is_one_function(comm, declared, pattern):
    total = sum(window(vector) for vector in contributions(pattern, comm.size))
    vector = contributions(pattern, comm.size)[comm.rank]
    for outcome in (
        gtopk_allreduce(vector, comm, 3, algorithm="gathering"),
        gtopk_iallreduce(vector, comm, 3, algorithm="gathering").wait(),
    ):
        np.testing.assert_array_equal(window(outcome[0]), select(total, 3))


@pytest.mark.at_least(2)
def test_the_debug_mode_checks_a_new_algorithm(comm, declared, monkeypatch):
    monkeypatch.setenv("MPICOMP_CHECK", "1")
    watched = comm.Dup()
    vector = contributions("random", comm.size)[comm.rank]
    gtopk_allreduce(vector, watched, 3, algorithm="gathering")
    with pytest.raises(CheckError, match="gtopk_allreduce: mass is not conserved"):
        gtopk_allreduce(vector, watched, 3, algorithm="forgetful")
    watched.Free()


@pytest.mark.at_least(2)
@pytest.mark.parametrize("entries", [10, 100_000])
def test_ranks_that_name_different_algorithms_all_raise(comm, declared, entries):
    """Also where messages are so long that they wait for their receiver."""
    vector = SparseVector(np.arange(entries), np.ones(entries, np.float32), entries)
    for name in ("recursive_doubling", "exact", "tree", "auto"):
        with pytest.raises(CollectiveError, match="algorithm must be the same on all ranks"):
            gtopk_allreduce(vector, comm, 3, algorithm=name if comm.rank == 0 else "gathering")
