"""The examples run on 2 ranks, check themselves, and leave the plot where they say."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LINES = (ROOT / "tests" / "openmpi.env").read_text().splitlines()
LAUNCH = {
    **dict(line.split("=") for line in LINES if not line.startswith("#")),
    "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def run(size, example, *arguments, cwd):
    command = ["mpirun", "-n", str(size), sys.executable, "-m", "mpi4py", str(ROOT / "examples" / example), *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **LAUNCH}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_train_digits(tmp_path, size):
    pytest.importorskip("sklearn")
    done = run(size, "train_digits.py", "--steps", "12", "--plot", "here.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 5
    assert "plot: here.png" in done.stdout
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")


def test_train_digits_ends_with_status_1_when_a_claim_does_not_hold(tmp_path):
    pytest.importorskip("sklearn")
    done = run(2, "train_digits.py", "--steps", "1", "--assert-claims", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "at least 2 points behind dense" in done.stdout
    assert "FAILED" in done.stdout


def test_least_squares():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "least_squares.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 4
