"""Throughput of selection and addition on one rank: with one thread, with several, and of several processes.

    python benchmarks/threads.py          # --help for the options

The kernels of one rank use as many threads as MPICOMP_THREADS says. Memory is shared by
all cores, so a pass over the gradient need not be twice as fast on two threads; several
processes side by side, each on its own data with one thread, show what the memory of
this machine gives. The three ways are interleaved. Throughput is in values per second,
of all processes together from a common start to the end of the last one; no MPI is
started.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpicomp import TopK
from mpicomp.kernels import host
from mpicomp.threads import VARIABLE

HEADER = "| call | 1 thread, values/s | {0} threads | {0} processes |\n| --- | --- | --- | --- |"


def calls(length: int, density: float, seed: int) -> dict[str, Callable[[], Any]]:
    """Return the calls that are timed, on a normal float32 gradient of a process of its own."""
    rng = np.random.default_rng(seed)
    gradient, residual = (rng.standard_normal(length, np.float32) for _ in range(2))
    out, compressor = np.empty_like(gradient), TopK(density=density)
    adds = partial(
        compressor.select,
        out,
        [0, length],
        (residual, 1.0, [gradient]),
    )
    return {
        f"selection of {density:g}": lambda: compressor.compress(gradient),
        "addition": lambda: host.add(residual, gradient, out),
        f"addition and selection of {density:g} in one pass": adds,
    }


def seconds(call: Callable[[], Any], threads: int) -> float:
    """Return the time of a call with so many threads."""
    os.environ[VARIABLE] = str(threads)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def serve(connection: Any, start: Any, length: int, density: float, seed: int) -> None:
    """Run the calls that are asked for by name, each from the common start; answer with the time of its end."""
    known = calls(length, density, seed)
    for name in iter(connection.recv, None):
        start.wait()
        seconds(known[name], 1)
        connection.send(time.perf_counter())  # one clock for all processes of a machine


def side_by_side(
    name: str, call: Callable[[], Any], others: list[Any], start: Any
) -> float:
    """Return the time from a common start until all processes have made their call."""
    for connection in others:
        connection.send(name)
    start.wait()
    began = time.perf_counter()
    seconds(call, 1)
    return (
        max(time.perf_counter(), *(connection.recv() for connection in others)) - began
    )


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the median times by call and way, and the throughput of each."""
    context = multiprocessing.get_context("spawn")
    start, others = context.Barrier(options.threads), []
    for seed in range(1, options.threads):
        here, there = context.Pipe()
        arguments = (there, start, options.length, options.density, seed)
        context.Process(target=serve, args=arguments, daemon=True).start()
        others.append(here)
    rows = []
    for name, call in calls(options.length, options.density, 0).items():
        ways: dict[str, Callable[[], float]] = {
            "one thread": lambda call=call: seconds(call, 1),
            "threads": lambda call=call: seconds(call, options.threads),
            "processes": lambda name=name, call=call: side_by_side(
                name, call, others, start
            ),
        }
        turns = [[way() for way in ways.values()] for _ in range(1 + options.repeats)][
            1:
        ]
        times = {
            way: statistics.median(column)
            for way, column in zip(ways, zip(*turns, strict=True), strict=True)
        }
        made = {"one thread": 1, "threads": 1, "processes": options.threads}
        rows.append(
            {
                "call": name,
                "seconds": times,
                "rate": {way: made[way] * options.length / times[way] for way in ways},
            }
        )
    for connection in others:
        connection.send(None)
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--length",
        type=lambda text: int(float(text)),
        default=25_000_000,
        help="%(default)s values",
    )
    parser.add_argument(
        "--density", type=float, default=0.001, help="of the selection (%(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads, and processes (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="turns of each (%(default)s)"
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="write the figures to a file as well",
    )
    options = parser.parse_args()
    if options.threads < 2:
        parser.error(f"got --threads {options.threads}: expected at least 2")
    rows = measured(options)
    print(HEADER.format(options.threads))
    for row in rows:
        alone, *more = row["rate"].values()
        cells = [f"{rate:.3g} ({rate / alone:.2f})" for rate in more]
        print(
            f"| {row['call']}, {options.length:g} values | {alone:.3g} | {' | '.join(cells)} |"
        )
    if options.json:
        about = {
            name: getattr(options, name)
            for name in ("length", "density", "threads", "repeats")
        }
        options.json.write_text(
            json.dumps({**about, "cpus": os.cpu_count(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
