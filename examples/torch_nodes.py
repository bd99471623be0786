"""Local steps between nodes in PyTorch: FSDP2 or DDP average the ranks of a node in every step.

    mpirun -n 4 python -m mpi4py examples/torch_nodes.py

With FSDP2 the model is sharded over the ranks of a node, and each rank exchanges its
shard with the same rank of the other nodes: a node sends each parameter once. With DDP
each rank exchanges a share of the parameters, and passes it on to the ranks of its node.

A node is `--ranks-a-node` consecutive ranks: here two, to have two nodes on one machine;
on a cluster take the number of ranks that you start on each. The data are random. Needs
torch. It checks itself at the end and exits with status 1 when a check fails.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores

from mpi4py import MPI

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[torch,examples]'")

from checks import verdict

from collectives import GradientExchange, OuterLoop
from collectives.torch import init_process_group, outer_loop

EVERY = 10  # steps between two exchanges


def new_network():
    """Return a network with the same parameters on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def with_fsdp(comm, node_size, between):
    """Return a model that is sharded over the ranks of a node, and what follows each step."""
    shape = (comm.size // node_size, node_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "shard"))
    model = fully_shard(new_network(), mesh=mesh["shard"])
    outer = outer_loop(model, GradientExchange(between, bits=4), every=EVERY)
    return model, outer.step


def with_ddp(comm, node_size, between):
    """Return a model that DDP averages over the ranks of a node, and what follows each step."""
    inside, _ = dist.new_subgroups(node_size)
    model = DistributedDataParallel(new_network(), process_group=inside)
    parameters = list(model.module.parameters())
    mine = comm.rank % node_size
    own = {f"{i}": w for i, w in enumerate(parameters) if i % node_size == mine}
    outer = OuterLoop(GradientExchange(between, bits=4), own, every=EVERY)

    def after_step():
        if outer.step():
            for i, weight in enumerate(parameters):
                dist.broadcast(weight.data, group=inside, group_src=i % node_size)

    return model, after_step


def train(model, after_step, rank, steps):
    """Train on batches of this rank, and return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        images = torch.randn(32, 64, generator=generator)
        labels = images[:, :10].argmax(1)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return losses


def bits_of(model):
    """Return the bytes of all parameters; all ranks of a node call it."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return b"".join(each.numpy().tobytes() for each in state.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks-a-node", type=int, default=2)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    init_process_group(comm)
    between = comm.Split(comm.rank % options.ranks_a_node, comm.rank)
    checks = {}
    for way in (with_fsdp, with_ddp):
        model, after_step = way(comm, options.ranks_a_node, between)
        losses = train(model, after_step, comm.rank, options.steps)
        everyone = comm.allgather(bits_of(model))
        checks[f"{way.__name__}: all ranks have the same bits"] = len({*everyone}) == 1
        first = comm.allreduce(sum(losses[:5]))
        last = comm.allreduce(sum(losses[-5:]))
        checks[f"{way.__name__}: the loss falls by a fifth"] = last < 0.8 * first
    dist.destroy_process_group()
    return verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
