"""`mpicomp bench overlap`: gradients that leave as they become ready, against ones that wait for the last of them.

The computing is a pause: what an accelerator does while the processor is free. Tensors are of one size and become ready
one after the other, at equal times.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives import GradientExchange, Request, sparse_allreduce, sparse_iallreduce, warm_up
from collectives.cli.bench.exchange import together_clocked
from collectives.cli.bench.timing import Row, quartiles, taking_turns
from mpicomp import TopK

WHOLE = 2**62  # bytes of a bucket that takes everything
SLICE = 1e-3  # seconds of computing between two looks at what is in flight


def rows(
    comm: Any,
    length: int,
    densities: Sequence[float],
    repeats: int,
    *,
    tensors: int = 20,
    compute: float = 0.4,
    rate: float | None = None,
) -> Iterator[Row]:
    """Yield the comparisons of every density.

    length: of all tensors together, normal float32. compute: seconds of a backward pass. rate: bits per second of a
    link that every vector has to pass on top of what MPI takes, one after the other; None for none. A time is that of
    the slowest rank, from a common start; the floor is the computing alone.
    """
    warm_up(comm)
    parts = np.array_split(np.random.default_rng([1, comm.rank]).standard_normal(length, np.float32), tensors)
    gradients = {f"tensor {number}": part for number, part in enumerate(parts)}
    together = partial(together_clocked, comm)
    for density in densities:
        few, buckets = tensors // 4, {"a bucket a tensor": 1}
        if few > 1:
            buckets[f"{few} in a bucket"] = few * gradients["tensor 0"].nbytes
        overlapped = [
            partial(step, _exchange(comm, density, size, rate), gradients, compute) for size in buckets.values()
        ]
        whole = _exchange(comm, density, WHOLE, rate)
        waiting, alone = partial(step_then_exchange, whole, gradients, compute), partial(_work, gradients, compute)
        *ours, base, least = taking_turns([*overlapped, waiting, alone], repeats, together)
        baseline, floor = quartiles(base)[1], quartiles(least)[1]
        for name, times in zip(buckets, ours, strict=True):
            low, median, high = quartiles(times)
            yield Row(f"{density:g} overlapped, {name}", median, low, high, "compute, then one bucket", baseline, floor)


def step(exchange: GradientExchange, gradients: dict[str, Any], compute: float) -> None:
    """Hand every gradient over as it becomes ready."""
    for name, gradient in gradients.items():
        ready = time.perf_counter() + compute / len(gradients)
        while (left := ready - time.perf_counter()) > 0:
            time.sleep(min(left, SLICE))
            exchange.progress()
        exchange.start(name, gradient)
    exchange.finish()


def step_then_exchange(exchange: GradientExchange, gradients: dict[str, Any], compute: float) -> None:
    """Wait for all gradients, and exchange them."""
    _work(gradients, compute)
    exchange(gradients)


def _work(gradients: dict[str, Any], compute: float) -> None:
    for _ in gradients:
        time.sleep(compute / len(gradients))


def _exchange(comm: Any, density: float, bucket_nbytes: int, rate: float | None) -> GradientExchange:
    collective = sparse_allreduce if rate is None else Link(rate)
    settings: dict[str, Any] = {"small": 0, "bucket_nbytes": bucket_nbytes}
    return GradientExchange(comm, TopK(density=density), collective=collective, **settings)


class Link:
    """`sparse_iallreduce` over a slow link: a sum is there once its vector has passed, behind those before it."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free = rate, 0.0  # bits per second; when the link is free again

    def __call__(self, vector: Any, comm: Any) -> "Passing":
        """Start the sum."""
        nbytes = 0 if isinstance(vector, Exception) else vector.nbytes
        self.free = max(self.free, time.perf_counter()) + 8 * nbytes / self.rate
        return Passing(sparse_iallreduce(vector, comm), self.free)


class Passing(Request[Any]):
    """The Request of a sum whose vector passes a link until `end`: it asks another one, and is none of the engine's."""

    def __init__(self, request: Request[Any], end: float) -> None:
        self.request, self.end = request, end

    @property
    def failed(self) -> bool:
        """See `Request.failed`."""
        return self.request.failed

    def test(self) -> bool:
        """See `Request.test`."""
        return self.request.test() and time.perf_counter() >= self.end

    def wait(self) -> Any:
        """See `Request.wait`."""
        total = self.request.wait()
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return total
