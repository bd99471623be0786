"""Scripts with PyTorch, in processes of their own: the page's, with and without compression, and one under torchrun."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from jobs import ROOT, environment

pytest.importorskip("torch", reason="needs PyTorch: make test-torch")

MPIRUN = ["mpirun", "-n", "2", sys.executable, "-m", "mpi4py", "train.py"]
LAUNCHED = ["mpirun", "-n", "2", sys.executable, "-m", "collectives.torch", "train.py"]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc_per_node",
    "2",
    "train.py",
]


def run(command, folder):
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def blocks(text):
    """Return the Python of a text."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def losses(done):
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        rank: float(loss)
        for rank, loss in re.findall(r"rank (\d): loss ([\d.]+)", done.stdout)
    }
    assert found.keys() == {"0", "1"}
    return found["0"]


@pytest.mark.parametrize("launch", [TORCHRUN, LAUNCHED], ids=["torchrun", "mpirun"])
def test_a_script_runs_with_another_launch_line_only(tmp_path, launch):
    shutil.copy(ROOT / "tests" / "pytorch" / "ddp_script.py", tmp_path / "train.py")
    first = losses(run(launch, tmp_path))
    assert losses(run(launch, tmp_path)) < first  # from its checkpoint


def test_the_complete_training_resumes_from_its_checkpoints(tmp_path):
    """With float16, accumulation, clipping, a schedule and EMA; bitwise, which it checks itself."""
    script = [*LAUNCHED[:-1], ROOT / "examples" / "torch_complete.py", "--every", "10"]
    for steps, began in ("20", 0), ("30", 20):
        done = run([*script, "--steps", steps], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"steps {began} to {steps}, " in done.stdout
        assert done.stdout.count(": ok") == 3
    again = run([*script, "--steps", "30"], tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "all 30 steps were taken before" in again.stdout


WRAPPED = """
import torch
from accelerate import Accelerator
from mpi4py import MPI

from collectives import GradientExchange
from collectives.torch import attach
from mpicomp import TopK

network = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(network.parameters(), 0.1)
exchange = GradientExchange(MPI.COMM_WORLD, TopK(0.5), small=0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer = accelerator.prepare(network, optimizer)
{line}
model(torch.ones(3, 4)).sum().backward()
print(f"steps: {{exchange.steps}}")
"""


def test_the_model_that_accelerate_wraps_is_exchanged(tmp_path):
    pytest.importorskip("accelerate")
    line = "attach(model, exchange, scaler=accelerator.scaler)"
    assert f"`{line}`" in PAGE
    (tmp_path / "train.py").write_text(WRAPPED.format(line=line))
    done = run(LAUNCHED, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("steps: 1") == 2


def test_the_blocks_of_pytorch_run_as_they_are_copied(tmp_path):
    """One after the other, in one process of each of four ranks."""
    assert run_as_copied(tmp_path, "frameworks.md").count("steps: 2") == 4


def run_as_copied(folder, name, ranks="4"):
    """Run the blocks of a page one after the other, with nothing else, and return what they print."""
    shutil.copy(ROOT / "examples" / "muon.py", folder)
    page = (ROOT / "docs" / name).read_text()
    (folder / "train.py").write_text("\n".join(blocks(page)))
    done = run([*LAUNCHED[:2], ranks, *LAUNCHED[3:]], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_lines_to_take_over_slow_links_train(tmp_path):
    said = run_as_copied(tmp_path, "slow_links.md")
    assert len(set(re.findall(r"rank \d: loss [\d.]+, 2 outer steps", said))) == 4
    assert len(re.findall(r"rank \d: loss [\d.]+$", said, re.MULTILINE)) == 4


def test_fewer_bits_train_in_local_steps_as_well(tmp_path):
    local, entries, _ = blocks((ROOT / "docs" / "slow_links.md").read_text())
    shutil.copy(ROOT / "examples" / "muon.py", tmp_path)
    exchange = "exchange = GradientExchange(comm, bits=4)\n"
    assert exchange in local
    (tmp_path / "train.py").write_text(local.replace(exchange, entries))
    done = run(LAUNCHED, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 outer steps") == 2


REPORT = """
import atexit

import torch.distributed as dist
from mpi4py import MPI


@atexit.register
def report():
    print(f"group {dist.is_initialized()}, MPI {not MPI.Is_finalized()}", flush=True)
"""
LEFT = """
import sys

import report  # at the end of the interpreter
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4)).sum().backward()
"""


@pytest.mark.parametrize("end", ["", "sys.exit()"])
def test_a_process_group_that_is_left_is_destroyed_before_the_interpreter_and_mpi_end(
    tmp_path, end
):
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "train.py").write_text(LEFT + end)
    done = run(LAUNCHED, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("group False, MPI True") == 2, done.stdout


ALONE = """
import torch
from mpi4py import MPI

from collectives import GradientExchange
from collectives.torch import outer_loop

outer_loop(torch.nn.Linear(4, 2), GradientExchange(MPI.COMM_WORLD, bits=4))
"""


def test_local_steps_of_one_rank_say_how_to_start_several(tmp_path):
    (tmp_path / "train.py").write_text(ALONE)
    done = run([sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "MPI has one rank, and nothing is exchanged: start with mpirun" in done.stderr
    )


def test_under_torchrun_it_says_how_to_start(tmp_path):
    (tmp_path / "train.py").write_text(
        "from mpi4py import MPI\nfrom collectives.torch import init_process_group\ninit_process_group(MPI.COMM_WORLD)\n"
    )
    done = run(TORCHRUN, tmp_path)
    assert done.returncode != 0
    assert "torchrun says WORLD_SIZE=2, and MPI sees 1" in done.stderr
    assert "start with: mpirun -n 2 python -m collectives.torch train.py" in done.stderr


def test_our_lines_for_those_who_come_from_another_library_run(tmp_path):
    said = run_as_copied(tmp_path, "coming_from.md")
    assert said.count("steps: 1") == 4


FIT = """
import pytorch_lightning as pl
import torch
from mpi4py import MPI

from collectives import GradientExchange
from collectives.torch import attach
from mpicomp import TopK

comm = MPI.COMM_WORLD
exchange = GradientExchange(comm, TopK(0.5), small=0)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)


class Compressed(pl.Callback):
    def on_train_start(self, trainer, module):
        {line}


trainer = pl.Trainer(devices=comm.size, strategy="ddp", callbacks=[Compressed()])
module = Module()
trainer.fit_loop.max_epochs = 1
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 4), 4))
bits = module.layer.weight.detach().numpy().tobytes()
print(f"steps: {{exchange.steps}}, same bits: {{len(set(comm.allgather(bits))) == 1}}", flush=True)
"""


def test_lightning_trains_with_the_callback_of_the_page(tmp_path):
    pytest.importorskip("pytorch_lightning")
    line = "attach(trainer.strategy.model, exchange)"
    assert f"`{line}`" in PAGE
    (tmp_path / "train.py").write_text(FIT.format(line=line))
    done = run(LAUNCHED, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("steps: 4, same bits: True") == 2, done.stdout


ENDS = """
import sys

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import GradientExchange
from collectives.torch import attach, init_process_group

comm, case = MPI.COMM_WORLD, {case!r}
if not torch.distributed.is_initialized():
    init_process_group(comm)
settings = {{"static_graph": True}} if case == "static graph" else {{}}
settings |= {{"find_unused_parameters": True}} if case == "replaced" else {{}}
model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3000)), **settings)
attach(model, GradientExchange(comm, bits=4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
inputs = torch.ones(5, 4)


def fail(*_):
    raise MemoryError("no room")


for step in range(4):
    if comm.rank == 0 and step == (0 if case == "static graph" else 2):
        if case == "before the forward pass":
            fail()
        if case in ("backward pass", "static graph"):
            model.module[1].weight.register_hook(fail)
        if case == "replaced":
            model.load_state_dict({{name: each.clone() for name, each in model.state_dict().items()}}, assign=True)
        if case == "step of the optimiser":
            optimizer.step = fail
    loss = model(inputs).sum()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("case", "launch"),
    [
        ("before the forward pass", MPIRUN),
        ("backward pass", MPIRUN),
        ("static graph", MPIRUN),
        ("replaced", MPIRUN),
        ("step of the optimiser", LAUNCHED),
        ("backward pass", LAUNCHED),
    ],
)
def test_an_error_that_is_not_caught_ends_the_job_without_a_deadline(
    tmp_path, case, launch
):
    """Wherever the other rank waits: in the exchange, in DDP's sums, or in its broadcast of buffers."""
    script = ENDS.format(case=case)
    if launch is LAUNCHED:
        script = (
            "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
            + script
        )
    (tmp_path / "train.py").write_text(script)
    done = run(launch, tmp_path)
    assert done.returncode != 0
    words = "replaced are" if case == "replaced" else "MemoryError: no room"
    assert words in done.stderr


def test_steps_by_name_and_in_ddp_are_timed_beside_those_of_one_vector(tmp_path):
    script = ROOT / "benchmarks" / "few_bits.py"
    options = ["--hook", "gpt", "--repeats", "1", "--json", "rows.json"]
    done = run([*MPIRUN[:-1], str(script), *options], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["name"]: row["seconds"] for row in found["rows"]}
    assert len(rows) == len(done.stdout.splitlines()) - 1 == 7
    hook = rows["DDP, 4 bits in its hook"] - rows["DDP, its hook empty"]
    assert rows["the hook: DDP with it, less DDP"] == pytest.approx(hook)
    assert found["ranks"] == 2
