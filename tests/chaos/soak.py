"""Exchange for a long time, and see whether anything grows:

    mpirun -n 4 python -m mpi4py tests/chaos/soak.py [--exchanges 100000]

Small vectors, by each kind of collective in turn, blocking and nonblocking, one array
and named tensors, with errors on one rank among them; and now and then a communicator
that is made, used and freed. Looked at every hundredth of the way: resident memory,
open descriptors, the operations that the library holds, and the handles that MPI has
given out (the number of a new communicator and a new attribute: they are reused when
those before were freed). Exit status 1 when memory grows by over 1 % after the first
tenth, or one of the others at all.
"""

import gc
import os
import pathlib
import resource
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "support"))

from jobs import parser
from mpi4py import MPI

from collectives import (
    CollectiveError,
    GradientExchange,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_iallreduce,
    traffic,
)
from collectives.runtime.engine import of_process
from mpicomp import ErrorFeedback, TopK

LENGTH = 200
COLLECTIVES = gtopk_allreduce, sparse_allreduce, sparse_iallreduce, sparse_allgather


def resident():
    """Return the bytes of this process that are in memory."""
    return (
        int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        * resource.getpagesize()
    )


def state(comm):
    """Return what must not grow: descriptors, operations in flight, and where MPI's next handle would be."""
    fresh = comm.Dup()
    handle = fresh.py2f()
    fresh.Free()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "in flight": len(of_process()._in_flight),
        "handle": handle,
    }


def exchanges(comm):
    """Return ways to exchange a vector: of each collective as one array, and as two named ones."""

    def named(collective):
        exchange = GradientExchange(
            comm, TopK(k=9), ErrorFeedback(), collective, small=50
        )
        return lambda gradient: exchange({"weight": gradient, "bias": gradient[:7]})[
            "weight"
        ]

    ones = [
        GradientExchange(comm, TopK(k=9), ErrorFeedback(), collective)
        for collective in COLLECTIVES
    ]
    return ones + [named(collective) for collective in COLLECTIVES]


def step(ways, comm, number):
    """Exchange once; every 50th time one rank contributes an invalid vector, and all ranks raise."""
    gradient = (
        np.random.default_rng([number, comm.rank])
        .standard_normal(LENGTH)
        .astype(np.float32)
    )
    spoilt = number % 50 == 49
    if spoilt and comm.rank == number % comm.size:
        gradient[3] = np.nan
    try:
        ways[number % len(ways)](gradient)
    except (CollectiveError, ValueError):
        if not spoilt:
            raise


def passing(comm):
    """Use a communicator of a short life."""
    own = comm.Dup()
    GradientExchange(own, TopK(k=3), ErrorFeedback(), sparse_allreduce)(np.ones(LENGTH))
    own.Free()


def soak(comm, count, looks=100):
    """Run so many exchanges; return what was seen on the way, at so many looks."""
    ways, seen = exchanges(comm), []
    for number in range(count):
        step(ways, comm, number)
        if number % max(1, count // looks) == 0:
            passing(comm)
            gc.collect()
            seen.append({"memory": resident(), **state(comm)})
    return seen


def grown(seen):
    """Return what has grown since the first tenth; memory by the medians of a tenth at the start and at the end."""
    tenth = max(1, len(seen) // 10)
    first, last = seen[tenth : 2 * tenth], seen[-tenth:]
    faults = [
        name
        for name in ("descriptors", "in flight", "handle")
        if last[-1][name] > first[0][name]
    ]
    before, after = (
        float(np.median([each["memory"] for each in part])) for part in (first, last)
    )
    return faults + ["memory"] * (after > 1.01 * before), before, after


def main():
    asked, comm = parser(__doc__, exchanges=100_000).parse_args(), MPI.COMM_WORLD
    began = MPI.Wtime()
    faults, before, after = grown(soak(comm, asked.exchanges))
    for rank, (mine, first, last) in enumerate(comm.allgather((faults, before, after))):
        if comm.rank == 0:
            said = f"rank {rank}: resident memory {first / 2**20:.2f} MiB, then {last / 2**20:.2f} MiB"
            print(
                f"{said} ({100 * (last / first - 1):+.2f} %), grown: {', '.join(mine) or 'nothing'}"
            )
    if comm.rank == 0:
        sent = traffic(comm)
        print(
            f"{asked.exchanges} exchanges in {MPI.Wtime() - began:.0f} s, {sent.messages} messages of rank 0"
        )
    sys.exit(bool(comm.allreduce(len(faults))))


if __name__ == "__main__":
    main()
