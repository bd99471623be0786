"""What processes and threads may do beside a rank: forked children, threads that may not call MPI, ranks left alone."""

import pytest
from jobs import environment, mpirun, python

from collectives.runtime.launcher import lone_warning

FORKED = """
import multiprocessing, os
import numpy as np
from mpi4py import MPI
from collectives import GradientExchange, dense_allreduce
from mpicomp import TopK

comm = MPI.COMM_WORLD
calls = [
    lambda: dense_allreduce(np.ones(2), comm),
    lambda: dense_allreduce(np.ones(2), MPI.COMM_SELF),
    lambda: GradientExchange(comm, TopK(0.5))(np.ones(4)),
]

def child():
    refused = 0
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            refused += "forked from a rank" in str(error)
    return refused

def work():
    os._exit(child())

def by_os():
    pid = os.fork()
    if not pid:
        work()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def by_multiprocessing():
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join()
    return worker.exitcode

for fork in by_os, by_multiprocessing:
    if comm.rank == 0:
        status = fork()
        assert status == len(calls), (fork, status)
    for call in calls:
        call()
    assert (dense_allreduce(np.ones(2), comm) == comm.size).all()
print("done")
"""


def test_a_forked_child_is_refused_and_the_rank_goes_on(tmp_path):
    """Before the first call of the rank, and after it."""
    (tmp_path / "job.py").write_text(FORKED)
    done = mpirun(2, "job.py", cwd=tmp_path)
    assert done.stdout.count("done") == 2, done.stderr


def test_a_child_of_a_process_without_mpi_is_a_rank(tmp_path):
    """The parent only imports the library."""
    script = """
import os, collectives
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
else:
    import numpy as np
    from mpi4py import MPI
    assert collectives.dense_allreduce(np.ones(2), MPI.COMM_WORLD).tolist() == [1, 1]
"""
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


FUNNELED = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from mpi4py import MPI
from collectives import dense_allreduce

def call():
    return dense_allreduce(np.ones(2), MPI.COMM_WORLD).tolist()

for _ in range(2):
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(call).result()
        except RuntimeError as error:
            assert "main thread only (MPI_THREAD_FUNNELED)" in str(error)
        else:
            raise AssertionError("another thread called MPI")
    assert call() == [2, 2]
print("done")
"""


def test_another_thread_is_refused_where_mpi_has_only_its_main_thread(tmp_path):
    (tmp_path / "job.py").write_text(FUNNELED)
    done = mpirun(2, "job.py", cwd=tmp_path)
    assert done.stdout.count("done") == 2, done.stderr


ALONE = """
import numpy as np
from mpi4py import MPI
from collectives import dense_allreduce
for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
    dense_allreduce(np.ones(2), comm)
"""


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS=8, and MPI sees 1: use"),
        ({"PMI_SIZE": "8"}, "PMI_SIZE=8, and MPI sees 1: use"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE=8"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3, and MPI sees one rank: use the mpirun"),
        ({"WORLD_SIZE": "8"}, "torchrun says WORLD_SIZE=8"),
    ],
)
def test_a_rank_is_alone_where_the_launcher_started_several(variables, remedy):
    assert remedy in lone_warning(1, variables)
    assert lone_warning(8, variables) is None
    assert lone_warning(1, {**variables, "MPICOMP_ALONE": "1"}) is None


def test_a_rank_that_is_meant_to_be_alone_is_not_warned():
    assert lone_warning(1, {}) is None
    assert lone_warning(1, {"PMIX_RANK": "0", "PMI_SIZE": "1"}) is None


@pytest.mark.parametrize(
    ("variables", "warnings"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, 1),
        ({"SLURM_STEP_NUM_TASKS": "8", "MPICOMP_ALONE": "1"}, 0),
    ],
)
def test_a_rank_that_is_alone_under_a_launcher_of_several_warns_once(
    variables, warnings
):
    done = python("-W", "always", "-c", ALONE, env=environment(**variables))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this process trains alone") == warnings


OTHER_ORDER = """
import numpy as np
from mpi4py import MPI
from collectives import CollectiveTimeoutError, sparse_iallreduce
from mpicomp import SparseVector

world = MPI.COMM_WORLD
vector = SparseVector([world.rank], np.ones(1, np.float32), 2)
comms = [world.Dup(), world.Dup()]
try:
    for comm in comms if world.rank else reversed(comms):
        sparse_iallreduce(vector, comm)
except CollectiveTimeoutError as error:
    print(error, flush=True)
world.Barrier()
world.Abort(3)
"""


def test_first_calls_in_another_order_are_told_at_the_timeout(tmp_path):
    (tmp_path / "job.py").write_text(OTHER_ORDER)
    done = mpirun(2, "job.py", cwd=tmp_path, MPICOMP_TIMEOUT="1")
    told = "make first calls on communicators in the same order on all ranks"
    assert done.stdout.count(told) == 2, done.stdout + done.stderr


IMPATIENT = """
import os, threading
from collectives.runtime import engine

engine._LONG = 0.3
threading.Timer(2, os._exit, [3]).start()
"""


def test_first_calls_in_another_order_are_told_without_a_timeout(tmp_path):
    """The ranks wait on after the warning, as another rank may only be late; here they end themselves."""
    (tmp_path / "job.py").write_text(IMPATIENT + OTHER_ORDER)
    done = mpirun(2, "job.py", cwd=tmp_path)
    told = "make first calls on communicators in the same order on all ranks"
    assert done.stderr.count(told) == 2, done.stdout + done.stderr
    assert "has waited for other ranks for 0.3 s" in done.stderr


TWICE = """
import os, signal, threading, time
import numpy as np
from mpi4py import MPI
from collectives import CollectiveError, GradientExchange
from mpicomp import TopK

def interrupt_twice():
    for pause in (0.4, 0.2):
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)

"""
INTERRUPTED = """
world = MPI.COMM_WORLD
exchange = GradientExchange(world, TopK(k=2))
if world.rank:
    time.sleep(1.5)
else:
    threading.Thread(target=interrupt_twice, daemon=True).start()
    try:
        exchange(np.ones(4))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
for _ in range(2):
    exchange(np.ones(4))
print("kept", flush=True)
"""


def test_a_first_call_that_was_left_by_a_second_interrupt_goes_on_in_the_next(tmp_path):
    """Other ranks have the duplicate for which the first one waited."""
    (tmp_path / "job.py").write_text(TWICE + INTERRUPTED)
    done = mpirun(2, "job.py", cwd=tmp_path, timeout=60)
    assert done.stdout.count("kept") == 2, done.stdout + done.stderr
    assert done.stdout.count("interrupted") == 1


LEFT = """
world = MPI.COMM_WORLD
exchange = GradientExchange(world, TopK(density=0.3))
gradient = np.random.default_rng(world.rank).standard_normal(2_000_000, np.float32)
exchange(gradient)
world.Barrier()
if world.rank == 0:
    threading.Thread(target=interrupt_twice, daemon=True).start()
    try:
        exchange(gradient)
    except KeyboardInterrupt:
        time.sleep(4)  # it computes
else:
    time.sleep(1)
    try:
        exchange(gradient)
    except CollectiveError as error:
        print(type(error).__name__, error, flush=True)
os._exit(0)
"""


def test_a_step_that_was_left_by_a_second_interrupt_keeps_no_rank_waiting(tmp_path):
    """Long messages that are in flight then move while the rank computes."""
    (tmp_path / "job.py").write_text(TWICE + LEFT)
    done = mpirun(2, "job.py", cwd=tmp_path, timeout=60, MPICOMP_TIMEOUT="2")
    assert done.stdout.startswith("CollectiveError"), done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout


FINALIZED = """
import numpy as np
from mpi4py import MPI
from collectives import GradientExchange, OuterLoop
from mpicomp import TopK

exchange = GradientExchange(MPI.COMM_WORLD, TopK(0.5))
exchange(np.ones(4))
loop = OuterLoop(GradientExchange(MPI.COMM_WORLD, bits=4), {"weight": np.ones(4)}, every=1)
loop.step()
states = [each.state_dict() for each in (exchange, loop)]
MPI.Finalize()
for each, state in zip((exchange, loop), states):
    np.testing.assert_equal(each.state_dict(), state)
print("saved")
"""


def test_states_can_be_saved_after_mpi_has_ended(tmp_path):
    (tmp_path / "job.py").write_text(FINALIZED)
    done = mpirun(1, "job.py", cwd=tmp_path)
    assert done.stdout == "saved\n", done.stderr
