"""A communicator of an MPI session, on two ranks of Open MPI 5."""

import os
import subprocess
import sys

import pytest
from mpi4py import MPI
from test_examples import LAUNCH

SCRIPT = """
import numpy as np
from mpi4py import MPI
from collectives import sparse_allreduce
from mpicomp import SparseVector

session = MPI.Session.Init()
group = session.Create_group("mpi://WORLD")
comm = MPI.Intracomm.Create_from_group(group, "mpicomp.tests")
group.Free()
total = sparse_allreduce(SparseVector([comm.rank, 2], np.ones(2, np.float32), 3), comm)
assert total.to_dense().tolist() == [1, 1, 2]
comm.Free()
session.Finalize()
"""


@pytest.mark.skipif(not MPI.Get_library_version().startswith("Open MPI v5"), reason="tried under Open MPI 5 only")
def test_a_communicator_of_a_session_works_and_is_freed(tmp_path):
    (tmp_path / "session.py").write_text(SCRIPT)
    command = ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py", "session.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **LAUNCH}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
