"""Train an embedding data-parallel: a plan sends the rows of the tokens that some rank saw, and no others.

    mpirun -n 4 python -m mpi4py examples/embedding_rows.py

Each token has a row of 16 numbers in one table and a weight in another; the score of a
text is the sum of its tokens' weights plus the product of the sum of their rows with a
vector. A batch has gradients for its own tokens alone. `SparseVector.from_entries` adds
up those of repeated tokens, `SupportPlan.union` agrees on the tokens of all ranks'
batches, and then both tables are summed by the same plan: only values are sent. No
entry is dropped, so no error feedback is needed.

The bytes are compared with those of a dense allreduce of both tables, and of
`sparse_allreduce`, which needs no plan. With a plan each rank sends rows for the tokens
of all ranks: that saves bytes if the ranks have nearly the same tokens, or the same
ones for many sums. Here they change with every batch, and `sparse_allreduce` sends
fewer bytes.

Synthetic data, plain NumPy. It checks itself at the end and exits with status 1 when a
check fails.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from checks import verdict
from mpi4py import MPI

from collectives import SupportPlan, dense_allreduce, sparse_allreduce, traffic
from mpicomp import SparseVector

VOCABULARY, WIDTH, TEXTS, WORDS, RATE = 20_000, 16, 32, 8, 0.5


class Model:
    """A table of rows, a table of weights, and the vector that rows are multiplied with."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.rows = 0.1 * rng.standard_normal((VOCABULARY, WIDTH), np.float32)
        self.weights = np.zeros(VOCABULARY, np.float32)
        self.vector = rng.standard_normal(WIDTH, np.float32)

    def chances(self, texts):
        """Return the probability of class 1 for each text; texts: an array of tokens of shape (texts, words)."""
        scores = (
            self.weights[texts].sum(axis=1) + self.rows[texts].sum(axis=1) @ self.vector
        )
        return 1 / (1 + np.exp(-scores))

    def gradients(self, texts, labels):
        """Return the gradients of the mean cross entropy: rows, weights (both sparse) and vector (dense)."""
        delta = (self.chances(texts) - labels).astype(np.float32) / np.float32(
            len(texts)
        )
        # of each token, in the order of texts.reshape(-1)
        each = np.repeat(delta, texts.shape[1])
        rows = SparseVector.from_entries(
            texts.reshape(-1), np.outer(each, self.vector), VOCABULARY
        )
        weights = SparseVector.from_entries(texts.reshape(-1), each, VOCABULARY)
        return rows, weights, delta @ self.rows[texts].sum(axis=1)

    def descend(self, plan, rows, weights, vector):
        """Take a step of SGD; rows, weights: the mean gradients at the plan's indices."""
        self.rows[plan.indices] -= np.float32(RATE) * rows
        self.weights[plan.indices] -= np.float32(RATE) * weights
        self.vector -= np.float32(RATE) * vector

    def bits(self):
        """Return the bytes of all parameters."""
        return self.rows.tobytes() + self.weights.tobytes() + self.vector.tobytes()


class Texts:
    """Texts whose tokens follow Zipf's law, as words do; half of the tokens indicate class 1, half class 0."""

    def __init__(self, seed):
        self.rng = np.random.default_rng([1, seed])
        self.opinions = np.random.default_rng(2).choice([-1, 1], VOCABULARY)
        frequencies = 1 / np.arange(1, VOCABULARY + 1)
        self.frequencies = frequencies / frequencies.sum()

    def batch(self, count):
        """Return tokens of shape (count, WORDS), and labels."""
        tokens = self.rng.choice(VOCABULARY, (count, WORDS), p=self.frequencies)
        return tokens, (self.opinions[tokens].sum(axis=1) > 0).astype(np.float32)


def laid_out(plan, vector):
    """Return a vector's values at the plan's indices, which include all of its own; zero where it has no entry."""
    values = np.zeros((plan.indices.size, *vector.values.shape[1:]), vector.dtype)
    values[np.searchsorted(plan.indices, vector.indices)] = vector.values
    return values


def by_plan(rows, weights, comm):
    """Return the plan of the tokens of all ranks, and the means of both gradients at its indices."""
    plan = SupportPlan.union(rows, comm)
    # both are in flight
    requests = [plan.iallreduce(laid_out(plan, vector)) for vector in (rows, weights)]
    return plan, *(request.wait() / np.float32(comm.size) for request in requests)


def train(comm, steps):
    """Return a model trained on different texts on each rank."""
    model, texts = Model(), Texts(comm.rank)
    for _ in range(steps):
        rows, weights, vector = model.gradients(*texts.batch(TEXTS))
        plan, *means = by_plan(rows, weights, comm)
        model.descend(
            plan, *means, dense_allreduce(vector, comm) / np.float32(comm.size)
        )
    return model


def bytes_of(call, comm):
    """Return the result of a call, and the bytes that this rank sends in it."""
    before = traffic(comm).nbytes
    result = call()
    return result, traffic(comm).nbytes - before


def compare(comm, model):
    """Yield name, bytes sent and the dense mean of a batch's gradients, for three ways to sum them."""
    rows, weights, _ = model.gradients(*Texts(comm.rank).batch(TEXTS))
    size = np.float32(comm.size)
    (plan, *means), nbytes = bytes_of(lambda: by_plan(rows, weights, comm), comm)
    yield "plan", nbytes, [plan.vector(mean).to_dense() for mean in means]
    sums, nbytes = bytes_of(
        lambda: [sparse_allreduce(vector, comm) for vector in (rows, weights)], comm
    )
    yield "sparse_allreduce", nbytes, [total.to_dense() / size for total in sums]
    sums, nbytes = bytes_of(
        lambda: [
            dense_allreduce(vector.to_dense(), comm) for vector in (rows, weights)
        ],
        comm,
    )
    yield "dense_allreduce", nbytes, [total / size for total in sums]


def verdicts(comm, steps):
    """Yield the checks, as (text, whether it holds on this rank)."""
    model = train(comm, steps)
    same = len(set(comm.allgather(model.bits()))) == 1
    yield "all ranks hold the same parameter bits", same
    unseen, labels = Texts(comm.size).batch(2000)
    right = float(((model.chances(unseen) > 0.5) == labels).mean())
    yield f"it learns ({right:.1%} of new texts are told right)", right > 0.6
    ways = [*compare(comm, model)]
    most = {way: max(comm.allgather(nbytes)) for way, nbytes, _ in ways}
    dense = ways[-1][2]
    close = [
        np.allclose(*pair, rtol=1e-5, atol=1e-7)
        for _, _, means in ways
        for pair in zip(means, dense, strict=True)
    ]
    yield "the three ways give the same means, up to rounding", all(close)
    figures = ", ".join(f"{way} {nbytes:,}" for way, nbytes in most.items())
    yield (
        f"plan: under 5 % of the bytes of dense (a rank sends: {figures})",
        (most["plan"] < 0.05 * most["dense_allreduce"] or comm.size == 1),
    )


def main():
    options, comm = parse_arguments(), MPI.COMM_WORLD
    return verdict(dict(verdicts(comm, options.steps)), comm)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of SGD (default %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
