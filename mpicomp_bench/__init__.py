"""The `mpicomp` command. Run it alone, or under mpirun or srun; only rank 0 prints."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mpicomp import __version__
from mpicomp_bench import bench, explain, info, warm
from mpicomp_bench.options import Parser

COMMANDS: dict[str, Any] = {
    "info": info,
    "bench": bench,
    "explain": explain,
    "warm": warm,
}

EXAMPLES = """
mpirun -n 4 mpicomp bench gtopk --densities 0.001 0.01
mpicomp explain --ranks 64 --length 25e6 --density 0.001 --network 10gbit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = parser(COMMANDS.values()).parse_args(arguments)
    if options.command in ("bench", "warm") and (missing := info.missing_mpi()):
        sys.stderr.write(f"{options.parser.prog}: {missing}\n")
        return 1
    try:
        status: int = COMMANDS[options.command].run(options, sys.stdout)
    except MemoryError as error:
        sys.stderr.write(
            f"{options.parser.prog}: out of memory: {error}; reduce the lengths\n"
        )
        return 1
    return status


def parser(commands: Iterable[Any]) -> Parser:
    """Return the parser of the command line. commands: modules with a function `add_to`."""
    found = Parser(
        prog="mpicomp",
        description="Sparse MPI collectives for compressed gradients.",
        examples=EXAMPLES,
    )
    found.add_argument("--version", action="version", version=f"mpicomp {__version__}")
    subparsers = found.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands:
        command.add_to(subparsers)
    return found
