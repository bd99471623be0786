"""All ranks choose alike, whatever they remember, and never at the price of a hang."""

from dataclasses import replace

import numpy as np
import pytest

from collectives import (
    CollectiveError,
    SupportPlan,
    gtopk_allreduce,
    sparse_allreduce,
    traffic,
)
from collectives.allreduce import ALGORITHMS
from collectives.calls.first_call import link_of
from collectives.planning import links
from collectives.planning.links import agreed_links
from collectives.planning.schedule import groups
from mpicomp import SparseVector

LENGTH = 30_000


def contributed(rank, entries, length=LENGTH):
    rng = np.random.default_rng([rank, entries])
    indices = np.sort(rng.choice(length, entries, replace=False))
    return SparseVector(
        indices, rng.integers(-9, 9, entries).astype(np.float32), length
    )


def check_sums(comm, counts=(0, 1, 40, 9000, LENGTH)):
    """Check sums of several densities, and one to which the ranks contribute unequal counts."""
    for entries in (*counts, None):
        vectors = [
            contributed(rank, 3000 * (rank % 3) if entries is None else entries)
            for rank in range(comm.size)
        ]
        total = sum(vector.to_dense() for vector in vectors)
        np.testing.assert_array_equal(
            sparse_allreduce(vectors[comm.rank], comm).to_dense(), total
        )
        result, rejected = gtopk_allreduce(vectors[comm.rank], comm, k=500)
        kept = result.to_dense() + sum(
            each.to_dense() for each in comm.allgather(rejected)
        )
        np.testing.assert_array_equal(kept, total)
    plan = SupportPlan.union(contributed(comm.rank, 50), comm)
    assert set(plan.indices) == {
        index for rank in range(comm.size) for index in contributed(rank, 50).indices
    }


@pytest.mark.at_least(3)
def test_ranks_that_remember_different_calls_sum_all_the_same(fresh):
    """As after an error on one rank: it sends metadata, the others their vectors, or the other way around."""
    vector = contributed(fresh.rank, 5_000, 1_000_000)
    before = sparse_allreduce(vector, fresh)
    # the last call gathered the vectors
    assert messages_of(fresh, vector) == (fresh.size - 1).bit_length()
    for turn in range(fresh.size):
        for forget in fresh.rank != turn, fresh.rank == turn:
            if forget:
                link_of(fresh).taken.clear()
            assert (
                sparse_allreduce(vector, fresh).values.tobytes()
                == before.values.tobytes()
            )
    assert (
        sparse_allreduce(vector, fresh, algorithm="allgather").values.tobytes()
        == before.values.tobytes()
    )
    assert messages_of(fresh, vector) == (fresh.size - 1).bit_length()
    check_sums(fresh)


def messages_of(comm, vector):
    """Return the number of messages that this rank sends for a sum."""
    before = traffic(comm).messages
    sparse_allreduce(vector, comm)
    return traffic(comm).messages - before


@pytest.mark.at_least(2)
def test_links_between_nodes_are_measured_and_all_ranks_get_the_same_figures(fresh):
    """As if each rank were on a node of its own, and with two on each."""
    for nodes in list(range(fresh.size)), [rank // 2 * 2 for rank in range(fresh.size)]:
        if len(set(nodes)) > 1:
            found = links.measured(fresh, nodes)
            assert found == links.rounded(found.latency, found.rate)
            assert set(fresh.allgather(found)) == {found}
            assert agreed_links(fresh, nodes).rate > 0
    fresh.Barrier()
    assert not fresh.Iprobe()


def test_in_one_node_and_where_a_variable_names_the_links_nothing_is_measured(
    fresh, monkeypatch
):
    monkeypatch.setattr(links, "_trip", None)
    assert agreed_links(fresh, [0] * fresh.size) == links.NETWORKS["1gbit"]
    monkeypatch.setenv(links.VARIABLE, "hdr")
    assert agreed_links(fresh, range(fresh.size), 2.0) == replace(
        links.NETWORKS["hdr"], crowding=2.0
    )


def test_a_bad_name_of_the_links_raises_on_all_ranks(fresh, monkeypatch):
    monkeypatch.setenv(links.VARIABLE, "2gbits")
    with pytest.raises(
        ValueError,
        match=r"MPICOMP_NETWORK is not a network: got '2gbits': expected one of",
    ):
        sparse_allreduce(contributed(fresh.rank, 10), fresh)
    monkeypatch.delenv(links.VARIABLE, raising=False)
    check_sums(fresh, (40,))


@pytest.mark.at_least(2)
@pytest.mark.parametrize("entries", [10, 9000])
def test_ranks_with_different_lengths_or_algorithms_meet_and_raise(fresh, entries):
    """A small vector is sent in the metadata exchange, and a large one is not."""
    for turn in range(fresh.size):
        mine = fresh.rank == turn
        with pytest.raises(
            CollectiveError, match="length must be the same on all ranks"
        ):
            sparse_allreduce(
                contributed(fresh.rank, 10 if mine else entries, LENGTH + mine), fresh
            )
        with pytest.raises(CollectiveError, match="k must be the same on all ranks"):
            gtopk_allreduce(
                contributed(fresh.rank, entries), fresh, k=LENGTH if mine else 1
            )
        with pytest.raises(TypeError if mine else CollectiveError):
            sparse_allreduce(None if mine else contributed(fresh.rank, entries), fresh)
    for name in ALGORITHMS:
        with pytest.raises(CollectiveError, match="algorithm must be the same"):
            sparse_allreduce(
                contributed(fresh.rank, entries),
                fresh,
                algorithm=name if fresh.rank == 0 else "auto",
            )
    check_sums(fresh, (40,))


def alike(rank, entries, length, common):
    """Return a vector of which so many indices are those of all ranks."""
    shared = np.random.default_rng(0).choice(length, entries, replace=False)[:common]
    own = np.random.default_rng([3, rank]).choice(length, entries, replace=False)
    own = np.setdiff1d(own, shared)[: entries - common]
    indices = np.sort(np.concatenate([shared, own]))
    values = np.random.default_rng([4, rank]).standard_normal(indices.size)
    return SparseVector(indices, values.astype(np.float32), length)


@pytest.mark.at_least(3)
@pytest.mark.parametrize("common", [0, 10_000, 20_000])
def test_ranks_choose_alike_by_the_union_whatever_they_remember(fresh, common):
    """Each rank as on a node of its own; after an error, or a resumption, some remember less than others."""
    link = link_of(fresh)
    link.nodes = tuple(range(fresh.size))
    link.by_node = groups(link.nodes)
    entries = 20_000
    vectors = [
        alike(rank, entries, 100 * entries, common) for rank in range(fresh.size)
    ]
    mine = vectors[fresh.rank]
    first = sparse_allreduce(mine, fresh)
    dense = sum(vector.to_dense().astype(np.float64) for vector in vectors)
    np.testing.assert_allclose(first.to_dense(), dense, atol=1e-5)
    for turn in range(fresh.size):
        for forget in fresh.rank != turn, fresh.rank == turn:
            if forget:
                link.taken.clear()
            total = sparse_allreduce(mine, fresh)
            assert total.values.tobytes() == first.values.tobytes()
        with pytest.raises(TypeError if fresh.rank == turn else CollectiveError):
            sparse_allreduce(None if fresh.rank == turn else mine, fresh)
        (taken,) = link.taken.values()
        assert set(fresh.allgather(taken)) == {taken}
        if common == entries:
            assert taken not in ("allgather", "dense_mpi")
    assert set(fresh.allgather(first.values.tobytes())) == {first.values.tobytes()}
    # some show their supports, and some have too few entries for it
    few = vectors[fresh.rank] if fresh.rank else contributed(0, 100, 100 * entries)
    total = sparse_allreduce(few, fresh)
    assert set(fresh.allgather(total.values.tobytes())) == {total.values.tobytes()}
