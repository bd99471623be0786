"""`mpicomp explain`: predicted costs of each algorithm, an exchange and a training step; by formulas, without MPI."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import numpy as np

from collectives import choice
from collectives.choice import Case, Choice, Cost, seconds
from collectives.collective import COLLECTIVES, Collective
from collectives.partition import likely
from mpicomp.vector import MAX_LENGTH, SparseVector
from mpicomp_bench.bounds import least_nbytes
from mpicomp_bench.files import look
from mpicomp_bench.network import Network
from mpicomp_bench.options import above_zero, number, positive, share

ABOUT = """\
For every algorithm: seconds, bytes that the busiest rank sends, rounds; beside the least bytes, the
entropy of what has to be sent. The formulas are those of algorithm="auto"; no MPI is started. Where
ranks share a node, algorithms that ignore nodes count its link as shared by all of them.

The speed-up over a dense allreduce ("dense /") is smaller for a whole exchange, which also selects,
keeps the residual and writes the mean, and smaller again for a training step (--step).
"""

EXAMPLES = """\
mpicomp explain --ranks 64 --length 25e6 --density 0.001 --network 10gbit --step 0.2
mpicomp explain --ranks 1e6 --length 1e9 --density 1e-4 --network hdr --per-node 8 --overlap 0.5
"""

MOST_RANKS, MOST_COUNTED, COUNTED_ENTRIES = 10**6, 64, 2000  # simulated: so many ranks at most, so many entries of each
NETWORKS = {"100mbit": (100e-6, 11.8e6), "1gbit": (40e-6, 118e6), "10gbit": (20e-6, 1.18e9), "hdr": (1.5e-6, 24e9)}
OWN_LATENCY = 10e-6  # seconds that this library spends on a message
MEMORY = 1.5e10  # bytes a second of a core that reads or writes an array
FEW_BITS = 8, 4  # bits of a value for which `quantised_allreduce` is predicted
PASSES = {"selection": 1, "feedback": 2, "mean": 1}  # over all values, of an exchange with `out=`

Row = dict[str, Any]


def add_to(commands: Any) -> None:
    """Add the command to the command line."""
    explain = commands.add_parser(
        "explain",
        help="predict the cost of each algorithm, an exchange and a step",
        description="Predict the cost of each algorithm, of an exchange and of a step, at any number of ranks.",
        examples=EXAMPLES,
        notes=ABOUT,
    )
    explain.add_argument("--ranks", type=ranks, required=True, metavar="P", help="ranks, 1 to 1000000 (required)")
    explain.add_argument(
        "--length",
        type=partial(positive, most=MAX_LENGTH),
        required=True,
        metavar="N",
        help="values of a gradient (required)",
    )
    explain.add_argument(
        "--density", type=share, required=True, metavar="D", help="fraction of entries each rank contributes (required)"
    )
    explain.add_argument(
        "--overlap",
        type=overlap,
        default=0.0,
        metavar="X",
        help="of the supports: -1 disjoint, 0 independent, 1 equal (%(default)s)",
    )
    explain.add_argument("--per-node", type=positive, default=1, metavar="R", help="ranks on a node (%(default)s)")
    explain.add_argument(
        "--value-bytes", type=positive, choices=(2, 4, 8), default=4, help="bytes of a value (%(default)s)"
    )
    coded = "bits of a value as coded, such as 1 for signs (those of floats selected by magnitude)"
    explain.add_argument("--value-bits", type=above_zero, metavar="B", help=coded)
    explain.add_argument("--network", choices=list(NETWORKS), default="1gbit", help="links between nodes (%(default)s)")
    explain.add_argument(
        "--step", type=above_zero, metavar="S", help="seconds of computing in a training step (no rows)"
    )
    explain.add_argument("--json", action="store_true", help="print JSON (a table)")


def ranks(text: str) -> int:
    """Return the number of ranks in an option's text."""
    number = positive(text)
    if number > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"got {text!r}: expected 1 to {MOST_RANKS} ranks")
    return number


overlap = number("-1 <= overlap <= 1 (0: independent)", lambda found: -1 <= found <= 1)


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print the predictions."""
    look(options)
    nodes = -(-options.ranks // options.per_node)
    entries = max(1, round(options.length * options.density))
    about = options.overlap, options.value_bytes, options.value_bits, nodes > 1
    case = Case(options.ranks, options.length, entries, *about)
    found = list(explained(case, nodes, options.network, options.step))
    if options.json:
        union = case.union(case.ranks)
        head = {"ranks": case.ranks, "nodes": nodes, "length": case.length, "entries": entries, "union": union}
        out.write(json.dumps({**head, "rows": found}, indent=1) + "\n")
    else:
        out.write(table(case, nodes, found))
    return 0


def explained(
    case: Case, nodes: int, network: str, step: float | None = None, *, most_counted: int = MOST_COUNTED
) -> Iterator[Row]:
    """Yield a row for each algorithm of each collective, the fastest first, for an exchange, and for a step.

    most_counted: the most ranks for which algorithms without a formula are counted on the simulated network.
    """
    per_node = -(-case.ranks // nodes)
    formulas: dict[str, dict[str, Callable[[Case], Cost]]] = {**choice.FORMULAS}
    formulas["sparse_reduce_scatter"] = {"split": choice.split}
    formulas["sparse_allgather"] = {"dissemination": choice.allgather}
    formulas["dense_allreduce"] = {"mpi": dense_allreduce}
    constants = constants_of(nodes, per_node, network)
    dense = seconds(dense_allreduce(case), constants)
    chosen: dict[str, float] = {}
    rows: list[Row] = []
    for collective, declared in COLLECTIVES.items():
        if collective == "quantised_allreduce":
            rows += ranked(collective, quantised(case, nodes, per_node, network), dense)
            continue
        costs = {name: formula(case) for name, formula in formulas.get(collective, {}).items()}
        taken = {name: (seconds(cost, constants), cost) for name, cost in costs.items()}
        if 1 < nodes < case.ranks and collective in ON_NODES:
            taken |= ON_NODES[collective](case, nodes, per_node, network)
        if case.ranks <= most_counted:
            for name in declared.algorithms.keys() - taken.keys() - NOT_COUNTED:
                taken[name] = (seconds(cost := counted(declared, name, case), constants), cost)
        if collective == "sparse_allreduce":
            for name, (its_own, cost) in taken.items():
                first = choice.metadata_cost(case, name)
                taken[name] = seconds(first, constants) + its_own, choice.both(first, cost)
        rows += ranked(collective, taken, dense)
        if collective in formulas:
            union = case.union(case.ranks)
            nbytes = least_nbytes(collective, case.ranks, case.length, case.entries, union, case.value_nbytes)
            least = upper(case.ranks), 0, nbytes, 0
            rows.append(row(collective, "least bytes", None, least, dense))
        if collective in choice.FORMULAS:
            several = [*[per_node] * (nodes - 1), case.ranks - per_node * (nodes - 1)]
            name = Choice().algorithm(collective, case, several)
            chosen[collective] = taken[name][0]
            rows.append({**row(collective, "auto", *taken[name], dense), "by": name})
    yield from rows
    yield from whole_steps(case, chosen, dense, constants[0] * upper(case.ranks), step)


def upper(ranks: int) -> int:
    """Return ceil(lg ranks)."""
    return (ranks - 1).bit_length()


def row(collective: str, algorithm: str, taken: float | None, cost: Cost, dense: float) -> Row:
    """Return a row of the predictions; seconds are None for lower bounds. dense: seconds of a dense allreduce."""
    speedup = dense / taken if taken else None
    figures = {"seconds": taken, "bytes": round(cost[2]), "rounds": round(cost[0]), "speedup": speedup}
    return {"operation": collective, "algorithm": algorithm, **figures}


def ranked(collective: str, taken: dict[str, tuple[float, Cost]], dense: float) -> list[Row]:
    """Return the rows of a collective, the fastest first."""
    names = sorted(taken, key=lambda name: taken[name][0])
    return [row(collective, name, *taken[name], dense) for name in names]


def constants_of(nodes: int, per_node: int, network: str) -> Cost:
    """Return the constants of algorithms that ignore nodes; the ranks of a node share its link."""
    latency, rate = NETWORKS[network]
    between = (latency + OWN_LATENCY, choice.BETWEEN[1], per_node / rate, choice.BETWEEN[3])
    return choice.INSIDE if nodes == 1 else between


def on_nodes(case: Case, nodes: int, per_node: int, network: str) -> dict[str, tuple[float, Cost]]:
    """Return seconds and costs of the algorithms that use nodes; the fastest exact sum runs between the nodes."""
    node = replace(case, ranks=per_node, coded=False)
    found = {}
    for name, lanes in ("node_lanes", per_node), ("node_leaders", 1):
        length, union = max(1, case.length // lanes), case.union(per_node)
        between = replace(case, ranks=nodes, length=length, entries=min(length, union / lanes), bits=None)
        constants = constants_of(nodes, lanes, network)
        sums = [choice.FORMULAS["sparse_allreduce"][each](between) for each in choice.FORMULAS["sparse_allreduce"]]
        outer = min(sums, key=lambda cost: seconds(cost, constants))
        rounds, all_of_it = upper(per_node), case.union(case.ranks)
        if lanes == 1:  # up a tree and down again
            nbytes, merged = rounds * node.message(all_of_it), 2 * rounds * union
            inner: Cost = (2 * rounds, 2 * rounds, nbytes, merged)
        else:
            rounds_split, messages, nbytes, merged = choice.split(node)
            shares = (per_node - 1) * node.message(all_of_it / per_node, 1 / per_node)
            inner = (rounds_split + rounds, messages + rounds, nbytes + shares, merged + all_of_it)
        found[name] = seconds(inner, choice.INSIDE) + seconds(outer, constants), choice.both(inner, outer)
    return found


def gtopk_on_nodes(case: Case, nodes: int, per_node: int, network: str) -> dict[str, tuple[float, Cost]]:
    """Return seconds and cost of gTop-k's `node_leaders`, in which the first ranks of the nodes gather once."""
    union, constants, rounds = case.union(per_node), constants_of(nodes, 1, network), upper(per_node)
    between = replace(case, ranks=nodes, entries=union, bits=None)
    several = union + between.union(nodes - 1) - between.union(nodes)  # entries of a node that others have as well
    sent = min(likely(case.entries / nodes, nodes), between.union(nodes) / nodes)
    outer = choice.gather(between, between.message(sent, summed=True), 2 * nodes * sent)
    for entries, bits in (union, 0.0), (several, 0.0), (several, None):
        outer = choice.both(outer, choice.split(replace(between, entries=entries, bits=bits)))
    up_and_down = rounds * replace(case, coded=False).message(case.entries)
    inner: Cost = (2 * rounds, 2 * rounds, up_and_down, 2 * rounds * union)
    agreeing = upper(case.ranks)
    outer = choice.both(outer, (agreeing, agreeing, choice.LINE * agreeing, 0))
    return {"node_leaders": (seconds(inner, choice.INSIDE) + seconds(outer, constants), choice.both(inner, outer))}


ON_NODES = {"sparse_allreduce": on_nodes, "gtopk_allreduce": gtopk_on_nodes}  # what knows of nodes


def quantised(case: Case, nodes: int, per_node: int, network: str) -> dict[str, tuple[float, Cost]]:
    """Return seconds and costs of the algorithms of `quantised_allreduce`, for 8 and 4 bits a value."""
    found: dict[str, tuple[float, Cost]] = {}
    constants = constants_of(nodes, per_node, network)
    for bits in FEW_BITS:
        own = replace(case, bits=bits)
        found |= {
            f"{name}, {bits} bits": (seconds(cost(own), constants), cost(own))
            for name, cost in choice.QUANTISED.items()
        }
        if 1 < nodes < case.ranks:
            lane = choice.quantised_direct(replace(own, ranks=nodes, length=max(1, case.length // per_node)))
            others, agreed = per_node - 1, upper(case.ranks)
            sent = others * (case.length * max(case.value_nbytes, 4) + own.few_bits()) / per_node
            inner: Cost = (agreed + 2, agreed + 2 * others, agreed * choice.LINE + sent, case.length / 4)
            taken = seconds(inner, choice.INSIDE) + seconds(lane, constants)
            found[f"node_lanes, {bits} bits"] = taken, choice.both(inner, lane)
    return found


def dense_allreduce(case: Case) -> Cost:
    """The cost of `collectives.dense`: the call signatures, and MPI's own allreduce."""
    rounds, nbytes = upper(case.ranks), choice.dense_mpi(case)[2]
    return 2 * rounds, 2 * rounds, nbytes, 0


def whole_steps(
    case: Case, chosen: dict[str, float], dense: float, agreeing: float, compute: float | None
) -> Iterator[Row]:
    """Yield the rows of an exchange by each collective, of its parts, and of a training step.

    chosen: seconds of the collectives. agreeing: seconds of the rounds in which the ranks agree to keep the step.
    """
    per_pass = case.length * case.value_nbytes / MEMORY
    nothing = (0.0, 0.0, 0.0, 0.0)
    for name, passes in PASSES.items():
        yield row("GradientExchange", name, passes * per_pass, nothing, dense)
    own = sum(PASSES.values()) * per_pass + agreeing
    for collective, taken in chosen.items():
        yield row("GradientExchange", collective, own + taken, nothing, dense)
        if compute:
            name = f"by {collective}"
            yield row(f"step of {compute:g} s", name, compute + own + taken, nothing, compute + dense)
    if compute:
        yield row(f"step of {compute:g} s", "dense allreduce", compute + dense, nothing, compute + dense)


ARGUMENTS: dict[str, Callable[[int], Row]] = {  # of the algorithms of a collective, for so many entries
    "gtopk_allreduce": lambda entries: {"k": entries},
    "sparse_allreduce": lambda entries: {"partition": "auto"},
    "sparse_reduce_scatter": lambda entries: {"partition": "equal"},
    "sparse_reduce": lambda entries: {"root": 0},
    "sparse_bcast": lambda entries: {"root": 0},
}
NOT_COUNTED = {"node_lanes", "node_leaders", "mpi"}  # for several ranks on several nodes; MPI's own, see `choice`


def counted(collective: Collective[..., Any], name: str, case: Case) -> Cost:
    """Return the rounds and bytes of an algorithm without a formula, counted on a simulated network.

    It simulates vectors of a few thousand entries, with the density of the given ones.
    """
    scale = min(1.0, COUNTED_ENTRIES / case.entries)
    length, entries = max(1, round(case.length * scale)), max(1, round(case.entries * scale))
    nodes = list(range(case.ranks)) if case.coded else [0] * case.ranks
    arguments = ARGUMENTS[collective.name](entries) if collective.name in ARGUMENTS else {}

    def run(rank: int, group: Any) -> Any:
        rng = np.random.default_rng([case.ranks, rank])
        indices = np.sort(rng.choice(length, entries, replace=False, shuffle=False))
        vector = SparseVector(indices, 1 + rng.random(entries, np.float32), length)
        return collective.algorithms[name](vector, group, **arguments)

    network = Network(case.ranks, nodes)
    _, rounds = network.run(run, length=length, dtype="float32", **arguments)
    return rounds, rounds, max(link.traffic.nbytes for link in network.links) / scale, 0


def table(case: Case, nodes: int, found: list[Row]) -> str:
    """Return the rows as a table."""
    where = f"{case.ranks} rank{'s' * (case.ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    union = case.union(case.ranks)
    lines = [
        f"{where}; {case.entries:.0f} of {case.length} entries each; "
        f"their union: {union:.0f} ({union / case.length:.2%})",
        f"{'':22}{'':26} {'ms':>12} {'bytes':>16} {'rounds':>7} {'dense /':>8}",
    ]
    for each in found:
        ms = "-" if each["seconds"] is None else f"{1e3 * each['seconds']:.3f}"
        ratio = "-" if each["speedup"] is None else f"{each['speedup']:.2f}"
        name = f"{each['algorithm']}: {each['by']}" if "by" in each else each["algorithm"]
        sent = f"{each['bytes']:16d} {each['rounds']:7d}" if each["bytes"] else f"{'-':>16} {'-':>7}"
        lines.append(f"{each['operation']:22}{name:26} {ms:>12} {sent} {ratio:>8}")
    return "\n".join(lines) + "\n"
