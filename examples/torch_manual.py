"""Train a PyTorch network on several ranks; gradients are sent during the backward pass.

    mpirun -n 2 python -m mpi4py examples/torch_manual.py

A hook on each parameter passes its gradient to the exchange as soon as it is available
(`start`). A full bucket is sent at once. After the backward pass `finish` waits for the
sums and writes the means over the gradients (`out=`). Three rules:

* order: `register` names the tensors once, in the order of the backward pass; all ranks
  send their buckets in that order;
* a parameter that a step did not use is not started on this rank, and counts as zero.
  Its mean need not be zero: other ranks may have used it, or an entry of its residual
  is sent. So every `.grad` is set to what `finish` returns;
* a rank that has no batch left calls `finish` alone, until the last rank has none.

The exchange compresses each large tensor on its own and sends the small ones dense, in
its own buckets. The result does not depend on when gradients become ready:
`collectives.torch.attach`, under DDP's own buckets, gives the same bits. The data are
the digits that come with scikit-learn.

Needs torch and scikit-learn. It checks itself at the end and exits with status 1 when a
check fails.
"""

import argparse
import hashlib
import os
import sys
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores

from mpi4py import MPI

try:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[torch,examples]'")

from checks import verdict

from collectives import GradientExchange, traffic
from mpicomp import TopK

BATCH, RATE = 32, 0.2


@dataclass(frozen=True)
class Case:
    """What differs between steps. skips: some leave the branch out. uneven: some ranks have fewer batches."""

    name: str
    skips: bool
    uneven: bool

    def batches(self, rank, steps):
        """Return how many batches a rank has: the last quarter of the steps is not for odd ranks, if uneven."""
        return steps - steps // 4 if self.uneven and rank % 2 else steps

    def takes_branch(self, rank, step):
        """Return whether a rank takes the branch in a step: on 2 ranks rank 0 alone, then none, then rank 1 alone."""
        return not self.skips or (step + rank) % 3 == 0


CASES = (
    Case("all parameters, even batches", skips=False, uneven=False),
    Case("unused parameters", skips=True, uneven=False),
    Case("uneven batches", skips=False, uneven=True),
    Case("unused parameters, uneven batches", skips=True, uneven=True),
)


class Network(nn.Module):
    """A multilayer perceptron with a branch that a step may leave out."""

    def __init__(self):
        super().__init__()
        self.body, self.branch, self.head = (
            nn.Linear(64, 256),
            nn.Linear(256, 256),
            nn.Linear(256, 10),
        )

    def forward(self, images, takes_branch=True):
        """Return the logits."""
        hidden = functional.relu(self.body(images))
        if takes_branch:
            hidden = hidden + functional.relu(self.branch(hidden))
        return self.head(hidden)


def load():
    """Return the images, in the range 0 to 1, and their labels; one image in five, the last ones, is for the test."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.data / 16, dtype=torch.float32),
        torch.tensor(digits.target),
    )
    first = len(images) * 4 // 5
    return (images[:first], labels[:first]), (images[first:], labels[first:])


def batch(data, rank, size, step):
    """Return a batch of this rank's share of the images; the same for the same step."""
    mine = torch.arange(rank, len(data[0]), size)
    chosen = mine[
        torch.randint(
            len(mine),
            (BATCH,),
            generator=torch.Generator().manual_seed(1000 * step + rank),
        )
    ]
    return data[0][chosen], data[1][chosen]


def loss_of(model, data, case, comm, step):
    """Return the loss of this rank's batch."""
    images, labels = batch(data, comm.rank, comm.size, step)
    return functional.cross_entropy(
        model(images, case.takes_branch(comm.rank, step)), labels
    )


def new_network():
    """Return a network with the same weights on every rank."""
    torch.manual_seed(0)
    return Network()


def new_exchange(model, comm):
    """Return an exchange in which the model's parameters are registered in backward order, the last ones first."""
    # a small model has several buckets
    exchange = GradientExchange(comm, TopK(density=0.02), bucket_nbytes=2**16)
    exchange.register(dict(reversed([*model.named_parameters()])))
    return exchange


def train(case, data, comm, steps):
    """Train from the initial weights of every case; return the network and the messages sent in backward passes."""
    model, early = new_network(), 0
    exchange, optimizer = (
        new_exchange(model, comm),
        torch.optim.SGD(model.parameters(), RATE),
    )
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: exchange.start(name, p.grad, out=p.grad)
        )
    for step in range(steps):
        optimizer.zero_grad()
        if step < case.batches(comm.rank, steps):
            loss = loss_of(model, data, case, comm, step)
            before = traffic(comm).messages
            loss.backward()
            early += traffic(comm).messages - before
        means = exchange.finish()
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
    return model, early


def digest(model):
    """Return a digest of the parameters' bits."""
    flat = torch.cat(
        [parameter.detach().reshape(-1) for parameter in model.parameters()]
    )
    return hashlib.sha256(flat.numpy()).hexdigest()[:16]


def accuracy(model, test):
    """Return the fraction of the test images that are classified correctly."""
    with torch.no_grad():
        return float((model(test[0]).argmax(dim=1) == test[1]).float().mean())


def outcomes(case, model, test, comm):
    """Print a line about a trained network, and yield its checks, as (text, whether it holds)."""
    mine, recognised = digest(model), accuracy(model, test)
    if comm.rank == 0:
        print(f"{case.name}: parameters {mine}, test accuracy {recognised:.1%}")
    yield (
        f"{case.name}: the same bits on all ranks",
        len(set(comm.allgather(mine))) == 1,
    )
    yield f"{case.name}: it learns", recognised > accuracy(new_network(), test) + 0.3


def main():
    comm, steps = MPI.COMM_WORLD, parse_arguments().steps
    torch.set_num_threads(1)
    (data, test), checks = load(), []
    for case in CASES:
        model, early = train(case, data, comm, steps)
        checks += outcomes(case, model, test, comm)
        checks += [
            (
                f"{case.name}: gradients were sent during the backward pass",
                early > 0 or comm.size == 1,
            )
        ]
    return verdict(dict(checks), comm)


def parse_arguments(words=__doc__):
    parser = argparse.ArgumentParser(description=words.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=60, help="steps in each case (default %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
