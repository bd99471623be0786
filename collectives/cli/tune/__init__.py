"""`mpicomp tune`: measure what messages and kernels take on these ranks, and keep it for `algorithm="auto"`."""

import argparse
import json
import sys
from typing import Any, TextIO

from collectives.cli.bench.settings import each_once, not_negative, positive, share
from collectives.cli.files import a_profile, look, new_file, write
from collectives.profiles import Profile

ABOUT = """\
Measure latency, bandwidth, and what merging, selecting and coding take on all ranks at the same time, and write a
profile. "auto" of the collectives then predicts what each algorithm would take and runs the fastest one. Run it with
the launcher, the hosts and the number of ranks of the job that is to use it; nothing else should run there meanwhile.

A job finds the profile of its hosts, MPI library, number of ranks and of nodes by itself where --output was not given.
MPICOMP_PROFILE=FILE names another one, MPICOMP_PROFILE=none does without. Only rank 0 reads it, and tells the others.
"""

EXAMPLES = """\
mpirun -n 4 mpicomp tune
mpirun -n 4 mpicomp tune --output profile.json --check
mpirun -n 4 mpicomp tune --profile profile.json --check --lengths 10000 --densities 0.01 0.1 --json rows.json
"""

LENGTHS, DENSITIES = [10_000, 100_000, 1_000_000], [0.001, 0.01, 0.1, 0.3]  # of the grid


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    tune = commands.add_parser(
        "tune",
        help="measure these ranks, and let algorithm='auto' go by it; --check compares predictions with measurements",
        description=ABOUT,
        examples=EXAMPLES,
    )
    tune.add_argument("--output", type=new_file, metavar="FILE", help="the profile to write (one per user, see above)")
    tune.add_argument("--profile", type=a_profile, metavar="FILE", help="take this profile, and measure none")
    tune.add_argument("--check", action="store_true", help="measure every algorithm on a grid, beside its prediction")
    tune.add_argument(
        "--lengths", type=positive, nargs="+", action=each_once, help=f"of the grid ({' '.join(map(str, LENGTHS))})"
    )
    tune.add_argument(
        "--densities", type=share, nargs="+", action=each_once, help=f"of the grid ({' '.join(map(str, DENSITIES))})"
    )
    tune.add_argument("--repeats", type=positive, default=5, help="timed turns of everything (%(default)s)")
    tune.add_argument(
        "--seconds", type=not_negative, help="go on in each place of the grid for so long: more turns (0)"
    )
    tune.add_argument("--json", type=new_file, metavar="FILE", help="write what the check finds to a file as well")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Measure or take a profile, keep it, and check it if asked to; rank 0 speaks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    look(options, comm)
    fault = misused(options)
    if fault:
        sys.stderr.write(f"mpicomp tune: {fault}\n" if comm.rank == 0 else "")
        return 2
    profile, failed = kept(options, comm, out if comm.rank == 0 else None)
    if options.check and not failed:
        failed = check(options, comm, profile, out if comm.rank == 0 else None)
    return failed


def misused(options: argparse.Namespace) -> str | None:
    """Return what is wrong with options that do not go together."""
    if options.profile and options.output:
        return "--profile takes a profile and --output writes one: give one of them"
    if options.profile and not options.check:
        return "--profile is there for --check: add it (`mpicomp explain --profile FILE` predicts without measuring)"
    if options.json and not options.check:
        return "--json holds what --check finds: add it (--output names the file of the profile)"
    of_grid = [name for name in ("lengths", "densities", "seconds") if getattr(options, name) is not None]
    if of_grid and not options.check:
        return f"--{of_grid[0]} is about the grid of --check: add it, or leave --{of_grid[0]} out"
    return None


def kept(options: argparse.Namespace, comm: Any, out: TextIO | None) -> tuple[Profile, int]:
    """Return rank 0's profile on all ranks, written to its file if it is new, and whether that failed."""
    from collectives.cli.tune.calibrating import calibrated
    from collectives.cli.tune.measuring import measure
    from collectives.tuning import default_path

    if options.profile:
        return options.profile, 0
    profile = calibrated(comm, measure(comm, options.repeats), options.repeats)
    options.output = options.output or default_path(profile.ranks, profile.nodes)
    if out:
        out.write(told(profile))
    failed = write(options, comm, output=lambda file: file.write_text(profile.text()))
    if out and not failed:
        out.write(f"written to {options.output}\n")
    return profile, failed


def told(profile: Profile) -> str:
    """Return the figures of a profile as lines."""
    lines = [f"{profile.ranks} ranks on {profile.nodes} of the hosts {profile.host!r}, {profile.mpi}"]
    lines += [f"a call {1e6 * profile.call:.0f} us, each further message of a step {1e6 * profile.message:.1f} us"]
    for name, link in ("inside a node", profile.inside), ("between nodes", profile.between):
        if link:
            lines.append(f"{name}: {1e6 * link.start:.0f} us a message, {link.rate / 1e6:.0f} MB/s")
    lines.append(f"MPI's Allreduce: {1e6 * profile.reduce.start:.0f} us, {profile.reduce.rate / 1e6:.0f} MB/s")
    rates = [f"{name} {curve.rate / 1e6:.0f}" for name, curve in profile.kernels.items() if curve.rate < 1e11]
    return "\n".join([*lines, f"million entries/s: {', '.join(rates)}\n"])


def check(options: argparse.Namespace, comm: Any, profile: Profile, out: TextIO | None) -> int:
    """Measure the grid, and print each row beside its prediction, and the summary; return 1 if it cannot be written."""
    from collectives.cli.tune import checking

    found = []
    if out:
        out.write(checking.HEADER + "\n")
    grid = options.lengths or LENGTHS, options.densities or DENSITIES
    for row in checking.rows(comm, profile, *grid, options.repeats, options.seconds or 0.0):
        found.append(row)
        if out:
            out.write(f"{row}\n")
            out.flush()
    if out:
        out.write(checking.summary(found))
    about = {"ranks": comm.size, "host": profile.host, "MPI": profile.mpi, **checking.verdict(found)}
    rows = {**about, "rows": checking.as_rows(found)}
    return write(options, comm, json=lambda file: file.write_text(json.dumps(rows, indent=1)))
