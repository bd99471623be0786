"""`mpicomp bench step`: a training step whose computing takes a fixed time, and whose communication is real.

The setting of the gTop-k paper (arXiv 1901.04359): scaling efficiency is the time of computing over that of the step.
Nothing overlaps: the gradient is exchanged when all of it is there. The sizes are those of the paper's kind of models;
the seconds of computing are assumed (a mini-batch on one accelerator of its time), so give those of your own.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from collectives import warm_up
from collectives.cli.bench import collective
from collectives.cli.bench.collective import SELECTION, Case, Contestant, Plan
from collectives.cli.bench.progress import Silent, progress
from collectives.cli.bench.supports import draw
from collectives.cli.bench.timing import Call, quartiles

PUBLISHED = (
    "published, gTop-k (arXiv 1901.04359), 32 GPUs on 1 Gbit/s, efficiency up to: "
    "2.7 to 12 times that of dense, 1.1 to 1.7 times that of Top-k by allgather\n"
)
OURS = ["recursive_doubling", "exact", "exact_doubling"]
DENSE, TOP_K = "MPI_Allreduce", "MPI_Allgatherv"


class Model(NamedTuple):
    """What a step is about: values of a gradient, and seconds of forward and backward pass."""

    length: int
    compute: float


MODELS = {
    "ResNet-50": Model(25_600_000, 0.4),
    "VGG-16": Model(15_000_000, 0.12),
    "LSTM-PTB": Model(66_000_000, 0.5),
}


@dataclass(frozen=True)
class Step:
    """A way to exchange gradients in a model's step. Seconds: median and quartiles of the slowest rank.

    over_dense, over_top_k: its efficiency over that of MPI's dense sum, and of Top-k by MPI's Allgatherv.
    """

    model: str
    ranks: int
    length: int
    density: float
    compute: float
    algorithm: str
    turns: int
    seconds: float
    low: float
    high: float
    over_dense: float = 1.0
    over_top_k: float = 1.0

    @property
    def efficiency(self) -> float:
        """The share of the step in which it computes."""
        return self.compute / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the efficiency, by name."""
        return {**asdict(self), "efficiency": self.efficiency}

    def __str__(self) -> str:
        times = f"{1e3 * self.compute:10.1f} {1e3 * self.seconds:10.1f} {1e3 * self.low:10.1f}-{1e3 * self.high:<10.1f}"
        ratios = f"{self.efficiency:10.1%} {self.over_dense:9.2f} {self.over_top_k:9.2f}"
        return f"{self.model:10} {self.length:>10} {self.density:>8g}  {self.algorithm:35} {times} {ratios}"


HEADER = (
    f"{'model':10} {'length':>10} {'density':>8}  {'':35} {'compute ms':>10} {'step ms':>10} {'quartiles':>21} "
    f"{'efficiency':>10} {'/ dense':>9} {'/ Top-k':>9}"
)


def rows(
    comm: Any, models: dict[str, Model], density: float, repeats: int, dense_repeats: int, *, pause: bool
) -> Iterator[Step]:
    """Yield a row for each way of every model; they take turns. pause: compute by a pause, not by a busy loop."""
    warm_up(comm)
    baselines = ["dense", "allgather", "tree"]
    plan = Plan("gtopk", OURS, ["auto"], baselines, repeats, dense_repeats, from_gradient=True)
    bar: Any = progress(len(models) * (len(baselines) + len(OURS) + 1) * repeats) if comm.rank == 0 else Silent()
    for name, model in models.items():
        case = Case(model.length, "float32", density, "independent")
        vector = draw(case.pattern, comm.rank, comm.size, case.length, case.entries, case.dtype)
        ways = [each for each in collective.contestants(comm, plan, case, vector) if each.algorithm != SELECTION]
        times = in_turns(comm, ways, model.compute, repeats, bar, pause=pause)
        bar.clear()
        yield from compared(name, case, model.compute, ways, times, comm.size)
    bar.close()


def in_turns(
    comm: Any, ways: Sequence[Contestant], compute: float, repeats: int, bar: Any, *, pause: bool
) -> list[list[float]]:
    """Return the seconds of the slowest rank, from a common start, of each way by turn; see `Contestant`."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats):
        for way, own in zip(ways, times, strict=True):
            if turn % way.every == 0:
                way.call()
                comm.Barrier()
                own.append(max(comm.allgather(step(way.call, compute, pause=pause))))
            bar.update()
    return times


def step(call: Call, compute: float, *, pause: bool) -> float:
    """Compute for so many seconds, exchange, and return how long both took."""
    start = time.perf_counter()
    if pause:
        time.sleep(compute)
    while time.perf_counter() - start < compute:
        pass
    call()
    return time.perf_counter() - start


def compared(
    name: str, case: Case, compute: float, ways: Sequence[Contestant], times: Sequence[Sequence[float]], ranks: int
) -> list[Step]:
    """Return the rows of a model."""
    found = []
    for way, own in zip(ways, times, strict=True):
        low, median, high = quartiles(own)
        about = name, ranks, case.length, case.density, compute
        found.append(Step(*about, way.algorithm, len(own), median, low, high))
    by_name = {each.algorithm: each.seconds for each in found}
    return [
        replace(each, over_dense=by_name[DENSE] / each.seconds, over_top_k=by_name[TOP_K] / each.seconds)
        for each in found
    ]
