"""Train a small network on handwritten digits, data-parallel, with three ways to average the gradients.

    mpirun -n 4 python -m mpi4py examples/numpy_digits.py

Shows a table and a plot (numpy_digits.png): global Top-k with error feedback reaches
the test accuracy of a dense allreduce and sends a few per cent of its bytes; without
feedback most of the gradient is lost, and accuracy is lower. All three have the same
initial weights, batches and learning rate. The data are the 1,797 images that come with
scikit-learn; the network is plain NumPy, and its gradient is one flat array.

Needs matplotlib, scikit-learn and tqdm. It checks itself at the end and exits with
status 1 when a check fails.
"""

import argparse
import hashlib
import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI

try:
    import matplotlib as mpl
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[examples]'")

from collectives import GradientExchange, dense_allreduce, gtopk_allreduce, traffic
from mpicomp import NoFeedback, TopK

DENSITY = 0.01
DENSE, FEEDBACK, NO_FEEDBACK = (
    "dense allreduce",
    "gTop-k 1 %, error feedback",
    "gTop-k 1 %, no feedback",
)


class Network:
    """A multilayer perceptron with ReLU; its parameters are one flat float32 vector, its layers are views of that."""

    SIZES = (64, 512, 256, 10)

    def __init__(self, seed):
        self.parameters = np.zeros(
            sum((m + 1) * n for m, n in pairwise(self.SIZES)), np.float32
        )
        self.layers = self._views(self.parameters)
        rng = np.random.default_rng(seed)
        for weights, _ in self.layers:
            weights[:] = rng.normal(0, np.sqrt(2 / len(weights)), weights.shape)

    def forward(self, images):
        """Return the input of each layer, and the logits."""
        inputs = [images]
        for weights, bias in self.layers[:-1]:
            inputs.append(np.maximum(inputs[-1] @ weights + bias, 0))
        weights, bias = self.layers[-1]
        return inputs, inputs[-1] @ weights + bias

    def gradient(self, images, labels):
        """Return the gradient of the mean cross entropy, flat as the parameters."""
        inputs, logits = self.forward(images)
        delta = softmax(logits)
        delta[np.arange(labels.size), labels] -= 1
        delta /= labels.size
        flat = np.empty_like(self.parameters)
        for entering, (weights, _), (d_weights, d_bias) in reversed(
            [*zip(inputs, self.layers, self._views(flat), strict=True)]
        ):
            np.matmul(entering.T, delta, out=d_weights)
            delta.sum(axis=0, out=d_bias)
            delta = (delta @ weights.T) * (entering > 0)
        return flat

    def accuracy(self, images, labels):
        """Return the fraction of the images that are classified correctly."""
        return float(np.mean(self.forward(images)[1].argmax(axis=1) == labels))

    def _views(self, flat):
        """Return (weights, bias) of each layer, as views of `flat`."""
        views, start = [], 0
        for m, n in pairwise(self.SIZES):
            views.append(
                (
                    flat[start : start + m * n].reshape(m, n),
                    flat[start + m * n : start + (m + 1) * n],
                )
            )
            start += (m + 1) * n
        return views


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


class Ledger:
    """The sums of the gradients that this rank passed to the exchange, and of the means it applied, in float64."""

    def __init__(self, length):
        self.given, self.applied = np.zeros(length), np.zeros(length)

    def enter(self, gradient, result):
        """Record one step."""
        self.given += gradient
        self.applied += result

    def missing(self, residual, comm):
        """Return |given - applied - residuals| / |given|, with given and residuals summed over all ranks."""
        given, held = np.empty_like(self.given), np.empty_like(self.given)
        comm.Allreduce(self.given, given)
        comm.Allreduce(
            np.zeros_like(held) if residual is None else residual.astype(np.float64),
            held,
        )
        return float(
            np.linalg.norm(given - self.applied - held) / np.linalg.norm(given)
        )


@dataclass
class Run:
    """The result of one training. nbytes: sent a step, by the busiest rank."""

    name: str
    curve: list  # of (step, test accuracy)
    nbytes: float
    milliseconds: np.ndarray  # median step of this rank: compute, compress, communicate
    missing: float  # of the gradients' mass, as a ratio
    same: bool  # all ranks hold the same parameter bits

    @property
    def accuracy(self):
        """Test accuracy at the end."""
        return self.curve[-1][1]

    def share_of(self, other):
        """Return the bytes of this run over those of another; a single rank sends none."""
        return self.nbytes / other.nbytes if other.nbytes else 1.0


def methods(comm):
    """Yield the name of each method, and a function that averages a gradient over the ranks."""
    yield DENSE, lambda gradient: dense_allreduce(gradient, comm) / comm.size
    yield (
        FEEDBACK,
        GradientExchange(comm, TopK(density=DENSITY), collective=gtopk_allreduce),
    )
    yield (
        NO_FEEDBACK,
        GradientExchange(comm, TopK(density=DENSITY), NoFeedback(), gtopk_allreduce),
    )


def train(name, average, shard, test, options, comm):
    """Train from the initial weights of every method, and return the Run."""
    network, ledger = (
        Network(options.seed),
        Ledger(Network(options.seed).parameters.size),
    )
    batches = np.random.default_rng([options.seed, comm.rank])
    curve, times, sent_before = [(0, network.accuracy(*test))], [], traffic(comm).nbytes
    bar = tqdm(range(1, options.steps + 1), name, disable=comm.rank > 0, ncols=100)
    for step in bar:
        chosen = batches.integers(len(shard[0]), size=options.batch)
        times.append(
            take_step(
                network,
                average,
                shard[0][chosen],
                shard[1][chosen],
                options.rate,
                ledger,
                comm,
            )
        )
        if step % max(1, options.steps // 50) == 0 or step == options.steps:
            curve.append((step, network.accuracy(*test)))
            bar.set_postfix_str(f"accuracy {curve[-1][1]:.1%}")
    sent = (traffic(comm).nbytes - sent_before) / options.steps
    residual = getattr(getattr(average, "feedback", None), "residual", None)
    return Run(
        name,
        curve,
        nbytes=max(comm.allgather(sent)),
        milliseconds=1e3 * np.median(times, axis=0),
        missing=ledger.missing(residual, comm),
        same=len(set(comm.allgather(hashlib.sha256(network.parameters).digest()))) == 1,
    )


def take_step(network, average, images, labels, rate, ledger, comm):
    """Take one step of SGD, and return its seconds: compute, compress, communicate."""
    began = perf_counter()
    gradient = network.gradient(images, labels)
    computed = perf_counter()
    mean = average(gradient)
    averaged = perf_counter()
    network.parameters -= rate * mean
    compute = computed - began + perf_counter() - averaged
    ledger.enter(gradient, comm.size * mean)
    if not isinstance(average, GradientExchange):
        return compute, 0.0, averaged - computed
    took = average.statistics
    return (
        compute,
        took.compress_seconds + took.restore_seconds,
        took.communicate_seconds,
    )


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


def integers_are_conserved(comm, steps=4, length=10_000):
    """Exchange small integers, whose sums are exact, and return whether they are conserved bitwise."""
    exchange = GradientExchange(
        comm, TopK(density=DENSITY), collective=gtopk_allreduce, average=False
    )
    ledger = Ledger(length)
    for step in range(steps):
        gradient = (
            np.random.default_rng([step, comm.rank])
            .integers(-9, 10, length)
            .astype(np.float32)
        )
        ledger.enter(gradient, exchange(gradient))
    return ledger.missing(exchange.feedback.residual, comm) == 0


def invariants(runs, comm):
    """Yield the checks for any number of ranks, as (text, whether it holds)."""
    for run in runs:
        yield f"{run.name}: all ranks hold the same parameter bits", run.same
    missing = next(run.missing for run in runs if run.name == FEEDBACK)
    yield (
        f"{FEEDBACK}: mass conserved in training, up to rounding ({missing:.1e} of it is missing)",
        missing < 1e-5,
    )
    yield (
        f"{FEEDBACK}: mass conserved to the last bit on integers",
        integers_are_conserved(comm),
    )


def claims(runs):
    """Yield the claims of the README for 4 ranks, as (text, whether it holds)."""
    dense, feedback, without = runs
    behind, share = dense.accuracy - feedback.accuracy, feedback.share_of(dense)
    yield (
        f"{FEEDBACK}: within 1 point of dense in accuracy ({-100 * behind:+.1f})",
        behind <= 0.01,
    )
    yield f"{FEEDBACK}: under 3 % of the bytes of dense ({share:.2%})", share < 0.03
    lost = dense.accuracy - without.accuracy
    yield (
        f"{NO_FEEDBACK}: at least 2 points behind dense ({-100 * lost:+.1f})",
        lost >= 0.02,
    )


def print_table(runs, comm):
    print(
        f"\n{'':28}{'test':>9}{'bytes a rank':>14}{'against':>9}{'time a step, ms':>31}"
    )
    print(
        f"{'':28}{'accuracy':>9}{'sends a step':>14}{'dense':>9}{'compute':>9}{'compress':>10}{'communicate':>12}"
    )
    for run in runs:
        compute, compress, communicate = run.milliseconds
        print(
            f"{run.name:28}{run.accuracy:9.1%}{run.nbytes:14,.0f}{run.share_of(runs[0]):9.2%}"
            f"{compute:9.2f}{compress:10.2f}{communicate:12.2f}"
        )
    print(
        f"{comm.size} ranks. Bytes of dense: 2 (P-1)/P n v, the least that an allreduce sends."
    )
    print("Times: medians on rank 0; communicate has the wait for slower ranks in it.")


def plot(runs, path):
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colours = ("tab:gray", "tab:blue", "tab:orange")
    for run, colour in zip(runs, colours, strict=True):
        steps, accuracy = zip(*run.curve, strict=True)
        left.plot(
            steps,
            100 * np.array(accuracy),
            color=colour,
            label=f"{run.name}: {run.accuracy:.1%}",
        )
    left.set(xlabel="step", ylabel="test accuracy, %", title="Accuracy", ylim=(50, 100))
    left.legend(loc="lower right")
    left.grid(alpha=0.3)
    bars = right.barh(
        [run.name for run in runs], [max(run.nbytes, 1) for run in runs], color=colours
    )
    right.bar_label(
        bars, [f" {run.nbytes:,.0f} ({run.share_of(runs[0]):.1%})" for run in runs]
    )
    right.set(xscale="log", xlabel="bytes a rank sends a step", title="Traffic")
    right.set_xlim(1e3, 200 * max(runs[0].nbytes, 1e3))
    right.invert_yaxis()
    figure.savefig(path, dpi=120)


def main():
    options = parse_arguments()
    comm = MPI.COMM_WORLD
    shard, test = load(comm)
    runs = [
        train(name, average, shard, test, options, comm)
        for name, average in methods(comm)
    ]
    checks = [*invariants(runs, comm), *(claims(runs) if options.assert_claims else ())]
    if comm.rank == 0:
        print_table(runs, comm)
        for words, holds in checks:
            print(f"check: {words}: {'ok' if holds else 'FAILED'}")
        plot(runs, options.plot)
        print(f"plot: {options.plot}")
    return 0 if all(comm.bcast([holds for _, holds in checks])) else 1


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="steps of SGD with each method (default %(default)s)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        help="images a rank takes a step (default %(default)s)",
    )
    parser.add_argument(
        "--rate", type=float, default=0.05, help="learning rate (default %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the weights and the batches (default %(default)s)",
    )
    parser.add_argument(
        "--plot",
        default="numpy_digits.png",
        help="where the plot goes (default %(default)s)",
    )
    parser.add_argument(
        "--assert-claims",
        action="store_true",
        help="check what the README says of 4 ranks, too",
    )
    options = parser.parse_args()
    if min(options.steps, options.batch) < 1:
        parser.error(
            f"got --steps {options.steps} and --batch {options.batch}: expected at least 1 of each"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
