"""The cost of the first step: functions that a method compiles, and the folder that `mpicomp warm` fills."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# functions that the first step compiles, parts of kernels and Numba's own among them: one
# more takes 0.05 to 0.5 s on each new machine
MOST = {
    "few-bits-4": 14,
    "few-bits-2": 17,
    "topk": 14,
    "in-basis": 25,
    "local-sparse": 24,
    "sidco": 19,
    "adacomp": 16,
}


@pytest.fixture
def cold(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "cold.py"))


@pytest.mark.parametrize(
    "name",
    [
        name if name == "few-bits-4" else pytest.param(name, marks=pytest.mark.slow)
        for name in MOST
    ],
)
def test_a_first_step_compiles_few_functions(cold, name, tmp_path):
    assert 0 < cold["in_new_process"]([name], str(tmp_path))["functions"] <= MOST[name]


def warmed(folder, **variables):
    command = [sys.executable, "-m", "mpicomp_bench", "warm", *folder]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, **variables},
    )


def test_warm_refuses_a_folder_that_cannot_be_made(tmp_path):
    file = tmp_path / "file"
    file.touch()
    done = warmed([file / "folder"])
    assert done.returncode == 1
    assert "the kernels are not kept: name a writable folder" in done.stdout


FULL = """
import resource
import sys

import numpy as np
from mpicomp.kernels import host
from mpicomp_bench import main, warm

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
warm.FIRST_STEPS = ()
warm.sums_of_ranks = lambda: host.consecutive(0, 10, np.int32)
sys.exit(main(["warm"]))
"""


def test_warm_returns_1_for_a_folder_that_is_full(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 1, done.stderr
    assert "kernels are not kept, as Numba cannot write" in done.stdout
    assert "make room there, or name another folder" in done.stdout


def files(folder):
    return sorted(path.name for path in folder.rglob("*.nbc"))


@pytest.mark.slow
def test_a_warm_folder_has_the_kernels_of_all_steps(cold, tmp_path):
    done = warmed([tmp_path], NUMBA_CACHE_DIR="/nowhere/else")
    assert done.returncode == 0, done.stderr
    assert f"set NUMBA_CACHE_DIR={tmp_path} on the nodes" in done.stdout
    before = files(tmp_path)
    cold["in_new_process"](cold["FIRST_STEPS"], str(tmp_path))
    assert files(tmp_path) == before
