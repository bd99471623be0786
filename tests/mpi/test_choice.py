"""All ranks choose alike, whoever has which table, and never at the price of a hang."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import SupportPlan, gtopk_allreduce, sparse_allreduce, traffic
from collectives.allreduce import ALGORITHMS
from collectives.choice import links, winners
from collectives.choice.winners import agreed_choice
from collectives.collective import link_of
from mpicomp import CollectiveError, SparseVector
from mpicomp.errors import ProfileError

LENGTH = 30_000


def contributed(rank, entries, length=LENGTH):
    rng = np.random.default_rng([rank, entries])
    indices = np.sort(rng.choice(length, entries, replace=False))
    return SparseVector(indices, rng.integers(-9, 9, entries).astype(np.float32), length)


def check_sums(comm, counts=(0, 1, 40, 9000, LENGTH)):
    """Check sums of several densities, and one to which the ranks contribute unequal counts."""
    for entries in (*counts, None):
        vectors = [contributed(rank, 3000 * (rank % 3) if entries is None else entries) for rank in range(comm.size)]
        total = sum(vector.to_dense() for vector in vectors)
        np.testing.assert_array_equal(sparse_allreduce(vectors[comm.rank], comm).to_dense(), total)
        result, rejected = gtopk_allreduce(vectors[comm.rank], comm, k=500)
        kept = result.to_dense() + sum(each.to_dense() for each in comm.allgather(rejected))
        np.testing.assert_array_equal(kept, total)
    plan = SupportPlan.union(contributed(comm.rank, 50), comm)
    assert set(plan.indices) == {index for rank in range(comm.size) for index in contributed(rank, 50).indices}


@pytest.fixture
def fresh(comm):
    """A communicator that the library has not seen: its ranks agree on a table in the first operation."""
    if comm == MPI.COMM_NULL:
        yield comm
        return
    duplicate = comm.Dup()
    yield duplicate
    duplicate.Free()


def table(size, algorithm, gtopk="exact"):
    places = {"sparse_allreduce": [[LENGTH, 0.1, 32, algorithm]], "gtopk_allreduce": [[LENGTH, 0.1, 32, gtopk]]}
    return {"host": "node", "mpi": "any", "ranks": size, "nodes": 1, "winners": places}


@pytest.fixture
def told(monkeypatch, tmp_path, fresh):
    """Return a function that gives this rank a table with one winner, or a text in place of one, or none."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def tell(what):
        monkeypatch.delenv(winners.VARIABLE, raising=False)
        if what is not None:
            path = tmp_path / "profile.json"
            path.write_text(winners.text_of(table(fresh.size, what)) if what in ALGORITHMS else what)
            monkeypatch.setenv(winners.VARIABLE, str(path))

    tell(None)
    return tell


@pytest.fixture
def taken(monkeypatch):
    """The algorithms of sparse_allreduce that run, in order."""
    names = []

    def recorded(name, steps):
        def run(vector, group, metadata):
            names.append(name)
            return steps(vector, group, metadata)

        return run

    for name, steps in list(ALGORITHMS.items()):
        monkeypatch.setitem(ALGORITHMS, name, recorded(name, steps))
    return names


@pytest.mark.at_least(3)
@pytest.mark.parametrize("others", ["recursive_halving", None, "broken"])
def test_the_table_of_rank_0_counts_for_all(fresh, told, taken, others):
    told("split_allgather" if fresh.rank == 0 else others)
    sparse_allreduce(contributed(fresh.rank, LENGTH - 1), fresh)
    assert taken == ["split_allgather"]
    check_sums(fresh)
    assert link_of(fresh).choice.table == table(fresh.size, "split_allgather")
    assert len(set(fresh.allgather(tuple(taken)))) == 1


def test_without_a_table_on_rank_0_there_is_none(fresh, told, taken):
    told(None if fresh.rank == 0 else "dense")
    check_sums(fresh)
    assert link_of(fresh).choice.table is None
    assert len(set(fresh.allgather(tuple(taken)))) == 1


@pytest.mark.at_least(3)
def test_ranks_that_remember_different_calls_sum_all_the_same(fresh, told):
    """As after an error on one rank: it sends metadata, the others their vectors, or the other way around."""
    told("allgather" if fresh.rank == 0 else None)
    check_sums(fresh, (9000, 9000))
    for turn in range(fresh.size):
        if fresh.rank != turn:
            link_of(fresh).choice.last.clear()
        check_sums(fresh, (9000, 40, 9000))
        if fresh.rank == turn:
            link_of(fresh).choice.last.clear()
        check_sums(fresh, (9000, 9000))
    vector = contributed(fresh.rank, 9000)
    sums = [sparse_allreduce(vector, fresh, algorithm=name).values for name in ("auto", "auto", "allgather")]
    assert len({array.tobytes() for array in sums}) == 1
    assert traffic_of(fresh, vector) == (fresh.size - 1).bit_length()


def traffic_of(comm, vector):
    """Return the number of messages that this rank sends for a sum."""
    before = traffic(comm).messages
    sparse_allreduce(vector, comm)
    return traffic(comm).messages - before


def test_a_broken_table_on_rank_0_raises_on_all_ranks(fresh, told):
    told("broken" if fresh.rank == 0 else "dense")
    for _ in range(2):
        with pytest.raises(ProfileError, match=r"is refused: .*Rank 0 read it because MPICOMP_PROFILE names it"):
            sparse_allreduce(contributed(fresh.rank, 10), fresh)
    told(None)
    check_sums(fresh, (40,))


def test_the_default_path_is_found_and_none_does_without(fresh, told, monkeypatch):
    path = winners.default_path(fresh.size, 1)
    path.parent.mkdir(parents=True)
    path.write_text(winners.text_of(table(fresh.size, "dense")))
    assert agreed_choice(fresh, [0] * fresh.size).table is not None
    monkeypatch.setenv(winners.VARIABLE, "none")
    assert agreed_choice(fresh, [0] * fresh.size).table is None


@pytest.mark.at_least(2)
def test_links_between_nodes_are_measured_and_all_ranks_get_the_same_figures(fresh):
    """As if each rank were on a node of its own, and with two on each."""
    for nodes in list(range(fresh.size)), [rank // 2 * 2 for rank in range(fresh.size)]:
        if len(set(nodes)) > 1:
            found = links.measured(fresh, nodes)
            assert found == found.rounded()
            assert set(fresh.allgather(found)) == {found}
            assert agreed_choice(fresh, nodes).links.rate > 0
    fresh.Barrier()
    assert not fresh.Iprobe()


def test_in_one_node_and_where_a_variable_names_the_links_nothing_is_measured(fresh, monkeypatch):
    monkeypatch.setattr(links, "_trip", None)
    assert agreed_choice(fresh, [0] * fresh.size).links == links.NETWORKS["1gbit"]
    if fresh.rank == 0:
        monkeypatch.setenv(links.VARIABLE, "hdr")
    assert agreed_choice(fresh, range(fresh.size), 2.0).links == links.NETWORKS["hdr"]


def test_a_bad_name_of_the_links_on_rank_0_raises_on_all_ranks(fresh, monkeypatch):
    if fresh.rank == 0:
        monkeypatch.setenv(links.VARIABLE, "2gbits")
    with pytest.raises(ValueError, match=r"MPICOMP_NETWORK is not a network: got '2gbits': expected one of"):
        sparse_allreduce(contributed(fresh.rank, 10), fresh)
    monkeypatch.delenv(links.VARIABLE, raising=False)
    check_sums(fresh, (40,))


@pytest.mark.at_least(2)
@pytest.mark.parametrize("entries", [10, 9000])
def test_ranks_with_different_lengths_or_algorithms_meet_and_raise(fresh, told, entries):
    """A small vector is sent in the metadata exchange, and a large one is not."""
    for turn in range(fresh.size):
        mine = fresh.rank == turn
        with pytest.raises(CollectiveError, match="length must be the same on all ranks"):
            sparse_allreduce(contributed(fresh.rank, 10 if mine else entries, LENGTH + mine), fresh)
        with pytest.raises(CollectiveError, match="k must be the same on all ranks"):
            gtopk_allreduce(contributed(fresh.rank, entries), fresh, k=LENGTH if mine else 1)
        with pytest.raises(TypeError if mine else CollectiveError):
            sparse_allreduce(None if mine else contributed(fresh.rank, entries), fresh)
    for name in ALGORITHMS:
        with pytest.raises(CollectiveError, match="algorithm must be the same"):
            sparse_allreduce(contributed(fresh.rank, entries), fresh, algorithm=name if fresh.rank == 0 else "auto")
    check_sums(fresh, (40,))
