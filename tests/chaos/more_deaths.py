"""Ranks that die while the others recover from a death: between the parts of `shrink`, and before `continue_on`.

    mpirun --with-ft ulfm -n 6 python -m mpi4py tests/chaos/more_deaths.py

Rank 5 dies in a step, rank 4 when all have come to shrink, rank 3 when it has the new
communicator, rank 2 before it goes on there. Ranks 0 and 1 are left, which are too few
for the default quorum of a second shrink.
"""

import os
import signal
import time

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import GradientExchange, RankFailedError
from collectives.calls import recovery
from mpicomp import ErrorFeedback, TopK


def die(*given):
    os.kill(os.getpid(), signal.SIGKILL)


def dies(me, exchange):
    """Have this rank die where it is its turn."""
    agree_to_shrink = recovery.Agreements.agree_to_shrink
    if me == 5:
        die()
    elif me == 4:
        recovery.Agreements.agree_to_shrink = lambda *given: (
            agree_to_shrink(*given),
            die(),
        )
    elif me == 3:
        recovery._survivors = lambda comm: (comm.Shrink(), die())
    elif me == 2:
        exchange.continue_on = die


def recovered(comm, exchange):
    """Shrink and go on, again where one died meanwhile; return the communicator and how often it took."""
    for times in range(1, 9):
        comm = collectives.shrink(comm, quorum=1)
        try:
            exchange.continue_on(comm)
        except RankFailedError:
            continue
        return comm, times
    raise RuntimeError("somebody dies each time")


def main():
    comm = first = MPI.COMM_WORLD.Dup()
    me, given = comm.rank, np.ones(20)
    exchange = GradientExchange(
        comm, TopK(k=9), ErrorFeedback(), collectives.gtopk_allreduce, average=False
    )
    exchange(given)
    collectives.configure(timeout=20.0)
    dies(me, exchange)
    began = time.monotonic()
    try:
        exchange(given)
    except RankFailedError:
        comm, times = recovered(comm, exchange)
    assert (comm.size, times, exchange.steps) == (2, 2, 1), (
        comm.size,
        times,
        exchange.steps,
    )
    np.testing.assert_array_equal(np.unique(exchange(given)), [0, 4])
    few = "2 of 6 ranks are left, and ranks 2-5 died or cannot be reached: expected at least 4 .quorum=.*checkpoint"
    with pytest.raises(RankFailedError, match=few):
        collectives.shrink(first)
    print(
        f"rank {me}: 2 of 6 ranks are left, {time.monotonic() - began:.3f} s",
        flush=True,
    )
    comm.Barrier()
    os._exit(0)  # MPI_Finalize may wait for the dead


main()
