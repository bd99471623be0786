"""`mpicomp explain`: predicted costs of each algorithm, an exchange and a training step; by formulas, without MPI."""

import argparse
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import numpy as np

from collectives.calls.collective import COLLECTIVES, Collective
from collectives.planning.choice import Case, constants_of, upper
from collectives.planning.links import NETWORKS, Cost, Links, links_of, seconds
from mpicomp.vector import MAX_LENGTH, SparseVector
from mpicomp_bench import answer, formulas
from mpicomp_bench.advice import (
    MEMORY,
    SIXTEEN,
    Training,
    auto,
    by_auto,
    compression,
    evenly,
    sixteen_bits,
    with_memory,
)
from mpicomp_bench.bounds import least_nbytes
from mpicomp_bench.formulas import dense_seconds, predicted
from mpicomp_bench.measuring import Row
from mpicomp_bench.network import Network
from mpicomp_bench.options import above_zero, positive, share

ABOUT = """\
For every algorithm: seconds, bytes that the busiest rank sends, rounds; beside the least bytes, the
entropy of what has to be sent. "patch" is sparse_bcast of a patch of weights, of which --density
changed. "auto" chooses by estimates with fewer terms; no MPI is started.
Every rank has a core of its own. Where ranks share a node, algorithms that ignore nodes count its
link as shared by all of them; a dense sum is the faster of a ring over the ranks and one over the
nodes.

The speed-up over a dense allreduce ("dense /") is smaller for a whole exchange, which also selects
or codes, keeps the residual and writes the mean (as measured on one core), and smaller again for a
training step (--step).

--train asks which method trains the fastest over these links: it ranks one node alone, dense
sums, 16 bits, PowerSGD, 4 bits, coefficients in a basis and local steps by the predicted time for
the progress of a dense step, and prints the lines for PyTorch. The steps were measured. Above 1
Gbit/s and on GPUs nothing was: there it recommends no method of its own.

--step: train on one rank, without communication, and take the median time of some 20 steps
(forward and backward pass and optimiser), the first few left out. On a GPU call
torch.cuda.synchronize() before each reading of the clock.

Networks: fdr, edr, hdr and ndr are InfiniBand of 54, 100, 200 and 400 Gbit/s; the others Ethernet
with TCP, of the rate in the name. A rate of your own may have a delay: 10gbit:50us.
"""

EXAMPLES = """\
mpicomp explain --ranks 64 --length 25M --density 0.001 --network 10gbit --step 0.2
mpicomp explain --train --parameters 25M --step 0.3 --ranks 8 --network 1gbit --optimizer muon
"""

# Ranks that --ranks takes, at most.
MOST_RANKS = 10**6
# Ranks on the simulated network, at most, and entries of each.
MOST_COUNTED = 64
COUNTED_ENTRIES = 2000
# Bits of a value for which `quantised_allreduce` is predicted.
FEW_BITS = 8, 4
OF_ALL = "quantised_allreduce", "dense_allreduce"  # sums of all values
# Methods by whose measurements the computation of a GradientExchange is predicted, by
# its collective or bits.
COMPUTES = {
    "sparse_allreduce": "topk-0.01",
    "gtopk_allreduce": "topk-0.01",
    "8 bits": "few-bits-8",
    "4 bits": "few-bits-4",
}
# Dense messages in 16 bits, such as those of PyTorch's fp16 hook.
HALVED = "mpi, 16 bits"


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    explain = commands.add_parser(
        "explain",
        help="predict the cost of each algorithm, an exchange and a step",
        description="Predict the cost of each algorithm, of an exchange and of a step, at any number of ranks.",
        examples=EXAMPLES,
        notes=ABOUT,
    )
    add = explain.add_argument
    values = partial(positive, most=MAX_LENGTH)
    add(
        "--ranks",
        type=partial(positive, most=MOST_RANKS),
        required=True,
        metavar="P",
        help="at most 1e6 (required)",
    )
    add(
        "--length",
        type=values,
        metavar="N",
        help="values of a gradient, such as 25M (required without --train)",
    )
    about = "fraction of entries each rank contributes (only sums of all values)"
    add("--density", type=share, metavar="D", help=about)
    about = "entries of the sum over those of a rank (independent supports)"
    add("--union", type=above_zero, metavar="U", help=about)
    add(
        "--per-node",
        type=positive,
        default=1,
        metavar="R",
        help="ranks on a node (%(default)s)",
    )
    about = f"links between nodes: {', '.join(NETWORKS)}, or a rate such as 25Gbit/s; see below (%(default)s)"
    add("--network", type=links, default="1gbit", metavar="NAME", help=about)
    about = "one way between nodes, half of a ping, such as 5ms (that of the network)"
    add("--delay", type=delay, metavar="T", help=about)
    add(
        "--step",
        type=above_zero,
        metavar="S",
        help="seconds of computing in a training step; how to measure: below (no rows)",
    )
    add("--json", action="store_true", help="print JSON (a table)")
    add = explain.add_argument_group(
        "which method trains the fastest, with --step"
    ).add_argument
    add("--train", action="store_true", help="rank the methods (explain one sum)")
    add(
        "--parameters",
        type=values,
        metavar="N",
        help="of the model, such as 125M (required with --train)",
    )
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="that you train with (%(default)s)",
    )
    about = "local steps between exchanges (the best of those measured, up to 100)"
    add("--every", type=positive, metavar="H", help=about)
    about = "GB a second that a rank reads and writes: a core 15, a socket 100, a GPU 1000 (%(default)s)"
    add("--memory", type=above_zero, default=MEMORY / 1e9, metavar="R", help=about)


def links(text: str) -> Links:
    """Return the links in an option's text."""
    try:
        return links_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def delay(text: str) -> float:
    """Return the seconds in an option's text."""
    try:
        return links_of(f"1gbit:{text}").latency
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}: expected a time such as 50us or 5ms"
        ) from None


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print the predictions."""
    if fault := refused(options):
        options.parser.error(fault)
    options.memory *= 1e9
    if options.delay is not None:
        options.network = replace(options.network, latency=options.delay)
    return advise(options, out) if options.train else explain_sum(options, out)


def refused(options: argparse.Namespace) -> str | None:
    """Return why options do not belong together, or None."""
    if not options.train and options.length is None:
        return "got no --length: expected the values of a gradient, or --train with --parameters and --step"
    if options.train and options.parameters is None:
        return "got no --parameters: expected those of the model, such as 125M"
    if options.train and options.step is None:
        return (
            "got no --step: expected the median seconds of a step on one rank, forward and backward pass and optimiser "
            "without communication; see `mpicomp explain --help`"
        )
    others = ("length", "density") if options.train else ("parameters", "every")
    if given := [name for name in others if getattr(options, name) is not None]:
        way = "without" if options.train else "with"
        return f"got --{given[0]}: expected it {way} --train only"
    return None


def advise(options: argparse.Namespace, out: TextIO) -> int:
    """Print which method of training to take, and all of them, the fastest first."""
    training = Training(
        options.ranks,
        options.parameters,
        options.step,
        options.network,
        options.per_node,
        options.memory,
        options.optimizer,
        options.every,
    )
    out.write(answer.as_json(training) if options.json else answer.report(training))
    return 0


def explain_sum(options: argparse.Namespace, out: TextIO) -> int:
    """Print the predictions for one sum, and for an exchange and a step with it."""
    density = options.density
    on_node = evenly(options.ranks, options.per_node)
    entries = max(1, round(options.length * (density or 1)))
    case = Case(options.ranks, options.length, entries, on_node)
    if options.union:
        case = case.with_union(options.union * entries)
    links = with_memory(options.network, options.memory)
    collectives = None if density else OF_ALL
    found = list(explained(case, links, options.step, collectives=collectives))
    if options.json:
        about = {
            "ranks": case.ranks,
            "nodes": case.nodes,
            "length": case.length,
            "entries": entries,
            "union": case.union(case.ranks),
            "rows": found,
        }
        out.write(json.dumps(about, indent=1) + "\n")
    else:
        out.write(table(case, found))
    return 0


def explained(
    case: Case,
    links: Links,
    step: float | None = None,
    *,
    collectives: Collection[str] | None = None,
    most_counted: int = MOST_COUNTED,
) -> Iterator[Row]:
    """Yield a row for each algorithm of each collective, the fastest first, for an exchange, and for a step.

    collectives: their names; None for all. most_counted: the most ranks for which
    algorithms without a formula are counted on the simulated network.
    """
    dense = dense_seconds(case, links)
    half = replace(case, length=-(-case.length // 2))
    halved = sixteen_bits(case, links) + compression(SIXTEEN, case, links)
    exchanges: dict[str, float] = {}
    for collective in COLLECTIVES if collectives is None else collectives:
        in_bits = FEW_BITS if collective == "quantised_allreduce" else (None,)
        for bits in in_bits:
            own = replace(case, entries=case.length, bits=bits) if bits else case
            suffix = f", {bits} bits" if bits else ""
            costs = costs_of(COLLECTIVES[collective], own, links, most_counted)
            for name in sorted(costs, key=lambda name: costs[name][0]):
                yield row(collective, f"{name}{suffix}", *costs[name], dense)
            if not bits and (collective in formulas.FORMULAS or collective in OTHERS):
                yield row(
                    collective, "least bytes", None, least(collective, case), dense
                )
            if collective in formulas.FORMULAS:
                name = auto(collective, own, links)
                exchanges[f"{bits} bits" if bits else collective] = by_auto(
                    collective, own, links
                )
                yield {
                    **row(collective, f"auto{suffix}", *costs[name], dense),
                    "by": name,
                }
    yield row("dense_allreduce", HALVED, halved, formulas.dense_mpi(half), dense)
    for name in exchanges:
        exchanges[name] += compression(COMPUTES[name], case, links)
        yield row("GradientExchange", name, exchanges[name], NOTHING, dense)
    if step:
        whole = {"dense": dense, "dense, 16 bits": halved}
        whole |= {f"by {name}": taken for name, taken in exchanges.items()}
        for name, taken in whole.items():
            yield row(f"step of {step:g} s", name, step + taken, NOTHING, step + dense)


def costs_of(
    collective: Collective[..., Any], case: Case, links: Links, most_counted: int
) -> dict[str, tuple[float, Cost]]:
    """Return the seconds and the cost of each algorithm of a collective: by its formula, or counted."""
    found: dict[str, tuple[float, Cost]] = {}
    constants = constants_of(case, links)
    if collective.name in formulas.FORMULAS:
        found = predicted(collective.name, case, links)
    elif collective.name in OTHERS:
        name, formula = OTHERS[collective.name]
        found[name] = seconds(cost := formula(case), constants), cost
        if name == "mpi":
            found[name] = dense_seconds(case, links), cost
    elif collective.name == "sparse_bcast":
        cost, timed = formulas.patch(case)
        found["patch"] = seconds(timed, constants), cost
    if case.ranks <= most_counted and not case.bits:
        for name in collective.algorithms.keys() - found.keys() - NOT_COUNTED:
            found[name] = (
                seconds(cost := counted(collective, name, case), constants),
                cost,
            )
    return found


def least(collective: str, case: Case) -> Cost:
    """Return the lower bounds of the rounds and bytes of a collective."""
    union = case.union(case.ranks)
    nbytes = least_nbytes(
        collective, case.ranks, case.length, case.entries, union, case.value_nbytes
    )
    return upper(case.ranks), 0, nbytes, 0


def row(
    collective: str, algorithm: str, taken: float | None, cost: Cost, dense: float
) -> Row:
    """Return a row of the predictions; seconds are None for lower bounds. dense: seconds of a dense allreduce."""
    return {
        "operation": collective,
        "algorithm": algorithm,
        "seconds": taken,
        "bytes": round(cost[2]),
        "rounds": round(cost[0]),
        "speedup": dense / taken if taken else None,
    }


def compressed(case: Case) -> Cost:
    """The cost of `compressed_allreduce`, for as many entries of the compressed sum as each rank has.

    An owner reads its share twice, for the sum and to select from it.
    """
    read = 2 * formulas.FILLED * case.length / case.ranks
    return formulas.plus(
        formulas.split(case),
        formulas.gather_shares(case, case.entries, case.entries + read),
    )


NOTHING: Cost = (0, 0, 0, 0)
# Collectives that have one algorithm: its name and its formula.
OTHERS: dict[str, tuple[str, Callable[[Case], Cost]]] = {
    "sparse_reduce_scatter": ("split", formulas.split),
    "sparse_allgather": (
        "dissemination",
        formulas.FORMULAS["sparse_allreduce"]["allgather"],
    ),
    "compressed_allreduce": ("split_allgather", compressed),
    "dense_allreduce": ("mpi", formulas.dense_mpi),
}


# Arguments of the algorithms of each collective, by the number of entries.
ARGUMENTS: dict[str, Callable[[int], Row]] = {
    "gtopk_allreduce": lambda entries: {"k": entries},
    "sparse_reduce_scatter": lambda entries: {"partition": "equal"},
    "sparse_reduce": lambda entries: {"root": 0},
    "sparse_bcast": lambda entries: {"root": 0},
}
# Algorithms whose messages are not counted: those for nodes of several ranks, and MPI's
# own.
NOT_COUNTED = {"node_lanes", "node_leaders", "mpi"}


def counted(collective: Collective[..., Any], name: str, case: Case) -> Cost:
    """Return the rounds and bytes of an algorithm without a formula, counted on a simulated network.

    It simulates vectors of a few thousand entries, with the density of the given ones.
    """
    scale = min(1.0, COUNTED_ENTRIES / case.entries)
    length = max(1, round(case.length * scale))
    entries = max(1, round(case.entries * scale))
    nodes = [0] * case.ranks if case.nodes == 1 else list(range(case.ranks))
    arguments = (
        ARGUMENTS[collective.name](entries) if collective.name in ARGUMENTS else {}
    )

    def run(rank: int, group: Any) -> Any:
        rng = np.random.default_rng([case.ranks, rank])
        indices = np.sort(rng.choice(length, entries, replace=False, shuffle=False))
        vector = SparseVector(indices, 1 + rng.random(entries, np.float32), length)
        return collective.algorithms[name](vector, group, **arguments)

    network = Network(case.ranks, nodes)
    _, rounds = network.run(run, length=length, dtype="float32", **arguments)
    return rounds, 0, max(link.traffic.nbytes for link in network.links) / scale, 0


def table(case: Case, found: list[Row]) -> str:
    """Return the rows as a table."""
    where = f"{case.ranks} rank{'s' * (case.ranks > 1)} on {case.nodes} node{'s' * (case.nodes > 1)}"
    union = case.union(case.ranks)
    sent = (
        f"{case.entries:.0f} of {case.length} entries each; "
        f"their union: {union:.0f} ({union / case.length:.2%})"
    )
    lines = [
        f"{where}; {sent if case.entries < case.length else f'{case.length} values'}",
        f"{'':22}{'':26} {'ms':>12} {'bytes':>16} {'rounds':>7} {'dense /':>8}",
    ]
    for each in found:
        ms = "-" if each["seconds"] is None else f"{1e3 * each['seconds']:.3f}"
        ratio = "-" if each["speedup"] is None else f"{each['speedup']:.2f}"
        name = (
            f"{each['algorithm']}: {each['by']}" if "by" in each else each["algorithm"]
        )
        sent = (
            f"{each['bytes']:16d} {each['rounds']:7d}"
            if each["bytes"]
            else f"{'-':>16} {'-':>7}"
        )
        lines.append(f"{each['operation']:22}{name:26} {ms:>12} {sent} {ratio:>8}")
    return "\n".join(lines) + "\n"
