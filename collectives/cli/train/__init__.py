"""`mpicomp train`: what compression costs in accuracy, on small models trained data-parallel.

Every method trains the same network, from the same starts and on the same batches, by momentum SGD at a constant rate:
heavy-ball momentum of 0.9, on the mean that comes out of the exchange, or inside where a method has its own. Each
method takes at each density the best of a few rates, by one rule for all (`grid`). docs/accuracy.md has a table.
"""

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from collectives import warm_up
from collectives.cli.files import look, write
from collectives.cli.info import library_and_version
from collectives.cli.train import report
from collectives.cli.train.grid import Grid, Row, cells
from collectives.cli.train.options import add_to, chosen, problem
from collectives.cli.train.progress import Progress
from collectives.cli.train.tasks import TASKS, Task
from collectives.cli.train.training import Recipe

__all__ = ["add_to", "run"]


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Train, print the table on rank 0, and write what else is asked for; return 2 where the options cannot be met."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    look(options, comm)
    task = prepared(options, comm)
    if task is None:
        return 2
    recipe = Recipe(options.steps, options.batch)
    grid = Grid(task, cells(chosen(options), options.density), options.rate or task.rates, options.seeds, recipe)
    with one_thread(comm):
        done = show(grid, comm, out)
    about = {"ranks": comm.size, "MPI": library_and_version(MPI.Get_library_version())}
    about |= {"machine": platform.platform(), "cpus": os.cpu_count()}
    makers: dict[str, Callable[[Path], Any]] = {
        "json": lambda file: file.write_text(report.as_json(grid, done, **about)),
        "plot": lambda file: report.plot(grid, done, file),
    }
    return write(options, comm, **makers)


def prepared(options: argparse.Namespace, comm: Any) -> Task | None:
    """Return the task; None on every rank, and what is wrong on rank 0's stderr, where one of them cannot."""
    task, wrong = None, problem(options)
    try:
        task = TASKS[options.task]()
    except ImportError as error:
        wrong = wrong or str(error)
    wrong = next(filter(None, comm.allgather(wrong)), None)
    if wrong and comm.rank == 0:
        sys.stderr.write(f"mpicomp train: error: {wrong}\n")
    return None if wrong else task


def show(grid: Grid, comm: Any, out: TextIO) -> list[Row]:
    """Train, print the rows on rank 0 as they come, and return them."""
    warm_up(comm)
    progress = Progress(grid.steps, sys.stderr if comm.rank == 0 and sys.stderr.isatty() else None)
    done, dense = [], report.dense_bytes(grid, comm.size)

    def say(line: str) -> None:
        if comm.rank == 0:
            progress.clear()
            out.write(line + "\n")
            out.flush()

    say(report.header(grid.task.figure))
    for row in grid.rows(comm, progress):
        say(report.line(row, dense))
        done.append(row)
    say(report.notes(grid, comm.size))
    return done


@contextlib.contextmanager
def one_thread(comm: Any) -> Iterator[None]:
    """Have NumPy compute in one thread on every rank: several each on few cores make a step ten times as slow.

    Without threadpoolctl, which scikit-learn brings, only the environment can say so; rank 0 then says that.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        if comm.rank == 0 and comm.size > 1 and "OMP_NUM_THREADS" not in os.environ:
            sys.stderr.write("mpicomp train: set OMP_NUM_THREADS=1, or pip install threadpoolctl: this may be slow\n")
        yield
        return
    with threadpool_limits(1):
        yield
