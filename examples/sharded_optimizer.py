"""Train with an optimiser whose state is sharded over the ranks, as in ZeRO: a sparse reduce-scatter feeds Adam.

    mpirun -n 4 python -m mpi4py examples/sharded_optimizer.py

A step: each rank compresses its gradient, and keeps the entries not sent (error
feedback by hand: residual -= sent). `sparse_reduce_scatter` returns the sum on the
rank's own range of indices. Adam, which has moments for that range only, updates this
share of the parameters; an allgather joins the shares. For comparison a replicated
Adam, with all moments on every rank, takes the result of `sparse_allreduce`: the
parameters must be bitwise equal.

The task is softmax regression on synthetic data, in plain NumPy. S. Rajbhandari et al.,
"ZeRO: Memory optimizations toward training trillion parameter models", SC 2020 (arXiv
1910.02054).

It checks itself at the end and exits with status 1 when a check fails.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from checks import verdict
from mpi4py import MPI

from collectives import sparse_allreduce, sparse_reduce_scatter, traffic
from mpicomp import TopK

FEATURES, CLASSES, ROWS, BATCH = 300, 10, 1000, 50
LENGTH = FEATURES * CLASSES


class Task:
    """Softmax regression on different rows on each rank; hidden weights, the same on all ranks, define the classes."""

    def __init__(self, rank):
        hidden = np.random.default_rng(0).standard_normal(
            (FEATURES, CLASSES), np.float32
        )
        self.rng = np.random.default_rng([1, rank])
        self.rows = self.rng.standard_normal((ROWS, FEATURES), np.float32)
        self.labels = (self.rows @ hidden).argmax(axis=1)

    def gradient(self, parameters):
        """Return the gradient of the mean cross entropy on a batch, flat as the parameters."""
        chosen = self.rng.integers(ROWS, size=BATCH)
        delta = softmax(self.rows[chosen] @ parameters.reshape(FEATURES, CLASSES))
        delta[np.arange(BATCH), self.labels[chosen]] -= 1
        return (self.rows[chosen].T @ delta / np.float32(BATCH)).reshape(-1)

    def loss(self, parameters):
        """Return the mean cross entropy on all rows of this rank."""
        chances = softmax(self.rows @ parameters.reshape(FEATURES, CLASSES))
        return float(-np.log(chances[np.arange(ROWS), self.labels] + 1e-30).mean())


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


class Adam:
    """Adam for the parameters first, ..., end - 1: its two moments have that length. D. Kingma, J. Ba, ICLR 2015."""

    RATE, FIRST, SECOND, EPSILON = (
        np.float32(0.01),
        np.float32(0.9),
        np.float32(0.999),
        np.float32(1e-8),
    )

    def __init__(self, first, end):
        self.first, self.end, self.steps = first, end, 0
        self.mean, self.square = (
            np.zeros(end - first, np.float32),
            np.zeros(end - first, np.float32),
        )

    @property
    def nbytes(self):
        """Bytes of the state."""
        return self.mean.nbytes + self.square.nbytes

    def update(self, parameters, gradient):
        """Update this range of the parameters, in place. gradient: a SparseVector with no entry outside the range."""
        dense = np.zeros(self.end - self.first, np.float32)
        dense[gradient.indices - self.first] = gradient.values
        self.steps += 1
        self.mean += (1 - self.FIRST) * (dense - self.mean)
        self.square += (1 - self.SECOND) * (dense * dense - self.square)
        mean, square = (
            moment / (1 - decay**self.steps)
            for moment, decay in ((self.mean, self.FIRST), (self.square, self.SECOND))
        )
        parameters[self.first : self.end] -= (
            self.RATE * mean / (np.sqrt(square) + self.EPSILON)
        )


class Compressed:
    """The largest entries of gradient + residual; the others stay in the residual."""

    def __init__(self, length, density):
        self.compressor, self.residual = (
            TopK(density=density),
            np.zeros(length, np.float32),
        )

    def __call__(self, gradient):
        """Return the entries to send."""
        self.residual += gradient
        sent = self.compressor.compress(self.residual)
        self.residual[sent.indices] -= sent.values
        return sent


def train(task, comm, steps, density):
    """Train with a sharded and a replicated Adam on the same gradients; return both parameters and both states."""
    bounds = [LENGTH * rank // comm.size for rank in range(comm.size + 1)]
    first, end = bounds[comm.rank : comm.rank + 2]
    sharded, replicated = np.zeros(LENGTH, np.float32), np.zeros(LENGTH, np.float32)
    share_adam, whole_adam = Adam(first, end), Adam(0, LENGTH)
    compressed, size, sent_bytes = Compressed(LENGTH, density), np.float32(comm.size), 0
    for _ in range(steps):
        # so that the sum over the ranks is the mean
        sent = compressed(task.gradient(sharded) / size)
        before = traffic(comm).nbytes
        share = sparse_reduce_scatter(sent, comm, partition=bounds)
        sent_bytes += traffic(comm).nbytes - before
        share_adam.update(sharded, share)
        comm.Allgatherv(
            MPI.IN_PLACE, [sharded, np.diff(bounds), bounds[:-1], MPI.FLOAT]
        )
        # Adds in rank order, as the owner of a range does.
        whole_adam.update(
            replicated, sparse_allreduce(sent, comm, algorithm="allgather")
        )
    return sharded, replicated, share_adam, whole_adam, sent_bytes / max(steps, 1)


def main():
    options, comm = parse_arguments(), MPI.COMM_WORLD
    task = Task(comm.rank)
    sharded, replicated, share, whole, nbytes = train(
        task, comm, options.steps, options.density
    )
    before, after = (
        comm.allreduce(task.loss(each)) / comm.size
        for each in (np.zeros_like(sharded), sharded)
    )
    dense = 4 * LENGTH * (comm.size - 1) / comm.size
    largest = max(comm.allgather(nbytes))
    checks = {
        "sharded and replicated Adam: the same parameter bits": sharded.tobytes()
        == replicated.tobytes(),
        "all ranks: the same parameter bits": len(
            set(comm.allgather(sharded.tobytes()))
        )
        == 1,
        f"a rank keeps 1/{comm.size} of the state ({share.nbytes} of {whole.nbytes} bytes)": (
            # ranges differ by one parameter at most
            share.nbytes <= whole.nbytes / comm.size + 8
        ),
        f"a rank sends fewer bytes than a dense reduce-scatter ({largest:,.0f} and {dense:,.0f} a step)": (
            largest < dense or comm.size == 1
        ),
        f"it learns (loss {before:.3f} before, {after:.3f} after)": after
        < 0.8 * before,
    }
    return verdict(checks, comm)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of Adam (default %(default)s)"
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.02,
        help="of what is sent (default %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
