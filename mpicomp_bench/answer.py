"""The answer of `mpicomp explain --train`: what to take and on what condition, its lines, the ranking, the basis."""

import json
from io import StringIO
from textwrap import fill
from typing import Any

from mpicomp_bench.advice import (
    ALONE,
    DENSE,
    FASTEST,
    GPU,
    NOT_OURS,
    PAYS,
    SIXTEEN,
    THEIRS,
    Training,
    lines_of,
    measured,
    ranked,
    recommended,
    seconds_of,
)
from mpicomp_bench.measuring import Row
from mpicomp_bench.methods import method, outer_settings
from mpicomp_bench.output import Column, figure, show, text

WIDTH = 118  # of lines
NOT_MEASURED = (
    "No training was measured above 1 Gbit/s, or on a GPU: predictions only. Keep dense or 16-bit sums unless your own "
    "trial says otherwise."
)
ON_A_GPU = "No training was measured on a GPU, only calls (docs/devices.md): what a method computes is predicted."
OTHER_RANKS = (
    "Steps are those of {ranks} ranks and {parameters} parameters; from there to {yours} ranks they grow as on a model "
    "of {small} (docs/slow_links.md#how-far-this-holds){far}."
)
MORE_RANKS = "; no training had more than {most} ranks: with more expect more steps"
MUON = (
    "With Muon for hidden matrices a dense step was worth {times:.2g} of AdamW, in {steps} steps of models with "
    "{parameters} parameters{far}: --optimizer muon (docs/slow_links.md)."
)
FAR = "; expect far less with {yours:.2g} (others gained 0.03 nats with 1.5e8)"
LARGE = 10  # times the largest model that was measured
# Passes over the parameters: forward, backward, and AdamW's over its states.
PASSES = 10
TOO_FAST = (
    "{passes} passes over {training.parameters:.3g} parameters take longer than a step of {training.computing:g} s: on "
    "a GPU give --memory 1000."
)
NEWTON_SCHULZ = (
    "--step has to include Muon: it adds about 5 m / B of the cost of forward and backward pass, for matrices with a "
    "smaller side m and B tokens of a rank in a step."
)
ALONE_ON_NODES = (
    "Every rank counts as a node of its own: where several share one, give --per-node."
)
OTHER_EVERY = "H = {every} is the best as predicted; larger models were trained with H = 10 (docs/slow_links.md)."
OVERLAPS = (
    "Only where all cores compute: with one left to messages, that hides them as far as possible, {rival} takes "
    "{least:.3g} s for this progress, {chosen} {seconds:.3g} s (docs/overlap.md). Time both."
)
START = """\
Start: mpirun -n RANKS --bind-to none python -m collectives.torch train.py (docs/frameworks.md), or slurm/torch.sbatch
NumPy and JAX: the same exchange, by mean = exchange(gradient), or outer = OuterLoop(exchange, parameters, every=H)
(docs/exchange.md, docs/slow_links.md, docs/frameworks.md#jax-and-numpy)
"""
COLUMNS: list[Column] = [
    ("", "<19", text("method")),
    ("seconds a step", ">14", figure("step", ".3f")),
    ("compression", ">11", figure("compression", ".3f")),
    ("messages", ">8", figure("messages", ".3f")),
    ("steps", ">5", figure("steps", ".2f")),
    (
        "on each model",
        ">13",
        lambda row: ", ".join(f"{each:.2f}" for each in row["on_each"]),
    ),
    ("seconds x steps", ">15", figure("seconds", ".3f")),
    ("overlapped", ">10", figure("overlapped", ".3f")),
    ("faster than dense", ">17", figure("gain", ".2f", unit="x")),
    ("rate", ">5", figure("rate", ".2g", unit="x")),
]
BASIS = """\
seconds a step: computing (--step) + compression + messages. steps: for the progress of a dense step; fewer than 1 count
as 1. overlapped: seconds x steps where a core is left to messages (docs/overlap.md), of local steps with delay=1; ours
on a GPU hide none. rate: the tuned learning rate over that of dense. Here {ranks_here} ranks,
{per_node} a node.
Measured: steps, on {ranks} ranks, {parameters} parameters, {steps} steps with {optimizer}, {seeds} seeds, best of
{trials} rates, the mean of those on each model, times their growth with ranks and local steps on a smaller one;
compression, on one core; here at {memory:g} GB/s (--memory).
Predicted: messages, by formulas; dense sums by the faster of a ring over ranks and one over
nodes. Longer trainings, larger models and other optimisers may rank otherwise: compare the losses of the first two in
a short training of your own.
"""


def conditions(rows: list[Row], training: Training) -> list[str]:
    """Return what to know before what is recommended: first whether anything like it was measured."""
    chosen = recommended(rows, training)
    on_gpu = [ON_A_GPU] if training.memory >= GPU else []
    notes = [NOT_MEASURED] if training.links.rate > FASTEST else on_gpu
    muon = training.optimizer == "muon"
    notes.append(NEWTON_SCHULZ if muon else gain_of_muon(training))
    if training.computing < PASSES * 4 * training.parameters / training.memory:
        notes.append(TOO_FAST.format(training=training, passes=PASSES))
    if training.nodes == training.ranks > 1:
        notes.append(ALONE_ON_NODES)
    every = 10 if chosen in NOT_OURS else outer_settings(chosen).get("every", 10)
    if every != 10:
        notes.append(OTHER_EVERY.format(every=every))
    if training.ranks not in (1, *measured()["ranks"]):
        notes.append(growth_of_steps(training.ranks))
    hidden = seconds_of(rows, "overlapped")
    rival = min(THEIRS, key=hidden.__getitem__)
    least, own = hidden[rival], hidden[chosen]
    if chosen not in THEIRS and own * PAYS > least:
        notes.append(
            OVERLAPS.format(rival=rival, least=least, chosen=chosen, seconds=own)
        )
    return notes


def growth_of_steps(ranks: int) -> str:
    """Return on how many ranks steps were measured, and how they grow."""
    on_map = measured()["map"]
    most = max(on_map["ranks"])
    far = MORE_RANKS.format(most=most) if ranks > most else ""
    small = f"{on_map['parameters']:.1g}"
    return OTHER_RANKS.format(**rests_on(), small=small, yours=ranks, far=far)


def gain_of_muon(training: Training) -> str:
    """Return what Muon gained where it was measured, and that it is far from there."""
    far = training.parameters > LARGE * max(measured()["parameters"])
    about = FAR.format(yours=training.parameters) if far else ""
    return MUON.format(**rests_on(), times=measured()["muon"], far=about)


def answer(rows: list[Row], training: Training) -> str:
    """Return what to take, in a line."""
    chosen = recommended(rows, training)
    if training.nodes == 1:
        return f"Keep: {DENSE} sums inside one node"
    if chosen == ALONE:
        return f"Train on one machine: {ALONE} accumulates {training.nodes} batches in each step, exactly dense"
    if chosen in (DENSE, SIXTEEN):
        why = f"; nothing measured is {PAYS:g} times as fast" * training.is_measured
        return f"Keep: {chosen} ({method(chosen).text}{why})"
    other, times = best_alternative(rows, chosen)
    hidden = seconds_of(rows, "overlapped")
    rival = min(THEIRS, key=hidden.__getitem__)
    hiding = f"{hidden[rival] / hidden[chosen]:.2g} times as fast as {rival} if messages are hidden, as by DDP"
    busy = f"{times:.2g} times {other} where all cores compute"
    return f"Take: {chosen} ({method(chosen).text}); predicted {hiding}; {busy}"


def best_alternative(rows: list[Row], chosen: str) -> tuple[str, float]:
    """Return the fastest other of PyTorch's methods and one node alone, and its time over that of a method."""
    seconds = seconds_of(rows)
    other = next(name for name in seconds if name in NOT_OURS and name != chosen)
    return other, seconds[other] / seconds[chosen]


def report(training: Training) -> str:
    """Return answer and conditions, the table, the lines, and what all rests on."""
    rows = ranked(training)
    table = StringIO()
    show(rows, COLUMNS, table)
    chosen = recommended(rows, training)
    said = [fill(each, WIDTH) for each in conditions(rows, training)]
    # The report says what was never measured before it recommends a method.
    said.insert(0 if training.is_measured else 1, fill(answer(rows, training), WIDTH))
    parts = [*said, "", table.getvalue()]
    printed = [("Lines", chosen)]
    first = rows[0]["method"]
    if training.nodes > 1 and not training.is_measured and first not in NOT_OURS:
        printed.append(("For a trial of your own, the fastest as predicted", first))
    parts += [
        f"{when}, for PyTorch: {name}\n\n{lines_of(name, training)}"
        for when, name in printed
    ]
    counts = {name: span([each[name] for each in rows]) for name in ("seeds", "trials")}
    if not {name for _, name in printed} <= {*NOT_OURS}:
        parts.append(START)
    basis = BASIS.format(
        **rests_on(),
        **counts,
        ranks_here=training.ranks,
        per_node=training.per_node,
        memory=training.memory / 1e9,
        optimizer=training.optimizer,
    )
    return "\n".join([*parts, basis])


def rests_on() -> dict[str, Any]:
    """Return on what the steps rest, for a reader."""
    found = measured()
    sizes = " and ".join(f"{each:.1g}" for each in found["parameters"])
    return {
        "steps": found["steps"],
        "ranks": " and ".join(map(str, found["ranks"])),
        "parameters": sizes,
    }


def as_json(training: Training) -> str:
    """Return the same as JSON."""
    rows = ranked(training)
    chosen = recommended(rows, training)
    found = {
        "take": chosen,
        "answer": answer(rows, training),
        "conditions": conditions(rows, training),
        "lines": lines_of(chosen, training),
        "rests_on": measured(),
        "rows": rows,
    }
    return json.dumps(found, indent=1) + "\n"


def span(numbers: list[int]) -> str:
    """Return the least and the largest number as text."""
    return f"{min(numbers)} to {max(numbers)}"
