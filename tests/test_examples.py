"""The examples run on 2 ranks, check themselves, and leave the plot where they say."""

import os
import pathlib
import re
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
def test_numpy_digits(tmp_path, size):
    pytest.importorskip("sklearn")
    done = run(size, "numpy_digits.py", "--steps", "12", "--plot", "here.png", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok") == 5
    assert "plot: here.png" in done.stdout
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")


def test_numpy_digits_ends_with_status_1_when_a_claim_does_not_hold(tmp_path):
    pytest.importorskip("sklearn")
    done = run(2, "numpy_digits.py", "--steps", "1", "--assert-claims", cwd=tmp_path)
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


def checked(example, *arguments, size=2, cwd, checks):
    """Run an example, and return what it printed once as many checks hold as expected, and no other."""
    done = run(size, example, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout.count("check: "), done.stdout.count(": ok")) == (checks, checks), done.stdout
    return done.stdout


def test_torch_with_a_hook_of_ddp_and_without_ddp_ends_with_the_same_bits(tmp_path):
    """With unused parameters, uneven batches, and both; in two jobs that know nothing of each other."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    manual = checked("torch_manual.py", "--steps", "20", cwd=tmp_path, checks=12)
    hooked = checked("torch_ddp_hook.py", "--steps", "20", cwd=tmp_path, checks=14)
    digests = [re.findall(r"^(.*): parameters ([0-9a-f]{16}),", printed, re.MULTILINE) for printed in (manual, hooked)]
    assert digests[0] == digests[1]
    assert len({digest for _, digest in digests[0]}) == 4  # the cases are no copies of each other


def test_jax(tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("sklearn")
    checked("jax_digits.py", "--steps", "30", cwd=tmp_path, checks=3)


def test_sharded_optimizer(tmp_path):
    checked("sharded_optimizer.py", "--steps", "40", size=3, cwd=tmp_path, checks=5)


def test_embedding_rows(tmp_path):
    checked("embedding_rows.py", "--steps", "60", cwd=tmp_path, checks=4)


def test_an_example_that_has_not_learnt_ends_with_status_1(tmp_path):
    done = run(2, "embedding_rows.py", "--steps", "0", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"it learns.*: FAILED", done.stdout)
    assert done.stdout.count("FAILED") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_opens_with_its_run_line_and_stands_in_the_readme(path):
    words, blank, line, *_ = path.read_text().split("\n")
    assert words.startswith('"""')
    assert blank == ""
    assert re.fullmatch(rf" {{4}}(mpirun -n [2-4] python -m mpi4py|python) examples/{path.name}", line)
    assert line.strip() in (ROOT / "README.md").read_text()
