"""The thread that advances operations in flight: when it looks, and how ranks end beside it."""

import os
import threading
import time
from functools import partial
from itertools import chain

import pytest
from endings import WAYS, Case, run
from jobs import mpirun, python

from collectives.runtime import progress
from collectives.runtime.progress import Look, Progress


def comes_true(condition, patience=60):
    deadline = time.monotonic() + patience
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return condition()


@pytest.fixture
def quick(monkeypatch):
    """Have the thread rest after some looks, and do without MPI."""
    monkeypatch.setattr(progress, "_REST", 1e-3)
    monkeypatch.setattr(progress, "reason_off", lambda: None)
    monkeypatch.setattr(Progress, "_prepare", lambda self: None)


class Looked:
    """A function that looks at operations in flight, and counts."""

    def __init__(self, found=Look.NOTHING_IN_FLIGHT):
        self.found = found
        self.times = 0

    def __call__(self):
        self.times += 1
        return self.found

    def is_past(self, times):
        return self.times > times


def rests(own, looked):
    """Return whether the thread waits for an operation, and looks no more."""
    assert comes_true(lambda: own._is_idle and not own._work.is_set())
    before = looked.times
    time.sleep(0.05)
    return looked.times == before


def test_with_nothing_in_flight_nothing_is_looked_at(quick):
    looked = Looked()
    own = Progress(looked)
    assert not own._alone.locked()
    own.wake()
    assert comes_true(lambda: looked.times > 0)
    assert rests(own, looked)
    before = looked.times
    own.wake()
    assert comes_true(lambda: looked.times > before)
    own.stop()


def test_it_looks_as_long_as_something_is_in_flight_or_the_user_is_inside(quick):
    looked = Looked(Look.NOTHING_MOVED)
    own = Progress(looked)
    own.wake()
    for found in Look.NOTHING_MOVED, Look.LATER, Look.MOVED:
        looked.found = found
        more = looked.times + 20
        assert comes_true(partial(looked.is_past, more))
    looked.found = Look.NOTHING_IN_FLIGHT
    assert rests(own, looked)
    own.stop()


def test_pauses_are_short_again_when_an_operation_is_looked_at_for_the_first_time(
    quick, monkeypatch
):
    """Its messages have just been started: their handshakes take several looks."""
    waiting = [Look.NOTHING_MOVED] * 40
    found = [Look.LATER] * 20, waiting, [Look.LATER] * 3, waiting
    looks = [*chain(*found), Look.MOVED]
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == len(looks):
            own.stop()

    monkeypatch.setattr(progress, "sleep", sleep)
    left = iter(looks)
    own = Progress(lambda: next(left))
    own._attend()
    shortest, _ = Look.MOVED.value
    at = [index for index, pause in enumerate(pauses) if pause == shortest]
    assert at == [0, 20, 63, 103]
    assert max(pauses[20:60]) == pauses[59] == Look.NOTHING_MOVED.value[0]


def test_pauses_grow_with_what_a_look_costs(quick, monkeypatch):
    """So that many operations in flight do not take the core."""
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 60:
            own.stop()

    def look():
        began = time.thread_time()
        while time.thread_time() < began + 1e-3:
            pass
        return Look.NOTHING_MOVED

    monkeypatch.setattr(progress, "sleep", sleep)
    own = Progress(look)
    own._attend()
    assert pauses[-1] > 0.02


def test_a_process_can_be_forked_within_a_look():
    """As by a finaliser that the garbage collector runs there."""
    statuses = []

    def look():
        if not statuses:
            child = os.fork()
            if child == 0:
                os._exit(0)
            statuses.append(os.waitpid(child, 0)[1])
        return Look.NOTHING_IN_FLIGHT

    own = Progress(look)
    own._prepare()
    thread = threading.Thread(target=own._looked, daemon=True)
    thread.start()
    thread.join(60)
    assert statuses == [0]


def test_an_operation_that_is_started_while_the_thread_comes_to_rest_is_looked_at(
    quick,
):
    """`wake` came before the thread was idle, and so did nothing."""
    looked = Looked()
    own = Progress(looked)
    attend = own._attend

    def attending():
        attend()
        looked.found = Look.MOVED

    own._attend = attending
    own.wake()
    assert comes_true(lambda: looked.times > 100)
    own.stop()


def test_no_look_begins_after_the_end_and_the_end_waits_for_the_one_under_way(quick):
    begun, go_on = threading.Event(), threading.Event()
    ended = []

    def look():
        begun.set()
        go_on.wait()
        ended.append(None)
        return Look.MOVED

    own = Progress(look)
    own.wake()
    begun.wait()
    threading.Timer(0.05, go_on.set).start()
    own.stop()
    assert len(ended) == 1
    assert comes_true(lambda: not own._alone.locked())
    own.wake()
    assert not own._alone.locked()
    assert len(ended) == 1


def test_a_thread_that_cannot_be_started_is_tried_again(quick, monkeypatch):
    """By the next operation; also one that ended for lack of memory before it did anything."""

    def fails(function, args):
        raise RuntimeError("can't start new thread")

    looked = Looked()
    own = Progress(looked)
    with monkeypatch.context() as patch:
        patch.setattr(progress, "start_new_thread", fails)
        with pytest.warns(
            RuntimeWarning, match="can't start new thread: messages move inside calls"
        ):
            own.wake()
        patch.setattr(progress, "start_new_thread", lambda function, args: None)
        own.wake()
    assert looked.times == 0
    own.wake()
    assert comes_true(lambda: looked.times > 0)
    own.stop()


def test_two_threads_do_not_look(quick, monkeypatch):
    """One that was started twice, as the first had not begun."""
    started = []
    monkeypatch.setattr(
        progress, "start_new_thread", lambda function, args: started.append(function)
    )
    looked = Looked(Look.MOVED)
    own = Progress(looked)
    own.wake()
    own.wake()
    first, second = started
    threading.Thread(target=first, daemon=True).start()
    assert comes_true(lambda: looked.times > 0)
    second()  # returns
    own.stop()


@pytest.mark.parametrize("way", WAYS)
def test_ranks_end_with_operations_in_flight(way):
    _, wrong, said = run(Case(0, way, ranks=2, seed=1))
    assert wrong is None, said


LEVELS = """
import sys, time
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
import numpy as np
from mpi4py import MPI
from collectives import sparse_iallreduce
from collectives.runtime.progress import reason_off
from mpicomp import SparseVector

comm = MPI.COMM_WORLD
vector = SparseVector([comm.rank, 2], np.ones(2, np.float32), 3)
for _ in range(3):
    request = sparse_iallreduce(vector, comm)
    deadline = time.monotonic() + 60 * (reason_off() is None)
    while not request.done and time.monotonic() < deadline:
        time.sleep(1e-3)
    alone = request.done
    assert request.wait().to_dense().tolist() == [1, 1, 2]
print("alone" if alone else "in calls", reason_off())
"""


@pytest.mark.parametrize(
    "level",
    [
        "single",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("funneled", "serialized")
        ),
        "multiple",
    ],
)
def test_thread_levels_of_mpi(tmp_path, level):
    """The variable of the environment differs between ranks: rank 0 has it off where the level allows progress."""
    (tmp_path / "job.py").write_text(LEVELS)
    done = mpirun(2, "job.py", level, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.split("\n")[:2]
    if level == "multiple":
        assert lines == ["alone None"] * 2
    else:
        why = f"in calls MPI was initialised with MPI_THREAD_{level.upper()}"
        assert all(line.startswith(why) for line in lines), lines


def test_the_variable_turns_it_off_on_one_rank_alone(tmp_path):
    script = "import os, mpi4py.MPI as M; os.environ['MPICOMP_PROGRESS'] = str(M.COMM_WORLD.rank)\n"
    (tmp_path / "job.py").write_text(script + LEVELS)
    done = mpirun(2, "job.py", "multiple", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in calls MPICOMP_PROGRESS is 0" in done.stdout
    assert "alone None" in done.stdout


def test_a_bad_setting_raises_on_all_ranks_in_the_first_call():
    code = """
import numpy as np
from mpi4py import MPI
from collectives import dense_allreduce
dense_allreduce(np.ones(2), MPI.COMM_WORLD)
"""
    done = python("-c", "import os; os.environ['MPICOMP_PROGRESS'] = 'yes'" + code)
    said = (
        "the environment variable MPICOMP_PROGRESS is 'yes': expected one of ['0', '1']"
    )
    assert said in done.stderr


def test_info_says_whether_messages_move_and_why_not():
    for level, said in (
        ("multiple", "progress messages move while the rank computes"),
        ("serialized", "inside calls of the library only: MPI was initialised with"),
    ):
        done = python(
            "-m",
            "mpi4py",
            "-rc",
            f"thread_level={level}",
            "-m",
            "mpicomp_bench",
            "info",
        )
        assert said in done.stdout, done.stderr
