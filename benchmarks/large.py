#!/usr/bin/env python3
"""Bytes and seconds of one exchange of a large model's gradient, method by method, over slow links.

    python benchmarks/testbed/testbed.py up 8 1gbit
    python benchmarks/testbed/testbed.py run python -m mpi4py benchmarks/large.py --methods dense "16 bits" "4 bits" \
      "top-k 0.1 %" --json docs/results/large/1e8-1gbit.json
    python benchmarks/testbed/testbed.py run python -m mpi4py benchmarks/large.py --methods dense "16 bits" \
      "in a basis" "local steps" --length 5e7 --json docs/results/large/5e7-1gbit.json
    python benchmarks/testbed/testbed.py down

Each method has the memory to itself: what it keeps is allocated before its turns, and freed after them. The first turn
compiles, connects and touches the memory, and is not counted. Seconds are those of the slowest rank, from a common
start; bytes are those that the busiest rank sends, as `collectives.traffic` counts them. MPI's own sums, which are not
counted, have their least bytes.

The hosts of a testbed share the cores of one machine. What an exchange takes of them, without links, is in
1e8-memory.json and 5e7-memory.json: the same by `mpirun -n 8 python -m mpi4py benchmarks/large.py`.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import OuterLoop, traffic
from mpicomp_bench.bench import machine
from mpicomp_bench.bench.quantised import sum_in_16_bits
from mpicomp_bench.files import look, new_file, write
from mpicomp_bench.measuring import Contestant, Row, interleave, timed
from mpicomp_bench.options import add_list, positive
from mpicomp_bench.output import as_json

sys.path.append(str(Path(__file__).resolve().parent / "race"))

from methods import every_exchange, outer_exchange  # the exchanges of the race

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]


def dense(gradient: Array, comm: Any) -> Call:
    """Sum 32 bits of every value by MPI."""
    return partial(comm.Allreduce, gradient, np.empty_like(gradient))


def halves(gradient: Array, comm: Any) -> Call:
    """Sum 16 bits of every value, as PyTorch's fp16 hook sends them."""
    return partial(sum_in_16_bits, gradient, comm, np.empty_like(gradient))


def few_bits(gradient: Array, comm: Any) -> Call:
    """Average 4 bits of every value."""
    return partial(every_exchange("few-bits", 4, comm), gradient, out=np.empty_like(gradient))


def in_basis(gradient: Array, comm: Any) -> Call:
    """Take the signs of the mean of 8 of each 256 coefficients, in two bits."""
    return partial(every_exchange("in-basis-two-bit", 8, comm), gradient, out=np.empty_like(gradient))


def top_k(gradient: Array, comm: Any) -> Call:
    """Average the largest 0.1 %, as a sparse vector."""
    return partial(every_exchange("topk", 0.001, comm), gradient, sparse=True)


def local_steps(gradient: Array, comm: Any) -> Call:
    """Make the replicas equal, by 128 of each 4,096 differences in two bits."""
    parameters = np.zeros_like(gradient)
    outer = OuterLoop(outer_exchange("local-sparse", comm), [parameters], every=1)

    def turn() -> None:
        np.add(parameters, gradient, out=parameters)
        outer.step()

    return turn


METHODS: dict[str, Callable[[Array, Any], Call]] = {
    "dense": dense,
    "16 bits": halves,
    "4 bits": few_bits,
    "in a basis": in_basis,
    "top-k 0.1 %": top_k,
    "local steps": local_steps,
}


def row(method: str, length: int, turns: int, comm: Any) -> Row:
    """Measure a method."""
    gradient = np.random.default_rng([1, comm.rank]).standard_normal(length, np.float32)
    call = METHODS[method](gradient, comm)
    call()
    before = traffic(comm).nbytes
    call()
    sent = traffic(comm).nbytes - before
    if method in ("dense", "16 bits"):
        sent = 2 * (comm.size - 1) * gradient.nbytes // comm.size // (2 if method == "16 bits" else 1)
    (seconds,) = interleave([Contestant(method, call)], turns, comm, warm=False)
    nbytes = comm.allreduce(sent, MPI.MAX)
    del call
    gc.collect()
    return {"method": method, "length": length, "ranks": comm.size, "nbytes": nbytes, **timed(seconds)}


def main() -> int:
    """Measure, and write the rows on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_list(parser, "--methods", list(METHODS), "to measure ")
    parser.add_argument("--length", type=positive, default=100_000_000, help="values of the gradient (%(default)s)")
    parser.add_argument("--turns", type=positive, default=3, help="of each method that count (%(default)s)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows to a file")
    options = parser.parse_args()
    options.parser = parser
    comm = MPI.COMM_WORLD
    look(options, comm)
    rows = []
    for method in options.methods:
        rows.append(row(method, options.length, options.turns, comm))
        if comm.rank == 0:
            print(f"{method:<12} {rows[-1]['nbytes'] / 1e6:10.1f} MB {rows[-1]['seconds']:9.3f} s", flush=True)
    return 0 if comm.rank else write(options, json=lambda file: file.write_text(as_json(rows, machine())))


if __name__ == "__main__":
    sys.exit(main())
