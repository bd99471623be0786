"""`mpicomp train`: what compression costs in accuracy, on small models trained data-parallel.

Every method trains the same network, from the same starts and on the same batches, by momentum SGD at a constant rate:
heavy-ball momentum of 0.9, on the mean that comes out of the exchange, or inside where a method has its own. Each
method takes at each density the best of a few rates, by one rule for all (`training.trained`). docs/accuracy.md has a
table.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from collectives import warm_up
from mpicomp_bench.bench import machine
from mpicomp_bench.bench.compressors import COMPRESSORS
from mpicomp_bench.files import look, new_figure, new_file, write
from mpicomp_bench.info import library_and_version
from mpicomp_bench.measuring import Row
from mpicomp_bench.options import above_zero, add_list, positive, share
from mpicomp_bench.output import Column, as_json, draw, figure, show
from mpicomp_bench.train.methods import COLLECTIVES, FEEDBACKS, METHODS, MOMENTUM, Method
from mpicomp_bench.train.tasks import TASKS, Task
from mpicomp_bench.train.training import LATENCY, trained

__all__ = ["add_to", "run"]

EXAMPLES = """
mpirun -n 4 mpicomp train
mpirun -n 4 mpicomp train --task text --methods dense gtopk --density 0.01 --seeds 3 --json text.json
mpirun -n 4 mpicomp train --compressor SIDCo-exponential TopK --collective gtopk --steps 100 --plot curves.png
"""


def add_to(commands: Any) -> None:
    """Add the command and its options to the command line."""
    about = "train small models with each method: accuracy against bytes"
    parser = commands.add_parser("train", help=about, description=f"{about.capitalize()}.", examples=EXAMPLES)
    add = parser.add_argument
    add("--task", choices=TASKS, default="digits", help="digits (needs scikit-learn) or text (%(default)s)")
    add_list(parser, "--methods", None, "rows of the table: ", choices=list(METHODS))
    own = parser.add_argument_group("custom methods, beside dense: every combination of the parts given")
    add_list(own, "--compressor", ["TopK"], "what is sent: ", choices=[name for name in COMPRESSORS if name != "Dense"])
    add_list(
        own,
        "--feedback",
        ["error-feedback"],
        "what happens to the entries that are not sent: ",
        choices=list(FEEDBACKS),
    )
    add_list(own, "--collective", ["allgather"], "how it is sent: ", choices=list(COLLECTIVES))
    own.set_defaults(compressor=None, feedback=None, collective=None)
    add_list(parser, "--density", [0.01, 0.001], "fractions of entries that each rank sends ", type=share)
    add_list(parser, "--every", [15], "local steps between two exchanges, of the methods local-* ", type=positive)
    add("--seeds", type=positive, default=1, help="trainings of each row, for mean and spread (%(default)s)")
    add("--steps", type=positive, default=300, help="steps of a training (%(default)s)")
    add("--batch", type=positive, default=32, help="examples of a rank in a step (%(default)s)")
    add_list(parser, "--rate", None, "learning rates; each row takes its best ", type=above_zero)
    add("--json", type=new_file, metavar="FILE", help="write the rows and their curves to a file")
    add("--plot", type=new_figure, metavar="FILE", help="draw the curves to a file (needs matplotlib)")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Train, print the table on rank 0, and write what else is asked for; return 2 where the options cannot be met."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    look(options, comm)
    task = prepared(options, comm)
    if task is None:
        return 2
    options.rate = options.rate or task.rates
    warm_up(comm)
    with one_thread(comm):
        cells = [
            cell
            for each in methods(options)
            for cell in product(
                [each], options.density if each.has_density else [None], options.every if each.local else [None]
            )
        ]
        rows = (trained(task, *cell, options, comm) for cell in cells)
        done = show(rows, columns(task, comm.size), None if comm.rank else out)
    if comm.rank == 0:
        out.write(notes(task, options, comm.size))
    about = {**machine(), "ranks": comm.size, "MPI": library_and_version(MPI.Get_library_version()), "task": task.name}
    about |= {"figure": task.figure, "parameters": task.parameters, "momentum": MOMENTUM, "rates": options.rate}
    about |= {name: vars(options)[name] for name in ("steps", "batch", "seeds")} | {"latency_seconds": LATENCY}
    return write(options, comm, json=lambda file: file.write_text(as_json(done, about)), plot=partial(plot, task, done))


def prepared(options: argparse.Namespace, comm: Any) -> Task | None:
    """Return the task; None on every rank, after a message on rank 0's stderr, where one of them has none."""
    task, wrong = None, None
    try:
        task = TASKS[options.task]()
    except ImportError as error:
        wrong = str(error)
    if options.methods and (options.compressor or options.feedback or options.collective):
        wrong = (
            "got --methods and parts of a custom method: expected --methods, or --compressor, --feedback, --collective"
        )
    wrong = next(filter(None, comm.allgather(wrong)), None)
    if wrong and comm.rank == 0:
        sys.stderr.write(f"mpicomp train: error: {wrong}\n")
    return None if wrong else task


def methods(options: argparse.Namespace) -> list[Method]:
    """Return the methods that are asked for: those by name, or the combinations and dense."""
    if not (options.compressor or options.feedback or options.collective):
        return [METHODS[name] for name in options.methods or METHODS]
    parts = product(
        options.compressor or ["TopK"], options.feedback or ["error-feedback"], options.collective or ["allgather"]
    )
    return [METHODS["dense"], *(Method(", ".join(names), *names) for names in parts)]


@contextlib.contextmanager
def one_thread(comm: Any) -> Iterator[None]:
    """Have NumPy compute in one thread on every rank: several each on few cores make a step ten times as slow.

    Without threadpoolctl, which scikit-learn installs, only the environment can set that; rank 0 then says so.
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


def columns(task: Task, ranks: int) -> list[Column]:
    """Return the columns of the table."""

    def final(row: Row) -> str:
        diverged = sum(each["diverged"] for each in row["trainings"])
        spread = f"{row['spread']:.2f}" if np.isfinite(row["spread"]) else "-"
        suffix = f" {diverged} of {len(row['trainings'])} diverged" if diverged else ""
        return f"{row['figure']:.2f} +- {spread}{suffix}"

    def network(rate: float) -> Any:
        return lambda row: f"{1e3 * row['network_seconds'][f'{rate:g}']:.2f}"

    dense = dense_bytes(task, ranks)
    return [
        ("method, density", "<25", label),
        ("rate", ">8", figure("rate", "g")),
        (f"{task.figure}", ">30", final),
        ("sent", ">8", figure("sent", ".2%")),
        ("bytes a step", ">12", figure("nbytes", ",.0f")),
        ("dense /", ">8", lambda row: f"{dense / row['nbytes']:.1f}" if row["nbytes"] else ""),
        ("ms a step", ">9", figure("seconds", ".2f", 1e3)),
        ("exchange", ">8", figure("exchange_seconds", ".2f", 1e3)),
        ("1 Gbit/s", ">8", network(1e9)),
        ("10 Gbit/s", ">9", network(1e10)),
    ]


def label(row: Row) -> str:
    """Return the name of a row: the method, and its density and local steps if it has them."""
    density, every = row["density"], row["every"]
    return f"{row['name']}{f' {density:g}' if density else ''}{f' every {every}' if every else ''}"


def notes(task: Task, options: argparse.Namespace, ranks: int) -> str:
    """Return how the figures of the table were made."""
    several = f"the best on validation of {', '.join(f'{rate:g}' for rate in options.rate)}"
    return (
        f"{task.name}, {ranks} ranks, {options.steps} steps of {options.batch} examples a rank, {options.seeds} seeds; "
        f"momentum {MOMENTUM:g}; rate: {several if len(options.rate) > 1 else 'given'}.\n"
        "Spread: standard deviation over the seeds. Bytes: of the rank that sends most, coded as between nodes;\n"
        "dense: 2 (P-1)/P n v. Times: median step of the slowest rank, with the wait for others in it; on a network\n"
        f"simulated: {1e6 * LATENCY:g} us for each message that the busiest rank sends, and its bytes over the rate.\n"
    )


def dense_bytes(task: Task, ranks: int) -> float:
    """Return the least that a rank sends in a dense allreduce of the gradient."""
    return 2 * (ranks - 1) / ranks * 4 * task.parameters


def plot(task: Task, rows: Sequence[Row], path: Path) -> None:
    """Draw the figure against the steps, and against the bytes that the busiest rank has sent.

    Means over the seeds, up to where the first one diverged.
    """
    styles = dict(
        zip(sorted({row["density"] or 1 for row in rows}, reverse=True), cycle(("-", "--", ":", "-.")), strict=False)
    )
    left, right = [], []
    for row in rows:
        curves = [each["curve"] for each in row["trainings"]]
        shortest = min(map(len, curves))
        steps, figures = np.mean([curve[:shortest] for curve in curves], axis=0).T
        look = {"label": label(row), "look": row["name"], "linestyle": styles[row["density"] or 1], "markevery": 5}
        left.append({**look, "x": steps, "y": figures})
        sent = steps[1:] * max(row["nbytes"], 1)  # nothing yet at step 0, and the scale is logarithmic
        right.append({**look, "x": sent, "y": figures[1:]})
    limits = {}
    if task.more_is_better:
        limits = {"ylim": (min(80.0, *(row["figure"] for row in rows)) - 5, 101)}
    bytes_panel = {"lines": right, "xlabel": "bytes that the busiest rank has sent", "xscale": "log"}
    draw([[{"lines": left, "xlabel": "step", "ylabel": task.figure, **limits}, {**bytes_panel, **limits}]], path)
