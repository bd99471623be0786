"""A script for torchrun: DDP, accumulation, bfloat16, clipping and a checkpoint."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
generator = torch.Generator().manual_seed(rank)
for _ in range(20):
    optimizer.zero_grad()
    for part in range(4):
        images = torch.randn(32, 64, generator=generator)
        model.require_backward_grad_sync = part == 3  # as no_sync() does
        with torch.autocast("cpu", torch.bfloat16):
            loss = (
                nn.functional.cross_entropy(model(images), images[:, :10].argmax(1)) / 4
            )
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
if rank == 0:
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "checkpoint.pt",
    )
print(f"rank {rank}: loss {loss.item():.3f}")
dist.destroy_process_group()
