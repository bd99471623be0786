"""`mpicomp bench allreduce | reduce_scatter | allgather | gtopk`: a collective, against what there is without it.

Baselines in the same run: MPI's own sum of the dense vector; the gTop-k tree as published (plain indices, to one rank
and back); Top-k by MPI's Allgatherv of plain indices and values, added up on every rank.
"""

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives import (
    GradientExchange,
    allreduce,
    cost,
    dense_allreduce,
    gtopk,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_reduce_scatter,
    traffic,
    warm_up,
)
from collectives.cli.bench.bounds import dense_nbytes, least_nbytes
from collectives.cli.bench.device_kernels import until_done
from collectives.cli.bench.interfaces import during
from collectives.cli.bench.predicting import predictor
from collectives.cli.bench.progress import Silent, progress
from collectives.cli.bench.supports import draw, gradient_above, most
from collectives.cli.bench.timing import Call, clocked, quartiles
from collectives.profiles import Profile
from collectives.progress import wait_for
from collectives.transport import endpoint_of
from mpicomp import SparseVector, TopK
from mpicomp.arrays import namespace
from mpicomp.vector import add_up

COLLECTIVES: dict[str, Callable[..., Any]] = {
    "allreduce": sparse_allreduce,
    "reduce_scatter": sparse_reduce_scatter,
    "allgather": sparse_allgather,
    "gtopk": gtopk_allreduce,
}
ALGORITHMS = {
    "allreduce": ["auto", *allreduce.ALGORITHMS],
    "reduce_scatter": ["split"],
    "allgather": ["dissemination"],
    "gtopk": list(gtopk.ALGORITHMS),
}
BASELINES = {
    "allreduce": ["dense", "tree", "allgather"],
    "reduce_scatter": ["dense"],
    "allgather": ["dense", "allgather"],
    "gtopk": ["dense", "tree", "allgather"],
}
WIRE_CALLS = 5  # whose bytes at the interfaces are counted together
SELECTION = "selection alone"
EXCHANGED = "allreduce", "gtopk"  # what GradientExchange may go by
CODECS = ["auto", "plain", "quick", "smallest"]
DTYPES = ["float16", "float32", "float64"]


class Case(NamedTuple):
    """What is brought to the contestants of a comparison."""

    length: int
    dtype: str
    density: float
    pattern: str

    @property
    def entries(self) -> int:
        """Entries that each rank brings."""
        return max(1, round(self.density * self.length))


class Plan(NamedTuple):
    """What is compared, and how often each takes its turn."""

    subject: str
    algorithms: Sequence[str]
    codecs: Sequence[str]
    baselines: Sequence[str]
    repeats: int
    dense_repeats: int
    from_gradient: bool
    network: Profile | None = None
    interfaces: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Contestant:
    """A call that takes its turn.

    nbytes: the least that the busiest rank sends, where the library cannot count. every: it has a turn in each, in
    every second, ... rehearsed: each timed call follows an untimed one, as in a loop of steps. Without that the pages
    of its results are cold: between turns of seconds a virtual machine hands freed ones back to its host, and to touch
    them again took 15 times as long. MPI's dense sum goes into a buffer that is there already.
    """

    algorithm: str
    codec: str
    call: Call
    nbytes: float | None = None
    every: int = 1
    rehearsed: bool = True


@dataclass(frozen=True)
class Comparison:
    """A contestant's times in a case, in seconds, and its bytes.

    seconds, low, high: the median and the quartiles over the turns, of the slowest rank in each. mean, least, most: the
    means of the ranks. dense_seconds: the median of MPI's dense sum, None where it did not run. nbytes: what the
    busiest rank sends; mean_nbytes: the ranks' mean. least_nbytes: the bound. predicted: by the model of costs, in
    seconds, with the measured selection where each call selects first; None without a profile, and for what the model
    does not know. wire_nbytes: at the interfaces of the busiest host, with headers; None where they are not looked at.
    """

    subject: str
    ranks: int
    length: int
    dtype: str
    density: float
    pattern: str
    from_gradient: bool
    entries: int
    union: int
    algorithm: str
    codec: str
    turns: int
    seconds: float
    low: float
    high: float
    mean: float
    least: float
    most: float
    dense_seconds: float | None
    nbytes: float
    mean_nbytes: float
    least_nbytes: float
    predicted: float | None = None
    wire_nbytes: float | None = None

    @property
    def speedup(self) -> float | None:
        """How many times as long MPI's dense sum takes."""
        return None if self.dense_seconds is None else self.dense_seconds / self.seconds

    @property
    def over_bound(self) -> float | None:
        """Bytes of the busiest rank over the bound; None where nothing has to be sent."""
        return self.nbytes / self.least_nbytes if self.nbytes and self.least_nbytes else None

    @property
    def over_measured(self) -> float | None:
        """Predicted over measured seconds."""
        return None if self.predicted is None else self.predicted / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the ratios, by name."""
        ratios = {"speedup": self.speedup, "over_bound": self.over_bound, "over_measured": self.over_measured}
        return {**asdict(self), **ratios}

    def __str__(self) -> str:
        return "  ".join(f"{column.show(self):{column.form}}" for column in COLUMNS)


class Column(NamedTuple):
    """A column of the table: its head, how wide it is and on which side its text stands, and what it shows of a row."""

    head: str
    form: str
    show: Callable[[Comparison], str]


def _ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


COLUMNS = [
    Column("length", ">10", lambda row: str(row.length)),
    Column("dtype", "<7", lambda row: row.dtype),
    Column("density", ">7", lambda row: f"{row.density:g}"),
    Column("supports", "<11", lambda row: row.pattern),
    Column("algorithm", "<35", lambda row: row.algorithm),
    Column("codec", "<8", lambda row: row.codec),
    Column("median ms", ">9", lambda row: f"{1e3 * row.seconds:.3f}"),
    Column("quartiles", ">15", lambda row: f"{1e3 * row.low:.4g}-{1e3 * row.high:.4g}"),
    Column("dense /", ">7", lambda row: _ratio(row.speedup)),
    Column("kB sent", ">10", lambda row: f"{row.nbytes / 1e3:.1f}"),
    Column("/ bound", ">7", lambda row: _ratio(row.over_bound)),
    Column("predicted", ">9", lambda row: "-" if row.predicted is None else f"{1e3 * row.predicted:.3f}"),
    Column("/ meas.", ">7", lambda row: _ratio(row.over_measured)),
]
HEADER = "  ".join(f"{column.head:{column.form}}" for column in COLUMNS)


def rows(comm: Any, plan: Plan, cases: Sequence[Case]) -> Iterator[Comparison]:
    """Yield the comparisons of every case.

    A time is that of the slowest rank, from a common start; all contestants of a case take turns, after one untimed
    call of each.
    """
    warm_up(comm, sorted({case.dtype for case in cases}))
    steps = plan.from_gradient * (1 + (plan.subject in EXCHANGED))
    each = len(plan.algorithms) * len(plan.codecs) + len(plan.baselines) + steps
    bar: Any = progress(len(cases) * each * (1 + plan.repeats)) if comm.rank == 0 else Silent()
    for case in cases:
        vector = draw(case.pattern, comm.rank, comm.size, case.length, case.entries, case.dtype)
        union = sparse_allreduce(vector, comm, algorithm="split_allgather").nnz
        yield from compared(comm, plan, case, union, contestants(comm, plan, case, vector), bar)
    bar.close()


def placed(plan: Plan, array: Any) -> Any:
    """Return an array where it is to be measured: in main memory, or on the current GPU."""
    return array if plan.device == "cpu" else importlib.import_module("cupy").asarray(array)


def too_many(cases: Sequence[Case], ranks: int) -> str | None:
    """Return what is wrong with the first case that cannot be: disjoint supports that do not fit beside each other."""
    for case in cases:
        if case.entries > most(case.pattern, ranks, case.length):
            asked = f"{ranks} x {case.entries} entries in {case.length} places"
            return f"{case.pattern} supports of density {case.density:g} are {asked}: expected at most 1/{ranks}"
    return None


def contestants(comm: Any, plan: Plan, case: Case, vector: SparseVector) -> list[Contestant]:
    """Return what is compared in a case, the baselines first."""
    gradient = placed(plan, gradient_above(vector, comm.rank)) if plan.from_gradient else None
    vector = SparseVector(placed(plan, vector.indices), placed(plan, vector.values), vector.length)
    compressor = TopK(k=case.entries)
    bring = (lambda: vector) if gradient is None else partial(compressor.compress, gradient)
    found = [baseline(name, comm, plan, case, bring, gradient) for name in plan.baselines]
    if gradient is not None:
        found.append(Contestant(SELECTION, "-", bring, 0.0))
    for algorithm, codec in itertools.product(plan.algorithms, plan.codecs):
        run = partial(COLLECTIVES[plan.subject], algorithm=algorithm, codec=codec)
        found.append(Contestant(algorithm, codec, _call(run, bring, comm)))
    if gradient is not None and plan.subject in EXCHANGED:
        run = partial(COLLECTIVES[plan.subject], algorithm=plan.algorithms[0], codec=plan.codecs[0])
        exchange = GradientExchange(comm, compressor, collective=run)
        name = f"GradientExchange {plan.algorithms[0]}"
        into = namespace(gradient).empty_like(gradient)  # as MPI's dense sum has an array for its result
        found.append(Contestant(name, plan.codecs[0], partial(exchange, gradient, out=into)))
    return [replace(each, call=until_done(each.call)) for each in found] if plan.device == "gpu" else found


def baseline(name: str, comm: Any, plan: Plan, case: Case, bring: Callable[[], SparseVector], dense: Any) -> Contestant:
    """Return one of the baselines."""
    if name == "tree":
        published = partial(gtopk_allreduce, algorithm="tree", codec="plain")
        return Contestant("gTop-k tree, as published", "plain", _call(published, bring, comm))
    if name == "allgather":
        gather = partial(gathered, add=plan.subject != "allgather")
        return Contestant("MPI_Allgatherv", "plain", _call(gather, bring, comm), (comm.size - 1) * bring().nbytes)
    if plan.device == "gpu":
        array: Any = placed(plan, np.ones(case.length, case.dtype)) if dense is None else dense
        sent = dense_nbytes(plan.subject, comm.size, case.length, array.itemsize)
        return Contestant(
            "dense_allreduce", "-", partial(dense_allreduce, array, comm), sent, -(-plan.repeats // plan.dense_repeats)
        )
    travels = np.promote_types(case.dtype, np.float32)  # MPI has no float16
    values = np.ones(case.length, travels) if dense is None else dense.astype(travels, copy=False)
    sent = dense_nbytes(plan.subject, comm.size, case.length, travels.itemsize)
    what, call = summed(comm, values, scatter=plan.subject == "reduce_scatter")
    return Contestant(what, "-", call, sent, -(-plan.repeats // plan.dense_repeats), rehearsed=False)


def summed(comm: Any, values: Any, *, scatter: bool) -> tuple[str, Call]:
    """Return MPI's own sum, by its name and as a call: of all ranks' values, or scattered over the ranks."""
    if not scatter:
        return "MPI_Allreduce", partial(comm.Allreduce, values, np.empty_like(values))
    counts = [len(part) for part in np.array_split(values, comm.size)]
    return "MPI_Reduce_scatter", partial(comm.Reduce_scatter, values, np.empty(counts[comm.rank], values.dtype), counts)


def _call(collective: Callable[..., Any], bring: Callable[[], SparseVector], comm: Any) -> Call:
    return lambda: collective(bring(), comm)


def gathered(vector: SparseVector, comm: Any, *, add: bool) -> Any:
    """Return the vectors of all ranks by MPI's Allgatherv, or their sum."""
    counts = comm.allgather(vector.nnz)
    ends = list(itertools.accumulate(counts))
    indices, values = (np.empty(ends[-1], array.dtype) for array in (vector.indices, vector.values))
    bits = f"u{values.itemsize}"  # MPI has no float16
    comm.Allgatherv(vector.indices, [indices, counts])
    comm.Allgatherv(vector.values.view(bits), [values.view(bits), counts])
    pieces = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    vectors = [SparseVector(indices[piece], values[piece], vector.length) for piece in pieces]
    return add_up(vectors) if add else vectors


def compared(
    comm: Any, plan: Plan, case: Case, union: int, contestants: Sequence[Contestant], bar: Any
) -> Iterator[Comparison]:
    """Let the contestants take turns, and yield what each took."""
    sent = [_once(comm, contestant, bar) for contestant in contestants]
    times = _in_turns(comm, contestants, plan.repeats, bar)
    dense = plan.baselines.index("dense") if "dense" in plan.baselines else None
    dense_seconds = None if dense is None else quartiles(list(times[dense].max(axis=0)))[1]
    itemsize = np.dtype(case.dtype).itemsize
    least = least_nbytes(plan.subject, comm.size, case.length, case.entries, union, itemsize)
    expected = predictions(comm, plan, case, contestants, times)
    wires = at_interfaces(comm, plan, contestants)
    bar.clear()
    for contestant, clock, (most_sent, mean_sent), seconds, wire in zip(
        contestants, times, sent, expected, wires, strict=True
    ):
        slowest, means = list(clock.max(axis=0)), clock.mean(axis=1)
        low, median, high = quartiles(slowest)
        yield Comparison(
            plan.subject,
            comm.size,
            *case,
            plan.from_gradient,
            case.entries,
            union,
            contestant.algorithm,
            contestant.codec,
            len(slowest),
            median,
            low,
            high,
            float(means.mean()),
            float(means.min()),
            float(means.max()),
            dense_seconds,
            most_sent,
            mean_sent,
            least,
            seconds,
            wire,
        )


def at_interfaces(comm: Any, plan: Plan, contestants: Sequence[Contestant]) -> list[float | None]:
    """Return the bytes of a call of each contestant at the interfaces of the busiest host, where that is asked for."""
    if not plan.interfaces:
        return [None] * len(contestants)
    return [during(comm, each.call, WIRE_CALLS if each.every == 1 else 1) for each in contestants]


def predictions(
    comm: Any, plan: Plan, case: Case, contestants: Sequence[Contestant], times: Sequence[Any]
) -> list[float | None]:
    """Return what the model says of each contestant; what was measured of the selection is added."""
    whole = cost.Case(
        comm.size,
        case.length,
        case.entries,
        overlap=float(case.pattern == "shared"),
        value_nbytes=np.dtype(case.dtype).itemsize,
    )
    predict = predictor(endpoint_of(comm, wait_for), plan.network, whole)
    selecting = [clock for each, clock in zip(contestants, times, strict=True) if each.algorithm == SELECTION]
    before = quartiles(list(selecting[0].max(axis=0)))[1] if selecting else 0.0
    found = [predict(plan.subject, each.algorithm, each.codec) for each in contestants]
    return [seconds and seconds + before * (each.rehearsed) for seconds, each in zip(found, contestants, strict=True)]


def _once(comm: Any, contestant: Contestant, bar: Any) -> tuple[float, float]:
    """Call for the first time, untimed; return the bytes of the busiest rank, and the mean."""
    before = traffic(comm).nbytes
    contestant.call()
    counted = traffic(comm).nbytes - before
    sent = comm.allgather(counted if contestant.nbytes is None else contestant.nbytes)
    bar.update()
    return max(sent), sum(sent) / comm.size


def _in_turns(comm: Any, contestants: Sequence[Contestant], repeats: int, bar: Any) -> list[Any]:
    """Return the times of each contestant, of shape (ranks, turns)."""
    own: list[list[float]] = [[] for _ in contestants]
    for turn in range(repeats):
        for contestant, times in zip(contestants, own, strict=True):
            if turn % contestant.every == 0:
                if contestant.rehearsed:
                    contestant.call()
                comm.Barrier()
                times.append(clocked(contestant.call))
            bar.update()
    return [np.array(times) for times in zip(*comm.allgather(own), strict=True)]


def osu(comparisons: Sequence[Comparison]) -> str:
    """Return the table that the OSU micro-benchmarks print, for each contestant: size is that of the dense vector."""
    blocks: dict[tuple[Any, ...], list[str]] = {}
    for row in comparisons:
        about = row.subject, row.algorithm, row.codec, row.dtype, f"density {row.density:g}", row.pattern
        size = row.length * np.dtype(row.dtype).itemsize
        times = "".join(f"{1e6 * seconds:18.2f}" for seconds in (row.mean, row.least, row.most))
        blocks.setdefault(about, []).append(f"{size:<14d}{times}{row.turns:14d}")
    head = "# Size             Avg Latency(us)   Min Latency(us)   Max Latency(us)    Iterations"
    return "\n".join("\n".join([f"# {', '.join(about)}", head, *lines, ""]) for about, lines in blocks.items())
