"""`mpicomp bench`: the time of each part of a step, compared with its baselines in the same run."""

import argparse
import sys
from typing import Any, TextIO

from collectives.calls.first_call import link_of
from mpicomp_bench.bench import choice, collective, compressors, exchange, quantised
from mpicomp_bench.bench.suite import Suite
from mpicomp_bench.files import check_files, new_file, settings
from mpicomp_bench.info import library_and_version
from mpicomp_bench.options import positive
from mpicomp_bench.output import COMPARISON, show, write_rows

__all__ = ["SUITES", "add_to", "run"]

SUITES: dict[str, Suite] = {
    "exchange": exchange.SUITE,
    "compressors": compressors.SUITE,
    "quantised": quantised.SUITE,
    "choice": choice.SUITE,
    **collective.SUITES,
}

EXAMPLES = """
mpirun -n 4 mpicomp bench exchange
mpicomp bench compressors --length 1e6
"""
SHARED_MEMORY = """\
All ranks share memory, where a dense sum is mostly faster: compression is for links between nodes. For yours run this
over several nodes, or ask `mpicomp explain`.
"""


def add_to(commands: Any) -> None:
    """Add the command and its suites to the command line."""
    about = "time collectives, compressors or whole steps, with baselines"
    bench = commands.add_parser(
        "bench", help=about, description=f"{about.capitalize()}.", examples=EXAMPLES
    )
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, suite in SUITES.items():
        line = f"Time {suite.help}."
        parser = subjects.add_parser(
            name,
            help=suite.help,
            description=line,
            examples=suite.examples,
            notes=suite.about,
        )
        suite.add_options(parser)
        if suite.length:
            about = "values of a gradient (%(default)s)"
            parser.add_argument(
                "--length", type=positive, default=suite.length, metavar="N", help=about
            )
        about = "timed turns of each call (%(default)s)"
        parser.add_argument(
            "--repeats", type=positive, default=suite.repeats, metavar="N", help=about
        )
        parser.add_argument(
            "--json",
            type=new_file,
            metavar="FILE",
            help="write the rows as JSON (not written)",
        )


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure, print the table on rank 0, and write the files; returns 2 for refused options, 1 if a file failed."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    check_files(options, comm)
    suite = SUITES[options.subject]
    if fault := next(filter(None, comm.allgather(suite.refuse(options, comm))), None):
        sys.stderr.write(f"{options.parser.prog}: {fault}\n" if comm.rank == 0 else "")
        return 2
    library = library_and_version(MPI.Get_library_version())
    if suite.alone and comm.rank:
        return 0
    common = None if suite.alone else comm
    where = f"{library}, {comm.size} rank{'s' if comm.size > 1 else ''}"
    head = where if suite.columns is COMPARISON and common else ""
    rows = show(
        suite.rows(options, common), suite.columns, None if comm.rank else out, head
    )
    if comm.rank == 0:
        out.write(suite.report(options, rows))
        if common and comm.size > 1 and len(link_of(comm).by_node) == 1:
            out.write(SHARED_MEMORY)
    about = {
        "subject": options.subject,
        "options": settings(options),
        "ranks": comm.size,
        "MPI": library,
    }
    about |= {"length": options.length} if "length" in options else {}
    return write_rows(options, rows, about, common)
