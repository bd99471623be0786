"""Ranks that call shrink with different quorums: all raise, and shrink with one quorum afterwards; nobody dies.

mpirun --with-ft ulfm -n 3 python -m mpi4py tests/quorums.py
"""

import os

from mpi4py import MPI

import collectives
from mpicomp import CollectiveError


def main():
    comm, said = MPI.COMM_WORLD.Dup(), ""
    MPI.COMM_WORLD.Barrier()  # Open MPI crashes where a communicator is revoked that another rank is still making
    try:
        collectives.shrink(comm, quorum=3 if comm.rank == 1 else 2)
    except CollectiveError as error:
        said = str(error)
    mine = 3 if comm.rank == 1 else 2
    assert f"quorum must be the same on all ranks, got {mine} on rank {comm.rank} and another on others" in said, said
    assert collectives.shrink(comm, quorum=2).size == 3
    print("refused, and shrank", flush=True)
    os._exit(0)  # MPI_Finalize may wait on a revoked communicator


main()
