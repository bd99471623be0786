"""MPI sessions, and the end of MPI."""

import pytest
from jobs import mpirun, python
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


AFTER_MPI = """
import numpy as np
from mpi4py import MPI
from collectives import GradientExchange, SupportPlan, traffic
from mpicomp import TopK

comm = MPI.COMM_WORLD
exchange = GradientExchange(comm, TopK(0.5))
unused = GradientExchange(comm, TopK(0.5))
for step in range(2):
    exchange(np.arange(5000.0))
plan = SupportPlan.union(TopK(0.5).compress(np.arange(4.0)), comm)
shown = [exchange.report(), unused.report(), repr(plan), exchange.residual_norm]
MPI.Finalize()
assert [exchange.report(), unused.report(), repr(plan), exchange.residual_norm] == shown
try:
    traffic(comm)
except RuntimeError as error:
    print(error)
"""


def test_what_a_rank_knows_is_shown_after_mpi_has_ended(tmp_path):
    (tmp_path / "shown.py").write_text(AFTER_MPI)
    done = mpirun(2, "shown.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("called after MPI.Finalize(): expected a call") == 2


STATE_AFTER_MPI = """
import numpy as np
from mpi4py import MPI
from collectives import GradientExchange, OuterLoop
from mpicomp import TopK

parameters = {"weight": np.ones(5000, np.float32)}
loop = OuterLoop(GradientExchange(MPI.COMM_WORLD, TopK(0.5)), parameters, every=1)
parameters["weight"] += 1
loop.step()
before = loop.state_dict()
MPI.Finalize()
after = loop.state_dict()
assert all(np.array_equal(after[key], before[key]) for key in before)
assert all(array.dtype.kind in "iufb" for array in after.values())
print("saved", len(after))
"""


def test_a_state_is_saved_after_mpi_has_ended():
    done = python("-c", STATE_AFTER_MPI)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved" in done.stdout


IN_FLIGHT_AFTER_MPI = """
from functools import partial
import numpy as np
from mpi4py import MPI
from collectives import GradientExchange, quantised_iallreduce, sparse_allreduce, sparse_iallreduce
from mpicomp import TopK

comm = MPI.COMM_WORLD
values = np.ones(200, np.float32)
vector = TopK(k=9).compress(values)
exchange = GradientExchange(comm, TopK(k=9))
exchange.register({"weight": values})
requests = []
exchange({"weight": values})
sparse_allreduce(vector, comm)
if comm.rank == 0:
    # The other rank starts none of them, so they are in flight for ever.
    exchange.start("weight", values)
    requests = [quantised_iallreduce(values, comm, bits=8), sparse_iallreduce(vector, comm)]
MPI.Finalize()
calls = [partial(sparse_allreduce, vector, comm), exchange.finish, partial(exchange, {"weight": values})]
for call in *calls, *[request.wait for request in requests], *[request.test for request in requests]:
    try:
        call()
    except RuntimeError as error:
        assert "MPI.Finalize() was called" in str(error) or "after MPI.Finalize()" in str(error), error
    else:
        raise SystemError(f"{call} did not raise")
print("raised")
"""


@pytest.mark.parametrize("progress", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_calls_after_the_end_of_mpi_raise_also_for_what_is_in_flight(
    tmp_path, progress
):
    (tmp_path / "job.py").write_text(IN_FLIGHT_AFTER_MPI)
    done = mpirun(2, "job.py", cwd=tmp_path, MPICOMP_PROGRESS=progress)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("raised") == 2
