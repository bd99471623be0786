"""Train a linear model on sparse features: the gradients are sparse without compression, and their sum is exact.

    mpirun -n 4 python -m mpi4py examples/sparse_features.py

Logistic regression, one class against all others, tells which package of Python's
library a block of ten lines is from. The features are words, and pairs and triples of
words, hashed to 2^20 columns: a batch has some thousands, so its gradient has as many
rows, with a value for each class. `sparse_allreduce` sends these rows;
`dense_allreduce` sends the whole table, to compare. No entry is dropped, so no error
feedback is needed.

Each rank rounds its gradient to multiples of 2^-20. Sums of such numbers are exact in
float32 in any order, and both models end with the same bits; without it they would
differ by rounding, as MPI adds in another order.

Source of the setting: SparCML (Renggli et al., SC 2019, arXiv 1802.08021), with the URL
and Webspam data sets. Needs scipy. It checks itself at the end and exits with status 1
when a check fails.
"""

import argparse
import os
import re
import sys
import sysconfig
import zlib
from itertools import islice
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI

try:
    import scipy.sparse
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[examples]'")

from checks import verdict

from collectives import dense_allreduce, sparse_allreduce, traffic
from mpicomp import SparseVector

PACKAGES = (
    "asyncio",
    "concurrent",
    "ctypes",
    "email",
    "encodings",
    "idlelib",
    "importlib",
    "json",
    "logging",
)
PACKAGES += "multiprocessing", "tkinter", "unittest", "urllib", "xml"
FEATURES, LINES, BATCH, RATE, STEP = 2**20, 10, 32, 2.0, 2.0**-20
WORD = re.compile(r"[A-Za-z_]\w*|\S")


def blocks(most):
    """Return blocks of lines in a random order, and the number of the package of each; the same on all ranks."""
    library, texts, labels = Path(sysconfig.get_path("stdlib")), [], []
    for label, package in enumerate(PACKAGES):
        found = []
        for path in sorted((library / package).rglob("*.py")):
            lines = [
                line
                for line in path.read_text(errors="replace").splitlines()
                if line.strip()
            ]
            found += [
                "\n".join(lines[start : start + LINES])
                for start in range(0, len(lines) - LINES, LINES)
            ]
        order = np.random.default_rng(label).permutation(len(found))
        texts += [found[place] for place in islice(order, most)]
        labels += [label] * min(most, len(found))
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[place] for place in order], np.array(labels)[order]


def features(texts):
    """Return a CSR matrix with a row for each text: how often it has a word, or two or three words in a row."""
    rows, columns = [], []
    for row, text in enumerate(texts):
        words = WORD.findall(text)
        grams = {
            " ".join(words[start : start + size])
            for size in (1, 2, 3)
            for start in range(len(words) - size + 1)
        }
        hashed = [zlib.crc32(gram.encode()) % FEATURES for gram in sorted(grams)]
        columns += hashed
        rows += [row] * len(hashed)
    values = np.ones(len(rows), np.float32)
    matrix = scipy.sparse.csr_matrix(
        (values, (rows, columns)), shape=(len(texts), FEATURES)
    )
    length = np.sqrt(np.maximum(np.bincount(rows, minlength=len(texts)), 1))
    return scipy.sparse.diags(1 / length).astype(np.float32) @ matrix


def chances(matrix, weights):
    """Return for each text the probability of each class against all others."""
    return 1 / (1 + np.exp(-(matrix @ weights)))


def gradient(matrix, labels, weights):
    """Return the gradient of a batch, rounded to multiples of STEP: a row for each feature that the batch has."""
    delta = chances(matrix, weights)
    delta[np.arange(len(labels)), labels] -= 1
    columns = np.unique(matrix.indices)
    rows = matrix[:, columns].T @ (delta / len(labels))
    return SparseVector(
        columns, (np.rint(rows / STEP) * STEP).astype(np.float32), FEATURES
    )


def train(comm, matrix, labels, steps, sum_up):
    """Return a model after steps of SGD, and the median milliseconds and the bytes that a sum takes on this rank."""
    weights, draw = (
        np.zeros((FEATURES, len(PACKAGES)), np.float32),
        np.random.default_rng([1, comm.rank]),
    )
    seconds, before = [], traffic(comm).nbytes
    for _ in range(steps):
        chosen = draw.choice(len(labels), BATCH)
        mine = gradient(matrix[chosen], labels[chosen], weights)
        began = perf_counter()
        total = sum_up(mine, comm)
        seconds.append(perf_counter() - began)
        total.add_to(weights, -RATE / comm.size)
    return (
        weights,
        1e3 * float(np.median(seconds)),
        (traffic(comm).nbytes - before) // max(steps, 1),
    )


def dense_sum(vector, comm):
    """Return the sum of vectors by a dense allreduce of the whole table."""
    return SparseVector(
        np.arange(FEATURES, dtype=np.int32),
        dense_allreduce(vector.to_dense(), comm),
        FEATURES,
    )


def verdicts(comm, options):
    """Yield the checks, as (text, whether it holds on this rank)."""
    texts, labels = blocks(options.blocks)
    held_out = len(texts) // 5
    matrix, mine = (
        features(texts[held_out:][comm.rank :: comm.size]),
        labels[held_out:][comm.rank :: comm.size],
    )
    weights, milliseconds, nbytes = train(
        comm, matrix, mine, options.steps, sparse_allreduce
    )
    same = len(set(comm.allgather(zlib.crc32(weights.tobytes())))) == 1
    yield "all ranks hold the same bits", same
    unseen = features(texts[:held_out])
    right = float((chances(unseen, weights).argmax(axis=1) == labels[:held_out]).mean())
    said = f"{right:.1%} of {held_out} new blocks in the right one of {len(PACKAGES)} packages"
    yield f"it learns ({said})", right > 1.5 / len(PACKAGES)
    few = min(options.steps, options.dense)
    short, _, _ = train(comm, matrix, mine, few, sparse_allreduce)
    by_dense, dense_milliseconds, dense_nbytes = train(
        comm, matrix, mine, few, dense_sum
    )
    yield (
        f"after {few} steps a dense allreduce gives the same bits",
        short.tobytes() == by_dense.tobytes(),
    )
    times, bytes_sent = dense_milliseconds / milliseconds, dense_nbytes / max(nbytes, 1)
    yield (
        f"a sum takes {milliseconds:.2f} ms and {nbytes:,} bytes of a rank; a dense one {dense_milliseconds:.2f} ms "
        f"and {dense_nbytes:,} bytes: {times:.0f} times the time, {bytes_sent:.0f} times the bytes",
        comm.size == 1 or bytes_sent > 5,
    )


def main():
    options, comm = parse_arguments(), MPI.COMM_WORLD
    return verdict(dict(verdicts(comm, options)), comm)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of SGD (default %(default)s)"
    )
    parser.add_argument(
        "--dense",
        type=int,
        default=10,
        help="steps by dense sums beside them (default %(default)s)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=400,
        help="blocks of a package at most (default %(default)s)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
