"""Train under DistributedDataParallel with DeMo's update: a few coefficients of each gradient, and a step by signs.

    mpirun -n 2 python -m mpi4py examples/torch_signs.py

The exchange transforms each gradient to the Hadamard basis, sends the 8 largest of
every 256 coefficients, keeps the others with a decay, and writes the signs of the mean
to `.grad`. So the optimiser is plain SGD with weight decay, without momentum and second
moments. Its rate is the length of the step of each parameter.

The rate has a cosine schedule. The residual was computed at the old rate: before each
step `exchange.rescale(old / new)` scales it to the new one. The data are the digits
that come with scikit-learn.

Needs torch and scikit-learn. It checks itself at the end and exits with status 1 when a
check fails.
"""

import argparse
import math
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores

from mpi4py import MPI

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[torch,examples]'")

from checks import verdict

from collectives import GradientExchange
from collectives.torch import attach, init_process_group
from mpicomp import ChunkedTopK, ErrorFeedback, Hadamard

# of SGD: the first rate, the last one, and the decay
RATE, LEAST, WEIGHT_DECAY = 2e-3, 2e-4, 0.01


def new_model():
    """Return a network with the same parameters on all ranks."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    return DistributedDataParallel(network)


def rate(step, steps):
    """Return the learning rate of a step."""
    return LEAST + (RATE - LEAST) * (1 + math.cos(math.pi * step / steps)) / 2


def backward(model, data, step, rank):
    """Compute the gradient of a batch of this rank, and exchange it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    chosen = torch.randint(len(data[0]), (32,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(data[0][chosen]), data[1][chosen]).backward()


def train_by_signs(comm, data, steps):
    """Return the model and its exchange after DeMo's steps, and whether every `.grad` had signs only."""
    model = new_model()
    exchange = GradientExchange(
        comm,
        ChunkedTopK(k=8, chunk=256),
        ErrorFeedback(decay=0.999),
        basis=Hadamard(chunk=256),
        average="sign",
    )
    attach(model, exchange)
    optimizer = torch.optim.SGD(model.parameters(), RATE, weight_decay=WEIGHT_DECAY)
    only_signs = True
    for step in range(steps):
        (group,) = optimizer.param_groups
        exchange.rescale(group["lr"] / rate(step, steps))
        group["lr"] = rate(step, steps)
        backward(model, data, step, comm.rank)
        only_signs &= all(
            bool((parameter.grad == parameter.grad.sign()).all())
            for parameter in model.parameters()
        )
        optimizer.step()
    return model, exchange, only_signs


def train_dense(comm, data, steps):
    """Return the model after steps of AdamW, whose gradients DistributedDataParallel averages densely."""
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=WEIGHT_DECAY)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, steps)
        backward(model, data, step, comm.rank)
        optimizer.step()
    return model


def load():
    """Return the images, in the range 0 to 1, and their labels; one image in five, the last ones, is for the test."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.data / 16, dtype=torch.float32),
        torch.tensor(digits.target),
    )
    first = len(images) * 4 // 5
    return (images[:first], labels[:first]), (images[first:], labels[first:])


def accuracy(model, test):
    """Return the fraction of the test images that are classified correctly."""
    with torch.no_grad():
        return float((model.module(test[0]).argmax(dim=1) == test[1]).float().mean())


def bits(model):
    """Return the parameters, as bytes."""
    return (
        torch.cat([each.detach().reshape(-1) for each in model.parameters()])
        .numpy()
        .tobytes()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=300, help="steps (default %(default)s)"
    )
    steps, comm = parser.parse_args().steps, MPI.COMM_WORLD
    torch.set_num_threads(1)
    init_process_group(comm)
    data, test = load()
    dense = train_dense(comm, data, steps)
    model, exchange, only_signs = train_by_signs(comm, data, steps)

    reached, share = (
        (accuracy(model, test), accuracy(dense, test)),
        exchange.statistics.density,
    )
    checks = {
        "the same bits on all ranks": len(set(comm.allgather(bits(model)))) == 1,
        "every mean was of signs": all(comm.allgather(only_signs)),
        f"accuracy {reached[0]:.1%}, dense AdamW {reached[1]:.1%}: at most 3 points behind": reached[
            0
        ]
        > reached[1] - 0.03,
        f"coefficients that a rank sent: {share:.1%}, at most 3.3 %": share <= 0.033,
    }
    if comm.rank == 0:
        print(exchange.report())
    dist.destroy_process_group()
    return verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
