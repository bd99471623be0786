"""Train a network in JAX on handwritten digits: the exchange takes a pytree of gradients and returns their means.

    mpirun -n 2 python -m mpi4py examples/jax_digits.py

`exchange_pytree` exchanges the leaves, each named by its path, and returns the means as
a pytree of JAX arrays. The data are the digits that come with scikit-learn.

Needs jax and scikit-learn. It checks itself at the end and exits with status 1 when a
check fails.
"""

import argparse
import hashlib
import os
import sys
from itertools import pairwise

# the exchange takes arrays in host memory
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores

import numpy as np
from mpi4py import MPI

try:
    import jax
    from jax import numpy as jnp
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[jax,examples]'")

from checks import verdict

from collectives import GradientExchange
from collectives.jax import exchange_pytree
from mpicomp import TopK

SIZES, BATCH, RATE = (64, 256, 128, 10), 32, 0.2


def new_parameters():
    """Return a pytree: a list of layers, each a dict; the same on every rank."""
    rng = np.random.default_rng(0)
    return [
        {
            "weights": jnp.asarray(rng.normal(0, np.sqrt(2 / m), (m, n)), jnp.float32),
            "bias": jnp.zeros(n),
        }
        for m, n in pairwise(SIZES)
    ]


@jax.jit
def logits_of(parameters, images):
    """Return the logits of a multilayer perceptron with ReLU."""
    for layer in parameters[:-1]:
        images = jax.nn.relu(images @ layer["weights"] + layer["bias"])
    return images @ parameters[-1]["weights"] + parameters[-1]["bias"]


@jax.jit
@jax.grad
def gradient_of(parameters, images, labels):
    """Return the gradient of the mean cross entropy, a pytree like the parameters."""
    chances = jax.nn.log_softmax(logits_of(parameters, images))
    return -chances[jnp.arange(labels.size), labels].mean()


@jax.jit
def descend(parameters, gradient):
    """Return the parameters after a step of SGD."""
    return jax.tree.map(
        lambda parameter, mean: parameter - RATE * mean, parameters, gradient
    )


def train(shard, comm, steps):
    """Return the parameters, and whether all means were JAX arrays of the gradients' shapes and dtypes."""
    exchange = GradientExchange(comm, TopK(density=0.02))
    parameters, alike, rng = new_parameters(), True, np.random.default_rng(comm.rank)
    for _ in range(steps):
        chosen = rng.integers(len(shard[0]), size=BATCH)
        gradient = gradient_of(parameters, shard[0][chosen], shard[1][chosen])
        means = exchange_pytree(exchange, gradient)
        alike &= all(jax.tree.leaves(jax.tree.map(same_kind, means, gradient)))
        parameters = descend(parameters, means)
    return parameters, alike


def same_kind(mean, leaf):
    """Return whether a mean is a JAX array as the gradient was."""
    return isinstance(mean, jax.Array) and (mean.shape, mean.dtype) == (
        leaf.shape,
        leaf.dtype,
    )


def accuracy(parameters, images, labels):
    """Return the fraction of the images that are classified correctly."""
    return float((logits_of(parameters, images).argmax(axis=1) == labels).mean())


def main():
    comm, steps = MPI.COMM_WORLD, parse_arguments().steps
    digits = load_digits()
    images, labels, first = (
        (digits.data / 16).astype(np.float32),
        digits.target,
        len(digits.target) * 4 // 5,
    )
    parameters, alike = train(
        (images[comm.rank : first : comm.size], labels[comm.rank : first : comm.size]),
        comm,
        steps,
    )
    bits = hashlib.sha256(
        b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(parameters))
    ).hexdigest()
    before, after = (
        accuracy(tree, images[first:], labels[first:])
        for tree in (new_parameters(), parameters)
    )
    checks = {
        "the means are JAX arrays, of the shapes and dtypes of the gradients": all(
            comm.allgather(alike)
        ),
        "the same bits on all ranks": len(set(comm.allgather(bits))) == 1,
        f"it learns (test accuracy {before:.1%} before, {after:.1%} after)": after
        > before + 0.3,
    }
    return verdict(checks, comm)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=80, help="steps of SGD (default %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
