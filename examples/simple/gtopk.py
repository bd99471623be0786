"""gTop-k by recursive doubling on 2^m ranks, to read beside `gtopk_allreduce`, which has the same bits.

    mpirun -n 4 python -m mpi4py examples/simple/gtopk.py

Left out: other numbers of ranks, the published tree, exact algorithms, formats of messages,
errors of one rank.
"""

import numpy as np
from mpi4py import MPI

from collectives import gtopk_allreduce
from mpicomp import SparseVector, TopK


def top_k(vector, k):
    """Return two dense vectors: the k largest magnitudes, of equal ones those with the lowest indices; the others."""
    order = np.argsort(-np.abs(vector), kind="stable")
    kept = np.zeros_like(vector)
    kept[order[:k]] = vector[order[:k]]
    return kept, vector - kept


def simple_gtopk(comm, vector, k):
    """Return k entries of the sum, the same on all ranks, and the entries that this rank must keep."""
    kept, rejected = top_k(vector, k)
    distance = 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        theirs = comm.sendrecv(kept, dest=partner, source=partner)
        kept, dropped = top_k(kept + theirs, k)

        # all ranks of a block drop the same entries: each keeps every block-th of them
        block = 2 * distance
        indices = np.flatnonzero(dropped)[comm.rank % block :: block]
        rejected[indices] += dropped[indices]
        distance = block
    return kept, rejected


def main():
    comm = MPI.COMM_WORLD
    assert comm.size & (comm.size - 1) == 0, "expected a power of two of ranks"
    rng = np.random.default_rng(comm.rank)
    # integer-valued: additions are exact in any order
    gradient = rng.integers(-99, 99, 1000).astype(np.float32)
    vector = TopK(k=30).compress(gradient)
    kept, rejected = simple_gtopk(comm, vector.to_dense(), k=20)

    result, back = gtopk_allreduce(vector, comm, k=20, algorithm="recursive_doubling")
    assert result.to_dense().tobytes() == kept.tobytes()
    assert back.to_dense().tobytes() == rejected.tobytes()
    total = sum(comm.allgather(vector.to_dense()))
    assert (kept + sum(comm.allgather(rejected)) == total).all()
    assert SparseVector.from_dense(kept).nnz == 20
    if comm.rank == 0:
        print("check: result, rejected entries, nothing is lost: ok")


if __name__ == "__main__":
    main()
