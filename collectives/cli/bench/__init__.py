"""`mpicomp bench`: what the parts of a step take, beside what there is without the library, in one run."""

import argparse
import os
import pathlib
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any, TextIO

from collectives.cli.bench.timing import HEADER, Row, as_json


def add_to(commands: Any) -> None:
    """Add the command and what can be measured to the command line."""
    bench = commands.add_parser("bench", help="time the kernels, or whole steps under mpirun, against their baselines")
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    kernels = subjects.add_parser("kernels", help="each kernel of one rank, against NumPy, PyTorch and one read")
    exchange = subjects.add_parser("exchange", help="selection and collective, against MPI's dense allreduce")
    for parser in (kernels, exchange):
        parser.add_argument("--length", type=positive, default=25_000_000, help="values of a gradient (%(default)s)")
        parser.add_argument("--repeats", type=positive, default=9, help="timed turns of each call (%(default)s)")
        parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows to a file as well")
    exchange.add_argument("--density", type=share, nargs="+", default=[0.001, 0.01], help="shares that travel")


def positive(text: str) -> int:
    """Return the number that a text says; ValueError for one below 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def share(text: str) -> float:
    """Return the density that a text says; ValueError for one that is not above 0 and at most 1."""
    density = float(text)
    if not 0 < density <= 1:
        raise ValueError(text)
    return density


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure, and print the table on rank 0."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rows = show(measured(options, comm), out if comm.rank == 0 else None)
    if options.json and comm.rank == 0:
        library = MPI.Get_library_version().partition(",")[0]
        numba = metadata.version("numba")
        about = {"subject": options.subject, "ranks": comm.size, "MPI": library, "machine": platform.platform()}
        options.json.write_text(as_json(rows, **about, cpus=os.cpu_count(), numba=numba, length=options.length))
    return 0


def measured(options: argparse.Namespace, comm: Any) -> Iterable[Row]:
    """Return the rows, as they are measured."""
    if options.subject == "exchange":
        from collectives.cli.bench import exchange

        return exchange.rows(comm, options.length, options.density, options.repeats)
    from collectives.cli.bench import kernels

    if comm.rank:  # one rank is enough
        return []
    return kernels.rows(options.length, options.repeats)


def show(rows: Iterable[Row], out: TextIO | None) -> list[Row]:
    """Print rows as they come, where there is something to print to, and return them."""
    done = []
    if out:
        out.write(HEADER + "\n")
    for row in rows:
        done.append(row)
        if out:
            out.write(f"{row}\n")
            out.flush()
    return done
