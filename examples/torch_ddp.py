"""Train under PyTorch's DistributedDataParallel with compressed gradients, stop, and continue from a checkpoint.

    mpirun -n 2 python -m mpi4py examples/torch_ddp.py

Compression takes one line: `attach` replaces DDP's allreduce by an exchange. Gradients
are accumulated over two batches, clipped on each rank before they are compressed, and
the residuals are saved beside the model, on each rank its own. The data are the digits
that come with scikit-learn.

Needs torch and scikit-learn. It checks itself at the end and exits with status 1 when a
check fails.
"""

import argparse
import io
import os
import sys
from contextlib import nullcontext

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
from mpicomp import TopK


class Training:
    """A model on all ranks, its optimiser, and the handle of its compressed gradients."""

    def __init__(self, comm):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 10),
        )
        self.rank, self.model = comm.rank, DistributedDataParallel(network)
        self.exchange = GradientExchange(comm, TopK(density=0.05))
        self.handle = attach(self.model, self.exchange, clip=1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.2)

    def run(self, data, steps):
        """Take some steps, of two batches each."""
        for step in steps:
            self.optimizer.zero_grad()
            for part in (0, 1):
                generator = torch.Generator().manual_seed(
                    10_000 * step + 10 * self.rank + part
                )
                chosen = torch.randint(len(data[0]), (16,), generator=generator)
                with self.model.no_sync() if part == 0 else nullcontext():
                    loss = (
                        nn.functional.cross_entropy(
                            self.model(data[0][chosen]), data[1][chosen]
                        )
                        / 2
                    )
                    loss.backward()
            self.optimizer.step()

    def save(self):
        """Return a checkpoint of this rank, as bytes."""
        file = io.BytesIO()
        torch.save(
            {"model": self.model.state_dict(), "exchange": self.handle.state_dict()},
            file,
        )
        return file.getvalue()

    def load(self, checkpoint):
        """Load a checkpoint."""
        state = torch.load(io.BytesIO(checkpoint))
        self.model.load_state_dict(state["model"])
        self.handle.load_state_dict(state["exchange"])

    @property
    def bits(self):
        """The parameters, as bytes."""
        return (
            torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])
            .numpy()
            .tobytes()
        )


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
        return float((model(test[0]).argmax(dim=1) == test[1]).float().mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=100, help="steps (default %(default)s)"
    )
    steps, comm = parser.parse_args().steps, MPI.COMM_WORLD
    torch.set_num_threads(1)
    init_process_group(comm)
    data, test = load()

    training = Training(comm)
    before = accuracy(training.model.module, test)
    training.run(data, range(steps // 2))
    checkpoint = training.save()
    training.run(data, range(steps // 2, steps))
    resumed = Training(comm)
    resumed.load(checkpoint)
    resumed.run(data, range(steps // 2, steps))

    after = accuracy(training.model.module, test)
    checks = {
        "the same bits on all ranks": len(set(comm.allgather(training.bits))) == 1,
        "the resumed run ends with the same bits": all(
            comm.allgather(resumed.bits == training.bits)
        ),
        "it learns": after > before + 0.3,
    }
    if comm.rank == 0:
        print(
            f"test accuracy {before:.1%} before, {after:.1%} after\n{training.exchange.report()}"
        )
    dist.destroy_process_group()
    return verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
