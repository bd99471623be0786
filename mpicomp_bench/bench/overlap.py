"""`mpicomp bench overlap`: gradients sent as they become ready, compared with one exchange after the last one.

The backward pass is simulated by pauses, as on an accelerator that leaves the CPU idle. Tensors have one size and
become ready at equal intervals.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from collectives import GradientExchange, Request, sparse_allreduce, sparse_iallreduce, warm_up
from mpicomp import TopK
from mpicomp_bench.bench.suite import Options, Suite
from mpicomp_bench.measuring import Call, Row, compare
from mpicomp_bench.options import above_zero, add_list, positive, share

EXAMPLES = """
mpirun -n 4 mpicomp bench overlap --density 0.05 --compute 0.3 --link 2e7
mpirun -n 4 mpicomp bench overlap --tensors 40 --length 1e7 --json overlap.json
"""

WHOLE = 2**62  # bytes of a bucket that takes everything
SLICE = 1e-3  # seconds of computing between two calls of progress()


def rows(options: Options, comm: Any) -> Iterator[Row]:
    """Yield the comparisons of every density; the floor is the backward pass alone.

    options: length, of all tensors together, normal float32; compute: seconds of a backward pass; link: bits per second
    of a link that every vector has to pass, one after the other, on top of MPI's time; None for none.
    """
    warm_up(comm)
    values = np.random.default_rng([1, comm.rank]).standard_normal(options.length, np.float32)
    gradients = {f"tensor {number}": part for number, part in enumerate(np.array_split(values, options.tensors))}
    pause = options.compute / options.tensors
    for density in options.density:
        few, buckets = options.tensors // 4, {"a bucket a tensor": 1}
        if few > 1:
            buckets[f"{few} in a bucket"] = few * gradients["tensor 0"].nbytes

        def exchange(nbytes: int, density: float = density) -> GradientExchange:
            collective = sparse_allreduce if options.link is None else Link(options.link)
            return GradientExchange(comm, TopK(density), collective=collective, small=0, bucket_nbytes=nbytes)

        ours: dict[str, Call] = {
            f"{density:g} overlapped, {name}": partial(step, exchange(nbytes), gradients, pause)
            for name, nbytes in buckets.items()
        }
        waiting = {"compute, then one bucket": partial(step_then_exchange, exchange(WHOLE), gradients, pause)}
        yield from compare(ours, waiting, options.repeats, comm, floor=partial(compute, gradients, pause))


def step(exchange: GradientExchange, gradients: dict[str, Any], pause: float) -> None:
    """Start the exchange of every gradient as it becomes ready."""
    for name, gradient in gradients.items():
        ready = time.perf_counter() + pause
        while (left := ready - time.perf_counter()) > 0:
            time.sleep(min(left, SLICE))
            exchange.progress()
        exchange.start(name, gradient)
    exchange.finish()


def step_then_exchange(exchange: GradientExchange, gradients: dict[str, Any], pause: float) -> None:
    """Wait for all gradients, and exchange them."""
    compute(gradients, pause)
    exchange(gradients)


def compute(gradients: dict[str, Any], pause: float) -> None:
    """Pause for each gradient."""
    for _ in gradients:
        time.sleep(pause)


class Link:
    """`sparse_iallreduce` over a simulated slow link, which sends one vector after the other."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free = rate, 0.0  # bits per second; when the link is free again

    def __call__(self, vector: Any, comm: Any) -> "Passing":
        """Start the sum."""
        nbytes = 0 if isinstance(vector, Exception) else vector.nbytes
        self.free = max(self.free, time.perf_counter()) + 8 * nbytes / self.rate
        return Passing(sparse_iallreduce(vector, comm), self.free)


class Passing(Request[Any]):
    """The Request of a sum whose transfer over the link ends at `end`; wraps another Request."""

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


def add_options(parser: Any) -> None:
    """Add the options of the suite."""
    add_list(parser, "--density", [0.05, 0.1], "fractions of entries each rank contributes ", type=share)
    parser.add_argument("--tensors", type=positive, default=20, metavar="N", help="tensors, of one size (%(default)s)")
    about = "seconds of a backward pass (%(default)s)"
    parser.add_argument("--compute", type=above_zero, default=0.4, metavar="S", help=about)
    parser.add_argument("--link", type=above_zero, metavar="RATE", help="bits a second of a simulated link (none)")


def refuse(options: Options, comm: Any) -> str | None:
    """Return an error for more tensors than values."""
    if options.tensors > options.length:
        return f"expected at most as many --tensors as --length, got {options.tensors}"
    return None


SUITE = Suite(
    help="a step whose gradients are sent as they become ready, against one exchange after the last",
    examples=EXAMPLES,
    add_options=add_options,
    rows=rows,
    length=2_000_000,
    refuse=refuse,
)
