"""The `mpicomp` command. Run it plainly, or under mpirun or srun: rank 0 speaks for all."""

import argparse
import sys
from collections.abc import Sequence

from collectives.cli import bench, explain, info, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="mpicomp", description="Sparse MPI collectives for compressed gradients.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="what this installation is made of, and whether the launcher and MPI fit together")
    for subject in (bench, tune, explain):
        subject.add_to(commands)
    options = parser.parse_args(arguments)
    if options.command == "info":
        return info.run(sys.stdout)
    run = {"bench": bench.run, "tune": tune.run, "explain": explain.run}[options.command]
    return run(options, sys.stdout)
