"""`mpicomp bench step`: a training step with a fixed compute time, and real communication.

As in the gTop-k paper (arXiv 1901.04359), scaling efficiency is compute time over step time. Nothing overlaps: the
exchange starts when the whole gradient is available. Model sizes are those of the paper's kind of models; the compute
times are assumptions (a mini-batch on one accelerator of that time), so pass your own.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from collectives import warm_up
from mpicomp_bench.bench import collective
from mpicomp_bench.bench.data import draw_sparse
from mpicomp_bench.bench.suite import Options, Suite
from mpicomp_bench.measuring import Call, Row, interleave, timed
from mpicomp_bench.options import above_zero, add_list, positive, share
from mpicomp_bench.output import Column, figure, text

ABOUT = """\
A step computes for a fixed time, in a busy loop, and then exchanges the gradient. Efficiency is the
time of computing over that of the step. Ways to exchange: MPI's dense allreduce; Top-k by MPI's
Allgatherv; the gTop-k tree as published; gtopk_allreduce; and GradientExchange, which also keeps
the residual and writes a dense mean. "/ dense" and "/ Top-k" are ratios of efficiency. The seconds
of computing of the models are assumed: give --compute for yours.
"""

EXAMPLES = """
mpirun -n 4 mpicomp bench step --models ResNet-50 --dense-repeats 3
mpirun -n 4 mpicomp bench step --models VGG-16 --length 1e6 --compute 0.05 --json steps.json
"""

PUBLISHED = (
    "published, gTop-k (arXiv 1901.04359), 32 GPUs on 1 Gbit/s, efficiency up to: "
    "2.7 to 12 times that of dense, 1.1 to 1.7 times that of Top-k by allgather\n"
)
OURS = ["recursive_doubling", "exact", "exact_doubling"]
DENSE, TOP_K = "MPI_Allreduce", "MPI_Allgatherv"

MODELS = {"ResNet-50": (25_600_000, 0.4), "VGG-16": (15_000_000, 0.12), "LSTM-PTB": (66_000_000, 0.5)}
"""Values of a gradient, and seconds of forward and backward pass."""

COLUMNS: list[Column] = [
    ("model", "<10", text("model")),
    ("length", ">10", text("length")),
    ("density", ">8", figure("density", "g")),
    ("", "<35", text("algorithm")),
    ("compute ms", ">10", figure("compute", ".1f", 1e3)),
    ("step ms", ">10", figure("seconds", ".1f", 1e3)),
    ("quartiles", ">21", lambda row: f"{1e3 * row['low']:.1f}-{1e3 * row['high']:.1f}"),
    ("efficiency", ">10", figure("efficiency", ".1%")),
    ("/ dense", ">9", figure("over_dense", ".2f")),
    ("/ Top-k", ">9", figure("over_top_k", ".2f")),
]


def rows(options: Options, comm: Any) -> Iterator[Row]:
    """Yield a row for each method and model. over_dense, over_top_k: its efficiency over theirs."""
    warm_up(comm)
    about = {"subject": "gtopk", "algorithms": OURS, "codecs": ["auto"], "baselines": ["dense", "allgather", "tree"]}
    how = Options(**vars(options) | about, from_gradient=True, device="cpu")
    for model in options.models:
        length, seconds = options.length or MODELS[model][0], options.compute or MODELS[model][1]
        entries = max(1, round(length * options.density))
        case: Row = {"length": length, "dtype": "float32", "entries": entries}
        vector = draw_sparse("independent", comm.rank, comm.size, length, entries, "float32")
        ways = [way for way in collective.contestants(how, comm, case, vector) if way.name[0] != collective.SELECTION]
        steps = [way._replace(call=partial(step, way.call, seconds), before=way.call) for way in ways]
        times = interleave(steps, options.repeats, comm, warm=False)
        figures = {way.name[0]: timed(own) | {"turns": own.shape[1]} for way, own in zip(ways, times, strict=True)}
        for name, own in figures.items():
            yield {
                "model": model,
                "ranks": comm.size,
                "length": length,
                "density": options.density,
                "compute": seconds,
                "algorithm": name,
                **own,
                "efficiency": seconds / own["seconds"],
                "over_dense": figures[DENSE]["seconds"] / own["seconds"],
                "over_top_k": figures[TOP_K]["seconds"] / own["seconds"],
            }


def step(exchange: Call, compute: float) -> None:
    """Compute for a number of seconds, in a busy loop, and exchange."""
    end = time.perf_counter() + compute
    while time.perf_counter() < end:
        pass
    exchange()


def add_options(parser: Any) -> None:
    """Add the options of the suite."""
    shown = ", ".join(f"{name} ({length:g} values, {seconds:g} s)" for name, (length, seconds) in MODELS.items())
    add_list(parser, "--models", list(MODELS), f"models: {shown}; names: ", choices=list(MODELS))
    add = parser.add_argument
    add("--length", type=positive, metavar="N", help="values of the gradient (the model's)")
    add("--compute", type=above_zero, metavar="S", help="seconds of computing (the model's)")
    add(
        "--density",
        type=share,
        default=0.001,
        metavar="D",
        help="fraction of entries each rank contributes (%(default)s)",
    )
    add("--dense-repeats", type=positive, metavar="N", help="turns of MPI's dense sum (as --repeats)")


SUITE = Suite(
    help="a training step, of fixed computing and real communication, against published ways",
    about=ABOUT,
    examples=EXAMPLES,
    add_options=add_options,
    rows=rows,
    columns=COLUMNS,
    repeats=7,
    report=lambda options, rows: PUBLISHED,
)
