"""A sum with every value in 4 bits, to read beside `quantised_allreduce`, which has the same bits.

    mpirun -n 4 python -m mpi4py examples/simple/few_bits.py

Left out: 8, 2 and 1 bits, packing two values in a byte, sums inside a node, float64, values that
are not finite.
"""

import numpy as np
from mpi4py import MPI

from collectives import quantised_allreduce

BLOCK = 256  # values that share a scale
TOP = 7  # of the levels -7 to 7


def coded(values):
    """Return what values are in 4 bits: multiples of a scale for each block."""
    decoded = np.zeros_like(values)
    for first in range(0, values.size, BLOCK):
        block = values[first : first + BLOCK]
        largest = np.abs(block).max()
        if largest == 0:
            continue
        # rounded up to 8 significant bits, so that the error needs no rounding
        fraction, exponent = np.frexp(np.float64(largest) / TOP)
        scale = np.float32(np.ldexp(np.ceil(fraction * 256), exponent - 8))
        levels = np.rint(block / scale).astype(np.int8)
        decoded[first : first + BLOCK] = levels * scale
    return decoded


def simple_sum(comm, array):
    """Return the sum of the arrays of all ranks in 4 bits, and what this rank must keep."""
    blocks = -(-array.size // BLOCK)
    bounds = [blocks * rank // comm.size * BLOCK for rank in range(comm.size)]
    shares = [
        slice(*span) for span in zip(bounds, [*bounds[1:], array.size], strict=True)
    ]
    own = shares[comm.rank]

    # each rank sends every share to its owner, and keeps the error
    sent = [coded(array[share]) for share in shares]
    rejected = np.concatenate(
        [array[share] - part for share, part in zip(shares, sent, strict=True)]
    )
    received = comm.alltoall(sent)

    # the owner adds to its own values as they are, in rank order, and rounds the sum once
    total = array[own].copy()
    for rank, part in enumerate(received):
        if rank != comm.rank:
            total += part
    result = coded(total)
    rejected[own] = total - result
    return np.concatenate(comm.allgather(result)), rejected


def main():
    comm = MPI.COMM_WORLD
    array = np.random.default_rng(comm.rank).standard_normal(10_000).astype(np.float32)
    total, rejected = quantised_allreduce(array, comm, bits=4, algorithm="direct")
    simple_total, simple_rejected = simple_sum(comm, array)
    assert total.tobytes() == simple_total.tobytes()
    assert rejected.tobytes() == simple_rejected.tobytes()
    if comm.rank == 0:
        print("check: the sum in 4 bits, and what is kept: ok")


if __name__ == "__main__":
    main()
