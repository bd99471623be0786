"""Scripts for torchrun, unmodified, under `python -m collectives.torch`: plain DDP, Accelerate, Lightning, a mesh."""

import pytest
from test_scripts import LAUNCHED, run

pytest.importorskip("torch", reason="needs PyTorch: make test-torch")

ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(accelerator.process_index)
network = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1))
for step in range(3):
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step()
weights = accelerator.gather(network.weight.detach()[None])
same = torch.equal(weights[0], weights[-1])
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: same {same}", flush=True)
"""

LIGHTNING = """
import pytorch_lightning as pl
import torch


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 4), 4))
weights = trainer.strategy.all_gather(module.layer.weight.detach())
same = torch.equal(weights[0], weights[-1])
print(f"rank {trainer.global_rank} of {trainer.world_size}: same {same}", flush=True)
"""

MESH = """# as torchtitan starts: the sizes from the environment, a device mesh, and errors recorded
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard


@record
def main():
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    dist.init_process_group("gloo")
    assert (rank, size, local) == (dist.get_rank(), dist.get_world_size(), rank)
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(4, 2), mesh=init_device_mesh("cpu", (size,)))
    model(torch.ones(8, 4)).square().mean().backward()
    same = bool(model.weight.grad.full_tensor().any())
    print(f"rank {rank} of {size}: same {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


WORKERS = """
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    seen = []
    for method in "spawn", "forkserver":
        loader = DataLoader(TensorDataset(torch.arange(4)), 4, num_workers=1, multiprocessing_context=method)
        seen += [batch.tolist() for (batch,) in loader]
    same = seen == 2 * [[0, 1, 2, 3]]
    print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: same {same}", flush=True)
"""


@pytest.mark.parametrize(
    ("needs", "script"),
    [
        ("torch", WORKERS),
        ("accelerate", ACCELERATE),
        ("pytorch_lightning", LIGHTNING),
        ("torch", MESH),
    ],
)
def test_a_script_for_torchrun_starts_unmodified(tmp_path, needs, script):
    pytest.importorskip(needs)
    (tmp_path / "train.py").write_text(script)
    done = run(LAUNCHED, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(
        line for line in done.stdout.splitlines() if line.startswith("rank")
    ) == [f"rank {rank} of 2: same True" for rank in (0, 1)]
