"""The options of `mpicomp bench`: what each means, and the errors that say what is expected."""

import argparse
from typing import Any

from collectives.cli.bench.collective import ALGORITHMS, BASELINES, CODECS, DTYPES
from collectives.cli.bench.contestants import MAKERS, SETTLING_CALLS
from collectives.cli.bench.data import FAMILIES
from collectives.cli.bench.exchange import TENSORS, length_of
from collectives.cli.bench.settings import above_zero, each_once, positive, share
from collectives.cli.bench.step import MODELS
from collectives.cli.bench.supports import PATTERNS
from collectives.cli.files import new_figure, new_file, rows_file
from collectives.profiles import NETWORKS

ABOUT_COMPRESSORS = f"""\
Every compressor on values of several distributions, at several densities, in one process. All that are compared take
turns; a time is the median of the turns, as a ratio to exact top-k (TopK, always there) and to one read of the values.

  /target    achieved over wanted density, of the first call and of the timed ones; "-" for a method without a target
  captured   1 - |gradient - sent|^2 / |gradient|^2: of values sent as they are, their share of the squared norm;
             "/top-k" is over what exact top-k captures
  B/entry    bytes of the smallest message (mpicomp.codec), header included, over its entries

Each compressor is called until its state has settled, before it is timed: SIDCo {SETTLING_CALLS} times for its
controller, so its first call shows the fit alone; AggregationAware observes what it sent itself. SampledTopK takes
another sample and RandomK other positions in every call: "achieved" and "captured" are means over the timed calls.
There is no residual: AdaComp sees a first step. Threshold has the threshold that lets the wanted density through.
Each timed call follows untimed ones of the same compressor, so that none finds the caches and the heap as another left
them.
"""

BENCH_EXAMPLES = """
mpirun -n 4 mpicomp bench gtopk --lengths 1e6 --densities 0.001 0.01
mpirun -n 4 mpicomp bench exchange
mpicomp bench kernels --length 1e6
"""

KERNELS_EXAMPLES = """
mpicomp bench kernels
mpicomp bench kernels --length 1e6 --repeats 3 --json kernels.json
mpicomp bench kernels --device gpu --length 1e9
"""

EXCHANGE_EXAMPLES = """
mpirun -n 4 mpicomp bench exchange
mpirun -n 4 mpicomp bench exchange --length 1e6 --density 0.01 --repeats 3 --json p4.json
mpirun -n 4 mpicomp bench exchange --tensors gpt --density 0.01
"""

ABOUT_EXCHANGE = """\
A step of one rank's gradient: the selection alone, the selection and the sum of what it selected, and a whole step of
GradientExchange with gTop-k and error feedback, by what it returns: a SparseVector (sparse=True), a dense mean in an
array that is there (out=), or in a new one. With --tensors the gradient is that of a model: its tensors by name, each
selected in its own right, beside one vector of the same length, with sparse_allreduce. All calls are interleaved; a
time is that of the slowest rank, from a common start. The first line of the table names the MPI library.
"""

OVERLAP_EXAMPLE = """
mpirun -n 4 mpicomp bench overlap --density 0.05 --compute 0.3 --link 2e7
"""

ABOUT_STEP = """\
A step computes for a fixed time, in a busy loop, and then exchanges the gradient; efficiency is the time of computing
over that of the step. Ways to exchange: MPI's dense allreduce; Top-k by MPI's Allgatherv; the gTop-k tree as published;
ours, and GradientExchange, which keeps the residual and writes a dense mean as well. "/ dense" and "/ Top-k" are
ratios of efficiency. The seconds of computing of the models are assumed: give --compute for yours. What overlapping
saves is in `mpicomp bench overlap`.
"""

STEP_EXAMPLE = """
mpirun -n 4 mpicomp bench step --models ResNet-50 --dense-repeats 3
mpirun -n 4 mpicomp bench step --models VGG-16 --length 1e6 --compute 0.05 --pause --json steps.json
"""

ABOUT_COLLECTIVE = """\
Sparse vectors, or dense gradients, are brought to every algorithm of a collective; all that are compared take turns. A
time is that of the slowest rank, from a common start: median and quartiles over the turns. Each timed call but those of
MPI's dense sum follows an untimed one of the same, as in a loop of steps.

  supports   independent: random places; shared: the same ones on all ranks; disjoint: no place on two ranks; hot: 9 of
             10 entries in a twentieth of the length
  dense /    time of MPI's own sum of the dense vector over this time
  kB sent    by the busiest rank, as the library counts; for a call of MPI's, the least that it can send
  / bound    those bytes over the least that a rank has to send on average: signs, fractions, the entropy of indices
  predicted  ms by the model of `mpicomp explain`, from the profile that `mpicomp tune` wrote for these ranks, or for
             --network; "-" without either; with --from-gradient, with the measured time of the selection alone
  / meas.    predicted over measured
"""

COLLECTIVE_EXAMPLE = """
mpirun -n 4 mpicomp bench {0}
mpirun -n 4 mpicomp bench {0} --lengths 1e5 1e6 --densities 0.001 0.01 0.1 --json p4.json --plot p4.png
mpirun -n 2 mpicomp bench {0} --device gpu --lengths 25e6
mpirun -n 4 mpicomp bench {0} --patterns shared disjoint --codecs plain smallest --osu
"""

HELP_OF_COLLECTIVES = {
    "allreduce": "the exact sum on all ranks, against MPI's dense allreduce",
    "reduce_scatter": "the exact sum, a share on each rank, against MPI's dense reduce-scatter",
    "allgather": "every rank's vector on every rank, against MPI's dense allreduce",
    "gtopk": "the largest entries of the sum on all ranks, against MPI's dense allreduce",
}

COMPRESSORS_EXAMPLE = """
mpicomp bench compressors
mpicomp bench compressors --length 25_000_000 --densities 0.001 --compressors SIDCo-exponential SampledTopK RedSync
mpicomp bench compressors --distributions normal cauchy --json rows.json --plot compressors.png
"""


def add_to(commands: Any) -> None:
    """Add the command and what can be measured to the command line."""
    about = "time kernels, compressors, or whole steps under mpirun; with baselines"
    bench = commands.add_parser("bench", help=about, description=f"{about.capitalize()}.", examples=BENCH_EXAMPLES)
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    kernels = subjects.add_parser(
        "kernels", help="each kernel of one rank, against NumPy, PyTorch and one read", examples=KERNELS_EXAMPLES
    )
    exchange = subjects.add_parser(
        "exchange",
        help="selection, collective and whole steps, against MPI's dense allreduce",
        description=ABOUT_EXCHANGE,
        examples=EXCHANGE_EXAMPLES,
    )
    overlap = subjects.add_parser(
        "overlap",
        help="a step whose gradients leave as they become ready, against one that waits for the last",
        examples=OVERLAP_EXAMPLE,
    )
    compressors = subjects.add_parser(
        "compressors",
        help="time, density, captured norm and bytes of every compressor, against exact top-k",
        description=ABOUT_COMPRESSORS,
        examples=COMPRESSORS_EXAMPLE,
    )
    lengths = (kernels, 25_000_000), (exchange, 25_000_000), (overlap, 2_000_000), (compressors, 1_000_000)
    for parser, length in lengths:
        parser.add_argument("--length", type=positive, default=length, help="values of a gradient (%(default)s)")
        parser.add_argument("--repeats", type=positive, default=9, help="timed turns of each call (%(default)s)")
        parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows to a file as well")
    about_device = "whose kernels; gpu: against CuPy, PyTorch on the GPU and one read there (%(default)s)"
    kernels.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help=about_device)
    _add_exchanges(exchange, overlap)
    _add_choices(compressors)
    _add_step(subjects)
    for subject, about in HELP_OF_COLLECTIVES.items():
        _add_collective(subjects, subject, about)
    about_plot = "draw what runs of one of these four wrote with --json, at several P"
    plot = subjects.add_parser("plot", help=about_plot, examples="mpicomp bench plot times.png p2.json p4.json p8.json")
    plot.add_argument("figure", type=new_figure, metavar="FIGURE", help="file to draw: times.png")
    plot.add_argument("files", type=rows_file, nargs="+", metavar="JSON", help="files to read: p2.json p4.json p8.json")


def _add_exchanges(exchange: argparse.ArgumentParser, overlap: argparse.ArgumentParser) -> None:
    shares: dict[str, Any] = {
        "type": share,
        "nargs": "+",
        "action": each_once,
        "help": "fractions of entries each rank contributes",
    }
    exchange.add_argument("--density", **shares, default=[0.001, 0.01])
    shown = ", ".join(f"{name} ({len(shapes)} of {length_of(name):g} values)" for name, shapes in TENSORS.items())
    exchange.add_argument(
        "--tensors", dest="model", choices=list(TENSORS), help=f"of a model, in place of --length: {shown}"
    )
    overlap.add_argument("--density", **shares, default=[0.05, 0.1])
    overlap.add_argument("--tensors", type=positive, default=20, help="of one size (%(default)s)")
    overlap.add_argument("--compute", type=above_zero, default=0.4, help="seconds of a backward pass (%(default)s)")
    overlap.add_argument("--link", type=above_zero, metavar="RATE", help="bits per second of a slow link, simulated")


def _add_step(subjects: Any) -> None:
    parser = subjects.add_parser(
        "step",
        help="a training step: fixed computing, real communication; efficiency against dense and published ways",
        description=ABOUT_STEP,
        examples=STEP_EXAMPLE,
    )
    known = list(MODELS)
    shown = ", ".join(f"{name} ({model.length:g} values, {model.compute:g} s)" for name, model in MODELS.items())
    parser.add_argument(
        "--models", nargs="+", action=each_once, choices=known, default=known, metavar="NAME", help=f"{shown} (all)"
    )
    parser.add_argument("--length", type=positive, metavar="N", help="values of the gradient, in place of the model's")
    parser.add_argument("--compute", type=above_zero, metavar="S", help="seconds of computing, in place of the model's")
    parser.add_argument("--pause", action="store_true", help="compute by a pause, as beside an accelerator")
    parser.add_argument(
        "--density", type=share, default=0.001, help="fraction of entries each rank contributes (%(default)s)"
    )
    parser.add_argument("--repeats", type=positive, default=7, help="timed turns of each (%(default)s)")
    parser.add_argument(
        "--dense-repeats", type=positive, help="of MPI's dense sum, where the link is slow: 2 (as many)"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows to a file as well")


def _add_collective(subjects: Any, subject: str, about: str) -> None:
    parser = subjects.add_parser(
        subject,
        help=about,
        description=ABOUT_COLLECTIVE,
        examples=COLLECTIVE_EXAMPLE.format(subject),
    )
    lists: list[tuple[str, Any, list[Any], str]] = [
        ("--lengths", positive, [1_000_000], "values of the dense vectors: 1e6 25_000_000"),
        ("--densities", share, [0.001, 0.01], "fractions of entries each rank contributes: 0.001 0.01"),
    ]
    for option, kind, default, text in lists:
        shown = f"{text} (default: {' '.join(f'{value:g}' for value in default)})"
        parser.add_argument(option, type=kind, nargs="+", action=each_once, default=default, metavar="N", help=shown)
    some: list[tuple[str, list[str], list[str]]] = [
        ("--patterns", list(PATTERNS), ["independent"]),
        ("--dtypes", DTYPES, ["float32"]),
        ("--algorithms", ALGORITHMS[subject], ALGORITHMS[subject]),
        ("--codecs", CODECS, ["auto"]),
    ]
    for option, known, default in some:
        shown = f"some of {', '.join(known)} (default: {' '.join(default) if default != known else 'all'})"
        parser.add_argument(
            option, nargs="+", action=each_once, choices=known, default=default, metavar="NAME", help=shown
        )
    where = "where the vectors live; gpu: ranks may share one, baselines are dense_allreduce and the tree (%(default)s)"
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help=where)
    _add_what_is_timed(parser, subject)


def _add_what_is_timed(parser: argparse.ArgumentParser, subject: str) -> None:
    known = BASELINES[subject]
    parser.add_argument(
        "--baselines",
        nargs="+",
        action=each_once,
        choices=[*known, "none"],
        default=known,
        metavar="NAME",
        help=f"some of {', '.join(known)}; or none (default: all)",
    )
    parser.add_argument("--repeats", type=positive, default=9, help="timed turns of each (%(default)s)")
    parser.add_argument(
        "--dense-repeats", type=positive, help="of MPI's dense sum, where the link is slow: 3 (as many)"
    )
    parser.add_argument(
        "--from-gradient",
        action="store_true",
        help="start from a dense gradient: each call selects first; also the selection alone and, where there is one, "
        "GradientExchange with the first algorithm and codec, which writes a dense mean to an array that is there",
    )
    parser.add_argument(
        "--network",
        choices=list(NETWORKS),
        help="predict for a typical one, a rank a node (by the profile of `mpicomp tune`, if any)",
    )
    parser.add_argument(
        "--interfaces",
        action="store_true",
        help="count at the network interfaces of the hosts as well, and print those bytes over the bound at the end; "
        "with each rank on a host of its own, as in benchmarks/testbed",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows to a file as well: p4.json")
    parser.add_argument("--plot", type=new_figure, metavar="FILE", help="draw time against density: p4.png")
    parser.add_argument("--osu", action="store_true", help="print as the OSU micro-benchmarks do, at the end")


def _add_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--densities",
        type=share,
        nargs="+",
        action=each_once,
        default=[0.1, 0.01, 0.001],
        metavar="SHARE",
        help="shares that are to travel, each above 0 and at most 1 (0.1 0.01 0.001)",
    )
    for option, known in ("--distributions", FAMILIES), ("--compressors", MAKERS):
        parser.add_argument(
            option,
            nargs="+",
            action=each_once,
            choices=list(known),
            default=list(known),
            metavar="NAME",
            help=f"some of {', '.join(known)} (all)",
        )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time in which the thread computes, not that in which it waits for a core: for a busy machine",
    )
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="write a table for each density as Markdown")
    parser.add_argument(
        "--plot",
        type=new_figure,
        metavar="FILE",
        help="draw time against what is captured, and achieved over target by distribution (needs matplotlib)",
    )
