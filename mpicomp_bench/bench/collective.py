"""`mpicomp bench allreduce | reduce_scatter | allgather | gtopk`: a collective, against its baselines.

Baselines in the same run: MPI's own sum of the dense vector; the gTop-k tree as
published (plain indices, to one rank and back); Top-k by MPI's Allgatherv of plain
indices and values, added up on every rank, of which for gTop-k every rank selects the
largest entries, and keeps its own others.
"""

import importlib
import io
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import collectives
from collectives import GradientExchange, dense_allreduce, traffic
from collectives.calls.collective import Collective
from collectives.calls.first_call import link_of
from mpicomp import SparseVector, TopK
from mpicomp.arrays.device import namespace
from mpicomp.vector import add_up, partition, top_k
from mpicomp_bench.bench.data import PATTERNS, draw_sparse, gradient_above
from mpicomp_bench.bench.suite import Options, Suite
from mpicomp_bench.bounds import dense_nbytes, least_nbytes
from mpicomp_bench.measuring import (
    Call,
    Contestant,
    Row,
    interleave,
    missing_gpu,
    timed,
    until_done,
)
from mpicomp_bench.options import add_list, positive, share
from mpicomp_bench.output import Column, figure, show, text

COLLECTIVES: dict[str, Collective[..., Any]] = {
    "allreduce": collectives.sparse_allreduce,
    "reduce_scatter": collectives.sparse_reduce_scatter,
    "allgather": collectives.sparse_allgather,
    "gtopk": collectives.gtopk_allreduce,
    "compressed": collectives.compressed_allreduce,
}


def algorithms() -> dict[str, list[str]]:
    """Return the declared algorithms of each collective; with "auto" if it chooses among them."""
    return {
        name: ["auto"] * (collective.automatic is not None)
        + list(collective.algorithms)
        for name, collective in COLLECTIVES.items()
    }


BASELINES = {
    "allreduce": ["dense", "tree", "allgather"],
    "reduce_scatter": ["dense"],
    "allgather": ["dense", "allgather"],
    "gtopk": ["dense", "tree", "allgather"],
    "compressed": ["dense", "allgather"],
}
CODECS = ["auto", "plain", "quick", "smallest"]
DTYPES = ["float16", "float32", "float64"]
EXCHANGED = "allreduce", "gtopk", "compressed"  # those that GradientExchange accepts
SELECTION = "selection alone"
# Calls whose bytes at the interfaces are counted together.
WIRE_CALLS = 5

ABOUT = """\
All calls are interleaved. A time is that of the slowest rank, from a common start: median and
quartiles over the turns. An untimed call precedes each timed one, but not those of MPI's dense sum.

  supports   independent: random indices; shared: the same on all ranks; disjoint: no index on two
             ranks; hot: 9 of 10 entries in a twentieth of the length
  dense /    time of MPI's own sum of the dense vector over this time
  kB sent    by the busiest rank, as the library counts; of MPI's calls the least that they can send
  / bound    those bytes over the least that a rank has to send on average

MPI_Allgatherv ends with the same result as the collective: the vectors, their sum, or its largest
entries and the rejected ones. It checks no argument, and does not compare the calls of the ranks.
"""

EXAMPLES = """
mpirun -n 4 mpicomp bench {0} --lengths 1e5 1e6 --densities 0.001 0.1 --json p4.json
mpirun -n 4 mpicomp bench {0} --patterns shared disjoint --codecs plain smallest
"""

HELP = {
    "allreduce": "the exact sum on all ranks, against MPI's dense allreduce",
    "reduce_scatter": "the exact sum, a share on each rank, against MPI's dense reduce-scatter",
    "allgather": "every rank's vector on every rank, against MPI's dense allreduce",
    "gtopk": "the largest entries of the sum on all ranks, against MPI's dense allreduce",
    "compressed": "the sum on all ranks, which its owners compress as well, against MPI's dense allreduce",
}

COLUMNS: list[Column] = [
    ("length", ">10", text("length")),
    ("dtype", "<7", text("dtype")),
    ("density", ">7", figure("density", "g")),
    ("supports", "<11", text("pattern")),
    ("algorithm", "<35", text("algorithm")),
    ("codec", "<8", text("codec")),
    ("median ms", ">9", figure("seconds", ".3f", 1e3)),
    ("quartiles", ">15", lambda row: f"{1e3 * row['low']:.4g}-{1e3 * row['high']:.4g}"),
    ("dense /", ">7", figure("speedup", ".2f")),
    ("kB sent", ">10", figure("nbytes", ".1f", 1e-3)),
    ("/ bound", ">7", figure("over_bound", ".2f")),
]
AT_INTERFACES: list[Column] = [
    *(
        column
        for column in COLUMNS
        if column[0] in ("length", "density", "algorithm", "codec")
    ),
    ("kB a call", ">10", figure("wire_nbytes", ".1f", 1e-3)),
    ("/ bound", ">7", figure("wire_over_bound", ".2f")),
]


def cases(options: Options) -> list[Row]:
    """Return the cases to compare the contestants on. entries: of a rank's vector."""
    asked = itertools.product(
        options.lengths, options.dtypes, options.densities, options.patterns
    )
    names = "length", "dtype", "density", "pattern"
    return [
        dict(zip(names, each, strict=True))
        | {"entries": max(1, round(each[0] * each[2]))}
        for each in asked
    ]


def rows(options: Options, comm: Any) -> Iterator[Row]:
    """Yield a row for each contestant of every case.

    seconds, low, high: median and quartiles over the turns, of the slowest rank.
    dense_seconds: the median of MPI's dense sum, None if it was not measured. nbytes:
    sent by the busiest rank; mean_nbytes: the mean over the ranks; least_nbytes: the
    lower bound. wire_nbytes: at the interfaces of the busiest host, with headers; None
    if they were not counted.
    """
    for case in cases(options):
        vector = draw_sparse(
            case["pattern"],
            comm.rank,
            comm.size,
            case["length"],
            case["entries"],
            case["dtype"],
        )
        union = collectives.sparse_allreduce(
            vector, comm, algorithm="split_allgather"
        ).nnz
        yield from compared(
            options, comm, case, union, contestants(options, comm, case, vector)
        )


def contestants(
    options: Options, comm: Any, case: Row, vector: SparseVector
) -> list[Contestant]:
    """Return the contestants of a case, the baselines first. A contestant is named by its algorithm and codec."""
    on_gpu = options.device == "gpu"
    place = importlib.import_module("cupy").asarray if on_gpu else np.asarray
    gradient = (
        place(gradient_above(vector, comm.rank)) if options.from_gradient else None
    )
    vector = SparseVector(place(vector.indices), place(vector.values), vector.length)
    compressor = TopK(k=case["entries"])

    def own() -> SparseVector:
        return vector if gradient is None else compressor.compress(gradient)

    found: list[Contestant] = []

    def add(
        algorithm: str, codec: str, call: Call, nbytes: float | None = None
    ) -> None:
        found.append(Contestant((algorithm, codec), call, before=call, nbytes=nbytes))

    def calling(subject: str, **how: Any) -> Call:
        return lambda: COLLECTIVES[subject](own(), comm, **how)

    subject = options.subject
    second = TopK(k=math.ceil(case["entries"] / comm.size))
    terms = {"compressed": {"compressor": second}, "gtopk": {"k": case["entries"]}}.get(
        subject, {}
    )
    if "dense" in options.baselines:
        found.append(dense(options, comm, case, place, gradient))
    if "tree" in options.baselines:
        tree = calling("gtopk", algorithm="tree", codec="plain")
        add("gTop-k tree, as published", "plain", tree)
    if "allgather" in options.baselines and not on_gpu:
        sent = (comm.size - 1) * own().nbytes
        add(
            "MPI_Allgatherv",
            "plain",
            lambda: by_allgather(subject, own(), comm),
            sent,
        )
    if gradient is not None:
        add(SELECTION, "-", own, 0.0)
    for algorithm, codec in itertools.product(options.algorithms, options.codecs):
        call = calling(subject, algorithm=algorithm, codec=codec, **terms)
        add(algorithm, codec, call)
    if gradient is not None and subject in EXCHANGED:
        algorithm = options.algorithms[0]
        codec = options.codecs[0]
        run = partial(COLLECTIVES[subject], algorithm=algorithm, codec=codec, **terms)
        exchange = GradientExchange(comm, compressor, collective=run)
        # MPI's dense sum has an array for its result, too.
        into = namespace(gradient).empty_like(gradient)
        step = partial(exchange, gradient, out=into)
        add(f"GradientExchange {algorithm}", codec, step)
    if on_gpu:
        found = [each._replace(call=until_done(each.call)) for each in found]
    return found


def dense(
    options: Options, comm: Any, case: Row, place: Any, gradient: Any
) -> Contestant:
    """Return a call of MPI's own dense allreduce or reduce-scatter; on a GPU of the library's dense allreduce.

    It writes to an existing buffer, so it needs no untimed call before.
    """
    every = math.ceil(
        options.repeats / min(options.dense_repeats or options.repeats, options.repeats)
    )
    scatter = options.subject == "reduce_scatter"
    on_gpu = options.device == "gpu"
    # MPI has no float16.
    dtype = (
        np.dtype(case["dtype"])
        if on_gpu
        else np.promote_types(case["dtype"], np.float32)
    )
    values = (
        place(np.ones(case["length"], dtype))
        if gradient is None
        else gradient.astype(dtype, copy=False)
    )
    sent = dense_nbytes(comm.size, case["length"], dtype.itemsize, scattered=scatter)
    call: Call
    before = None
    if on_gpu:
        name = "dense_allreduce"
        call = before = partial(dense_allreduce, values, comm)
    elif scatter:
        counts = [len(part) for part in np.array_split(values, comm.size)]
        into = np.empty(counts[comm.rank], values.dtype)
        name = "MPI_Reduce_scatter"
        call = partial(comm.Reduce_scatter, values, into, counts)
    else:
        name = "MPI_Allreduce"
        call = partial(comm.Allreduce, values, np.empty_like(values))
    return Contestant((name, "-"), call, before=before, every=every, nbytes=sent)


def by_allgather(subject: str, vector: SparseVector, comm: Any) -> Any:
    """Return what a collective returns, by MPI's Allgatherv; gTop-k: the exact one, and the rejected entries."""
    vectors = gathered(vector, comm)
    if subject == "allgather":
        return vectors
    total = add_up(vectors)
    if subject != "gtopk":
        return total
    largest, _ = top_k(total, max(each.nnz for each in vectors))
    return largest, partition(vector, largest)[1]


def gathered(vector: SparseVector, comm: Any) -> list[SparseVector]:
    """Return all vectors, in rank order, by MPI's Allgatherv."""
    counts = comm.allgather(vector.nnz)
    ends = list(itertools.accumulate(counts))
    indices, values = (
        np.empty(ends[-1], array.dtype) for array in (vector.indices, vector.values)
    )
    bits = f"u{values.itemsize}"  # MPI has no float16
    comm.Allgatherv(vector.indices, [indices, counts])
    comm.Allgatherv(vector.values.view(bits), [values.view(bits), counts])
    pieces = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return [
        SparseVector(indices[piece], values[piece], vector.length) for piece in pieces
    ]


def compared(
    options: Options, comm: Any, case: Row, union: int, found: Sequence[Contestant]
) -> Iterator[Row]:
    """Measure the contestants, and yield a row for each. union: entries of the exact sum."""
    sent = [nbytes_of(each, comm) for each in found]
    times = interleave(found, options.repeats, comm, warm=False)
    dense_seconds = timed(times[0])["seconds"] if "dense" in options.baselines else None
    itemsize = np.dtype(case["dtype"]).itemsize
    least = least_nbytes(
        COLLECTIVES[options.subject].name,
        comm.size,
        case["length"],
        case["entries"],
        union,
        itemsize,
    )
    for each, seconds, (most_sent, mean_sent) in zip(found, times, sent, strict=True):
        figures = timed(seconds)
        wire = (
            sent_during(comm, each.call, WIRE_CALLS if each.every == 1 else 1)
            if options.interfaces
            else None
        )
        yield {
            "subject": options.subject,
            "ranks": comm.size,
            **case,
            "from_gradient": options.from_gradient,
            "union": union,
            "algorithm": each.name[0],
            "codec": each.name[1],
            "turns": seconds.shape[1],
            **figures,
            "dense_seconds": dense_seconds,
            "speedup": dense_seconds and dense_seconds / figures["seconds"],
            "nbytes": most_sent,
            "mean_nbytes": mean_sent,
            "least_nbytes": least,
            "over_bound": most_sent / least if most_sent and least else None,
            "wire_nbytes": wire,
            "wire_over_bound": wire / least if wire and least else None,
        }


def nbytes_of(contestant: Contestant, comm: Any) -> tuple[float, float]:
    """Make the first call, untimed; return the bytes of the busiest rank, and the mean."""
    before = traffic(comm).nbytes
    contestant.call()
    counted = traffic(comm).nbytes - before
    sent = comm.allgather(counted if contestant.nbytes is None else contestant.nbytes)
    return max(sent), sum(sent) / comm.size


COUNTERS = pathlib.Path("/proc/self/net/dev")  # of this process's network namespace


def sent_by_host(counters: str) -> int:
    """Return the bytes sent over all interfaces of a host except loopback, from the text of /proc/net/dev.

    Includes the headers of TCP and Ethernet, and other traffic: for otherwise idle
    hosts.
    """
    figures = {
        name.strip(): line.split()
        for name, _, line in (line.partition(":") for line in counters.splitlines())
    }
    return sum(
        int(figure[8]) for name, figure in figures.items() if figure and name != "lo"
    )


def sent_during(comm: Any, call: Call, calls: int) -> float:
    """Return the bytes of a call at the interfaces of the busiest host: the mean of several calls."""
    comm.Barrier()
    before = sent_by_host(COUNTERS.read_text())
    for _ in range(calls):
        call()
    # The last messages of this rank have arrived once all ranks are here.
    comm.Barrier()
    return float(
        max(comm.allgather((sent_by_host(COUNTERS.read_text()) - before) / calls))
    )


def report(options: Options, rows: Sequence[Row]) -> str:
    """Return the text below the table: the bytes of --interfaces over the lower bound."""
    text = io.StringIO()
    if options.interfaces:
        text.write("at the interfaces, the busiest host, with headers:\n")
        show(rows, AT_INTERFACES, text)
    return text.getvalue()


def refuse(options: Options, comm: Any) -> str | None:
    """Return the reason why these options cannot be measured here."""
    if "none" in options.baselines:
        options.baselines = []
    missing = missing_gpu() if options.device == "gpu" else None
    if fault := missing or too_many(cases(options), comm.size):
        return fault
    if options.interfaces:
        link = link_of(comm)
        if len(set(link.nodes)) == 1:
            return "--interfaces counts what a host sends: expected ranks on several hosts (benchmarks/testbed)"
        if not COUNTERS.exists():
            return f"--interfaces reads {COUNTERS}, which this system does not have"
    return None


def too_many(cases: Sequence[Row], ranks: int) -> str | None:
    """Return an error for the first case whose disjoint supports exceed the length."""
    for case in cases:
        if case["pattern"] == "disjoint" and case["entries"] > case["length"] // ranks:
            asked = f"{ranks} x {case['entries']} entries in {case['length']} places"
            return f"disjoint supports of density {case['density']:g} are {asked}: expected at most 1/{ranks}"
    return None


def add_options(subject: str, parser: Any) -> None:
    """Add the options of a collective."""
    add_list(
        parser, "--lengths", [1_000_000], "values of the dense vectors ", type=positive
    )
    add_list(
        parser,
        "--densities",
        [0.001, 0.01],
        "fractions of entries each rank contributes ",
        type=share,
    )
    known = algorithms()[subject]
    add_list(parser, "--patterns", ["independent"], "supports: ", choices=PATTERNS)
    add_list(parser, "--dtypes", ["float32"], "dtypes of the values: ", choices=DTYPES)
    add_list(parser, "--algorithms", known, "algorithms: ", choices=known)
    add_list(parser, "--codecs", ["auto"], "codecs of messages: ", choices=CODECS)
    add_list(
        parser,
        "--baselines",
        BASELINES[subject],
        "baselines: ",
        choices=[*BASELINES[subject], "none"],
    )
    add = parser.add_argument
    about = "where the vectors are; ranks may share a GPU, which has fewer baselines (%(default)s)"
    add("--device", choices=["cpu", "gpu"], default="cpu", help=about)
    add(
        "--dense-repeats",
        type=positive,
        metavar="N",
        help="turns of MPI's dense sum (as --repeats)",
    )
    about = "each call selects from a dense gradient; rows for the selection and GradientExchange too (sparse vectors)"
    add("--from-gradient", action="store_true", help=about)
    about = "count bytes at the network interfaces; each rank on a host of its own: benchmarks/testbed (not counted)"
    add("--interfaces", action="store_true", help=about)


SUITES = {
    subject: Suite(
        help=about,
        about=ABOUT,
        examples=EXAMPLES.format(subject),
        add_options=partial(add_options, subject),
        rows=rows,
        columns=COLUMNS,
        refuse=refuse,
        report=report,
    )
    for subject, about in HELP.items()
}
