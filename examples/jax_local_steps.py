"""Local steps of Muon in JAX, with optax: ten steps on each rank, then the ranks exchange their progress.

    mpirun -n 4 python -m mpi4py examples/jax_local_steps.py

Parameters are NumPy arrays by name, which `OuterLoop` writes in place; a step is compiled
by `jax.jit`, and the exchange is outside of it. Muon is for matrices, AdamW for the rest.
The task is to learn a matrix from noisy products. Needs jax and optax. It checks itself
at the end and exits with status 1 when a check fails.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores

import numpy as np
from mpi4py import MPI

try:
    import jax
    import optax
    from optax.contrib import MuonDimensionNumbers, muon
except ImportError as error:
    sys.exit(f"{error}; in the checkout: pip install '.[jax,examples]' optax")

from checks import verdict

from collectives import GradientExchange, OuterLoop

EVERY = 10  # steps between two exchanges
WIDTH = 64


def loss(parameters, batch):
    """Return the mean squared error of a batch."""
    inputs, outputs = batch
    return ((inputs @ parameters["layer"] + parameters["bias"] - outputs) ** 2).mean()


def batches(rank, steps):
    """Yield batches of this rank: products with a matrix that is the same on all ranks, and noise."""
    matrix = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32)
    rng = np.random.default_rng([1, rank])
    for _ in range(steps):
        inputs = rng.standard_normal((32, WIDTH), np.float32)
        noise = rng.standard_normal((32, WIDTH), np.float32)
        yield inputs, inputs @ matrix + 0.1 * noise


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    steps, comm = parser.parse_args().steps, MPI.COMM_WORLD
    parameters = {
        "layer": np.zeros((WIDTH, WIDTH), np.float32),
        "bias": np.zeros(WIDTH, np.float32),
    }
    hidden = {"layer": MuonDimensionNumbers(), "bias": None}  # None: AdamW
    optimizer = muon(
        0.1,
        weight_decay=0.01,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=hidden,
    )
    state = optimizer.init(parameters)
    outer = OuterLoop(GradientExchange(comm, bits=4), parameters, every=EVERY)

    @jax.jit
    def step(parameters, state, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    losses = []
    for batch in batches(comm.rank, steps):
        new, state, value = step(parameters, state, batch)
        for name, array in parameters.items():
            array[...] = new[name]
        outer.step()
        losses.append(float(value))
    outer.synchronise()

    bits = b"".join(array.tobytes() for array in parameters.values())
    first = comm.allreduce(losses[0])
    last = comm.allreduce(losses[-1])
    checks = {
        "all ranks have the same bits": len({*comm.allgather(bits)}) == 1,
        f"the loss falls to a tenth: {first:.3g}, {last:.3g}": last < first / 10,
    }
    return verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
