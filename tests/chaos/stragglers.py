"""Ranks that learn of a fault in different operations, or late, or differ on the quorum, and shrink together.

    mpirun --with-ft ulfm -n 4 python -m mpi4py tests/chaos/stragglers.py

Without the rounds of `collectives.calls.recovery` the first of these waits for ever in
MPI's Shrink, every time.
"""

import os

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveError, CollectiveTimeoutError, GradientExchange
from mpicomp import ErrorFeedback, TopK

WORLD, DEADLINE = MPI.COMM_WORLD, 0.5


def apart(comm):
    """Half of the ranks were in a step, and agree on it; the others were in something else, and shrink at once."""
    if comm.rank % 2:
        assert not collectives.agree(True, comm)
    return collectives.shrink(comm)


def twice(comm):
    """One rank agrees on two steps while the others are in shrink."""
    if comm.rank == 0:
        assert not collectives.agree(False, comm)
        assert not collectives.agree(True, comm)
    return collectives.shrink(comm)


def late(comm):
    """One rank comes when the others have given up; they call again."""
    if comm.rank:
        gives_up(comm, collectives.shrink)
    WORLD.Barrier()
    return collectives.shrink(comm)


def late_from_a_step(comm):
    """The same, and that rank agrees on its step first."""
    if comm.rank:
        gives_up(comm, collectives.shrink)
    WORLD.Barrier()
    if comm.rank == 0:
        assert not collectives.agree(True, comm)
    return collectives.shrink(comm)


def given_up_in_a_step(comm):
    """One rank comes when the others have given up on the agreement of a step: their votes count there all the same."""
    if comm.rank:
        gives_up(comm, lambda comm: collectives.agree(True, comm))
    WORLD.Barrier()
    if comm.rank == 0:
        assert collectives.agree(True, comm)
    return collectives.shrink(comm)


def different_quorums(comm):
    """All are refused, and nothing has changed: they call again."""
    mine = 3 if comm.rank == 1 else 2
    said = f"quorum must be the same on all ranks, got {mine} on rank {comm.rank} and another on others"
    with pytest.raises(CollectiveError, match=said):
        collectives.shrink(comm, quorum=mine)
    return collectives.shrink(comm, quorum=2)


def gives_up(comm, call):
    collectives.configure(timeout=DEADLINE)
    with pytest.raises(CollectiveTimeoutError, match="not all live ranks called"):
        call(comm)
    collectives.configure(timeout=None)


def main():
    for scene in (
        apart,
        twice,
        late,
        late_from_a_step,
        given_up_in_a_step,
        different_quorums,
    ):
        comm = WORLD.Dup()
        exchange = GradientExchange(
            comm, TopK(k=9), ErrorFeedback(), collectives.gtopk_allreduce, average=False
        )
        exchange(np.ones(20))
        WORLD.Barrier()  # shrink revokes: all have to be out of the step
        survivors = scene(comm)
        assert survivors.size == WORLD.size
        exchange.continue_on(survivors)
        np.testing.assert_array_equal(
            np.unique(exchange(np.ones(20))), [0, 2 * WORLD.size]
        )
        assert exchange.comm is survivors
        WORLD.Barrier()
    print("all shrank together", flush=True)
    WORLD.Barrier()
    os._exit(0)  # MPI_Finalize may wait for what was revoked


main()
