"""`mpicomp bench`: what the parts of a step take, beside what there is without the library, in one run."""

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO, TypeVar

from collectives.cli.bench.collective import COLLECTIVES
from collectives.cli.bench.contestants import BASELINE, lacking
from collectives.cli.bench.parsers import add_to
from collectives.cli.bench.timing import HEADER, Row, as_json, header
from collectives.cli.files import look, settings, write
from collectives.cli.info import library_and_version
from collectives.profiles import NETWORKS
from mpicomp import threads

__all__ = ["add_to", "run"]

T = TypeVar("T")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure, print the table on rank 0, and write what else is asked for; 2 for what cannot be, 1 without a file."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    look(options, comm)
    own = {"kernels": run_kernels, "compressors": run_compressors, "step": run_step, "plot": run_plot}
    return (own | dict.fromkeys(COLLECTIVES, run_collective)).get(options.subject, run_rows)(options, comm, out)


def refused(options: argparse.Namespace, comm: Any, fault: str) -> int:
    """Say on rank 0 what is wrong, and return the status of that."""
    if comm.rank == 0:
        sys.stderr.write(f"{options.parser.prog}: {fault}\n")
    return 2


def run_kernels(options: argparse.Namespace, comm: Any, out: TextIO) -> int:
    """Measure the kernels on rank 0: one is enough."""
    from collectives.cli.bench import device_kernels, kernels

    on_gpu = options.device == "gpu"
    if on_gpu and (fault := device_kernels.lacking()):
        return refused(options, comm, fault)
    if comm.rank:
        return 0
    measuring = (device_kernels if on_gpu else kernels).rows(options.length, options.repeats)
    rows, about_run = show(measuring, out), {**about(options), "length": options.length, **about_mpi(comm)}
    return write(options, json=lambda file: file.write_text(as_json(rows, **about_run)))


def run_rows(options: argparse.Namespace, comm: Any, out: TextIO) -> int:
    """Measure steps, with or without overlap."""
    from collectives.cli.bench import exchange

    if options.subject == "overlap" and options.tensors > options.length:
        return refused(options, comm, f"expected at most as many --tensors as --length, got {options.tensors}")
    if options.subject == "exchange" and options.model:
        options.length = exchange.length_of(options.model)
    mpi = about_mpi(comm)
    head = header(f"{mpi['MPI']}, {comm.size} rank{'s' if comm.size > 1 else ''}")
    rows = show(measured(options, comm), None if comm.rank else out, head)
    about_run = {**about(options), "length": options.length, **mpi}
    return write(options, comm, json=lambda file: file.write_text(as_json(rows, **about_run)))


def run_plot(options: argparse.Namespace, comm: Any, out: TextIO) -> int:
    """Draw what other runs have written."""
    from collectives.cli.bench import chart

    rows = [row for rows in options.files for row in rows]
    return write(options, comm, figure=lambda file: chart.plot(rows, file))


def run_collective(options: argparse.Namespace, comm: Any, out: TextIO) -> int:
    """Measure a collective, print the table on rank 0, and write what else is asked for; 2 for what cannot be."""
    from collectives.cli.bench import chart, collective, device_kernels, interfaces

    baselines = [] if "none" in options.baselines else options.baselines
    network = NETWORKS[options.network] if options.network else None
    repeats = options.repeats, min(options.dense_repeats or options.repeats, options.repeats)
    plan = collective.Plan(
        options.subject,
        options.algorithms,
        options.codecs,
        baselines,
        *repeats,
        options.from_gradient,
        network,
        options.interfaces,
        options.device,
    )
    asked = itertools.product(options.lengths, options.dtypes, options.densities, options.patterns)
    cases = [collective.Case(*each) for each in asked]
    baselines = [name for name in baselines if name != "allgather" or options.device == "cpu"]
    plan = plan._replace(baselines=baselines)
    no_gpu = device_kernels.lacking() if options.device == "gpu" else None
    if fault := no_gpu or collective.too_many(cases, comm.size) or (options.interfaces and interfaces.missing(comm)):
        return refused(options, comm, fault)
    measuring = collective.rows(comm, plan, cases)
    rows = show(measuring, None if comm.rank or options.osu else out, collective.HEADER)
    if options.osu and not comm.rank:
        out.write(collective.osu(rows))
    if options.interfaces and not comm.rank:
        out.write(interfaces.report(rows))
    makers: dict[str, Callable[[Path], Any]] = {
        "json": lambda file: file.write_text(as_json(rows, **about(options), **about_mpi(comm))),
        "plot": lambda file: chart.plot([row.as_dict() for row in rows], file),
    }
    return write(options, comm, **makers)


def run_step(options: argparse.Namespace, comm: Any, out: TextIO) -> int:
    """Measure steps, print the table and the published ratios on rank 0, and write what else is asked for."""
    from collectives.cli.bench import step

    known = {name: model._replace(length=options.length or model.length) for name, model in step.MODELS.items()}
    models = {name: known[name]._replace(compute=options.compute or known[name].compute) for name in options.models}
    dense_repeats = min(options.dense_repeats or options.repeats, options.repeats)
    measuring = step.rows(comm, models, options.density, options.repeats, dense_repeats, pause=options.pause)
    rows = show(measuring, None if comm.rank else out, step.HEADER)
    if comm.rank == 0:
        out.write(step.PUBLISHED)
    about_run = {**about(options), **about_mpi(comm)}
    return write(options, comm, json=lambda file: file.write_text(as_json(rows, **about_run)))


def about_mpi(comm: Any) -> dict[str, Any]:
    """Return the number of ranks, and the MPI library."""
    from mpi4py import MPI

    return {"ranks": comm.size, "MPI": library_and_version(MPI.Get_library_version())}


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures of a run depend on; the options as they were understood, but for the names of files."""
    versions = {name: metadata.version(name) for name in ("numpy", "numba")}
    machine = {"machine": platform.platform(), "cpus": os.cpu_count(), "threads": threads.count()}
    machine |= {"python": platform.python_version()}
    return {"subject": options.subject, **machine, **versions, "options": settings(options)}


def measured(options: argparse.Namespace, comm: Any) -> Iterable[Row]:
    """Return the rows, as they are measured."""
    from collectives.cli.bench import exchange, overlap

    if options.subject == "exchange":
        return exchange.rows(comm, options.length, options.density, options.repeats, options.model)
    how = {"tensors": options.tensors, "compute": options.compute, "rate": options.link}
    return overlap.rows(comm, options.length, options.density, options.repeats, **how)


def run_compressors(options: argparse.Namespace, comm: Any, out: TextIO) -> int:
    """Measure the compressors, print the table, and write what else is asked for: on rank 0, one is enough."""
    from collectives.cli.bench import compressors, pivot

    if comm.rank:
        return 0
    missing = lacking(options.compressors)
    for name, reason in missing.items():
        sys.stderr.write(f"{name} is left out: {reason}\n")
    names = [BASELINE, *(name for name in options.compressors if name not in (BASELINE, *missing))]
    asked = options.distributions, options.densities, options.length, options.repeats
    clock = time.thread_time if options.cpu_time else time.perf_counter
    rows: Sequence[Any] = show(compressors.rows(names, *asked, clock), out, compressors.HEADER)
    about_run = {**about(options), "length": options.length, "clock": clock.__name__, "skipped": missing}
    makers: dict[str, Callable[[Path], Any]] = {
        "json": lambda file: file.write_text(as_json(rows, **about_run)),
        "markdown": lambda file: file.write_text(pivot.markdown(rows)),
        "plot": lambda file: pivot.plot(rows, file),
    }
    return write(options, **makers)


def show(rows: Iterable[T], out: TextIO | None, header: str = HEADER) -> list[T]:
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
