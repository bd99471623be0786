"""The testbed of benchmarks/testbed: two hosts carry bytes at the rate of their links, and the kernel counts them."""

import json
import os
import shutil
import sys

import pytest
from hosts import NAME, on_hosts, refusal

SENT = 4_000_000
PROGRAM = f"""
import time
import numpy as np
from mpi4py import MPI
comm, data = MPI.COMM_WORLD, np.ones({SENT}, np.uint8)
assert comm.size == 2, comm.size
comm.Barrier()
start = time.perf_counter()
comm.Send(data, 1) if comm.rank == 0 else comm.Recv(data, 0)
comm.Barrier()
if comm.rank == 0:
    print(MPI.Get_processor_name(), time.perf_counter() - start)
"""


@pytest.fixture
def two_hosts():
    if reason := refusal():
        pytest.skip(reason)
    assert on_hosts("up", "2", "100mbit") == (0, "")
    yield
    assert on_hosts("down") == (0, "")


def test_two_hosts_carry_bytes_that_are_counted(two_hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert on_hosts("reset") == (0, "")
    status, printed = on_hosts("run", sys.executable, "-m", "mpi4py", str(program))
    assert status == 0, printed
    # behind it may stand what mpirun has to say
    host, seconds = printed.splitlines()[0].split()
    assert host == f"{NAME}-1"
    # a link passes no more than its rate
    assert float(seconds) > 0.9 * 8 * SENT / 100e6
    first, second = json.loads(on_hosts("bytes", "--json")[1])
    assert SENT < first["sent"] < 1.06 * SENT
    assert SENT < second["received"] < 1.06 * SENT
    assert second["sent"] < 0.06 * SENT
    assert on_hosts("up", "2", "100mbit") == (
        1,
        "testbed: it is up already: call `down` first\n",
    )


def test_it_says_when_it_is_not_up_or_may_not_be():
    status, said = on_hosts("bytes", name="never-made")
    may = os.geteuid() == 0 and shutil.which("tc")
    assert status == 1
    assert (
        "it is not up" in said
        if may
        else "expected to be root" in said or "there is no tc" in said
    )
