"""Recovery across hosts of benchmarks/testbed: make test-links. Takes minutes, needs root."""

import re
import sys

import lost_hosts
import pytest
from hosts import NAME, on_hosts, refusal

from collectives.faults import ulfm

HOSTS = 4
FIRST_CALL = """
from mpi4py import MPI
from collectives import sparse_allgather
from mpicomp import SparseVector
for _ in range(2):
    sparse_allgather(SparseVector.empty(1), MPI.COMM_WORLD.Dup())
"""


@pytest.fixture(scope="module")
def name():
    if reason := refusal():
        pytest.skip(reason)
    assert on_hosts("up", str(HOSTS), "1gbit") == (0, "")
    yield NAME
    assert on_hosts("down") == (0, "")


@pytest.mark.parametrize("kind", lost_hosts.DOCUMENTED)
def test_ranks_hosts_and_links_that_are_lost(kind, name):
    case = lost_hosts.Case.drawn(kind, HOSTS, 0, 0)
    _, wrong, said = lost_hosts.tried(case, name)
    assert wrong is None, f"{case}: {said}"


def printed(name, flags, *command):
    status, said = on_hosts("run", "--", *flags.split(), *command, name=name)
    assert status == 0, said
    return said


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (
            "--with-ft ulfm",
            f"recovery warning: the failure detector of Open MPI is off, .*{ulfm.FLAGS}",
        ),
        (
            ulfm.FLAGS,
            "recovery the job continues when a rank dies .*; the failure detector is set",
        ),
    ],
)
def test_info_says_what_to_add_or_that_all_is_well(flags, found, name):
    said = printed(name, flags, "mpicomp", "info")
    (line,) = [line for line in said.splitlines() if line.startswith("recovery")]
    assert re.fullmatch(found, line), line


@pytest.mark.parametrize(("flags", "times"), [("--with-ft ulfm", 1), (ulfm.FLAGS, 0)])
def test_the_first_call_warns_once_on_one_rank(flags, times, name, tmp_path):
    program = tmp_path / "first_call.py"
    program.write_text(FIRST_CALL)
    said = printed(name, flags, sys.executable, "-m", "mpi4py", str(program))
    assert (
        said.count("RuntimeWarning: the failure detector of Open MPI is off") == times
    ), said
