"""`mpicomp bench exchange`: one step from gradient to result in hand, against MPI's dense allreduce in the same run."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives import gtopk_allreduce, sparse_allreduce, warm_up
from collectives.cli.bench.floor import read_once
from collectives.cli.bench.timing import Call, Row, clocked, quartiles, taking_turns
from mpicomp import ErrorFeedback, GradientExchange, TopK


def rows(comm: Any, length: int, densities: Sequence[float], repeats: int) -> Iterator[Row]:
    """Yield the comparisons of every density; each rank's gradient is `length` normal float32.

    A time is that of the slowest rank, from a start that the ranks have in common. The floor is one read of the data by
    all ranks at the same time.
    """
    warm_up(comm)
    gradient = np.random.default_rng([1, comm.rank]).standard_normal(length, np.float32)
    total = np.empty_like(gradient)
    dense, floor = partial(comm.Allreduce, gradient, total), read_once(gradient)
    for density in densities:
        calls = steps(comm, gradient, density)
        together = partial(together_clocked, comm)
        *ours, base, least = taking_turns([*calls.values(), dense, floor], repeats, together)
        baseline, reading = quartiles(base)[1], quartiles(least)[1]
        for name, times in zip(calls, ours, strict=True):
            low, median, high = quartiles(times)
            yield Row(f"{density:g} {name}", median, low, high, "MPI_Allreduce", baseline, reading)


def steps(comm: Any, gradient: Any, density: float) -> dict[str, Call]:
    """Return what is timed: the selection, steps that end with a SparseVector, and two that end with a dense mean.

    Of these one makes a new array for it, and one writes to an array that is there, as MPI_Allreduce does.
    """
    compressor = TopK(density=density)
    fresh, exchange = (GradientExchange(comm, compressor, ErrorFeedback(), gtopk_allreduce) for _ in range(2))

    def step(collective: Any, **options: Any) -> Any:
        return collective(compressor.compress(gradient), comm, **options)

    return {
        "selection alone": partial(compressor.compress, gradient),
        "selection, sparse_allreduce": partial(step, sparse_allreduce),
        "selection, sparse_allreduce recursive_doubling": partial(
            step, sparse_allreduce, algorithm="recursive_doubling"
        ),
        "selection, gtopk_allreduce": partial(step, gtopk_allreduce),
        "selection, gtopk_allreduce exact": partial(step, gtopk_allreduce, algorithm="exact"),
        "GradientExchange, feedback, new dense mean": partial(fresh, gradient),
        "GradientExchange, feedback, mean in out=": partial(exchange, gradient, out=np.empty_like(gradient)),
    }


def together_clocked(comm: Any, call: Call) -> float:
    """Return how long the slowest rank takes, from a common start."""
    comm.Barrier()
    return float(comm.allreduce(clocked(call), op=_max()))


def _max() -> Any:
    from mpi4py import MPI

    return MPI.MAX
