"""Every algorithm of every collective once on many ranks: sums, and the memory of a rank beside the documented one.

    MPICOMP_WAIT=backoff mpirun -n 64 python -m mpi4py tests/chaos/scale.py      # more ranks than there are cores

Prints for each algorithm the time of a call, the peak of the memory that NumPy and
Python allocate in it on the rank that needs most, and that over the formula of
docs/contributing/costs.md. `make test-scale` runs it; tests/collectives/test_simulated.py has 1,024 ranks
in a simulated network. Exit status 1 if a sum is wrong, or memory is over twice that of
the formula.
"""

import argparse
import math
import sys
import time
import tracemalloc

import numpy as np

import collectives
from mpicomp import SparseVector

ARGUMENTS = {
    "sparse_reduce_scatter": {"partition": "equal"},
    "sparse_reduce": {"root": 0},
    "sparse_bcast": {"root": 0},
}
NAMES = [*ARGUMENTS, "sparse_allgather", "gtopk_allreduce"]
S, V = 8, 4  # bytes of an entry, and of a value or an index
SLACK = 2**20  # bytes beside the formulas, which are for vectors that are not short


def algorithms(names):
    """Yield collectives and the names of their algorithms."""
    for name in names:
        collective = getattr(collectives, name)
        for algorithm in ["auto"] * (collective.automatic is not None) + list(
            collective.algorithms
        ):
            yield collective, algorithm


def formulas(size, n, k, union):
    """Return the bytes of docs/contributing/costs.md, by collective and algorithm."""
    rounds = math.ceil(math.log2(size))
    return {
        ("sparse_allgather", "dissemination"): 2 * size * k * S,
        ("sparse_allreduce", "allgather"): 3 * size * k * S,
        ("sparse_allreduce", "recursive_doubling"): 6 * union * S,
        ("sparse_allreduce", "split_allgather"): 6 * union * S,
        ("sparse_allreduce", "dense_mpi"): 4 * n * V,
        ("sparse_allreduce", "node_lanes"): 4 * union * S,
        ("sparse_reduce_scatter", "split"): 4 * k * S,
        ("sparse_reduce", "tree"): 5 * union * S,
        ("sparse_bcast", "tree"): 2 * k * S,
        ("gtopk_allreduce", "recursive_doubling"): 12 * k * S,
        ("gtopk_allreduce", "tree"): (6 + rounds) * k * S,
        ("gtopk_allreduce", "exact"): 10 * k * S,
        ("gtopk_allreduce", "node_leaders"): 7 * union * S,
    }


def contribution(rank, n, k):
    """Return a vector of about k integers at random indices."""
    rng = np.random.default_rng([rank, n])
    indices = np.unique(rng.integers(0, n, k)).astype(np.int32)
    return SparseVector(indices, rng.integers(1, 9, indices.size).astype(np.float32), n)


def vector_of(collective, rank, n, k):
    """Return what a rank contributes: to a broadcast only the root does."""
    return (
        contribution(rank, n, k)
        if rank == 0 or collective.name != "sparse_bcast"
        else None
    )


def is_sum(collective, results, total):
    """Return whether what all ranks returned adds up to the sum, and what they have alike has the same bits."""
    promised = [collective.declaration.promised(result) for result in results]
    alike = [
        value if isinstance(value, list) else [value]
        for value in (part.value for part in promised)
    ]
    bits = {
        tuple(part.values.tobytes() + part.indices.tobytes() for part in each)
        for each in alike
    }
    own = [part.rejected for part in promised if part.rejected is not None]
    parts = [*alike[0], *own]
    returned = np.zeros(total.size, total.dtype)
    for part in parts:
        returned[part.indices] += part.values
    return len(bits) == 1 and np.array_equal(returned, total)


def dense_sum(vectors, n):
    total = np.zeros(n, np.float32)
    for vector in vectors:
        total[vector.indices] += vector.values
    return total


def real(options):
    """Call every algorithm on all ranks of MPI; return whether all is well."""
    from mpi4py import MPI

    comm, sound, n, k = MPI.COMM_WORLD, True, options.length, options.entries
    every = (
        [contribution(rank, n, k) for rank in range(comm.size)]
        if comm.rank == 0
        else []
    )
    total, roots = dense_sum(every, n), dense_sum(every[:1], n)
    union = comm.bcast(np.count_nonzero(total))
    if comm.rank == 0:
        print(f"{comm.size} ranks, {k} of {n} entries each, {union} in the sum")
        print(f"{'collective, algorithm':45}{'seconds':>9}{'MiB':>9}{'/ formula':>11}")
    for collective, algorithm in algorithms(options.collectives):
        result, seconds, peak = measured(collective, algorithm, comm, n, k)
        seconds, peak = comm.allreduce(seconds, MPI.MAX), comm.allreduce(peak, MPI.MAX)
        results = comm.gather(result)
        if comm.rank == 0:
            promised = formulas(comm.size, n, k, union).get(
                (collective.name, algorithm), math.inf
            )
            right = is_sum(
                collective,
                results,
                roots if collective.name == "sparse_bcast" else total,
            )
            sound &= right and peak <= 2 * promised + SLACK
            row = f"{collective.name + ', ' + algorithm:45}{seconds:9.2f}{peak / 2**20:9.2f}"
            # of "auto": as it takes
            over = f"{peak / promised:11.2f}" if promised < math.inf else f"{'-':>11}"
            print(row + over + " WRONG" * (not right), flush=True)
    return comm.bcast(sound)


def measured(collective, algorithm, comm, n, k):
    """Return what a call returns, its seconds, and the peak of memory in it."""
    arguments = {"algorithm": algorithm, **ARGUMENTS.get(collective.name, {})}
    # what is compiled here is not counted
    collective(vector_of(collective, comm.rank, n, 9), comm, **arguments)
    vector = vector_of(collective, comm.rank, n, k)
    comm.Barrier()
    tracemalloc.start()
    try:
        start = time.perf_counter()
        result = collective(vector, comm, **arguments)
        return result, time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--length",
        type=int,
        default=500_000,
        help="of the vectors (default %(default)s)",
    )
    parser.add_argument(
        "--entries", type=int, default=5_000, help="of a rank (default %(default)s)"
    )
    parser.add_argument(
        "--collectives",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="NAME",
        help="instead of all",
    )
    options = parser.parse_args()
    return 0 if real(options) else 1


if __name__ == "__main__":
    sys.exit(main())
