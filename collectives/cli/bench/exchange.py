"""`mpicomp bench exchange`: one step from gradient to result in hand, against MPI's dense allreduce in the same run."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from collectives import GradientExchange, gtopk_allreduce, sparse_allreduce, warm_up
from collectives.cli.bench.floor import read_once
from collectives.cli.bench.timing import Call, Prepared, Row, clocked, quartiles, taking_turns
from mpicomp import ErrorFeedback, TopK

Shape = tuple[int, ...]


def gpt_shapes(width: int = 256, blocks: int = 4, vocabulary: int = 65, context: int = 128) -> dict[str, Shape]:
    """Return the shapes of the tensors of a small GPT by name, in the order of the model: 54, with 3.2e6 values."""
    layers = {
        "norm1": (width,),
        "attention.qkv": (3 * width, width),
        "attention.projection": (width, width),
        "norm2": (width,),
        "mlp.expansion": (4 * width, width),
        "mlp.projection": (width, 4 * width),
    }
    shapes: dict[str, Shape] = {"token_embedding": (vocabulary, width), "position_embedding": (context, width)}
    for block in range(blocks):
        for name, shape in layers.items():
            shapes |= {f"block{block}.{name}.weight": shape, f"block{block}.{name}.bias": shape[:1]}
    head = {"norm.weight": (width,), "norm.bias": (width,), "head.weight": (vocabulary, width)}
    return {**shapes, **head, "head.bias": (vocabulary,)}


TENSORS = {"gpt": gpt_shapes()}


def length_of(tensors: str) -> int:
    """Return how many values the tensors of a model have, by its name in `TENSORS`."""
    return sum(int(np.prod(shape)) for shape in TENSORS[tensors].values())


def rows(comm: Any, length: int, densities: Sequence[float], repeats: int, tensors: str | None = None) -> Iterator[Row]:
    """Yield the comparisons of every density; each rank's gradient is `length` normal float32.

    tensors: of a model in `TENSORS`, which the gradient is cut into. A time is that of the slowest rank, from a start
    that the ranks have in common. The floor is one read of the data by all ranks at the same time.
    """
    warm_up(comm)
    gradient = np.random.default_rng([1, comm.rank]).standard_normal(length, np.float32)
    total = np.empty_like(gradient)
    dense, floor = partial(comm.Allreduce, gradient, total), read_once(gradient)
    for density in densities:
        calls = model_steps(comm, gradient, density, TENSORS[tensors]) if tensors else steps(comm, gradient, density)
        together = partial(together_clocked, comm)
        *ours, base, least = taking_turns([*calls.values(), dense, floor], repeats, together)
        baseline, reading = quartiles(base)[1], quartiles(least)[1]
        for name, times in zip(calls, ours, strict=True):
            low, median, high = quartiles(times)
            yield Row(f"{density:g} {name}", median, low, high, "MPI_Allreduce", baseline, reading)


def steps(comm: Any, gradient: Any, density: float) -> dict[str, Call]:
    """Return what is timed for one vector: the selection, the sum of what is selected, and whole steps."""
    compressor = TopK(density=density)

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
        **exchanges(comm, gradient, density, sparse_allreduce, "GradientExchange"),
        **exchanges(comm, gradient, density, gtopk_allreduce, "GradientExchange by gTop-k"),
    }


def exchanges(comm: Any, gradient: Any, density: float, collective: Any, name: str) -> dict[str, Call]:
    """Return steps of `GradientExchange` on one vector, by `name` and what they return; each has its own residual.

    The array that holds the residual in place is filled with the gradient before each turn, which is not timed.
    """
    in_place, sparse, out, dense = (
        GradientExchange(comm, TopK(density=density), ErrorFeedback(in_place=first), collective)
        for first in (True, False, False, False)
    )
    own = gradient.copy()
    refill = partial(np.copyto, own, gradient)
    return {
        f"{name} residual in place, sparse mean": Prepared(partial(in_place, own, sparse=True), refill),
        f"{name}, sparse mean": partial(sparse, gradient, sparse=True),
        f"{name}, mean in out=": partial(out, gradient, out=np.empty_like(gradient)),
        f"{name}, new dense mean": partial(dense, gradient),
    }


def model_steps(comm: Any, gradient: Any, density: float, shapes: dict[str, Shape]) -> dict[str, Call]:
    """Return steps of `GradientExchange` on a model's tensors by name, and on one vector of the same length."""
    ends = np.cumsum([0, *(np.prod(shape) for shape in shapes.values())]).tolist()

    def cut(vector: Any) -> dict[str, Any]:
        parts = zip(shapes.items(), pairwise(ends), strict=True)
        return {name: vector[first:end].reshape(shape) for (name, shape), (first, end) in parts}

    tensors, buffers = cut(gradient), cut(np.empty_like(gradient))
    sparse, out, dense = (GradientExchange(comm, TopK(density=density)) for _ in range(3))
    return {
        f"{len(shapes)} tensors, sparse means": partial(sparse, tensors, sparse=True),
        f"{len(shapes)} tensors, means in out=": partial(out, tensors, out=buffers),
        f"{len(shapes)} tensors, new dense means": partial(dense, tensors),
        **exchanges(comm, gradient, density, sparse_allreduce, "one vector"),
    }


def together_clocked(comm: Any, call: Call) -> float:
    """Return how long the slowest rank takes, from a common start."""
    comm.Barrier()
    return float(comm.allreduce(clocked(call), op=_max()))


def _max() -> Any:
    from mpi4py import MPI

    return MPI.MAX
