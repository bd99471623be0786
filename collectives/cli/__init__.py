"""The `mpicomp` command. Run it plainly, or under mpirun or srun: rank 0 speaks for all."""

import argparse
import sys
from collections.abc import Sequence

from collectives.cli import bench, explain, info, train, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="mpicomp", description="Sparse MPI collectives for compressed gradients.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="what this installation is made of, and whether the launcher and MPI fit together")
    subjects = {"bench": bench, "train": train, "tune": tune, "explain": explain}
    for subject in subjects.values():
        subject.add_to(commands)
    options = parser.parse_args(arguments)
    return info.run(sys.stdout) if options.command == "info" else subjects[options.command].run(options, sys.stdout)
