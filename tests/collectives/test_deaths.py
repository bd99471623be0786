"""Ranks that die, under an MPI that goes on without them and under one that does not; each job is one of its own."""

import kills
import pytest
from jobs import ROOT, launcher, mpirun

pytestmark = pytest.mark.skipif(
    "(Open MPI) 5" not in launcher(), reason="needs the mpirun of Open MPI 5"
)


def said(ranks, script, *arguments):
    """Return what the ranks of a script of tests/chaos say."""
    done = mpirun(ranks, ROOT / "tests" / "chaos" / script, *arguments, ulfm=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "collective",
    ["gtopk_allreduce", pytest.param("sparse_iallreduce", marks=pytest.mark.slow)],
)
def test_an_exchange_goes_on_without_those_that_died_and_nothing_is_missing(
    collective, tmp_path
):
    """One rank dies before a collective, one in the middle of it, one after it."""
    found = said(5, "survivors.py", tmp_path, collective)
    assert found.count("2 of 5 ranks are left, nothing is missing; 3 deaths") == 2, (
        found
    )


def test_ranks_that_die_in_a_recovery_are_left_behind_too():
    found = said(6, "more_deaths.py")
    assert found.count("2 of 6 ranks are left") == 2, found


def test_ranks_that_hear_of_a_fault_in_different_operations_shrink_together():
    """And those that come late, where the others have given up and call again, or that differ on the quorum."""
    found = said(4, "stragglers.py")
    assert found.count("all shrank together") == 4, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [0, 2, 3], ids=["kill, ulfm", "kill, plain", "stop, plain"]
)
def test_a_job_that_loses_a_rank_ends_as_documented(number):
    """The script runs hundreds, and looks at how long they took."""
    case = kills.Case.drawn(2, number)
    assert kills.fault(case, *kills.run(case), limit=kills.PATIENCE) is None, case
