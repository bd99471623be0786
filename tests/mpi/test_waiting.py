"""How ranks wait, as the environment and the cores say; and that both ways give the same bits."""

import argparse
import io

import pytest
from cases import assert_same_bits, bits, contribution
from mpi4py import MPI

from collectives import gtopk_allreduce, sparse_allreduce
from collectives.calls.first_call import link_of
from collectives.runtime import waiting
from mpicomp_bench import info


def asking(comm, monkeypatch, setting, cores, *, gives=False):
    """Return a duplicate of `comm` on which this rank said how it waits, and whether it backs off there."""
    monkeypatch.setenv(waiting.VARIABLE, setting)
    monkeypatch.setattr(waiting, "cores", lambda: cores)
    monkeypatch.setattr(waiting, "yields_the_core", lambda: gives)
    own = comm.Dup()
    return own, link_of(own).backs_off


@pytest.mark.parametrize(("setting", "cores", "expected"), [
    ("backoff", lambda rank: (1 << 64) - 1, lambda size: True),
    ("block", lambda rank: 1, lambda size: False),
    ("auto", lambda rank: 1, lambda size: size > 1),  # all on one core
    ("auto", lambda rank: 1 << rank, lambda size: False),  # bound to a core each
    # two each, shared by two
    ("auto", lambda rank: 3 << rank // 2 * 2, lambda size: False),
    ("auto", lambda rank: 7, lambda size: size > 3),
])  # fmt: skip
def test_a_rank_naps_where_it_is_told_to_or_ranks_outnumber_cores(
    comm, monkeypatch, setting, cores, expected
):
    own, backs_off = asking(comm, monkeypatch, setting, cores(comm.rank))
    assert backs_off == expected(comm.size)
    own.Free()


def test_a_rank_waits_inside_an_mpi_that_gives_the_core_away(comm, monkeypatch):
    for setting, expected in ("auto", False), ("backoff", True):
        own, backs_off = asking(comm, monkeypatch, setting, 1, gives=True)
        assert backs_off == expected
        own.Free()


def test_both_ways_give_the_same_bits(comm, monkeypatch):
    vector, results = contribution("random", comm.rank, comm.size), []
    for setting in "backoff", "block":
        own, _ = asking(comm, monkeypatch, setting, 1)
        for algorithm in "recursive_doubling", "exact":
            results.append(
                bits(gtopk_allreduce(vector, own, 9, algorithm=algorithm)[0])
            )
        results.append(bits(sparse_allreduce(vector, own)))
        own.Free()
    assert results[:3] == results[3:]


def test_an_unknown_setting_raises_on_all(comm, monkeypatch):
    with pytest.raises(ValueError, match="MPICOMP_WAIT is 'spin': expected one of"):
        asking(comm, monkeypatch, "spin", 1)


@pytest.mark.parametrize("said", ["60s", "-3", "0", "nan", "inf"])
def test_a_bad_timeout_raises_on_all_and_frees_nothing(comm, fresh, monkeypatch, said):
    monkeypatch.setenv(waiting.TIMEOUT, said)
    assert waiting.initial_timeout() is None
    with pytest.raises(
        ValueError,
        match=f"MPICOMP_TIMEOUT is '{said}': expected seconds above 0",
    ):
        sparse_allreduce(contribution("random", comm.rank, comm.size), fresh)
    fresh.Barrier()
    monkeypatch.setenv(waiting.TIMEOUT, "")
    assert_same_bits(
        comm, sparse_allreduce(contribution("random", comm.rank, comm.size), fresh)
    )


class WithoutProbes(MPI.Intracomm):
    """A communicator over a network without matched probes, as its last rank sees it."""

    def Improbe(self, *envelope):  # noqa: N802
        if self.rank == self.size - 1:
            raise MPI.Exception(MPI.ERR_UNSUPPORTED_OPERATION)


def test_a_network_without_matched_probes_raises_on_all_and_in_mpicomp_info(
    comm, monkeypatch
):
    own = WithoutProbes(comm)
    with pytest.raises(
        RuntimeError,
        match=rf"no matched probes .*rank {comm.size - 1}: .*mpirun --mca pml ob1",
    ):
        sparse_allreduce(contribution("random", comm.rank, comm.size), own.Dup())
    monkeypatch.setattr(MPI, "COMM_WORLD", own)
    monkeypatch.setattr(info, "singleton_warning", lambda size, environment: None)
    out = io.StringIO()
    assert info.run(argparse.Namespace(json=False, recovery=False), out) == 1
    assert ("warning: MPI has no matched probes" in out.getvalue()) == (comm.rank == 0)


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MPICOMP_TIMEOUT", "60"),
        ("MPICOMP_CHECK", "1"),
        ("MPICOMP_WAIT", "backoff"),
        ("MPICOMP_NETWORK", "10gbit"),
    ],
)
@pytest.mark.parametrize("others", [None, ""])
def test_a_setting_of_some_ranks_only_raises_on_all_with_the_remedy(
    comm, fresh, monkeypatch, name, value, others
):
    monkeypatch.delenv(name, raising=False)
    if comm.rank == 0:
        monkeypatch.setenv(name, value)
    elif others is not None:
        monkeypatch.setenv(name, others)
    rest = "rank 1" if comm.size == 2 else f"ranks 1{',' if comm.size == 3 else '-'}"
    said = rf"{name} must be the same .*got {value} on rank 0; not set on {rest}.*mpirun -x {name}.*srun --export"
    vector = contribution("random", comm.rank, comm.size)
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            sparse_allreduce(vector, fresh)
    monkeypatch.setenv(name, value)
    assert_same_bits(comm, sparse_allreduce(vector, fresh))


@pytest.mark.parametrize(
    ("name", "value", "ranks"),
    [
        ("MPICOMP_CHECK", "off", "all"),
        ("MPICOMP_THREADS", "0", "all"),
        ("MPICOMP_THREADS", "two", "one"),
    ],
)
def test_a_bad_setting_raises_on_all_ranks_whatever_they_call(
    comm, fresh, monkeypatch, name, value, ranks
):
    if ranks == "all" or comm.rank == 0:
        monkeypatch.setenv(name, value)
    vector = contribution("random", comm.rank, comm.size)
    said = rf"the environment variable {name} is '{value}': expected"
    with pytest.raises(ValueError, match=said):
        sparse_allreduce(vector, fresh)
    monkeypatch.undo()
    assert_same_bits(comm, sparse_allreduce(vector, fresh))


@pytest.mark.at_least(2)
@pytest.mark.unchecked("is on")
def test_settings_that_mean_the_same_and_threads_may_differ(comm, fresh, monkeypatch):
    if comm.rank == 0:
        monkeypatch.setenv("MPICOMP_CHECK", "0")
        monkeypatch.setenv("MPICOMP_WAIT", "auto")
        monkeypatch.setenv("MPICOMP_TIMEOUT", "")
        monkeypatch.setenv("MPICOMP_THREADS", "1")
    vector = contribution("random", comm.rank, comm.size)
    assert_same_bits(comm, sparse_allreduce(vector, fresh))
