"""The `mpicomp` command. Run it plainly, or under mpirun or srun: rank 0 speaks for all."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from collectives.cli import bench, explain, info, train, tune
from collectives.cli.parser import Parser
from mpicomp import __version__

EXAMPLES = """
mpicomp info
mpirun -n 4 mpicomp bench gtopk --densities 0.001 0.01
mpirun -n 4 mpicomp tune --check
mpicomp explain --ranks 64 --length 25e6 --density 0.001 --network 10gbit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    subjects: dict[str, Any] = {"info": info, "bench": bench, "train": train, "tune": tune, "explain": explain}
    options = parser(subjects.values()).parse_args(arguments)
    try:
        status: int = subjects[options.command].run(options, sys.stdout)
    except MemoryError as error:
        sys.stderr.write(f"{options.parser.prog}: what was asked for does not fit into memory: {error}; ask for less\n")
        return 1
    return status


def parser(subjects: Iterable[Any]) -> Parser:
    """Return the parser of the command line."""
    found = Parser(prog="mpicomp", description="Sparse MPI collectives for compressed gradients.", examples=EXAMPLES)
    found.add_argument("--version", action="version", version=f"mpicomp {__version__}")
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for subject in subjects:
        subject.add_to(commands)
    return found
