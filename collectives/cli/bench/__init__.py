"""`mpicomp bench`: what the parts of a step take, beside what there is without the library, in one run."""

import argparse
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, TextIO, TypeVar

from collectives.cli.bench.collective import COLLECTIVES
from collectives.cli.bench.contestants import BASELINE, lacking
from collectives.cli.bench.parsers import add_to
from collectives.cli.bench.timing import HEADER, Row, as_json
from collectives.profiles import NETWORKS

__all__ = ["add_to", "run"]

T = TypeVar("T")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure, and print the table on rank 0."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.subject == "compressors":
        if comm.rank == 0:  # one rank is enough
            run_compressors(options, out)
        return 0
    if options.subject in COLLECTIVES:
        return run_collective(options, comm, out)
    if options.subject == "plot":
        if comm.rank == 0:
            from collectives.cli.bench import chart

            chart.plot([row for rows in options.files for row in rows], options.figure)
        return 0
    if options.subject == "step":
        return run_step(options, comm, out)
    if options.subject == "kernels" and options.device == "gpu" and (fault := no_gpu()):
        if comm.rank == 0:
            sys.stderr.write(f"mpicomp bench kernels --device gpu: {fault}\n")
        return 2
    rows = show(measured(options, comm), out if comm.rank == 0 else None)
    if options.json and comm.rank == 0:
        options.json.write_text(as_json(rows, **about(options), length=options.length, **about_mpi(comm)))
    return 0


def run_collective(options: argparse.Namespace, comm: Any, out: TextIO) -> int:
    """Measure a collective, print the table on rank 0, and write what else is asked for; 2 for what cannot be."""
    from collectives.cli.bench import chart, collective, interfaces

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
    lacking = no_gpu() if options.device == "gpu" else None
    if fault := lacking or collective.too_many(cases, comm.size) or (options.interfaces and interfaces.missing(comm)):
        if comm.rank == 0:
            sys.stderr.write(f"mpicomp bench {options.subject}: {fault}\n")
        return 2
    measuring = collective.rows(comm, plan, cases)
    rows = show(measuring, None if comm.rank or options.osu else out, collective.HEADER)
    if comm.rank:
        return 0
    if options.osu:
        out.write(collective.osu(rows))
    if options.interfaces:
        out.write(interfaces.report(rows))
    if options.json:
        options.json.write_text(as_json(rows, **about(options), **about_mpi(comm)))
    if options.plot:
        chart.plot([row.as_dict() for row in rows], options.plot)
    return 0


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
    if options.json and comm.rank == 0:
        options.json.write_text(as_json(rows, **about(options), **about_mpi(comm)))
    return 0


def about_mpi(comm: Any) -> dict[str, Any]:
    """Return the number of ranks, and the MPI library."""
    from mpi4py import MPI

    return {"ranks": comm.size, "MPI": MPI.Get_library_version().partition(",")[0]}


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures of a run depend on."""
    versions = {name: metadata.version(name) for name in ("numpy", "numba")}
    machine = {"machine": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    return {"subject": options.subject, **machine, **versions}


def measured(options: argparse.Namespace, comm: Any) -> Iterable[Row]:
    """Return the rows, as they are measured."""
    if options.subject == "exchange":
        from collectives.cli.bench import exchange

        return exchange.rows(comm, options.length, options.density, options.repeats)
    if options.subject == "overlap":
        from collectives.cli.bench import overlap

        how = {"tensors": options.tensors, "compute": options.compute, "rate": options.link}
        return overlap.rows(comm, options.length, options.density, options.repeats, **how)
    from collectives.cli.bench import device_kernels, kernels

    if comm.rank:  # one rank is enough
        return []
    rows = device_kernels.rows if options.device == "gpu" else kernels.rows
    return rows(options.length, options.repeats)


def no_gpu() -> str | None:
    """Return why the kernels of a GPU cannot be measured; None where they can."""
    from collectives.cli.bench import device_kernels

    return device_kernels.lacking()


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
        options.json.write_text(
            as_json(rows, **about(options), length=options.length, clock=clock.__name__, skipped=missing)
        )
    if options.markdown:
        options.markdown.write_text(pivot.markdown(rows))
    if options.plot:
        pivot.plot(rows, options.plot)


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
