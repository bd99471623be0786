"""Messages above 2 GiB, whose bytes do not fit a C int."""

import pathlib
import re

import numpy as np
import pytest
from mpi4py import MPI

from collectives import sparse_bcast, traffic
from collectives.calls.first_call import link_of
from mpicomp import SparseVector

# bytes: the row, its message, what arrives, and room for the copies on the way
NEEDED = 12 << 30


def available():
    """Return the bytes of memory that are free, or that the container may still take."""
    text = pathlib.Path("/proc/meminfo").read_text()
    free = int(re.search(r"MemAvailable: +(\d+)", text)[1]) << 10
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    stated = limit.read_text().strip() if limit.exists() else "max"
    return free if stated == "max" else min(free, int(stated))


# all ranks collect this file, and skip alike
SHORT = MPI.COMM_WORLD.allreduce(int(available() < NEEDED))


@pytest.mark.skipif(SHORT > 0, reason=f"needs {NEEDED >> 30} GiB of free memory")
@pytest.mark.exactly(2)
@pytest.mark.slow
def test_a_message_above_two_gibibytes(comm):
    """One row of 2^29 + 17 float32: 2 GiB and a little."""
    width = 2**29 + 17
    row = np.zeros((1, width), np.float32)
    row[0, [0, 2**28, -1]] = 1, 2, 3
    before = traffic(comm).nbytes
    got = sparse_bcast(SparseVector([5], row, 9) if comm.rank == 0 else None, comm)
    assert got.values.shape == (1, width)
    assert got.values[0, [0, 1, 2**28, -2, -1]].tolist() == [1, 0, 2, 0, 3]
    assert np.count_nonzero(got.values) == 3
    if comm.rank == 0:
        assert traffic(comm).nbytes - before > 2**31


def test_a_message_goes_in_pieces_whose_counts_fit_a_c_int_after_its_length(comm):
    link = link_of(comm)
    sent = []

    class Recorder:
        def Isend(self, message, dest, tag):  # noqa: N802
            sent.append(message[0])

    endpoint_comm, link.comm = link.comm, Recorder()
    before = link.traffic.nbytes
    try:
        # takes no memory
        huge = np.lib.stride_tricks.as_strided(
            np.zeros(64, np.uint8), (127 << 30,), (0,)
        )
        link.send(huge, 0, 0)
    finally:
        link.comm = endpoint_comm
        link.traffic.nbytes = before
        link.traffic.messages -= 1
    header, *pieces = sent
    sizes = [piece.size for piece in pieces]
    assert header.view(np.int64).tolist() == [127 << 30]
    assert sum(sizes) == 127 << 30
    assert max(sizes) < 2**31
