"""The options of `mpicomp train`, and what they ask for."""

import argparse
import importlib.util
import pathlib
from itertools import product
from typing import Any

from collectives.cli.bench.settings import above_zero, positive, share
from collectives.cli.train.methods import COLLECTIVES, COMPRESSORS, FEEDBACKS, METHODS, Method
from collectives.cli.train.tasks import TASKS

EXAMPLES = """
mpirun -n 4 mpicomp train
mpirun -n 4 mpicomp train --task text --methods dense gtopk --density 0.01 --seeds 3 --json text.json
mpirun -n 4 mpicomp train --compressor sidco topk --collective gtopk --steps 100 --plot curves.png
"""

OWN = ("compressor", "feedback", "collective")


def add_to(commands: Any) -> None:
    """Add the command and its options to the command line."""
    about = "train small models with each method: accuracy against bytes"
    parser = commands.add_parser("train", help=about, description=f"{about.capitalize()}.", examples=EXAMPLES)
    add = parser.add_argument
    add("--task", choices=TASKS, default="digits", help="digits (needs scikit-learn) or text (%(default)s)")
    add(
        "--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"rows of the table: {', '.join(METHODS)} (all)"
    )
    own = parser.add_argument_group("methods of one's own, beside dense: every combination of what is named")
    own.add_argument("--compressor", nargs="+", choices=COMPRESSORS, help="what travels (topk)")
    own.add_argument("--feedback", nargs="+", choices=FEEDBACKS, help="what becomes of the rest (error-feedback)")
    own.add_argument("--collective", nargs="+", choices=COLLECTIVES, help="how it travels (allgather)")
    add("--density", type=share, nargs="+", default=[0.01, 0.001], help="shares that travel (0.01 0.001)")
    add("--seeds", type=positive, default=1, help="trainings of each row, for mean and spread (%(default)s)")
    add("--steps", type=positive, default=300, help="steps of a training (%(default)s)")
    add("--batch", type=positive, default=32, help="examples that a rank takes a step (%(default)s)")
    add("--rate", type=above_zero, nargs="+", help="learning rate; each row takes its best of several (by task)")
    add("--json", type=pathlib.Path, metavar="FILE", help="write the rows and their curves to a file")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw the curves to a file (needs matplotlib)")


def chosen(options: argparse.Namespace) -> list[Method]:
    """Return the methods that are asked for, each once: those by name, or the combinations and dense."""
    if not any(getattr(options, name) for name in OWN):
        return [METHODS[name] for name in dict.fromkeys(options.methods or METHODS)]
    parts = product(
        options.compressor or ["topk"], options.feedback or ["error-feedback"], options.collective or ["allgather"]
    )
    return [METHODS["dense"], *(Method(", ".join(names), *names) for names in dict.fromkeys(parts))]


def problem(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the options on this rank, apart from the task: None where nothing is."""
    if options.methods and any(getattr(options, name) for name in OWN):
        return "got --methods and a method of one's own: expected --methods, or --compressor, --feedback, --collective"
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib, or leave --plot out"
    for name in ("json", "plot"):
        file = getattr(options, name)
        if file and not file.parent.is_dir():
            return f"--{name} is {file}: expected a file in a folder that is there, and {file.parent} is not"
    return None
