"""The options of `mpicomp train`, and what they ask for."""

import argparse
from itertools import product
from typing import Any

from collectives.cli.bench.settings import above_zero, each_once, positive, share
from collectives.cli.files import new_figure, new_file
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
    some: dict[str, Any] = {"nargs": "+", "action": each_once}
    rows = f"rows of the table: {', '.join(METHODS)} (all)"
    add("--methods", **some, choices=METHODS, metavar="METHOD", help=rows)
    own = parser.add_argument_group("methods of one's own, beside dense: every combination of what is named")
    own.add_argument("--compressor", **some, choices=COMPRESSORS, help="what travels (topk)")
    own.add_argument("--feedback", **some, choices=FEEDBACKS, help="what becomes of the rest (error-feedback)")
    own.add_argument("--collective", **some, choices=COLLECTIVES, help="how it travels (allgather)")
    add("--density", type=share, **some, default=[0.01, 0.001], help="shares that travel (0.01 0.001)")
    add("--seeds", type=positive, default=1, help="trainings of each row, for mean and spread (%(default)s)")
    add("--steps", type=positive, default=300, help="steps of a training (%(default)s)")
    add("--batch", type=positive, default=32, help="examples that a rank takes a step (%(default)s)")
    add("--rate", type=above_zero, **some, help="learning rate; each row takes its best of several (by task)")
    add("--json", type=new_file, metavar="FILE", help="write the rows and their curves to a file")
    add("--plot", type=new_figure, metavar="FILE", help="draw the curves to a file (needs matplotlib)")


def chosen(options: argparse.Namespace) -> list[Method]:
    """Return the methods that are asked for: those by name, or the combinations and dense."""
    if not any(getattr(options, name) for name in OWN):
        return [METHODS[name] for name in options.methods or METHODS]
    parts = product(
        options.compressor or ["topk"], options.feedback or ["error-feedback"], options.collective or ["allgather"]
    )
    return [METHODS["dense"], *(Method(", ".join(names), *names) for names in parts)]


def problem(options: argparse.Namespace) -> str | None:
    """Return what is wrong with options that do not go together; None where nothing is."""
    if options.methods and any(getattr(options, name) for name in OWN):
        return "got --methods and a method of one's own: expected --methods, or --compressor, --feedback, --collective"
    return None
