"""How buffers of a device pass MPI: the decision, and children that do it right and wrong, on the stand-in's memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from devices import real_cupy
from jobs import mpirun
from mpi4py import MPI

from collectives.runtime import cuda_aware, staging
from collectives.runtime.messages import Arrival
from mpicomp_bench import info

TESTS = Path(__file__).parents[1]
ON_THE_STAND_IN = pytest.mark.skipif(
    real_cupy() is not None, reason="a real device has no memory that tells"
)

CHILD = """
import sys, numpy as np
from devices import assert_same, cupy_for_tests, there
cupy = cupy_for_tests()
from mpi4py import MPI
from collectives import sparse_allreduce, traffic
from collectives.runtime import cuda_aware
from collectives.runtime import staging
from mpicomp import SparseVector
length = 4000
{prepare}
comm = MPI.COMM_WORLD
indices = np.arange(comm.rank, length, 3)
mine = SparseVector(indices, indices.astype(np.float32), length)
total = sparse_allreduce(there(mine, cupy), comm)
assert_same(total, sparse_allreduce(mine, comm))
assert comm.size == 1 or traffic(comm).messages
if comm.rank == 0:
    print("sound")
"""
DIRECT = {"MPICOMP_CUDA_AWARE": "1", "MPICOMP_FAKE_VISIBLE": "1"}
CLAIM = "cuda_aware.query = lambda: True\n"
DENIES = "cuda_aware.query = lambda: False\n"
LONG = """
from collectives.runtime import messages
messages.BIDIRECTIONAL, messages.PIECE = 64, 4096
"""
NO_STREAM = """
staging.first_lines = lambda blocks: [block[:64]._hidden.copy() for block in blocks]
"""
NO_EVENTS = """
from cupy.cuda import Event
Event.synchronize = lambda self: None
length = 900  # so short that MPI takes the message at once: of a longer one it may read what was copied meanwhile
"""


COUNTED = """
import gpu_costs
from mpi4py import MPI
from collectives.runtime import cuda_aware
cuda_aware.query = lambda: True
for name in gpu_costs.TIMED:
    for tensors in 1, 54:
        one, _ = gpu_costs.last(name, tensors, 160 * 64, 2)
        two, _ = gpu_costs.last(name, tensors, 160 * 64, 2, MPI.COMM_WORLD)
        assert two.launches <= one.launches + 12, (name, tensors, one, two)
        assert two.synchronisations <= one.synchronisations + 3, (name, tensors, one, two)
if MPI.COMM_WORLD.rank == 0:
    print("sound")
"""

ALL_TO_ALL = """
from devices import counted, cupy_for_tests
cupy = cupy_for_tests()
from mpi4py import MPI
from collectives import quantised_allreduce
from collectives.runtime import cuda_aware, staging
cuda_aware.query = lambda: True
comm = MPI.COMM_WORLD
values = cupy.arange(4096, dtype=cupy.float32)
for _ in range(2):
    read = []
    own = staging.first_lines
    def first_lines(blocks):
        with counted(cupy) as found:
            lines = own(blocks)
        read.append((len(blocks), found.synchronisations))
        return lines
    staging.first_lines = first_lines
    quantised_allreduce(values, comm, bits=4, algorithm="direct")
    staging.first_lines = own
# the shares, all at once; and the coded sum of this rank's share, which is one message
assert read == [(comm.size - 1, 1), (1, 1)], read
if comm.rank == 0:
    print("sound")
"""


def child(prepare, *, size=2, program=CHILD, **environment):
    """Return the finished run of a child job. `prepare` is Python that `CHILD` runs first; it decides the outcome."""
    folders = (
        TESTS / "fake_cupy",
        TESTS.parent,
        TESTS / "support",
        TESTS.parent / "benchmarks",
    )
    path = os.pathsep.join(map(str, folders))
    return mpirun(
        size, "-c", program.format(prepare=prepare), PYTHONPATH=path, **environment
    )


@ON_THE_STAND_IN
def test_staged_messages_arrive_and_long_ones_in_pieces():
    assert (done := child(LONG)).stdout.strip() == "sound", done.stderr


@ON_THE_STAND_IN
def test_a_step_of_two_ranks_waits_three_times_more_than_one_of_one():
    """With direct messages; tests/mpi/test_device_exchange.py has staged ones."""
    done = child("", program=COUNTED, **DIRECT)
    assert done.stdout.strip() == "sound", done.stderr


@ON_THE_STAND_IN
def test_direct_messages_arrive_by_the_pointer_and_those_to_all_ranks_are_waited_for_once():
    """Of an MPI that denies it: the stand-in's memory is what a CUDA-aware one sees of a device, as a trial finds."""
    done = child(DENIES, size=3, program=CHILD + ALL_TO_ALL, **DIRECT)
    assert done.stdout.split() == ["sound", "sound"], done.stderr


@ON_THE_STAND_IN
def test_another_mpi_dies_of_it():
    """So the test above, and all that stage, can tell."""
    done = child(CLAIM, MPICOMP_CUDA_AWARE="1")
    assert done.returncode != 0
    assert "sound" not in done.stdout
    assert re.search("Segmentation fault|SIGSEGV|signal 11", done.stderr)


@ON_THE_STAND_IN
def test_who_hands_out_an_array_without_waiting_for_the_stream_is_caught():
    done = child(CLAIM + NO_STREAM, **DIRECT)
    assert done.returncode != 0
    assert "the stream was not synchronised" in done.stderr


@ON_THE_STAND_IN
def test_who_sends_without_waiting_for_the_copy_is_caught():
    """What leaves is poison: a rank that gets it tells the others, or waits for those that do not know."""
    done = child(NO_EVENTS, MPICOMP_TIMEOUT="2")
    assert done.returncode != 0
    assert "sound" not in done.stdout


@ON_THE_STAND_IN
@pytest.mark.parametrize("waits", [True, False])
def test_the_memory_of_an_arrival_is_free_once_it_has_been_copied(cupy, waits):
    message = np.arange(1, 129).astype(np.uint8)
    request = MPI.COMM_SELF.Isend(message, 0, 0)
    arrival = Arrival(MPI.COMM_SELF, 0, 0, cupy.empty(0))
    arrival.wait()
    if waits:
        staging.wait_for_stream()
    arrival.buffer[:] = 0  # as the next message in this memory would
    request.Wait()
    assert (arrival.copy.get() == message).all() == waits


@pytest.mark.parametrize(
    ("setting", "claims", "direct"),
    [("", True, False), ("0", True, False), ("1", True, True), ("1", None, True)],
)
def test_messages_are_direct_only_if_asked_for(monkeypatch, setting, claims, direct):
    monkeypatch.setattr(cuda_aware, "query", lambda: claims)
    assert cuda_aware.verdict({"MPICOMP_CUDA_AWARE": setting}) == (
        direct,
        f"MPICOMP_CUDA_AWARE is {setting or 0}",
    )


@pytest.mark.parametrize(
    ("setting", "words"), [("yes", "expected 1 or 0"), ("1", "it is not CUDA-aware")]
)
def test_a_setting_that_cannot_be(monkeypatch, setting, words):
    monkeypatch.setattr(cuda_aware, "query", lambda: False)
    monkeypatch.setattr(cuda_aware, "trial", lambda: "a trial failed")
    with pytest.raises(ValueError, match=f"MPICOMP_CUDA_AWARE is .*{words}"):
        cuda_aware.verdict({"MPICOMP_CUDA_AWARE": setting})
    monkeypatch.setenv("MPICOMP_CUDA_AWARE", setting)
    assert words in info.device()["device"]


@ON_THE_STAND_IN
def test_an_mpi_that_denies_it_is_tried_in_a_child_process():
    """Which the stand-in's memory kills here; where it is visible, messages are direct: see above."""
    done = child(DENIES, MPICOMP_CUDA_AWARE="1")
    assert done.returncode != 0
    assert "ended with exit status -11" in done.stderr
    assert "ValueError: rank 0: the environment variable" in done.stderr


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", False),
        ("system,mpi", False),
        ("system,cuda:host", False),
        ("mpi,system,cuda:device", True),
        ("cuda", True),
        ("system,cuda:managed:device", True),
    ],
)
def test_what_mpi_4_1_says_of_its_memory(monkeypatch, kinds, expected):
    assert cuda_aware.has_cuda(kinds) == expected
    monkeypatch.setattr(cuda_aware, "query", lambda: False)
    monkeypatch.setattr(cuda_aware, "alloc_kinds", lambda: kinds)
    monkeypatch.setattr(cuda_aware, "trial", lambda: "a trial failed")
    monkeypatch.delenv("MPICOMP_CUDA_AWARE", raising=False)
    found = info.device()
    assert found["device"].startswith("staged")
    assert "MPIX_Query_cuda_support 0, mpi_memory_alloc_kinds " in found["CUDA"]
    follows = "passes device memory" if expected else "tries a device buffer first"
    assert follows in found["CUDA"]
    monkeypatch.setenv("MPICOMP_CUDA_AWARE", "1")
    assert info.device()["device"].startswith("direct" if expected else "cannot")


def gpu_evidence(*arguments, **how):
    script = TESTS.parent / "benchmarks" / "gpu_evidence.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, **how
    )


@ON_THE_STAND_IN
def test_no_evidence_is_written_where_there_is_no_gpu():
    done = gpu_evidence(timeout=60)
    assert done.returncode == 2
    assert "nothing was written" in done.stderr


@ON_THE_STAND_IN
def test_every_call_of_the_benchmark_on_a_gpu_can_be_measured(tmp_path):
    report = tmp_path / "calls.json"
    script = TESTS.parent / "benchmarks" / "gpu_calls.py"
    subprocess.run(
        [
            sys.executable,
            str(script),
            "--length=20000",
            "--repeats=1",
            "--json",
            str(report),
        ],
        env=os.environ | {"PYTHONPATH": f"{TESTS / 'fake_cupy'}:{TESTS}"},
        check=True,
        timeout=120,
    )
    rows = json.loads(report.read_text())
    errors = {row["name"]: row["error"] for row in rows if "error" in row}
    other_libraries = {
        "torch.topk of magnitudes",
        "cuda.compute.select of magnitudes",
    }
    assert errors.keys() <= other_libraries
    assert len(rows) > 30


@ON_THE_STAND_IN
def test_a_dry_run_of_the_evidence_writes_that_there_was_no_time(tmp_path):
    """Every part on the stand-in takes a minute: make test-cupy does that."""
    done = gpu_evidence(
        "--dry-run", "--folder", str(tmp_path), "--seconds", "1", timeout=60
    )
    assert done.returncode == 1, done.stderr
    (report,) = tmp_path.glob("*.json")
    written = json.loads(report.read_text())
    assert written["device"] == "fake device"
    assert {
        "tests",
        "calls 20000",
        "calls 10000",
        "step staged",
        "step direct",
        "PyTorch, staged",
        "selection 20000",
        "counters",
    } < written.keys()
    assert written["step staged"] == "no time left of 1.0 s"
