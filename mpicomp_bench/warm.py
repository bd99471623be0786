"""`mpicomp warm`: compile the kernels of every method into a folder that all nodes read."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mpicomp_bench.methods import METHODS, construct, outer_settings

VARIABLE = "NUMBA_CACHE_DIR"

EXAMPLES = """
mpicomp warm
mpicomp warm /shared/project/numba
"""

FIRST_STEPS = (
    *(f"few-bits-{bits}" for bits in (8, 4, 2, 1)),
    *(
        name
        for name, method in METHODS.items()
        if "GradientExchange" in method.line and name != "few-bits"
    ),
)


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    about = "compile the kernels of every method, once for all nodes with this kind of processor"
    warm = commands.add_parser(
        "warm", help=about, description=f"{about.capitalize()}.", examples=EXAMPLES
    )
    warm.add_argument(
        "folder", nargs="?", type=Path, help=f"of the kernels; {VARIABLE} by default"
    )


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Compile and say where to; return 1 if they would not be kept. Starts anew where the folder is another one."""
    if options.folder:
        folder = str(options.folder.resolve())
        if os.environ.get(VARIABLE) != folder:
            # Numba reads the variable when it is imported, so the command starts anew.
            command = [sys.executable, "-m", "mpicomp_bench", "warm"]
            os.execve(sys.executable, command, {**os.environ, VARIABLE: folder})
    from mpi4py import MPI

    from mpicomp.kernels.host.bits import cache_folder
    from mpicomp.kernels.host.compiled import problems

    kept = cache_folder() or ""
    asked = os.environ.get(VARIABLE, "")
    if not (kept.startswith(asked) and os.access(kept, os.W_OK)):
        out.write(
            f"the kernels are not kept: name a writable folder, or set {VARIABLE}\n"
        )
        return 1
    for name in FIRST_STEPS:
        first_step(name, MPI.COMM_SELF)
    sums_of_ranks()
    if problems:
        out.write(
            f"kernels are not kept, as Numba {problems[0]}: make room there, or name another folder\n"
        )
        return 1
    out.write(
        f"kernels for {processor()} in {kept}; set {VARIABLE}={Path(kept).parent} on the nodes\n"
    )
    return 0


def first_step(name: str, comm: Any) -> None:
    """Run the first step of a method, on one tensor of shape (2500, 400)."""
    from collectives import OuterLoop

    drawn = np.random.default_rng(0).standard_normal((2, 2500, 400), np.float32)
    exchange = construct(name, comm, rate=0.1, momentum=0.9)
    if settings := outer_settings(name):
        parameters = {"weight": drawn[0]}
        outer = OuterLoop(exchange, parameters, **{**settings, "every": 1})
        parameters["weight"] += drawn[1]
        outer.step()
    else:
        exchange({"weight": drawn[1]})


def sums_of_ranks() -> None:
    """Run the kernels that only several ranks need, of float32 values."""
    from mpicomp import TopK
    from mpicomp.vector import add_up, from_all_values, merge, top_k

    drawn = np.random.default_rng(0).standard_normal((2, 100_000), np.float32)
    one, other = (TopK(density=0.01).compress(each) for each in drawn)
    merge(one, other)
    add_up([one, other, one])
    from_all_values(drawn[0])
    top_k(one, 10)
    one.divide(np.arange(10))


def processor() -> str:
    """Return the name of the processor that kernels are compiled for: the files have it, and its features, as a key."""
    from llvmlite.binding import get_host_cpu_name
    from numba import config

    return str(config.CPU_NAME or get_host_cpu_name())
