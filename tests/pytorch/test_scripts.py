"""Scripts with PyTorch, in processes of their own: the page's, with and without compression, and one under torchrun."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs PyTorch: make test-torch")


ROOT = pathlib.Path(__file__).parent.parent.parent
LINES = (ROOT / "tests" / "openmpi.env").read_text().splitlines()
LAUNCH = dict(line.split("=") for line in LINES if not line.startswith("#"))
MPIRUN = ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py", "train.py"]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "train.py"]


def run(command, folder):
    environment = {**os.environ, **LAUNCH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def blocks(text):
    """Return the Python of a text."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def page():
    """Return the script of docs/frameworks.md, the same with compression, and how many lines that is more."""
    (script,) = (found for found in blocks(PAGE) if "GradScaler" in found)
    (changes,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    changed = script
    for hunk in changes.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        assert changed.count(before) == 1, before
        changed = changed.replace(before, "".join(line[1:] for line in lines if line[0] in " +"))
    return script, changed, changed.count("\n") - script.count("\n")


def losses(done):
    assert done.returncode == 0, done.stdout + done.stderr
    found = {rank: float(loss) for rank, loss in re.findall(r"rank (\d): loss ([\d.]+)", done.stdout)}
    assert found.keys() == {"0", "1"}
    return found["0"]


def test_the_script_of_the_page_runs_compressed_and_resumes(tmp_path):
    (tmp_path / "train.py").write_text(page()[1])
    first = losses(run(MPIRUN, tmp_path))
    assert {path.name for path in tmp_path.glob("*.pt")} == {"checkpoint.pt", "exchange-0.pt", "exchange-1.pt"}
    assert losses(run(MPIRUN, tmp_path)) < first


def test_the_script_of_the_page_runs_without_compression(tmp_path):
    script, _, more = page()
    assert more <= 8
    (tmp_path / "train.py").write_text(script)
    losses(run(TORCHRUN, tmp_path))


def test_each_way_of_the_page_to_use_pytorch_runs(tmp_path):
    """The first block is common to the others, which are alternatives: one process runs them one after the other."""
    found = blocks(PAGE.partition("## PyTorch in one line\n")[2].partition("\n### ")[0])
    assert len(found) == 4
    (tmp_path / "train.py").write_text("".join(found))
    done = run([*MPIRUN[:2], "4", *MPIRUN[3:]], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


WRAPPERS = """
import pytorch_lightning as pl
import torch
from accelerate import Accelerator
from mpi4py import MPI
from pytorch_lightning.plugins.environments import MPIEnvironment

from collectives import GradientExchange
from collectives.torch import attach, init_process_group
from mpicomp import TopK

comm = MPI.COMM_WORLD
network = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(network.parameters(), 0.1)
exchange = GradientExchange(comm, TopK(0.5), small=0)
{block}
model(torch.ones(3, 4)).sum().backward()
print(f"steps: {{exchange.steps}}")
"""


def test_the_model_that_accelerate_wraps_is_exchanged(tmp_path):
    """The block for Lightning makes a trainer, which is not run."""
    pytest.importorskip("accelerate")
    pytest.importorskip("pytorch_lightning")
    (block,) = (found for found in blocks(PAGE) if "Accelerator(" in found)
    (tmp_path / "train.py").write_text(WRAPPERS.format(block=block))
    done = run(MPIRUN, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("steps: 1") == 2


def test_under_torchrun_it_says_how_to_start(tmp_path):
    (tmp_path / "train.py").write_text(
        "from mpi4py import MPI\nfrom collectives.torch import init_process_group\ninit_process_group(MPI.COMM_WORLD)\n"
    )
    done = run(TORCHRUN, tmp_path)
    assert done.returncode != 0
    assert "torchrun says WORLD_SIZE=2, and MPI sees 1" in done.stderr
    assert "start with: mpirun -n 2 python -m collectives.torch train.py" in done.stderr
