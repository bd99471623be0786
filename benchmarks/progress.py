"""What is left to wait for after a computation beside operations in flight, and what their progress costs.

    mpirun -n 2 python benchmarks/progress.py --torch --json build/progress.json
    MPICOMP_PROGRESS=0 mpirun -n 2 python benchmarks/progress.py      # as if there were no thread

Over a slow link: benchmarks/testbed/netns_cluster.sh. Each rank starts an operation,
computes for 0.5 s, and waits. "left": milliseconds in `wait`, and alone, without the
computation; the slowest rank. "core": the part of a core that the thread takes while
rank 0 computes and another rank has not started the operation. Medians of 5. `--torch`:
beside the forward and backward passes of a network in PyTorch, too.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import gtopk_iallreduce, quantised_iallreduce, sparse_iallreduce
from collectives.runtime import progress
from mpicomp import TopK

SECONDS = 0.5
REPEATS = 5
COMM = MPI.COMM_WORLD
SQUARE = np.random.default_rng(0).standard_normal((300, 300))


def until(step: Callable[[], Any]) -> None:
    """Repeat a step of a computation for `SECONDS`."""
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        step()


COMPUTATIONS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "sleep": partial(time.sleep, SECONDS),
    "BLAS": partial(until, lambda: SQUARE @ SQUARE),
    "Python": partial(until, lambda: sum(range(1000))),
}


def passes_of_torch() -> Callable[[], None]:
    """Return a computation: forward and backward passes of a network."""
    import torch

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    network = torch.nn.Sequential(*layers)
    batch = torch.ones(64, 256)
    return partial(until, lambda: network(batch).square().mean().backward())


def operations() -> dict[str, Callable[[], Any]]:
    """Return functions that start an operation, by its name."""
    rng = np.random.default_rng(COMM.rank)
    values = rng.standard_normal(3_000_000, np.float32)
    short = TopK(k=1000).compress(values)
    long = TopK(k=100_000).compress(values)
    return {
        "gtopk_iallreduce, k=1,000": partial(gtopk_iallreduce, short, COMM, k=1000),
        "sparse_iallreduce, 100,000 entries": partial(sparse_iallreduce, long, COMM),
        "quantised_iallreduce, 3e6 values, bits=4": partial(
            quantised_iallreduce, values, COMM, bits=4
        ),
    }


def left(start: Callable[[], Any], compute: Callable[[], None]) -> float:
    """Return the milliseconds that the slowest rank waits after a computation."""
    COMM.Barrier()
    request = start()
    compute()
    began = time.perf_counter()
    request.wait()
    return 1e3 * float(COMM.allreduce(time.perf_counter() - began, MPI.MAX))


def share(start: Callable[[], Any], compute: Callable[[], None]) -> float:
    """Return the part of a core that other threads take while rank 0 computes and the others have not started."""
    COMM.Barrier()
    taken = 0.0
    if COMM.rank == 0:
        request = start()
        others = time.process_time() - time.thread_time()
        began = time.perf_counter()
        compute()
        others = time.process_time() - time.thread_time() - others
        taken = others / (time.perf_counter() - began)
        COMM.Barrier()
    else:
        COMM.Barrier()
        request = start()
    request.wait()
    return float(COMM.bcast(taken))


def median(measure: Callable[[], float]) -> float:
    """Return the median of some measurements, after one that is not counted."""
    measure()
    return statistics.median([measure() for _ in range(REPEATS)])


def measured(start: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Return the milliseconds left, and the parts of a core, by computation."""
    return {
        "left": {
            name: median(partial(left, start, compute))
            for name, compute in COMPUTATIONS.items()
        },
        "core": {
            name: median(partial(share, start, compute))
            for name, compute in COMPUTATIONS.items()
            if name != "nothing"
        },
    }


def shown(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table of what was measured."""
    computed = [name for name in COMPUTATIONS if name != "nothing"]
    heads = ["operation", "alone"]
    heads += [f"left: {name}" for name in computed]
    heads += [f"core: {name}" for name in computed]
    lines = [heads, ["---"] * len(heads)]
    for name, row in found.items():
        waits = [f"{wait:.2f}" for wait in row["left"].values()]
        lines.append([name, *waits, *[f"{part:.2%}" for part in row["core"].values()]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    if options.torch:
        COMPUTATIONS["PyTorch"] = passes_of_torch()
    found = {name: measured(start) for name, start in operations().items()}
    if COMM.rank == 0:
        about = f"{COMM.size} ranks; {progress.described()}"
        print(f"{about}\n\n{shown(found)}", flush=True)
        if options.json:
            results = {"about": about, "operations": found}
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
