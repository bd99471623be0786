"""The lockstep harness itself: whatever happens to a rank, the whole run ends, in time, with the right verdict."""

import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.slow  # it tests what runs the tests, and changes seldom
HERE = pathlib.Path(__file__).parent
HEAD = """
import os, signal, sys, time
import pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

def test_before():
    assert comm.allreduce(1) == comm.size

"""


class Run:
    def __init__(self, tmp_path, body, size=3, **limits):
        (tmp_path / "test_case.py").write_text(HEAD + textwrap.dedent(body))
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        names = {
            "MPI_TEST_GRACE": "2",
            "MPI_TEST_LIMIT": "5",
            "MPI_TEST_HANG": "3",
            "MPI_TEST_OUT": str(tmp_path / "out"),
        }
        path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        began = time.monotonic()
        done = subprocess.run(
            [str(HERE / "launch.sh"), str(size), "test_case.py", "-q", "--color=no"],
            cwd=tmp_path,
            env={**os.environ, **names, **limits, "PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.seconds = time.monotonic() - began
        self.status, self.text = done.returncode, done.stdout + done.stderr
        self.logs = [path.read_text() for path in sorted((tmp_path / "out").glob("rank-*.log"))]


def test_a_run_that_passes(tmp_path):
    run = Run(tmp_path, "")
    assert run.status == 0, run.text
    assert "1 passed" in run.text
    assert [("1 passed" in log) for log in run.logs] == [True, True]


def test_a_failed_assertion_on_one_rank_fails_the_run_on_all(tmp_path):
    run = Run(
        tmp_path,
        """
        def test_case():
            assert comm.rank != 1, "rank one objects"

        def test_after():
            assert comm.allreduce(1) == comm.size
        """,
    )
    assert run.status != 0
    for text in (run.text, *run.logs):
        assert "by rank: passed failed passed" in text
        assert "rank one objects" in text
    assert "1 failed, 2 passed" in run.text


def test_a_fixture_that_one_rank_does_not_outlive_fails_the_test_on_all(tmp_path):
    run = Run(
        tmp_path,
        """
        @pytest.fixture
        def made():
            assert comm.rank != 1, "rank one objects"

        def test_case(made):
            pass
        """,
    )
    assert run.status != 0
    assert "by rank: passed failed passed" in run.text
    assert "rank one objects" in run.text


def test_a_teardown_that_fails_on_one_rank_fails_the_next_test_and_the_run(tmp_path):
    run = Run(
        tmp_path,
        """
        @pytest.fixture
        def made():
            yield
            assert comm.rank != 1, "rank one objects"

        def test_case(made):
            pass

        def test_last(made):
            pass
        """,
    )
    assert run.status != 0
    assert "by rank: passed failed passed" in run.text
    assert "1 failed, 2 passed" in run.text
    assert "test_case.py::test_case (teardown): " in run.text
    assert "--- rank 1: test_case.py::test_last (teardown): " in run.text


def test_a_rank_that_fails_in_front_of_a_collective_ends_the_run(tmp_path):
    run = Run(
        tmp_path,
        """
        def test_case():
            if comm.rank == 2:
                raise RuntimeError("did not come")
            comm.Barrier()
        """,
    )
    assert run.status != 0
    assert "did not come" in run.text
    assert "no answer from every rank on test_case.py::test_case (call) within 2 s: ending the job" in run.text


@pytest.mark.parametrize(
    ("silence", "words"),
    [
        ("time.sleep(1000)", "Timeout"),  # the stack, from faulthandler
        ("comm.recv(source=0, tag=77)", "Timeout"),  # inside C code
        ("os.kill(os.getpid(), signal.SIGSTOP)", "no answer from every rank"),
    ],
    ids=["sleeps", "waits for nobody", "stopped"],
)
def test_a_rank_that_stops_answering_ends_the_run_in_time(tmp_path, silence, words):
    run = Run(
        tmp_path,
        f"""
        def test_case():
            if comm.rank == 1:
                {silence}
        """,
    )
    assert run.status != 0
    assert words in run.text
    assert run.seconds < 40


@pytest.mark.parametrize("death", ["os._exit(5)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_rank_that_dies_ends_the_run(tmp_path, death):
    run = Run(
        tmp_path,
        f"""
        def test_case():
            if comm.rank == 1:
                {death}
            comm.Barrier()
        """,
    )
    assert run.status != 0
    assert run.seconds < 40


def test_ranks_that_collect_different_tests_are_noticed(tmp_path):
    run = Run(
        tmp_path,
        """
        if comm.rank == 1:
            def test_of_its_own():
                assert True
        """,
    )
    assert run.status != 0
    assert "the ranks collected different tests" in run.text


def test_ranks_that_each_believe_to_be_alone_are_noticed(tmp_path):
    (tmp_path / "test_case.py").write_text(HEAD)
    done = subprocess.run(
        [str(HERE / "launch.sh"), "--rank", "test_case.py"],
        cwd=tmp_path,
        env={**os.environ, "MPI_TEST_NPROCS": "3", "MPI_TEST_OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4
    assert "expected 3 ranks, MPI sees 1" in done.stdout + done.stderr
