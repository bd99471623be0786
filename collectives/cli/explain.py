"""`mpicomp explain`: what each algorithm would take, and which one "auto" would; from a profile, without MPI."""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, TextIO

from collectives import cost
from collectives.cli.bench.settings import positive, share
from collectives.cli.files import a_profile, look
from collectives.profiles import NETWORKS, Profile
from collectives.tuning import Tuner
from mpicomp.vector import MAX_LENGTH

ABOUT = """\
Predict the seconds, the bytes that the busiest rank sends, and the rounds of every algorithm, beside a lower bound: the
entropy of what has to travel, and ceil(lg P) rounds, in messages of this library. (Where all ranks share memory, MPI's
own sums may have faster ones.) The model is that of algorithm="auto"; it starts no MPI.

--network takes typical cores on a typical network, --profile what `mpicomp tune` measured. Where neither is given it is
1gbit. A profile that was measured with more ranks than cores has that in its figures.
"""

EXAMPLES = """\
mpicomp explain --ranks 64 --length 25e6 --density 0.001 --network 10gbit
mpicomp explain --ranks 1e6 --length 1e9 --density 0.0001 --network hdr --per-node 8 --overlap 0.5
mpicomp explain --ranks 4 --length 1e6 --density 0.01 --json
"""

MOST_RANKS = 10**6


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    explain = commands.add_parser(
        "explain",
        help="what each algorithm would take at any number of ranks, and which one algorithm='auto' would choose",
        description=ABOUT,
        examples=EXAMPLES,
    )
    explain.add_argument("--ranks", type=ranks, required=True, metavar="P", help="1 to 1000000")
    explain.add_argument(
        "--length", type=partial(positive, most=MAX_LENGTH), required=True, metavar="N", help="values of a gradient"
    )
    explain.add_argument("--density", type=share, required=True, metavar="D", help="share of them that a rank brings")
    explain.add_argument(
        "--overlap", type=overlap, default=0.0, metavar="SHARE", help="of a rank's entries: where all have one (0)"
    )
    explain.add_argument(
        "--per-node", type=positive, metavar="R", help="ranks of a node (1, or all where one node was measured)"
    )
    explain.add_argument("--value-bytes", type=positive, choices=(2, 4, 8), default=4, help="of a number (4)")
    explain.add_argument("--codec", choices=("auto", "plain", "quick", "smallest"), default="auto", help="(auto)")
    machine = explain.add_mutually_exclusive_group()
    machine.add_argument("--network", choices=list(NETWORKS), help="a typical one, each core typical as well (1gbit)")
    machine.add_argument("--profile", type=a_profile, metavar="FILE", help="what `mpicomp tune` wrote")
    explain.add_argument("--json", action="store_true", help="print JSON instead of a table")


def ranks(text: str) -> int:
    """Return the number of ranks that a text says."""
    number = positive(text)
    if number > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected 1 to {MOST_RANKS} ranks")
    return number


def overlap(text: str) -> float:
    """Return the share that a text says; 0 is one."""
    try:
        number = float(text)
        if not 0 <= number <= 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected 0 <= overlap <= 1 (0: independent supports)"
        ) from None
    return number


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print the predictions."""
    look(options)
    profile = options.profile or NETWORKS[options.network or "1gbit"]
    per_node = options.per_node or (1 if profile.between else options.ranks)
    case = cost.Case(
        options.ranks,
        options.length,
        max(1, round(options.length * options.density)),
        overlap=options.overlap,
        value_nbytes=options.value_bytes,
        codec=options.codec,
        nodes=-(-options.ranks // per_node),
    )
    fault = unknown_link(case, profile)
    if fault:
        sys.stderr.write(f"mpicomp explain: {fault}\n")
        return 2
    nodes = [case.per_node] * (case.nodes - 1)
    chosen, spent = Tuner(profile).automatic(case, [*nodes, case.ranks - sum(nodes)])
    found = [*explained(case, profile), row("sparse_allreduce", "auto", spent)]
    if options.json:
        about = {
            "ranks": case.ranks,
            "nodes": case.nodes,
            "per_node": case.per_node,
            "length": case.length,
            "entries": case.entries,
        }
        union = {"union": case.union(case.ranks), "auto": chosen}
        out.write(json.dumps({**about, **union, "rows": found}, indent=1) + "\n")
    else:
        out.write(table(case, per_node, found, chosen))
    return 0


def unknown_link(case: cost.Case, profile: Profile) -> str | None:
    """Return what is wrong where the profile has not seen such links."""
    if case.nodes > 1 and profile.between is None:
        return "the profile was measured on one node: leave --per-node out, or tune on several nodes"
    if case.nodes < case.ranks and profile.inside is None:
        return "the profile was measured with one rank a node: --per-node 1 is all that it can tell"
    return None


def explained(case: cost.Case, profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield a row for each algorithm of each operation, the fastest one of an operation first, and its lower bound."""
    several = 1 < case.nodes < case.ranks
    for operation, algorithms in cost.OPERATIONS.items():
        names = [name for name in algorithms if several or not name.startswith("node")]
        costs = {name: cost.predict(operation, name, case, profile) for name in names}
        bound = cost.lower_bound(operation, case, profile)
        for name in sorted(names, key=lambda name: costs[name].seconds):
            yield row(operation, name, costs[name])
        yield row(operation, "lower bound", bound)


def row(operation: str, algorithm: str, found: cost.Cost) -> dict[str, Any]:
    """Return a prediction as JSON has it."""
    figures = {"seconds": found.seconds, "bytes": round(found.nbytes), "rounds": found.rounds}
    return {"operation": operation, "algorithm": algorithm, **figures}


def where(case: cost.Case, per_node: int) -> str:
    """Return how many ranks there are, and on how many nodes. per_node: ranks of a node that were asked for."""
    ranks, nodes = (
        f"{number} {name}{'s' * (number > 1)}" for number, name in ((case.ranks, "rank"), (case.nodes, "node"))
    )
    most = "at most " if case.ranks % case.nodes else ""
    evenly = "" if case.nodes == 1 or case.ranks % per_node == 0 else f" ({case.ranks} is no multiple of {per_node})"
    return f"{ranks} on {nodes}" + (f", {most}{case.per_node} a node{evenly}" if case.nodes > 1 else "")


def table(case: cost.Case, per_node: int, found: list[dict[str, Any]], chosen: str) -> str:
    """Return the rows as a table, and by which algorithm "auto" goes."""
    union = case.union(case.ranks)
    lines = [
        f"{where(case, per_node)}; {case.entries:.0f} of {case.length} entries each; "
        f"their union: {union:.0f} ({union / case.length:.2%})",
        f"{'':24}{'':20} {'ms':>12} {'bytes':>16} {'rounds':>7}",
    ]
    for each in found:
        mark = f"  by {chosen}" if each["algorithm"] == "auto" else ""
        figures = f"{1e3 * each['seconds']:12.3f} {each['bytes']:16d} {each['rounds']:7d}"
        lines.append(f"{each['operation']:24}{each['algorithm']:20} {figures}{mark}")
    return "\n".join(lines) + "\n"
