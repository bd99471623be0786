"""Ranks that die before, during and after a collective, one by one, and an exchange that goes on without them.

    mpirun --with-ft ulfm -n 5 python -m mpi4py tests/chaos/survivors.py FOLDER COLLECTIVE

Of 5 ranks 2 are left. Everything is an integer, and each rank that dies writes down
what it owes: in the end what was given in the steps that were kept is what came, and
what everybody owes, to the last bit.
"""

import os
import pathlib
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

import collectives
from collectives import GradientExchange, RankFailedError
from collectives.runtime.link import link_if_any
from mpicomp import ErrorFeedback, TopK

LENGTH, STEPS = 600, 12
# rank: in which step, and when
DEATHS = {4: (3, "before"), 3: (6, "during"), 0: (9, "after")}


def gradient(rank, step):
    return (
        np.random.default_rng([rank, step]).integers(-9, 10, LENGTH).astype(np.float64)
    )


def die(exchange, me, step):
    np.save(pathlib.Path(sys.argv[1], f"{me}-{step}.npy"), exchange.feedback.residual)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_at_its_second_message(comm, exchange, me, step):
    """Have this rank die in the middle of the schedule."""
    link, owed = link_if_any(comm), exchange.feedback.residual.copy()
    send = link.send

    def last(*message):
        link.send = lambda *message: (
            np.save(pathlib.Path(sys.argv[1], f"{me}-{step}"), owed),
            os.kill(os.getpid(), 9),
        )
        return send(*message)

    link.send = last


def main():
    comm = MPI.COMM_WORLD.Dup()
    me, came, slowest = comm.rank, np.zeros(LENGTH), 0.0
    collective = getattr(collectives, sys.argv[2])
    exchange = GradientExchange(
        comm, TopK(k=20), ErrorFeedback(), collective, average=False
    )
    named = 0
    while exchange.steps < STEPS:
        step, (when, how) = exchange.steps, DEATHS.get(me, (-1, ""))
        if step == when and how == "before":
            die(exchange, me, step)
        if step == when and how == "during":
            dies_at_its_second_message(comm, exchange, me, step)
        began = time.monotonic()
        try:
            came += exchange(gradient(me, step))
        except RankFailedError as error:
            named += any(f"rank {rank} died" in str(error) for rank in range(comm.size))
        except Exception as error:
            if "the step is undone" not in str(error):
                raise
            named += 1
        else:
            if step == when:
                die(exchange, me, step + 1)
            continue
        comm = collectives.shrink(comm)
        exchange.continue_on(comm)
        slowest = max(slowest, time.monotonic() - began)
    check(comm, exchange, came)
    print(
        f"{me}: {comm.size} of 5 ranks are left, nothing is missing; {named} deaths, {slowest:.3f} s",
        flush=True,
    )
    comm.Barrier()
    os._exit(0)  # MPI_Finalize may wait for the dead


def check(comm, exchange, came):
    lived = dict.fromkeys(range(5), STEPS)
    owed = sum(comm.allgather(exchange.feedback.residual.copy()))
    for rank in DEATHS:
        (last,) = pathlib.Path(sys.argv[1]).glob(f"{rank}-*.npy")
        lived[rank] = int(last.stem.partition("-")[2])
        owed = owed + np.load(last)
    given = sum(
        gradient(rank, step) for rank, steps in lived.items() for step in range(steps)
    )
    np.testing.assert_array_equal(came + owed, given)


main()
