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


def digest(printed):
    """Return the digest of the parameters at the end of a training."""
    (line,) = [line for line in printed.splitlines() if "parameters" in line]
    return line.split()[-1]


def train(*arguments, cwd, size=2):
    done = run(size, "checkpointed_training.py", "--steps", "12", *arguments, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def test_a_training_continues_bit_for_bit(tmp_path):
    whole = train("--folder", "whole", cwd=tmp_path)
    assert whole[0] == 0, whole
    status, printed, _ = train("--stop-after", "5", cwd=tmp_path)
    assert (status, printed.splitlines()[-1]) == (75, "step 5: saved, to be continued")
    # What a job that dies in a save leaves behind: files of a later step, not renamed. They are not looked at.
    partial = tmp_path / "checkpoints" / "partial"
    partial.mkdir()
    (partial / "rank-0-of-2.npz").write_bytes(b"half a fi")
    continued = train("--every", "4", cwd=tmp_path)
    assert continued[0] == 0, continued
    assert "step 5: taken up from checkpoints/step-00000005" in continued[1]
    assert continued[1].count("check: ") == continued[1].count(": ok") == 2
    assert digest(continued[1]) == digest(whole[1])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


def test_a_training_does_not_continue_what_is_another_one(tmp_path):
    assert train("--stop-after", "5", cwd=tmp_path)[0] == 75
    assert "is of another number of ranks than 1" in train(cwd=tmp_path, size=1)[2]
    assert "trained with --seed 0: expected 1" in train("--seed", "1", cwd=tmp_path)[2]
