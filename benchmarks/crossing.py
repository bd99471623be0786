"""Time exact sums whose long messages cross: one way after the other by chance, or both at once.

    mpirun -n 2 python -m mpi4py benchmarks/crossing.py          # or on the testbed; --help for the options

"at once" is how messages leave, see the head of `collectives.messages`; "as they come" lets every message leave when it
is ready. Both take turns in an order drawn anew; a time is that of the slowest rank.
"""

import argparse
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import dense_allreduce, messages, sparse_allreduce, warm_up
from collectives.allreduce import ALGORITHMS
from collectives.cli.tune.checking import random_vector

WAYS = {"as they come": 1 << 62, "at once": messages.CROSSING}  # from how many bytes on a message awaits the other
HEADER = "| algorithm | as they come, ms | at once, ms | of the time before |\n| --- | --- | --- | --- |"


def timed(call: Callable[[], Any], comm: MPI.Intracomm) -> float:
    """Return the milliseconds that a call takes on the slowest rank."""
    comm.Barrier()
    start = perf_counter()
    call()
    return 1e3 * float(comm.allreduce(perf_counter() - start, MPI.MAX))


def measured(
    calls: dict[str, Callable[[], Any]], comm: MPI.Intracomm, repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Return the milliseconds of all calls, by algorithm and way."""
    order = np.random.default_rng(0)
    times: dict[tuple[str, str], list[float]] = {(name, way): [] for name in calls for way in WAYS}
    for _ in range(repeats):
        for place in order.permutation(len(times)):
            name, way = list(times)[place]
            messages.CROSSING = WAYS[way]
            times[name, way].append(timed(calls[name], comm))
    messages.CROSSING = WAYS["at once"]
    return times


def lines(times: dict[tuple[str, str], list[float]]) -> Iterator[str]:
    """Yield the table: medians, and quartiles in brackets."""
    yield HEADER
    for name in dict.fromkeys(name for name, _ in times):
        rows = [np.percentile(times[name, way], [50, 25, 75]) for way in WAYS]
        cells = [f"{middle:.1f} ({low:.1f} to {high:.1f})" for middle, low, high in rows]
        yield f"| {name} | {' | '.join(cells)} | {rows[1][0] / rows[0][0]:.2f} |"


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=float, default=1e6)
    parser.add_argument("--density", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=15)
    names = ["recursive_doubling", "allgather", "recursive_halving", "split_allgather", "dense"]
    parser.add_argument("--algorithms", nargs="+", default=names, choices=ALGORITHMS)
    options, comm = parser.parse_args(), MPI.COMM_WORLD
    length = int(options.length)
    vector = random_vector(length, max(1, round(length * options.density)), comm.rank)
    calls = {name: lambda name=name: sparse_allreduce(vector, comm, algorithm=name) for name in options.algorithms}
    values = vector.to_dense()
    warm_up(comm, ["float32"])
    times = measured(calls | {"MPI's Iallreduce": lambda: dense_allreduce(values, comm)}, comm, options.repeats)
    if comm.rank == 0:
        print(*lines(times), sep="\n")


if __name__ == "__main__":
    main()
