"""A profile decides: alike on all ranks, whoever has which, and never at the price of a hang."""

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives import SupportPlan, allreduce, sparse_allreduce
from collectives.cli import main
from collectives.cli.tune import calibrating, checking, measuring
from collectives.cost import Case
from collectives.profiles import NETWORKS, VARIABLE, Curve, ProfileError, load
from collectives.progress import wait_for
from collectives.transport import endpoint_of
from collectives.tuning import Tuner, default_path, without_survey
from mpicomp import CollectiveError, SparseVector

FREE = {name: Curve.line(0.0, 1e15) for name in NETWORKS["hdr"].kernels}


def profile(latency, bandwidth, message=0.0):
    """Return a profile in which computing costs nothing."""
    link = Curve.line(latency, bandwidth)
    reduce = Curve.line(2 * latency, bandwidth)  # at 2 ranks
    return replace(NETWORKS["hdr"], call=0.0, message=message, inside=link, between=link, reduce=reduce, kernels=FREE)


SLOW_START, SLOW_LINK = profile(1.0, 1e12, message=1.0), replace(profile(0.0, 1e6), call=1e-3)
LENGTH = 3000


def brings(rank, entries, length=LENGTH):
    rng = np.random.default_rng([rank, entries])
    indices = np.sort(rng.choice(length, entries, replace=False))
    return SparseVector(indices, rng.integers(-9, 9, entries).astype(np.float32), length)


def check_sums(comm, counts=(0, 1, 40, 900, LENGTH)):
    """Check sums of several densities, and one to which the ranks bring unequal counts."""
    for entries in (*counts, None):
        vectors = [brings(rank, 300 * (rank % 3) if entries is None else entries) for rank in range(comm.size)]
        total = sparse_allreduce(vectors[comm.rank], comm)
        np.testing.assert_array_equal(total.to_dense(), sum(vector.to_dense() for vector in vectors))
    plan = SupportPlan.union(brings(comm.rank, 50), comm)
    assert set(plan.indices) == {place for rank in range(comm.size) for place in brings(rank, 50).indices}


@pytest.fixture
def fresh(comm):
    """A communicator that the library has not seen: its ranks agree on a profile in the first operation."""
    if comm == MPI.COMM_NULL:
        yield comm
        return
    duplicate = comm.Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Return a function that gives this rank a profile, or a text in place of one, or none."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def tell(what):
        if what is None:
            monkeypatch.delenv(VARIABLE, raising=False)
            return
        path = tmp_path / "profile.json"
        path.write_text(what if isinstance(what, str) else what.text())
        monkeypatch.setenv(VARIABLE, str(path))

    tell(None)
    return tell


@pytest.fixture
def taken(monkeypatch):
    """The algorithms that run, in order."""
    names = []

    def recorded(name, steps):
        def run(offer, channel, survey):
            names.append(name)
            return steps(offer, channel, survey)

        return run

    for name, steps in allreduce.ALGORITHMS.items():
        monkeypatch.setitem(allreduce.ALGORITHMS, name, recorded(name, steps))
    return names


@pytest.mark.parametrize("known", [SLOW_START, SLOW_LINK, NETWORKS["1gbit"]], ids=["start", "link", "1gbit"])
def test_all_ranks_take_what_the_profile_says(fresh, told, taken, known):
    told(known)
    vector = brings(fresh.rank, 2500)
    total = sparse_allreduce(vector, fresh)
    assert total.nnz >= 2500
    assert taken == [Tuner(known).automatic(Case(fresh.size, LENGTH, 2500), [fresh.size])[0]]
    assert len(set(fresh.allgather(taken[0]))) == 1
    check_sums(fresh)


@pytest.mark.at_least(2)
def test_a_profile_overrides_the_rule_for_few_ranks(fresh, told, taken):
    """Where bytes are all that counts two shares of a dense sum are cheaper than doubling it, from 4 ranks on."""
    told(SLOW_LINK)
    sparse_allreduce(brings(fresh.rank, LENGTH - 1), fresh)
    assert (taken == [without_survey([fresh.size])]) == (fresh.size == 2)


@pytest.mark.parametrize("owner", ["first", "last"])
def test_a_profile_on_one_rank_only(fresh, told, taken, owner):
    """Rank 0's counts for all; what another rank has does not count at all."""
    mine = fresh.rank == (0 if owner == "first" else fresh.size - 1)
    told(SLOW_LINK if mine else None)
    check_sums(fresh)
    everywhere = endpoint_of(fresh, wait_for).tuner.profile
    assert everywhere == (SLOW_LINK if owner == "first" or fresh.size == 1 else None)
    assert len(set(fresh.allgather(tuple(taken)))) == 1


def test_a_different_profile_on_every_rank(fresh, told, taken):
    told([SLOW_LINK, SLOW_START, NETWORKS["100mbit"]][fresh.rank % 3])
    check_sums(fresh)
    assert endpoint_of(fresh, wait_for).tuner.profile == SLOW_LINK
    assert len(set(fresh.allgather(tuple(taken)))) == 1


def test_a_broken_profile_on_rank_0_raises_on_all_ranks(fresh, told):
    told(SLOW_LINK.text()[:-40] if fresh.rank == 0 else SLOW_LINK)
    for _ in range(2):
        with pytest.raises(ProfileError, match=r"is refused: .*Rank 0 read it because MPICOMP_PROFILE names it"):
            sparse_allreduce(brings(fresh.rank, 10), fresh)
    told(None)
    check_sums(fresh)


@pytest.mark.at_least(2)
def test_a_broken_profile_on_another_rank_is_not_looked_at(fresh, told):
    told("broken" if fresh.rank else None)
    check_sums(fresh)


def test_none_stands_for_no_profile(fresh, told, monkeypatch):
    path = default_path(fresh.size, 1)
    path.parent.mkdir(parents=True)
    path.write_text(SLOW_LINK.text())
    monkeypatch.setenv(VARIABLE, "none")
    check_sums(fresh)
    assert endpoint_of(fresh, wait_for).tuner.profile is None


@pytest.mark.at_least(2)
def test_ranks_that_ask_and_ranks_that_do_not_meet_and_raise(fresh, told):
    """Whether it is worth asking depends on the length, and the lengths differ."""
    told(SLOW_LINK)
    lengths = [1, LENGTH]
    if 2 < fresh.size <= 4:
        tuner = Tuner(SLOW_LINK)
        assert [tuner.worth_asking(length, 4, [fresh.size]) for length in lengths] == [False, True]
    for turn in range(fresh.size):
        length = lengths[fresh.rank == turn]
        with pytest.raises(CollectiveError, match="length must be the same on all ranks"):
            sparse_allreduce(brings(fresh.rank, length, length), fresh)
    check_sums(fresh)


@pytest.mark.at_least(2)
def test_a_bad_argument_on_one_rank_raises_everywhere(fresh, told):
    told(SLOW_LINK)
    for turn in range(fresh.size):
        with pytest.raises(TypeError if fresh.rank == turn else CollectiveError):
            sparse_allreduce(None if fresh.rank == turn else brings(fresh.rank, 2000), fresh)
    check_sums(fresh)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("name", ["recursive_doubling", "dense", "dense_mpi", "split_allgather"])
def test_ranks_that_name_an_algorithm_meet_those_that_go_by_a_profile(fresh, told, name):
    told(SLOW_LINK)
    with pytest.raises(CollectiveError, match="algorithm must be the same"):
        sparse_allreduce(brings(fresh.rank, 2000), fresh, algorithm=name if fresh.rank == 0 else "auto")
    check_sums(fresh)


@pytest.fixture
def quickly(monkeypatch):
    """Measure few and small things only."""
    monkeypatch.setattr(calibrating, "CASES", [(300, 30), (2000, 20)])
    for name, few in ("ENTRIES", [16, 500]), ("MESSAGES", [64, 4096]), ("REDUCTIONS", [64, 4096]), ("LONG_ENOUGH", 0):
        monkeypatch.setattr(measuring, name, few)


def test_what_is_measured_can_be_used(fresh, quickly):
    found = measuring.measure(fresh, 1)
    assert (found.ranks, found.nodes, found.between) == (fresh.size, 1, None)
    assert len(set(fresh.allgather(found.text()))) == 1
    assert endpoint_of(fresh, wait_for).tuner.profile is not None
    check_sums(fresh)


def test_turns_go_on_until_they_have_taken_so_long(comm, monkeypatch):
    """Two at least, and then one a tick of rank 0's clock."""
    ticks, calls = itertools.count(), []
    monkeypatch.setattr(checking, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    timed = measuring.Timed(lambda: calls.append(1), 1, first=0.0)
    checking.take_turns(comm, [timed], 2, 5.0)
    assert (len(timed.seconds), len(calls)) == (6, 12)


@pytest.mark.exactly(4)
def test_the_command_writes_a_profile_that_a_job_finds(fresh, told, quickly, capsys, monkeypatch):
    """The command runs on all ranks of the job: here on four of them, which keep what it measured to themselves."""
    monkeypatch.setattr(MPI, "COMM_WORLD", fresh)
    folder = fresh.bcast(os.environ["XDG_CONFIG_HOME"])
    monkeypatch.setenv("XDG_CONFIG_HOME", folder)
    some = ["--lengths", "500", "--densities", "0.1", "--repeats", "1"]
    assert main(["tune", "--check", *some]) == 0
    said = capsys.readouterr().out
    path = default_path(4, 1)
    assert ("written to" in said, "median error of the model" in said) == (
        (True, True) if fresh.rank == 0 else (False, False)
    )
    job = fresh.Dup()
    assert endpoint_of(job, wait_for).tuner.profile == load(path)
    check_sums(job)
    job.Free()
