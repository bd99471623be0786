"""Kernels are compiled on one rank of each node, and loaded by the others."""

import os
import subprocess
import sys

import pytest

from collectives import warm_up

pytestmark = pytest.mark.small_groups

SCRIPT = """
from mpi4py import MPI
from collectives import warm_up
print(warm_up(MPI.COMM_SELF, ["float32"]))
"""


@pytest.mark.exactly(1)
@pytest.mark.slow
def test_a_cold_cache_is_filled_and_said_so_and_a_warm_one_is_read(comm, tmp_path):
    mpi = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_", "HYDRA_", "MPIR_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(mpi)}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path), "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self"}

    def run():
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=50, check=True
        )

    cold, warm = run(), run()
    assert int(cold.stdout) > 10
    assert "compiling kernels, once on each node" in cold.stderr
    assert "\r" not in cold.stderr, "no terminal, no line that is written over"
    assert cold.stderr.count("compiling kernels") == 1
    assert int(warm.stdout) == 0
    assert "compiling" not in warm.stderr


def test_all_ranks_of_a_communicator_warm_up_together(comm):
    warm_up(comm, ["float32"])
    assert warm_up(comm, ["float32"]) == 0
