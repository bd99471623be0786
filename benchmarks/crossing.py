"""Time exact sums whose long messages cross: one way after the other by chance, or both at once.

    mpirun -n 2 python -m mpi4py benchmarks/crossing.py          # or on the testbed; --help for the options

"at once" is how messages leave, see the head of `collectives.runtime.messages`; "as
they come" lets every message leave when it is ready. Both take turns in an order drawn
anew; a time is that of the slowest rank.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import dense_allreduce, sparse_allreduce
from collectives.allreduce import ALGORITHMS
from collectives.runtime import messages
from mpicomp_bench.bench.data import draw_sparse
from mpicomp_bench.measuring import interleave, paced
from mpicomp_bench.options import Parser

# from how many bytes on a message awaits the other
WAYS = {"as they come": 1 << 62, "at once": messages.BIDIRECTIONAL}
HEADER = "| algorithm | as they come, ms | at once, ms | of the time before |\n| --- | --- | --- | --- |"


def going(way: str, call: Callable[[], Any]) -> Any:
    """Run a call whose messages leave in one way."""
    messages.BIDIRECTIONAL = WAYS[way]
    return call()


def lines(times: dict[tuple[str, str], Any]) -> Iterator[str]:
    """Yield the table: medians, and quartiles in brackets."""
    yield HEADER
    for name in dict.fromkeys(name for name, _ in times):
        rows = [
            1e3 * np.percentile(times[name, way].max(axis=0), [50, 25, 75])
            for way in WAYS
        ]
        cells = [
            f"{middle:.1f} ({low:.1f} to {high:.1f})" for middle, low, high in rows
        ]
        yield f"| {name} | {' | '.join(cells)} | {rows[1][0] / rows[0][0]:.2f} |"


def main() -> None:
    """Measure, and print on rank 0."""
    parser = Parser(description=__doc__)
    parser.add_argument("--length", type=float, default=1e6)
    parser.add_argument("--density", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=15)
    names = ["recursive_doubling", "allgather", "split_allgather"]
    parser.add_argument("--algorithms", nargs="+", default=names, choices=ALGORITHMS)
    options, comm = parser.parse_args(), MPI.COMM_WORLD
    length = int(options.length)
    entries = max(1, round(length * options.density))
    vector = draw_sparse(
        "independent", comm.rank, comm.size, length, entries, "float32"
    )
    calls = {
        name: partial(sparse_allreduce, vector, comm, algorithm=name)
        for name in options.algorithms
    }
    calls["MPI's Iallreduce"] = partial(dense_allreduce, vector.to_dense(), comm)
    ways = {
        (name, way): partial(going, way, call)
        for name, call in calls.items()
        for way in WAYS
    }
    contestants = paced(ways, comm)
    times = interleave(contestants, options.repeats, comm)
    if comm.rank == 0:
        print(*lines(dict(zip(ways, times, strict=True))), sep="\n")


if __name__ == "__main__":
    main()
