"""`mpicomp explain --train`: the methods by the predicted time for the progress of one dense step; without MPI.

That time is steps x (computing + compression + messages). Steps: how many a method needs for the progress of one dense
step, measured in the simulation of benchmarks/every_step; fewer than one count as one, as a lead of another optimiser
on one small model is no reason to expect it on others. Compression: seconds measured on one core, counted in reads of
the vector at `MEMORY`, at the memory rate of a rank. Messages: by the formulas of algorithm="auto"
(`collectives.choice`). Nothing overlaps.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from collectives.choice import Choice
from collectives.choice.formulas import Case, Cost, dense_mpi, seconds
from collectives.choice.links import Links, inside
from collectives.choice.predictions import constants_of, predicted, upper

MEMORY = 1.5e10  # bytes a second of a core that reads or writes an array
PAYS = 1.1  # times as fast as messages of 16 bits: the least gain for which another method is recommended
DENSE, SIXTEEN = "dense", "16 bits"
CASTS = 2.0  # reads of the vector for a copy to 16 bits and back; not measured

Row = dict[str, Any]
Seconds = Callable[[Case, int, Links], float]  # of the messages of an exchange


class Method(NamedTuple):
    """A method. measured: its name in measured.json. every: steps between exchanges. lines: of Python, to copy."""

    about: str
    measured: str
    messages: Seconds
    lines: str
    every: int = 1

    @property
    def reads(self) -> float:
        """The reads of the vector that a step computes beside the training."""
        known = {DENSE: 0.0, SIXTEEN: CASTS}
        name = "local" if self.every > 1 else self.measured
        return (known[self.about] if self.about in known else float(measured()["reads"][name])) / self.every


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """Return what was measured, as benchmarks/every_step/condense.py wrote it."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("measured.json").read_text())
    return found


def dense(case: Case, nodes: int, links: Links, share: float = 1.0) -> float:
    """Return the seconds of a dense sum. share: of its bytes that are sent, 0.5 for 16 bits.

    On nodes of several ranks the faster of a sum over all ranks, and one of each share of a node's sum over the nodes.
    """
    per_node = -(-case.ranks // nodes)
    ways = [[(dense_mpi(case), constants_of(nodes, per_node, links, 1.0))]]
    if 1 < nodes < case.ranks:
        node = dense_mpi(replace(case, ranks=per_node, coded=False))
        lane = dense_mpi(replace(case, ranks=nodes, length=max(1, case.length // per_node)))
        ways.append([(node, inside(1.0)), (lane, links.constants(per_node))])
    return min(sum(seconds(with_share(cost, share), constants) for cost, constants in way) for way in ways)


def with_share(cost: Cost, share: float) -> Cost:
    """Return a cost with a share of its bytes."""
    return cost[0], cost[1], share * cost[2], cost[3]


def sixteen_bits(case: Case, nodes: int, links: Links) -> float:
    """Return the seconds of a dense sum in 16 bits."""
    return dense(case, nodes, links, 0.5)


def few_bits(bits: int) -> Seconds:
    """Return the prediction for every value in so many bits."""
    return lambda case, nodes, links: by_auto(
        "quantised_allreduce", replace(case, entries=case.length, bits=bits), nodes, links
    )


def sparse(density: float, bits: float | None = None) -> Seconds:
    """Return the prediction for the sum of a fraction of the entries, of so many bits each."""
    return lambda case, nodes, links: by_auto(
        "sparse_allreduce", replace(case, entries=max(1.0, case.length * density), bits=bits), nodes, links
    )


def by_auto(collective: str, case: Case, nodes: int, links: Links) -> float:
    """Return the seconds of a collective by the algorithm that "auto" takes, and of the agreement to keep the step."""
    per_node = -(-case.ranks // nodes)
    several = [*[per_node] * (nodes - 1), case.ranks - per_node * (nodes - 1)]
    name = Choice(links=links).algorithm(collective, case, several)
    return predicted(collective, case, nodes, links)[name][0] + latency(case, nodes, links) * upper(case.ranks)


def latency(case: Case, nodes: int, links: Links) -> float:
    """Return the seconds of a round of small messages."""
    return constants_of(nodes, -(-case.ranks // nodes), links, 1.0)[0]


IN_BASIS = """\
from collectives import GradientExchange
from mpicomp import ChunkedTopK, ErrorFeedback, Hadamard, Quantised
compressor = Quantised(ChunkedTopK(k=8, chunk=256), "two_bit")
feedback = ErrorFeedback(decay=0.999)
exchange = GradientExchange(comm, compressor, feedback, basis=Hadamard(chunk=256), average="sign")
signs = exchange(gradient)  # in place of your optimiser: parameters -= rate * signs
"""
LOCAL = """\
from collectives import GradientExchange, OuterLoop
from mpicomp import ChunkedTopK, ErrorFeedback, Quantised
compressor = Quantised(ChunkedTopK(k=128, chunk=4096), "two_bit")
exchange = GradientExchange(comm, compressor, ErrorFeedback(decay=0.95), average="contributors")
outer = OuterLoop(exchange, parameters, every={every})
outer.step()  # after each step of your optimiser
"""
FEW_BITS = """\
from collectives import GradientExchange
exchange = GradientExchange(comm, bits={bits})
mean = exchange(gradient)  # for your optimiser
"""
TOPK = """\
from collectives import GradientExchange
from mpicomp import TopK
exchange = GradientExchange(comm, TopK(density=0.01))
mean = exchange(gradient)  # for your optimiser
"""
HOOK = """\
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model.register_comm_hook(None, fp16_compress_hook)  # of DistributedDataParallel
"""
ALLREDUCE = """\
from collectives import dense_allreduce
mean = dense_allreduce(gradient, comm) / comm.size  # or DistributedDataParallel as it is
"""
METHODS = (
    Method(DENSE, "dense", dense, ALLREDUCE),
    Method(SIXTEEN, "dense", sixteen_bits, HOOK),
    Method("8 bits", "few-bits-8", few_bits(8), FEW_BITS.format(bits=8)),
    Method("4 bits", "few-bits-4", few_bits(4), FEW_BITS.format(bits=4)),
    Method("in a basis, two bits, signs", "in-basis", sparse(8 / 256, 2), IN_BASIS),
    Method("Top-k, 1 %", "topk", sparse(0.01), TOPK),
    Method("local steps, H = 5, two bits", "local-5", sparse(128 / 4096, 2), LOCAL.format(every=5), 5),
    Method("local steps, H = 10, two bits", "local-10", sparse(128 / 4096, 2), LOCAL.format(every=10), 10),
)


def ranked(
    ranks: int, parameters: int, computing: float, links: Links, per_node: int = 1, memory: float = MEMORY
) -> list[Row]:
    """Return a row for each method, the fastest to the progress of a dense step first.

    computing: seconds of a step without an exchange. memory: bytes a second that a rank reads or writes.
    """
    nodes = -(-ranks // per_node)
    case = Case(ranks, parameters, parameters, coded=nodes > 1)
    rows = []
    for method in METHODS:
        messages = method.messages(case, nodes, links) / method.every if ranks > 1 else 0.0
        compression = method.reads * 4 * parameters / memory
        step = computing + compression + messages
        parts = {"step": step, "computing": computing, "compression": compression, "messages": messages}
        found = {name: measured()["methods"][method.measured][name] for name in ("steps", "trials", "seeds")}
        rows.append({"method": method.about, **parts, **found, "seconds": step * max(1.0, found["steps"])})
    by_name = {row["method"]: row["seconds"] for row in rows}
    for row in rows:
        row["gain"] = by_name[DENSE] / row["seconds"]
    return sorted(rows, key=lambda row: row["seconds"])


def recommended(rows: list[Row]) -> str:
    """Return the method to take: the first, if it is `PAYS` times as fast as 16 bits; else these, or dense."""
    by_name = {row["method"]: row["seconds"] for row in rows}
    plain = SIXTEEN if by_name[DENSE] > PAYS * by_name[SIXTEEN] else DENSE
    best = rows[0]["method"]
    return best if by_name[plain] > PAYS * by_name[best] else plain


def lines_of(name: str) -> str:
    """Return the lines of Python of a method."""
    return next(method.lines for method in METHODS if method.about == name)


BASIS = """\
Measured: `steps`, how many a method takes for the progress of a dense step of AdamW, in {steps} steps of
a GPT of {parameters} parameters on {ranks} ranks, without a network, at the best of so many learning rates
tried, mean of so many seeds. Below 1 they count as 1; 16 bits count as dense. `compression`, in reads
of the vector on one core; here at {memory:g} GB/s (--memory). Predicted: `messages`, by the formulas of
algorithm="auto". Nothing overlaps. Longer trainings, larger models and other optimisers may rank
otherwise: compare the losses of the first two in a short training of your own.
"""


def report(rows: list[Row], memory: float = MEMORY) -> str:
    """Return the rows as a table, what to take, and what that rests on."""
    heads = f"{'':30} {'s a step':>9} = {'computing':>9} + {'compression':>11} + {'messages':>8}"
    lines = [f"{heads} {'steps':>6} {'tried, seeds':>12} {'s for a dense step':>18} {'dense /':>8}"]
    for row in rows:
        parts = f"{row['step']:9.3f} = {row['computing']:9.3f} + {row['compression']:11.3f} + {row['messages']:8.3f}"
        counts = f"{row['trials']}, {row['seeds']}"
        told = f"{row['steps']:6.2f} {counts:>12} {row['seconds']:18.3f} {row['gain']:8.2f}"
        lines.append(f"{row['method']:30} {parts} {told}")
    name = recommended(rows)
    take = f"Take: {name}"
    if name in (DENSE, SIXTEEN):
        take = f"Keep: {name} (no other method is {PAYS:g} times as fast)"
    basis = BASIS.format(**measured(), memory=memory / 1e9)
    return "\n".join([*lines, "", f"{take}\n", lines_of(name), basis])
