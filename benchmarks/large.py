#!/usr/bin/env python3
"""Bytes and seconds of one exchange of a large model's gradient, method by method, over slow links.

    python benchmarks/testbed/testbed.py up 8 1gbit
    python benchmarks/testbed/testbed.py run python -m mpi4py benchmarks/large.py --methods dense fp16 few-bits-4 \
      topk-0.001 --json docs/results/large/1e8-1gbit.json
    python benchmarks/testbed/testbed.py run python -m mpi4py benchmarks/large.py --methods dense fp16 \
      in-basis-two-bit-8 local-sparse-1 --length 5e7 --json docs/results/large/5e7-1gbit.json
    python benchmarks/testbed/testbed.py down

Each method has the memory to itself: what it keeps is allocated before its turns, and
freed after them. The first turn compiles, connects and touches the memory, and is not
counted. Seconds are those of the slowest rank, from a common start; bytes are those
that the busiest rank sends, as `collectives.traffic` counts them. MPI's own sums, which
are not counted, have their least bytes.

The hosts of a testbed share the cores of one machine. What an exchange takes of them,
without links, is in 1e8-memory.json and 5e7-memory.json: the same by `mpirun -n 8
python -m mpi4py benchmarks/large.py`.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import OuterLoop, traffic
from mpicomp.arrays import Array
from mpicomp_bench.bench.quantised import sum_in_16_bits
from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import Contestant, Row, interleave, timed
from mpicomp_bench.methods import construct, outer_settings
from mpicomp_bench.options import Parser, add_list, positive
from mpicomp_bench.output import write_rows

Call = Callable[[], Any]


METHODS = (
    "dense",
    "fp16",
    "few-bits-4",
    "in-basis-two-bit-8",
    "topk-0.001",
    "local-sparse-1",
)


def call_of(name: str, gradient: Array, comm: Any) -> Call:
    """Return the exchange of a method: of 32 and 16 bits by MPI, of few entries with a sparse mean."""
    out = np.zeros_like(gradient)
    if name == "dense":
        return partial(comm.Allreduce, gradient, out)
    if name == "fp16":  # as PyTorch's hook sends them
        return partial(sum_in_16_bits, gradient, comm, out)
    exchange, outer = construct(name, comm), outer_settings(name)
    if outer:
        return partial(local_round, OuterLoop(exchange, [out], **outer), out, gradient)
    if name.startswith("topk"):
        return partial(exchange, gradient, sparse=True)
    return partial(exchange, gradient, out=out)


def local_round(outer: OuterLoop, parameters: Array, change: Array) -> None:
    """Change the parameters, and make the replicas equal."""
    np.add(parameters, change, out=parameters)
    outer.step()


def row(method: str, length: int, turns: int, comm: Any) -> Row:
    """Measure a method."""
    gradient = np.random.default_rng([1, comm.rank]).standard_normal(length, np.float32)
    call = call_of(method, gradient, comm)
    call()
    before = traffic(comm).nbytes
    call()
    sent = traffic(comm).nbytes - before
    if method in ("dense", "fp16"):
        sent = (
            2
            * (comm.size - 1)
            * gradient.nbytes
            // comm.size
            // (2 if method == "fp16" else 1)
        )
    (seconds,) = interleave([Contestant(method, call)], turns, comm, warm=False)
    nbytes = comm.allreduce(sent, MPI.MAX)
    del call
    gc.collect()
    return {
        "method": method,
        "length": length,
        "ranks": comm.size,
        "nbytes": nbytes,
        **timed(seconds),
    }


def main() -> int:
    """Measure, and write the rows on rank 0."""
    parser = Parser(description=__doc__.partition("\n")[0])
    add_list(parser, "--methods", list(METHODS), "to measure ")
    parser.add_argument(
        "--length",
        type=positive,
        default=100_000_000,
        help="values of the gradient (%(default)s)",
    )
    parser.add_argument(
        "--turns",
        type=positive,
        default=3,
        help="of each method that count (%(default)s)",
    )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the rows to a file"
    )
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    check_files(options, comm)
    rows = []
    for method in options.methods:
        rows.append(row(method, options.length, options.turns, comm))
        if comm.rank == 0:
            print(
                f"{method:<18} {rows[-1]['nbytes'] / 1e6:10.1f} MB {rows[-1]['seconds']:9.3f} s",
                flush=True,
            )
    return 0 if comm.rank else write_rows(options, rows)


if __name__ == "__main__":
    sys.exit(main())
