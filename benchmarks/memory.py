"""Measure the memory of a step on a rank, in bytes a value: kept between steps, and more while a step runs.

    mpirun -n 2 python -m mpi4py benchmarks/memory.py --json docs/results/memory.json

The gradient, the mean (`out=` is the gradient) and the parameters of a loop are the
caller's, and are not counted. Resident pages, as Linux counts them: the first two steps,
which compile and allocate, are left out.
"""

import argparse
import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop
from mpicomp import (
    ChunkedTopK,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    Quantised,
    TopK,
)

COMM = MPI.COMM_WORLD
IN_PLACE = "`TopK(0.001)`, `ErrorFeedback(in_place=True)`, `sparse=True`"


def status(field: str) -> int:
    """Return a field of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def collect() -> None:
    """Return freed memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def exchanges() -> dict[str, Callable[[], GradientExchange]]:
    """Return what makes each exchange, by its line."""
    chunks = Quantised(ChunkedTopK(128, 4096), "two_bit")
    return {
        "`bits=4`": lambda: GradientExchange(COMM, bits=4),
        "`TopK(0.01)`": lambda: GradientExchange(COMM, TopK(0.01)),
        "`TopK(0.001)`": lambda: GradientExchange(COMM, TopK(0.001)),
        IN_PLACE: lambda: GradientExchange(
            COMM, TopK(0.001), ErrorFeedback(in_place=True)
        ),
        "`TopK(0.001)`, `MomentumCorrection()`": lambda: GradientExchange(
            COMM, TopK(0.001), MomentumCorrection()
        ),
        '`Quantised(ChunkedTopK(128, 4096), "two_bit")`': lambda: GradientExchange(
            COMM, chunks
        ),
        "`ChunkedTopK(8, 256)`, `basis=Hadamard(256)`": lambda: GradientExchange(
            COMM, ChunkedTopK(8, 256), basis=Hadamard(256)
        ),
    }


def measured(make: Callable[[], Callable[[], Any]], length: int) -> dict[str, float]:
    """Return the bytes a value that are kept, and those more in a step, the most of all ranks."""
    collect()
    before = status("VmRSS")
    step = make()
    for _ in range(2):
        step()
    collect()
    kept = status("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = status("VmRSS")
    step()
    more = status("VmHWM") - base
    found = COMM.allreduce(kept, MPI.MAX), COMM.allreduce(more, MPI.MAX)
    return {"kept": found[0] / length, "in_a_step": found[1] / length}


def main() -> None:
    """Measure each exchange, and a loop."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=float, default=2**24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    length = int(options.length)
    rng = np.random.default_rng(COMM.rank)
    gradient = rng.standard_normal(length, np.float32)
    rows = []

    def steps_of(exchange: GradientExchange, name: str) -> Callable[[], Any]:
        if name == IN_PLACE:
            return lambda: exchange(gradient, sparse=True)
        return lambda: exchange(gradient, out=gradient)

    def rounds(momentum: float) -> Callable[[], Any]:
        exchange = GradientExchange(COMM, bits=4)
        return OuterLoop(exchange, gradient, every=1, momentum=momentum).step

    # Compilers and connections take memory of their own: once before anything counts.
    for name, make in exchanges().items():
        steps_of(make(), name)()
    rounds(momentum=0.9)()
    for name, make in exchanges().items():
        row = measured(lambda name=name, make=make: steps_of(make(), name), length)
        rows.append({"name": name, **row})
    for momentum in (0.0, 0.9):
        name = f"`OuterLoop`, `momentum={momentum:g}`, of an exchange with `bits=4`"
        row = measured(lambda momentum=momentum: rounds(momentum), length)
        rows.append({"name": name, **row})
    if COMM.rank == 0:
        for row in rows:
            print(f"{row['name']:60} {row['kept']:6.2f} {row['in_a_step']:6.2f}")
        if options.json:
            text = json.dumps({"ranks": COMM.size, "length": length, "rows": rows})
            options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
