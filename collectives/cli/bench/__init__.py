"""`mpicomp bench`: what the parts of a step take, beside what there is without the library, in one run."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, TextIO

from collectives.cli.bench.contestants import BASELINE, MAKERS, SETTLING_CALLS, lacking
from collectives.cli.bench.data import FAMILIES
from collectives.cli.bench.settings import above_zero, each_once, new_figure, new_file, positive, share
from collectives.cli.bench.timing import HEADER, Row, as_json

ABOUT_COMPRESSORS = f"""\
Every compressor on values of several distributions, at several densities, in one process. All that are compared take
turns; a time is the median of the turns, as a ratio to exact top-k (TopK, always there) and to one read of the values.

  /target    achieved over wanted density, of the first call and of the timed ones; "-" for a method without a target
  captured   1 - |gradient - sent|^2 / |gradient|^2: of values sent as they are, their share of the squared norm;
             "/top-k" is over what exact top-k captures
  B/entry    bytes of the smallest message (mpicomp.codec), header included, over its entries

Each compressor is called until its state has settled, before it is timed: SIDCo {SETTLING_CALLS} times for its
controller, so its first call shows the fit alone; AggregationAware observes what it sent itself. SampledTopK takes
another sample and RandomK other positions in every call: "achieved" and "captured" are means over the timed calls.
There is no residual: AdaComp sees a first step. Threshold has the threshold that lets the wanted density through.
Each timed call follows untimed ones of the same compressor, so that none finds the caches and the heap as another left
them.
"""

OVERLAP_EXAMPLE = """\
example:
  mpirun -n 4 mpicomp bench overlap --density 0.05 --compute 0.3 --link 2e7
"""

COMPRESSORS_EXAMPLE = """\
examples:
  mpicomp bench compressors
  mpicomp bench compressors --length 25_000_000 --densities 0.001 --compressors SIDCo-exponential SampledTopK RedSync
  mpicomp bench compressors --distributions normal cauchy --json rows.json --plot compressors.png
"""


def add_to(commands: Any) -> None:
    """Add the command and what can be measured to the command line."""
    bench = commands.add_parser("bench", help="time kernels, compressors, or whole steps under mpirun; with baselines")
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    kernels = subjects.add_parser("kernels", help="each kernel of one rank, against NumPy, PyTorch and one read")
    exchange = subjects.add_parser("exchange", help="selection and collective, against MPI's dense allreduce")
    overlap = subjects.add_parser(
        "overlap",
        help="a step whose gradients leave as they become ready, against one that waits for the last",
        epilog=OVERLAP_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compressors = subjects.add_parser(
        "compressors",
        help="time, density, captured norm and bytes of every compressor, against exact top-k",
        description=ABOUT_COMPRESSORS,
        epilog=COMPRESSORS_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lengths = (kernels, 25_000_000), (exchange, 25_000_000), (overlap, 2_000_000), (compressors, 1_000_000)
    for parser, length in lengths:
        parser.add_argument("--length", type=positive, default=length, help="values of a gradient (%(default)s)")
        parser.add_argument("--repeats", type=positive, default=9, help="timed turns of each call (%(default)s)")
        parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows to a file as well")
    exchange.add_argument("--density", type=share, nargs="+", default=[0.001, 0.01], help="shares that travel")
    overlap.add_argument("--density", type=share, nargs="+", default=[0.05, 0.1], help="shares that travel")
    overlap.add_argument("--tensors", type=positive, default=20, help="of one size (%(default)s)")
    overlap.add_argument("--compute", type=above_zero, default=0.4, help="seconds of a backward pass (%(default)s)")
    overlap.add_argument("--link", type=above_zero, metavar="RATE", help="bits per second of a slow link, simulated")
    _add_choices(compressors)


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--densities",
        type=share,
        nargs="+",
        action=each_once,
        default=[0.1, 0.01, 0.001],
        metavar="SHARE",
        help="shares that are to travel, each above 0 and at most 1 (0.1 0.01 0.001)",
    )
    for option, known in ("--distributions", FAMILIES), ("--compressors", MAKERS):
        parser.add_argument(
            option,
            nargs="+",
            action=each_once,
            choices=list(known),
            default=list(known),
            metavar="NAME",
            help=f"some of {', '.join(known)} (all)",
        )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time in which the thread computes, not that in which it waits for a core: for a busy machine",
    )
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="write a table for each density as Markdown")
    parser.add_argument(
        "--plot",
        type=new_figure,
        metavar="FILE",
        help="draw time against what is captured, and achieved over target by distribution (needs matplotlib)",
    )


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure, and print the table on rank 0."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.subject == "compressors":
        if comm.rank == 0:  # one rank is enough
            run_compressors(options, out)
        return 0
    rows = show(measured(options, comm), out if comm.rank == 0 else None)
    if options.json and comm.rank == 0:
        library = MPI.Get_library_version().partition(",")[0]
        options.json.write_text(as_json(rows, **about(options), ranks=comm.size, MPI=library))
    return 0


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures of a run depend on."""
    versions = {name: metadata.version(name) for name in ("numpy", "numba")}
    machine = {"machine": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    return {"subject": options.subject, "length": options.length, **machine, **versions}


def measured(options: argparse.Namespace, comm: Any) -> Iterable[Row]:
    """Return the rows, as they are measured."""
    if options.subject == "exchange":
        from collectives.cli.bench import exchange

        return exchange.rows(comm, options.length, options.density, options.repeats)
    if options.subject == "overlap":
        from collectives.cli.bench import overlap

        how = {"tensors": options.tensors, "compute": options.compute, "rate": options.link}
        return overlap.rows(comm, options.length, options.density, options.repeats, **how)
    from collectives.cli.bench import kernels

    if comm.rank:  # one rank is enough
        return []
    return kernels.rows(options.length, options.repeats)


def run_compressors(options: argparse.Namespace, out: TextIO) -> None:
    """Measure the compressors, print the table, and write what else is asked for."""
    from collectives.cli.bench import compressors, pivot

    missing = lacking(options.compressors)
    for name, reason in missing.items():
        sys.stderr.write(f"{name} is left out: {reason}\n")
    names = [BASELINE, *(name for name in options.compressors if name not in (BASELINE, *missing))]
    asked = options.distributions, options.densities, options.length, options.repeats
    clock = time.thread_time if options.cpu_time else time.perf_counter
    rows: Sequence[Any] = show(compressors.rows(names, *asked, clock), out, compressors.HEADER)
    if options.json:
        options.json.write_text(as_json(rows, **about(options), clock=clock.__name__, skipped=missing))
    if options.markdown:
        options.markdown.write_text(pivot.markdown(rows))
    if options.plot:
        pivot.plot(rows, options.plot)


def show(rows: Iterable[Row], out: TextIO | None, header: str = HEADER) -> list[Row]:
    """Print rows as they come, where there is something to print to, and return them."""
    done = []
    if out:
        out.write(header + "\n")
    for row in rows:
        done.append(row)
        if out:
            out.write(f"{row}\n")
            out.flush()
    return done
