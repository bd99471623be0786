"""Train on one rank, and send what each step changed of the float16 weights to all other ranks, exactly.

    mpirun -n 4 python -m mpi4py examples/weight_patches.py

Rank 0 trains a network with AdamW, float32 masters and a small rate, as language models are
trained by reinforcement; the other ranks hold float16 weights, such as generate text
elsewhere. After each step rank 0 broadcasts a patch, about a byte for each weight that
changed; all ranks apply it, or none. One rank then loses a patch: the next is refused on
all ranks, and after a full broadcast they continue.

It checks itself at the end and exits with status 1 when a check fails.
"""

import hashlib
import sys

import numpy as np
from checks import verdict
from mpi4py import MPI

from collectives import CollectiveError, sparse_bcast
from mpicomp import changes

INPUTS, HIDDEN, OUTPUTS, BATCH = 64, 512, 16, 32
STEPS, RATE = 30, 1e-6


class Trainer:
    """A network of two layers that learns what a random one computes, and AdamW without its decay."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.masters = {
            "hidden": rng.normal(0, INPUTS**-0.5, (INPUTS, HIDDEN)),
            "output": rng.normal(0, HIDDEN**-0.5, (HIDDEN, OUTPUTS)),
        }
        self.masters = {
            name: array.astype(np.float32) for name, array in self.masters.items()
        }
        self.target = rng.normal(0, 1, (INPUTS, OUTPUTS))
        self.moments = {name: [0, 0] for name in self.masters}
        self.steps = 0

    def image(self):
        """Return the weights in float16."""
        return {name: array.astype(np.float16) for name, array in self.masters.items()}

    def step(self):
        """Take a step of AdamW."""
        self.steps += 1
        inputs = np.random.default_rng(self.steps).normal(0, 1, (BATCH, INPUTS))
        hidden = np.maximum(inputs @ self.masters["hidden"], 0)
        error = (hidden @ self.masters["output"] - inputs @ self.target) / BATCH
        entering = (error @ self.masters["output"].T) * (hidden > 0)
        gradients = {"hidden": inputs.T @ entering, "output": hidden.T @ error}
        for name, gradient in gradients.items():
            mean, square = self.moments[name]
            self.moments[name] = (
                0.9 * mean + 0.1 * gradient,
                0.99 * square + 0.01 * gradient**2,
            )
            mean, square = self.moments[name]
            change = mean / (1 - 0.9**self.steps)
            change /= np.sqrt(square / (1 - 0.99**self.steps)) + 1e-8
            self.masters[name] -= (RATE * change).astype(np.float32)


def digest(weights):
    """Return the SHA-256 of weights."""
    return hashlib.sha256(b"".join(map(np.ndarray.tobytes, weights.values()))).digest()


def next_patch(trainer, sent):
    """Take a step, and return what it changes of the weights that were sent."""
    trainer.step()
    return changes(sent, trainer.image())


def is_refused(patch, comm, weights):
    """Return whether a patch raises on this rank."""
    try:
        sparse_bcast(patch, comm, out=weights)
    except (CollectiveError, ValueError):
        return True
    return False


def main():
    comm = MPI.COMM_WORLD
    trainer = Trainer()
    weights = trainer.image()  # the same start on all ranks
    nbytes = changed = 0
    same = []
    for _ in range(STEPS):
        patch = None
        before = {name: array.copy() for name, array in weights.items()}
        if comm.rank == 0:
            patch = next_patch(trainer, weights)
        nbytes += sparse_bcast(patch, comm, out=weights).nbytes
        changed += sum(
            np.count_nonzero(before[name] != weights[name]) for name in weights
        )
        expected = comm.bcast(digest(trainer.image()))
        same.append(digest(weights) == expected)

    last = comm.size - 1
    patch = comm.bcast(next_patch(trainer, weights) if comm.rank == 0 else None)
    if comm.rank < last or last == 0:  # the last rank misses it
        patch.apply(weights)
    patch = next_patch(trainer, weights) if comm.rank == 0 else None
    held = digest(weights)
    refused = is_refused(patch, comm, weights)
    is_kept = digest(weights) == held
    for array in weights.values():
        comm.Bcast(array)
    if comm.rank == 0:
        patch = changes(weights, trainer.image())
    sparse_bcast(patch, comm, out=weights)

    size = sum(array.size for array in weights.values())
    share, each = changed / STEPS / size, nbytes / changed
    is_safe = all(comm.allgather(refused and is_kept)) or comm.size == 1
    is_new = digest(weights) == comm.bcast(digest(trainer.image()))
    checks = {
        f"all ranks, {STEPS} steps: the bits of rank 0": all(comm.allgather(all(same))),
        "a rank that missed a patch: an error on all ranks, nothing changed": is_safe,
        "after a full broadcast: the bits of rank 0": is_new,
        f"{share:.1%} of weights change in a step, {each:.2f} bytes each: at most 1.5": each <= 1.5,
    }  # fmt: skip
    return verdict(checks, comm)


if __name__ == "__main__":
    sys.exit(main())
