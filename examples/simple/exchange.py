"""A step with Top-k and error feedback, to read beside `GradientExchange`, which has the same bits.

    mpirun -n 4 python -m mpi4py examples/simple/exchange.py

Left out: any error of one rank, devices, named tensors, states, other methods.
"""

import numpy as np
from mpi4py import MPI

from collectives import GradientExchange
from mpicomp import TopK


class SimpleExchange:
    """Return the mean of the k largest entries of each rank's gradient and residual; keep the others."""

    def __init__(self, comm, k):
        self.comm = comm
        self.k = k
        self.residual = None

    def __call__(self, gradient):
        if self.residual is None:
            self.residual = np.zeros_like(gradient)
        corrected = gradient + self.residual

        # compress: the largest magnitudes, of equal ones those with the lowest indices
        order = np.argsort(-np.abs(corrected), kind="stable")
        indices = np.sort(order[: self.k])
        values = corrected[indices]

        # exchange: every rank gets the entries of all, and adds them in rank order
        total = np.zeros_like(gradient)
        for their_indices, their_values in self.comm.allgather((indices, values)):
            total[their_indices] += their_values

        # keep: what was not sent is added to the next gradient
        corrected[indices] = 0
        self.residual = corrected
        return total / self.comm.size


def main():
    comm = MPI.COMM_WORLD
    simple = SimpleExchange(comm, k=20)
    exchange = GradientExchange(comm, TopK(k=20))
    rng = np.random.default_rng(comm.rank)
    for _ in range(5):
        # integer-valued: additions are exact in any order
        gradient = rng.integers(-99, 99, 1000).astype(np.float32)
        assert simple(gradient).tobytes() == exchange(gradient).tobytes()
        assert (simple.residual == exchange.feedback.residual).all()
    if comm.rank == 0:
        print("check: means and residuals of five steps: ok")


if __name__ == "__main__":
    main()
