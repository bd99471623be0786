"""Train with local steps in PyTorch: every rank trains a plain module, and the ranks exchange their progress.

    mpirun -n 4 python -m mpi4py examples/torch_local_steps.py

There is no DistributedDataParallel and no process group of torch: each rank takes ten
steps of Muon and AdamW on its own data, then `OuterLoop` exchanges the change of its
parameters, 4 bits of every value. AdamW with a dense allreduce of every gradient is the
baseline. A checkpoint is the anchor, the model that is the same on all ranks. Muon is
PyTorch's, or on a processor without bfloat16 that of muon.py beside this file.

The data are the digits that come with scikit-learn. Needs torch 2.9 and scikit-learn.
It checks itself at the end and exits with status 1 when a check fails.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores

from mpi4py import MPI

try:
    import torch
    from muon import new_muon
    from sklearn.datasets import load_digits
    from torch import nn
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[torch,examples]'")

from checks import verdict

from collectives import GradientExchange, dense_allreduce, traffic
from collectives.torch import outer_loop

EVERY = 10  # steps between two exchanges


def new_network():
    """Return a network with the same parameters on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def muon_and_adamw(network, rate):
    """Return Muon for the matrices between the first and the last layer, and AdamW for all other parameters."""
    _, *hidden, _ = (each for each in network.parameters() if each.ndim == 2)
    others = [
        each
        for each in network.parameters()
        if all(each is not weight for weight in hidden)
    ]
    # AdamW's rates fit
    return new_muon(hidden, rate), torch.optim.AdamW(others, rate)


def progress(comm, method, step, steps):
    """Print every fiftieth step on rank 0."""
    if comm.rank == 0 and (step + 1) % 50 == 0:
        print(f"{method}: step {step + 1} of {steps}", flush=True)


def backward(network, data, step, rank):
    """Compute the gradient of a batch of this rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    chosen = torch.randint(len(data[0]), (16,), generator=generator)
    network.zero_grad()
    nn.functional.cross_entropy(network(data[0][chosen]), data[1][chosen]).backward()


def train_with_local_steps(comm, data, steps):
    """Return the loop and the network after steps of Muon and AdamW on each rank."""
    network = new_network()
    optimizers = muon_and_adamw(network, 4e-3)
    outer = outer_loop(network, GradientExchange(comm, bits=4), every=EVERY)
    for step in range(steps):
        backward(network, data, step, comm.rank)
        for optimizer in optimizers:
            optimizer.step()
        outer.step()
        progress(comm, "local steps of Muon", step, steps)
    return outer, network


def train_dense(comm, data, steps):
    """Return the network after steps of AdamW on the mean gradient of all ranks."""
    network = new_network()
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    for step in range(steps):
        backward(network, data, step, comm.rank)
        for parameter in network.parameters():
            parameter.grad = dense_allreduce(parameter.grad, comm) / comm.size
        optimizer.step()
        progress(comm, "dense AdamW", step, steps)
    return network


def load(comm):
    """Return this rank's share of the images and labels, and those of the test."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.data / 16, dtype=torch.float32),
        torch.tensor(digits.target),
    )
    first = len(images) * 4 // 5
    return (
        images[:first][comm.rank :: comm.size],
        labels[:first][comm.rank :: comm.size],
    ), (
        images[first:],
        labels[first:],
    )


def accuracy(network, test):
    """Return the fraction of the test images that are classified correctly."""
    with torch.no_grad():
        return float((network(test[0]).argmax(dim=1) == test[1]).float().mean())


def restored(anchor):
    """Return a network with the parameters of a checkpoint."""
    network = new_network()
    network.load_state_dict(
        {name: torch.tensor(array) for name, array in anchor.items()}
    )
    return network


def bits(network):
    return (
        torch.cat([each.detach().reshape(-1) for each in network.parameters()])
        .numpy()
        .tobytes()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=200, help="of each rank (default %(default)s)"
    )
    steps, comm = parser.parse_args().steps // EVERY * EVERY, MPI.COMM_WORLD
    torch.set_num_threads(1)
    data, test = load(comm)
    sent = [traffic(comm).nbytes]
    dense = train_dense(comm, data, steps)
    sent.append(traffic(comm).nbytes)
    outer, network = train_with_local_steps(comm, data, steps)
    sent.append(traffic(comm).nbytes)

    reached = accuracy(network, test), accuracy(dense, test)
    share = max(comm.allgather((sent[2] - sent[1]) / max(1, sent[1] - sent[0])))
    checks = {
        "after a round all ranks have the same parameter bits": len(
            set(comm.allgather(bits(network)))
        )
        == 1,
        "the anchor is the model of a checkpoint": bits(restored(outer.anchor))
        == bits(network),
        f"accuracy {reached[0]:.1%}, dense {reached[1]:.1%}: at most 4 points behind": reached[
            0
        ]
        > reached[1] - 0.04,
        f"bytes that a rank sends: {share:.2%} of dense, at most 2 %": share <= 0.02,
    }
    if comm.rank == 0:
        print(outer.exchange.report())
    return verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
