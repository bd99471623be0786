"""A communicator of an MPI session, on two ranks of Open MPI 5."""

import pytest
from jobs import mpirun
from mpi4py import MPI

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


@pytest.mark.skipif(
    not MPI.Get_library_version().startswith("Open MPI v5"),
    reason="tried under Open MPI 5 only",
)
def test_a_communicator_of_a_session_works_and_is_freed(tmp_path):
    (tmp_path / "session.py").write_text(SCRIPT)
    done = mpirun(2, "session.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
