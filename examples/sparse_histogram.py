"""Sum sparse histograms, and find the k most frequent items of all ranks: sparse sums without learning.

    mpirun -n 4 python -m mpi4py examples/sparse_histogram.py

Each rank counts the sequences of four bytes in its files of Python's library: a
histogram over 2^32 bins, of which some hundred thousand are not empty. k-mers of
genomes and n-grams of words are counted alike. Then

    sparse_reduce_scatter    the histogram of all ranks, divided by ranges of bins: rank r of P has bins 2^32 r / P on
    sparse_reduce            all of it, on rank 0 alone
    gtopk_allreduce          the k most frequent sequences: "exact", or by "recursive_doubling", which sends less, and
                             may miss a sequence that is frequent in total and nowhere among the first k

Counts are integers below 2^53 in float64, so every sum is exact. As a dense array the
bins would take 32 GiB. It checks itself at the end and exits with status 1 when a check
fails.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import numpy as np
from checks import verdict
from mpi4py import MPI

from collectives import gtopk_allreduce, sparse_reduce, sparse_reduce_scatter, traffic
from mpicomp import SparseVector

BINS = 2**32


def files(most):
    """Return the first files of Python's library, the same on all ranks."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:most]


def histogram(paths):
    """Return how often each sequence of four bytes is in files."""
    sequences = [np.empty(0, np.int64)]
    for path in paths:
        data = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
        sequences.append(
            data[:-3] << 24 | data[1:-2] << 16 | data[2:-1] << 8 | data[3:]
        )
    bins, counts = np.unique(np.concatenate(sequences), return_counts=True)
    return SparseVector(bins, counts.astype(np.float64), BINS)


def largest(vector, k):
    """Return the k bins with the largest counts, the lower one first of two with equal counts."""
    return vector.indices[np.lexsort((vector.indices, -vector.values))[:k]]


def is_same(vector, expected):
    """Return whether two vectors have the same entries."""
    return np.array_equal(vector.indices, expected.indices) and np.array_equal(
        vector.values, expected.values
    )


def text_of(place):
    """Return a sequence of four bytes as text."""
    return repr(int(place).to_bytes(4, "big").decode("latin1"))


def bytes_of(call, comm):
    """Return the result of a call, and the largest number of bytes that a rank sends in it."""
    before = traffic(comm).nbytes
    result = call()
    return result, max(comm.allgather(traffic(comm).nbytes - before))


def verdicts(comm, options):
    """Yield the checks, as (text, whether it holds on this rank)."""
    mine, whole = (
        histogram(files(options.files)[comm.rank :: comm.size]),
        histogram(files(options.files)),
    )
    share, nbytes = bytes_of(lambda: sparse_reduce_scatter(mine, comm), comm)
    first, end = (BINS * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    inside = (whole.indices >= first) & (whole.indices < end)
    expected = SparseVector(whole.indices[inside], whole.values[inside], BINS)
    yield (
        f"each rank has the sums of its bins, {whole.nnz:,} in all ({nbytes:,} bytes of a rank)",
        is_same(share, expected),
    )
    total, nbytes = bytes_of(lambda: sparse_reduce(mine, comm), comm)
    yield (
        f"rank 0 has all sums ({nbytes:,} bytes)",
        comm.rank > 0 or is_same(total, whole),
    )
    k, true = options.k, largest(whole, options.k)
    (exact, _), nbytes = bytes_of(
        lambda: gtopk_allreduce(mine, comm, k=k, algorithm="exact"), comm
    )
    named = ", ".join(
        f"{text_of(place)} {int(whole.values[whole.indices == place][0]):,}"
        for place in true[:3]
    )
    yield (
        f"the {k} most frequent, exactly ({named}, ...; {nbytes:,} bytes)",
        {*exact.indices} == {*true},
    )
    (near, _), nbytes = bytes_of(
        lambda: gtopk_allreduce(mine, comm, k=k, algorithm="recursive_doubling"), comm
    )
    found = len({*near.indices} & {*true})
    yield (
        f"by recursive doubling {found} of these {k} ({nbytes:,} bytes)",
        found >= k / 2,
    )


def main():
    options, comm = parse_arguments(), MPI.COMM_WORLD
    return verdict(dict(verdicts(comm, options)), comm)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--files", type=int, default=150, help="files to count (default %(default)s)"
    )
    parser.add_argument(
        "--k", type=int, default=1000, help="sequences to find (default %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
