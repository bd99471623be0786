"""`mpicomp tune`: measure the algorithms on these ranks, and store the table of winners for `algorithm="auto"`."""

import argparse
import io
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, TextIO

import numpy as np

import collectives
from collectives import gtopk_allreduce, sparse_allreduce, warm_up
from collectives.choice import Choice, winners
from collectives.collective import Collective, link_of
from mpicomp import SparseVector
from mpicomp_bench.files import a_profile, look, new_file, write
from mpicomp_bench.measuring import Call, Contestant, Row, interleave, loops_of
from mpicomp_bench.options import add_list, not_negative, positive, share

ABOUT = """\
Measures sparse_allreduce and gtopk_allreduce over a grid of lengths and densities, and writes the
fastest algorithm of each place to a table. algorithm="auto" then takes that of the nearest place.
Use the launcher, hosts and number of ranks of the job that is to use the table, with nothing else
running.

Without --output the table is kept for these hosts, this MPI library and these numbers of ranks and
nodes, and jobs find it by themselves. MPICOMP_PROFILE=FILE names another table,
MPICOMP_PROFILE=none uses none. Rank 0 reads the table and sends it to all ranks.
"""

EXAMPLES = """\
mpirun -n 4 mpicomp tune --check
mpirun -n 4 mpicomp tune --profile profile.json --check --lengths 10000 --json rows.json
"""

LENGTHS, DENSITIES = [10_000, 100_000, 1_000_000], [0.001, 0.01, 0.1, 0.3]  # of the grid
# The collectives that the table has.
SUMS: dict[str, Collective[..., Any]] = {each.name: each for each in (sparse_allreduce, gtopk_allreduce)}
AUTO, RULE, DENSE = "auto", "auto, no profile", "dense_allreduce"
NEAR_BEST, NEAR_DENSE = 1.15, 1.10  # times the fastest, and times dense_allreduce: what "auto" is to stay below


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    tune = commands.add_parser(
        "tune",
        help="measure which algorithms are the fastest on these ranks, for 'auto'",
        description="Measure which algorithms are the fastest on these ranks, for 'auto'.",
        examples=EXAMPLES,
        notes=ABOUT,
    )
    tune.add_argument("--output", type=new_file, metavar="FILE", help="table to write (one per user, see below)")
    tune.add_argument("--profile", type=a_profile, metavar="FILE", help="use this table, and measure none (measure)")
    tune.add_argument("--check", action="store_true", help='measure "auto" as well, with the table and without (no)')
    add_list(tune, "--lengths", LENGTHS, "values of a vector, of the grid ", type=positive)
    add_list(tune, "--densities", DENSITIES, "fractions of entries each rank contributes ", type=share)
    tune.add_argument("--repeats", type=positive, default=5, metavar="N", help="timed turns of each call (%(default)s)")
    tune.add_argument(
        "--seconds", type=not_negative, default=0.0, metavar="S", help="least seconds of each place (%(default)s)"
    )
    tune.add_argument("--json", type=new_file, metavar="FILE", help="write what --check finds as JSON (not written)")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure or load a table, store it, and check it if requested; rank 0 prints."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    look(options, comm)
    fault = misused(options)
    if fault:
        sys.stderr.write(f"mpicomp tune: {fault}\n" if comm.rank == 0 else "")
        return 2
    out = out if comm.rank == 0 else io.StringIO()
    failed, table = 0, options.profile
    if not table:
        table = fastest(comm, measured(comm, options, out))
        options.output = options.output or winners.default_path(table["ranks"], table["nodes"])
        failed = write(options, comm, output=lambda file: file.write_text(winners.text_of(table)))
        if not failed:
            out.write(f"written to {options.output}\n")
    if options.check and not failed:
        rows = measured(comm, options, out, table)
        found = verdict(rows)
        out.write(TOLD.format(**found))
        about = {"ranks": comm.size, "host": table["host"], "MPI": table["mpi"], **found, "rows": rows}
        failed = write(options, comm, json=lambda file: file.write_text(json.dumps(about, indent=1)))
    return failed


def misused(options: argparse.Namespace) -> str | None:
    """Return an error for options that cannot be combined."""
    if options.profile and options.output:
        return "--profile takes a table and --output writes one: give one of them"
    if options.profile and not options.check:
        return "--profile is there for --check: add it"
    if options.json and not options.check:
        return "--json holds what --check finds: add it (--output names the file of the table)"
    return None


def measured(comm: Any, options: argparse.Namespace, out: TextIO, table: Row | None = None) -> list[Row]:
    """Return the seconds of each algorithm at each point of the grid, the same on all ranks; rank 0 prints them.

    table: also measure "auto" with and without this table. Between nodes values of one magnitude, which are coded in
    one bit, have their own points.
    """
    warm_up(comm)
    fixed, rows = comm.Dup(), []
    by_table, by_rule = (link_of(each) for each in (comm, fixed))
    nodes, rule = len(set(by_table.nodes)), by_rule.choice
    by_table.choice, by_rule.choice = (Choice(each, rule.links, rule.crowding) for each in (table, None))
    for length, density, signs in product(options.lengths, options.densities, (False, True)[: min(2, nodes)]):
        vector = random_vector(length, max(1, round(length * density)), comm.rank, signs=signs)
        bits = comm.bcast(8 * by_rule.choice.coding(vector, apart=nodes > 1).values.nbytes(vector.nnz) / vector.nnz)
        if signs and bits == 8 * vector.values.itemsize:
            continue  # so few entries are not coded: this is the place before
        calls = contestants(vector, comm, fixed if table else None, several=1 < nodes < comm.size)
        rows_of_place = [
            Contestant(name, call, before=call, loops=loops_of(call, comm)) for name, call in calls.items()
        ]
        times = interleave(rows_of_place, options.repeats, comm, seconds=options.seconds)
        for (collective, algorithm), own in zip(calls, times, strict=True):
            seconds = float(np.median(own.max(axis=0)))
            names = "collective", "algorithm", "length", "density", "bits", "seconds"
            rows.append(dict(zip(names, (collective, algorithm, length, density, bits, seconds), strict=True)))
            place = f"{length:>10} {density:8g} {bits:5.1f}"
            out.write(f"{place}  {collective:18} {algorithm:20} {1e3 * seconds:11.3f} ms\n")
            out.flush()
    fixed.Free()
    return rows


def random_vector(length: int, entries: int, seed: int, *, signs: bool) -> SparseVector:
    """Return a vector of normal values, or of values of one magnitude, at random positions."""
    rng = np.random.default_rng([4, seed])
    indices, values = np.sort(rng.choice(length, entries, replace=False, shuffle=False)), rng.standard_normal(entries)
    magnitude = 1 + 0.01 * seed
    return SparseVector(indices, (np.copysign(magnitude, values) if signs else values).astype(np.float32), length)


def contestants(vector: SparseVector, comm: Any, fixed: Any, *, several: bool) -> dict[tuple[str, str], Call]:
    """Return the contestants, by collective and algorithm. fixed: a communicator without a table; None: no "auto"."""
    names = [
        (collective, name)
        for collective, each in SUMS.items()
        for name in each.algorithms
        if several or not name.startswith("node")
    ]
    names += [(collective, AUTO) for collective in SUMS] if fixed else []
    calls = {name: partial(SUMS[name[0]], vector, comm, algorithm=name[1]) for name in names}
    if fixed:
        calls |= {(collective, RULE): partial(each, vector, fixed) for collective, each in SUMS.items()}
    return {**calls, (DENSE, "mpi"): partial(collectives.dense_allreduce, vector.to_dense(), comm)}


def fastest(comm: Any, rows: Sequence[Row]) -> Row:
    """Return the table: at each point the fastest algorithm among the candidates of "auto"."""
    host, mpi = winners.host_and_library()
    found: dict[str, list[Any]] = {}
    for (length, density, bits), place in by_place(rows).items():
        for collective in SUMS:
            own = {name: seconds for (of, name), seconds in place.items() if of == collective and name != "tree"}
            found.setdefault(collective, []).append([length, density, bits, min(own, key=own.__getitem__)])
    nodes = len(set(link_of(comm).nodes))
    table: Row = comm.bcast({"host": host, "mpi": mpi, "ranks": comm.size, "nodes": nodes, "winners": found})
    return table


def by_place(rows: Sequence[Row]) -> dict[tuple[int, float, float], dict[tuple[str, str], float]]:
    """Return the seconds by point (length, density, bits), and then by collective and algorithm."""
    places: dict[tuple[int, float, float], dict[tuple[str, str], float]] = {}
    for row in rows:
        place = places.setdefault((row["length"], row["density"], row["bits"]), {})
        place[row["collective"], row["algorithm"]] = row["seconds"]
    return places


def verdict(rows: Sequence[Row]) -> dict[str, float]:
    """Return the fraction of points at which "auto" is near the best and near dense, with and without the table."""
    shares: dict[str, list[bool]] = {}
    for place in by_place(rows).values():
        for prefix, auto in ("", AUTO), ("rule_", RULE):
            for suffix, collective in ("best", "sparse_allreduce"), ("gtopk", "gtopk_allreduce"):
                named = [s for (of, name), s in place.items() if of == collective and name not in (AUTO, RULE, "tree")]
                shares.setdefault(prefix + suffix, []).append(place[collective, auto] <= NEAR_BEST * min(named))
            near = place["sparse_allreduce", auto] <= NEAR_DENSE * place[DENSE, "mpi"]
            shares.setdefault(prefix + "dense", []).append(near)
    return {name: statistics.mean(own) for name, own in shares.items()}


TOLD = """\
"auto" of sparse_allreduce is within 15 % of the best algorithm in {best:.0%} of the grid, without the table in
{rule_best:.0%}; within 10 % of dense_allreduce or better in {dense:.0%}, without the table in {rule_dense:.0%}
"auto" of gtopk_allreduce is within 15 % of the best in {gtopk:.0%}, without the table in {rule_gtopk:.0%}
"""
