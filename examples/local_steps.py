"""Train with local steps: each rank takes ten steps of AdamW, then the ranks exchange the change of the parameters.

    mpirun -n 4 python -m mpi4py examples/local_steps.py

The same training with a dense allreduce of every gradient is the baseline: local steps
reach about the same test accuracy with less than 2 % of the bytes. `OuterLoop`
exchanges the change of the parameters since the last exchange: 3 % of the entries at
ten bits each, with a residual that decays, and the mean over the ranks that sent an
entry. The state of AdamW is not exchanged. The data are the 1,797 images that come with
scikit-learn; the network is plain NumPy, its parameters are arrays by name.

Training is saved in the middle of a round and resumed, bitwise. Needs scikit-learn. It
checks itself at the end and exits with status 1 when a check fails.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[examples]'")

from checks import verdict

from collectives import GradientExchange, OuterLoop, dense_allreduce, traffic
from mpicomp import ChunkedTopK, ErrorFeedback, Quantised

PIXELS, HIDDEN, CLASSES, BATCH = 64, 256, 10, 16
EVERY, RATE = 10, 2e-3


def initial():
    """Return the parameters at the start, the same on all ranks; the last row of each matrix is the bias."""
    rng = np.random.default_rng(0)
    return {
        "hidden": rng.normal(0, np.sqrt(2 / PIXELS), (PIXELS + 1, HIDDEN)).astype(
            np.float32
        ),
        "output": rng.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN + 1, CLASSES)).astype(
            np.float32
        ),
    }


def forward(parameters, images):
    """Return the input of the last layer, and the logits."""
    hidden = np.maximum(
        images @ parameters["hidden"][:-1] + parameters["hidden"][-1], 0
    )
    return hidden, hidden @ parameters["output"][:-1] + parameters["output"][-1]


def gradients(parameters, images, labels):
    """Return the gradient of the mean cross entropy, by name."""
    hidden, logits = forward(parameters, images)
    delta = np.exp(logits - logits.max(axis=1, keepdims=True))
    delta /= delta.sum(axis=1, keepdims=True)
    delta[np.arange(labels.size), labels] -= 1
    delta /= labels.size
    entering = (delta @ parameters["output"][:-1].T) * (hidden > 0)
    return {
        "hidden": np.vstack([images.T @ entering, entering.sum(axis=0)]),
        "output": np.vstack([hidden.T @ delta, delta.sum(axis=0)]),
    }


def accuracy(parameters, images, labels):
    """Return the fraction of the images that are classified correctly."""
    return float(np.mean(forward(parameters, images)[1].argmax(axis=1) == labels))


class AdamW:
    """AdamW of one rank; its moments are never exchanged. I. Loshchilov, F. Hutter, ICLR 2019."""

    FIRST, SECOND, DECAY = np.float32(0.9), np.float32(0.99), np.float32(0.01)

    def __init__(self, parameters):
        self.moments = {
            name: np.zeros((2, *array.shape), np.float32)
            for name, array in parameters.items()
        }
        self.steps = 0

    def update(self, parameters, gradient):
        """Change the parameters, in place."""
        self.steps += 1
        for name, array in parameters.items():
            mean, square = self.moments[name]
            mean += (1 - self.FIRST) * (gradient[name] - mean)
            square += (1 - self.SECOND) * (gradient[name] ** 2 - square)
            change = mean / (1 - self.FIRST**self.steps)
            change /= np.sqrt(square / (1 - self.SECOND**self.steps)) + np.float32(1e-8)
            array -= np.float32(RATE) * (change + self.DECAY * array)


class LocalSteps:
    """A rank in training: parameters, the optimiser's state, and the loop."""

    def __init__(self, comm):
        self.comm, self.parameters, self.step = comm, initial(), 0
        self.optimiser = AdamW(self.parameters)
        compressor = Quantised(ChunkedTopK(k=128, chunk=4096), "two_bit")
        exchange = GradientExchange(
            comm, compressor, ErrorFeedback(decay=0.95), average="contributors"
        )
        self.loop = OuterLoop(exchange, self.parameters, every=EVERY)

    def train(self, shard, steps):
        """Train up to a step."""
        while self.step < steps:
            batch = batch_of(shard, self.step, self.comm.rank)
            self.optimiser.update(self.parameters, gradients(self.parameters, *batch))
            self.loop.step()
            self.step += 1

    def save(self):
        """Return the state of this rank: parameters, optimiser, and the loop."""
        own = {
            f"parameter/{name}": array.copy() for name, array in self.parameters.items()
        }
        own |= {
            f"moments/{name}": array.copy()
            for name, array in self.optimiser.moments.items()
        }
        return own | {
            f"loop/{name}": array for name, array in self.loop.state_dict().items()
        }

    def take_up(self, state):
        """Load the state that `save` returned: first the loop, then the parameters."""
        self.loop.load_state_dict(
            {name[5:]: state[name] for name in state if name.startswith("loop/")}
        )
        for name, array in self.parameters.items():
            array[...] = state[f"parameter/{name}"]
            self.optimiser.moments[name][...] = state[f"moments/{name}"]
        self.step = self.optimiser.steps = self.loop.count


def batch_of(shard, step, rank):
    """Return the images and labels of a step."""
    chosen = np.random.default_rng([step, rank]).integers(len(shard[0]), size=BATCH)
    return shard[0][chosen], shard[1][chosen]


def train_dense(comm, shard, steps):
    """Return the parameters after steps of AdamW on the mean gradient of all ranks."""
    parameters = initial()
    optimiser = AdamW(parameters)
    for step in range(steps):
        mine = gradients(parameters, *batch_of(shard, step, comm.rank))
        optimiser.update(
            parameters,
            {
                name: dense_allreduce(each, comm) / comm.size
                for name, each in mine.items()
            },
        )
    return parameters


def load(comm):
    """Return this rank's share of the training images, and the test images, each as (images, labels)."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=0
    )
    return (train_x[comm.rank :: comm.size], train_y[comm.rank :: comm.size]), (
        test_x,
        test_y,
    )


def bits(parameters):
    return b"".join(array.tobytes() for array in parameters.values())


def main():
    options, comm = parse_arguments(), MPI.COMM_WORLD
    shard, test = load(comm)
    sent = [traffic(comm).nbytes]
    dense = train_dense(comm, shard, options.steps)
    sent.append(traffic(comm).nbytes)
    local = LocalSteps(comm)
    local.train(shard, options.steps)
    sent.append(traffic(comm).nbytes)

    first, second = LocalSteps(comm), LocalSteps(comm)
    first.train(shard, options.steps - EVERY // 2)  # in the middle of a round
    second.take_up(first.save())
    second.train(shard, options.steps)

    reached = accuracy(local.parameters, *test), accuracy(dense, *test)
    of_local, of_dense = (
        max(comm.allgather(each / options.steps))
        for each in (sent[2] - sent[1], sent[1] - sent[0])
    )
    checks = {
        "all ranks: the same parameter bits": len(set(comm.allgather(bits(local.parameters)))) == 1,
        "taken up in the middle of a round: the same parameter bits": bits(second.parameters) == bits(local.parameters),
        f"accuracy {reached[0]:.1%}, dense {reached[1]:.1%}: at most 2 points behind": reached[0] > reached[1] - 0.02,
        f"bytes a rank sends a step {of_local:,.0f}, dense {of_dense:,.0f}: at most 2 %": of_local <= of_dense / 50,
    }  # fmt: skip
    return verdict(checks, comm)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=300, help="of AdamW (default %(default)s)"
    )
    options = parser.parse_args()
    if options.steps < EVERY or options.steps % EVERY:
        parser.error(
            f"got --steps {options.steps}: expected a multiple of {EVERY}, so that training ends with a round"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
