"""Ranks that die, under an MPI that goes on without them and under one that does not; each job is one of its own."""

import pathlib
import subprocess
import sys

import kills
import pytest

pytestmark = pytest.mark.skipif("(Open MPI) 5" not in kills.launcher(), reason="needs the mpirun of Open MPI 5")


@pytest.mark.parametrize("collective", ["gtopk_allreduce", pytest.param("sparse_iallreduce", marks=pytest.mark.slow)])
def test_an_exchange_goes_on_without_those_that_died_and_nothing_is_missing(collective, tmp_path):
    """One rank dies before a collective, one in the middle of it, one after it."""
    script = pathlib.Path(__file__).with_name("survivors.py")
    command = ["mpirun", "--with-ft", "ulfm", "-n", "5", sys.executable, "-m", "mpi4py"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path), collective],
        env=kills.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.count("2 of 5 ranks are left, nothing is missing; 3 deaths") == 2, done.stdout + done.stderr


def test_ranks_that_die_in_a_recovery_are_left_behind_too():
    script = pathlib.Path(__file__).with_name("more_deaths.py")
    command = ["mpirun", "--with-ft", "ulfm", "-n", "6", sys.executable, "-m", "mpi4py", str(script)]
    done = subprocess.run(command, env=kills.environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.count("2 of 6 ranks are left") == 2, done.stdout + done.stderr


def test_ranks_that_hear_of_a_fault_in_different_operations_shrink_together():
    """And those that come late, where the others have given up and call again."""
    script = pathlib.Path(__file__).with_name("stragglers.py")
    command = ["mpirun", "--with-ft", "ulfm", "-n", "4", sys.executable, "-m", "mpi4py", str(script)]
    done = subprocess.run(command, env=kills.environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.count("all shrank together") == 4, done.stdout + done.stderr


def test_ranks_with_different_quorums_raise_and_may_call_again():
    script = pathlib.Path(__file__).with_name("quorums.py")
    command = ["mpirun", "--with-ft", "ulfm", "-n", "3", sys.executable, "-m", "mpi4py", str(script)]
    done = subprocess.run(command, env=kills.environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count("refused, and shrank") == 3, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2, 3], ids=["kill, ulfm", "kill, plain", "stop, plain"])
def test_a_job_that_loses_a_rank_ends_as_documented(number):
    """The script runs hundreds, and looks at how long they took."""
    case = kills.Case.drawn(2, number)
    assert kills.fault(case, *kills.run(case), limit=kills.PATIENCE) is None, case
