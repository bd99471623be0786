"""The lockstep harness itself: whatever happens to a rank, the whole run ends, in time, with the right verdict."""

import re
import subprocess
import time

import pytest
from jobs import ROOT, environment

pytestmark = pytest.mark.slow  # it tests what runs the tests, and changes seldom
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
    def __init__(self, tmp_path, body, size="3", **variables):
        (tmp_path / "test_case.py").write_text(HEAD + body)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        names = {
            "MPI_TEST_GRACE": "2",
            "MPI_TEST_LIMIT": "5",
            "MPI_TEST_HANG": "3",
            "MPI_TEST_OUT": f"{tmp_path}/out",
        }
        command = [
            ROOT / "tests" / "launch.sh",
            size,
            "test_case.py",
            "-q",
            "--color=no",
        ]
        how = {"cwd": tmp_path, "env": environment(**names, **variables), "timeout": 60}
        began = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, **how
        )
        self.seconds = time.monotonic() - began
        self.status, self.text = done.returncode, done.stdout + done.stderr
        self.logs = [
            path.read_text() for path in sorted((tmp_path / "out").glob("rank-*.log"))
        ]


def test_a_run_that_passes(tmp_path):
    run = Run(tmp_path, "")
    assert run.status == 0, run.text
    assert "1 passed" in run.text
    assert [("1 passed" in log) for log in run.logs] == [True, True]


FAILS = """
def test_case():
    assert comm.rank != 1, "rank one objects"

def test_after():
    assert comm.allreduce(1) == comm.size
"""
FIXTURE = """
@pytest.fixture
def made():
    assert comm.rank != 1, "rank one objects"

def test_case(made):
    pass

def test_after():
    pass
"""
TEARDOWN = """
@pytest.fixture
def made():
    yield
    assert comm.rank != 1, "rank one objects"

def test_case(made):
    pass

def test_last(made):
    pass
"""


@pytest.mark.parametrize(
    "body", [FAILS, FIXTURE, TEARDOWN], ids=["test", "fixture", "teardown"]
)
def test_what_fails_on_one_rank_fails_the_run_on_all(tmp_path, body):
    """A teardown fails the next test; that of the last one is told at the end."""
    run = Run(tmp_path, body)
    assert run.status != 0
    for text in (run.text, *run.logs):
        assert "by rank: passed failed passed" in text
        assert "rank one objects" in text
    assert "1 failed, 2 passed" in run.text
    if body == TEARDOWN:
        assert "test_case.py::test_case (teardown): " in run.text
        assert "--- rank 1: test_case.py::test_last (teardown): " in run.text


ENDS = {
    "fails": (
        'raise RuntimeError("did not come")',
        "no answer from every rank on test_case.py::test_case .call",
    ),
    "sleeps": ("time.sleep(1000)", "Timeout"),  # the stack, from faulthandler
    "waits in C code": ("comm.recv(source=0, tag=77)", "Timeout"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "no answer from every rank"),
    "leaves": ("os._exit(5)", ""),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_leaves_its_peers_in_a_collective_ends_the_run_in_time(
    tmp_path, end
):
    what, said = ENDS[end]
    meeting = "comm.Barrier()" if end in ("fails", "leaves", "killed") else "pass"
    run = Run(
        tmp_path,
        f"def test_case():\n    if comm.rank == 1:\n        {what}\n    {meeting}\n",
    )
    assert run.status != 0
    assert re.search(said, run.text)
    assert "did not come" in run.text or end != "fails"
    assert run.seconds < 40


def test_ranks_that_collect_different_tests_are_noticed(tmp_path):
    run = Run(
        tmp_path,
        "if comm.rank == 1:\n    def test_of_its_own():\n        assert True\n",
    )
    assert run.status != 0
    assert "the ranks collected different tests" in run.text


def test_ranks_that_each_believe_to_be_alone_are_noticed(tmp_path):
    run = Run(tmp_path, "", "--rank", MPI_TEST_NPROCS="3")
    assert run.status == 4
    assert "expected 3 ranks, MPI sees 1" in run.text
