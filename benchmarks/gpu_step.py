"""A step of the exchange in place, over a dense allreduce of the same gradient, on a GPU.

    mpirun -n 2 python benchmarks/gpu_step.py --length 25e6 --json step.json

Ranks may share a GPU; MPICOMP_CUDA_AWARE says how messages pass MPI. A time is that of
the slowest rank, from a barrier until its stream has finished; the median of the
repeats. The sparse mean is returned, and added to an array of parameters; the dense sum
is written to an array.
"""

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from mpi4py import MPI  # noqa: E402

from collectives import (  # noqa: E402
    GradientExchange,
    dense_allreduce,
    gtopk_allreduce,
    sparse_allreduce,
)
from mpicomp import ChunkedTopK, ErrorFeedback, Quantised, TopK  # noqa: E402


def main() -> None:
    """Measure, and write the rows on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=float, default=25e6)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    comm, cupy = MPI.COMM_WORLD, importlib.import_module("cupy")
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    rows = [
        {
            "name": name,
            "length": int(options.length),
            "ranks": comm.size,
            "seconds": timed(comm, cupy, call, options),
        }
        for name, call in contestants(comm, cupy, options).items()
    ]
    if comm.rank == 0:
        for row in rows:
            row["over_dense"] = row["seconds"] / rows[0]["seconds"]
            print(
                f"{row['name']:40s} {1e3 * row['seconds']:9.3f} ms, {row['over_dense']:.3f} of the dense one"
            )
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def contestants(comm: Any, cupy: Any, options: Any) -> dict[str, Callable[[], Any]]:
    """Return a step by name, the dense one first. Each adds a fresh gradient to the array that holds the residual."""
    length, density = int(options.length), options.density
    fresh = cupy.asarray(
        np.random.default_rng(comm.rank).standard_normal(length, np.float32)
    )
    parameters = cupy.zeros(length, np.float32)

    def step(compressor: Any, collective: Any) -> Callable[[], Any]:
        gradient = fresh.copy()
        exchange = GradientExchange(
            comm, compressor, ErrorFeedback(in_place=True), collective
        )

        def run() -> None:
            np.add(gradient, fresh, out=gradient)
            exchange(gradient, sparse=True).add_to(parameters, -0.1)

        return run

    k = max(1, round(4096 * density))
    few_bits, mean = GradientExchange(comm, bits=4), cupy.empty_like(fresh)
    return {
        "dense_allreduce": lambda: dense_allreduce(fresh, comm),
        f"in place, top-k {density:g}, allreduce": step(
            TopK(density), sparse_allreduce
        ),
        f"in place, top-k {density:g}, gTop-k": step(TopK(density), gtopk_allreduce),
        "4 bits of every value, out=": lambda: few_bits(fresh, out=mean),
        f"in place, {k} of 4096, two bits": step(
            Quantised(ChunkedTopK(k, 4096), "two_bit"), sparse_allreduce
        ),
    }


def timed(comm: Any, cupy: Any, call: Callable[[], Any], options: Any) -> float:
    """Return the median seconds of the slowest rank, after two calls that are not measured."""
    found = []
    for _ in range(2 + options.repeats):
        cupy.cuda.get_current_stream().synchronize()
        comm.Barrier()
        began = perf_counter()
        call()
        cupy.cuda.get_current_stream().synchronize()
        found.append(comm.allreduce(perf_counter() - began, MPI.MAX))
    return statistics.median(found[2:])


if __name__ == "__main__":
    main()
