"""Measure what a profile holds: all ranks do the same at the same time, the slowest counts, and medians of that."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from collectives import cost, gtopk_allreduce, sparse_allgather, sparse_reduce_scatter, warm_up
from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.profiles import KERNELS, Profile, as_measured, parse, rising
from collectives.progress import start, wait_for
from collectives.terms import Terms
from collectives.transport import Endpoint, endpoint_of
from collectives.tuning import Tuner, host_and_library
from mpicomp.vector import SparseVector, add_up, join, merge, top_k

Call = Callable[[], Any]

LONG_ENOUGH = 2e-3  # seconds: shorter calls are repeated until they take as long ...
MOST_LOOPS = 512  # ... or so often
TOO_LONG = 0.25  # seconds: larger sizes are left out
MESSAGES = [2**power for power in (6, 10, 13, 16, 18, 20, 22, 24)]  # bytes
# Open MPI's Iallreduce takes a tree below 64 KiB and a ring from there on: three times as fast, with slow links.
REDUCTIONS = [*[2**power for power in (6, 12, 14)], 2**16 - 64, *[2**power for power in (16, 18, 20, 22, 24, 26)]]
ENTRIES = [16, 1000, 10_000, 100_000, 1_000_000]
DENSITY, DENSE = 0.02, 0.25  # of the vectors that kernels are measured on; of those that travel as bitmaps


@dataclass
class Timed:
    """A call to be timed: how often it is repeated to be long enough, what that took first, seconds of one by turn."""

    call: Call
    loops: int
    first: float
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the turns, in seconds."""
        return statistics.median(self.seconds)


Sizes = dict[float, Timed]


def measure(comm: Any, repeats: int) -> Profile:
    """Return the profile of a communicator, the same on all ranks; all of them call.

    What is measured takes turns, so that a disturbance meets a little of everything, and medians do not show it.
    """
    from mpi4py import MPI

    warm_up(comm)
    endpoint = endpoint_of(comm, wait_for)
    nodes, host, mpi = len(set(endpoint.nodes)), *host_and_library(MPI)
    curves = {name: prepared(comm, calls) for name, calls in (kernel_calls(endpoint) | links(endpoint)).items()}
    step, packing = further_messages(endpoint)
    others = [settled(comm, step), settled(comm, packing)]
    timed = [*others, *(each for sizes in curves.values() for each in sizes.values())]
    for _ in range(repeats):
        for each in timed:
            once_more(comm, each)
    points = {name: [(size, each.median) for size, each in sizes.items()] for name, sizes in curves.items() if sizes}
    found = {name: (as_measured if name == "reduce" else rising)(each) for name, each in points.items()}
    kernels = {name: found.pop(name) for name in KERNELS}
    inside, between, reduce = found.get("inside"), found.get("between"), found["reduce"]
    message = others[0].median - (comm.size - 1) * others[1].median - (inside or between or reduce).start
    message = max(1e-7, message / max(1, comm.size - 2))
    measured = Profile(host, mpi, comm.size, nodes, 0.0, message, inside, between, reduce, kernels)
    return anchored(comm, parse(comm.bcast(measured.text())), repeats)


def anchored(comm: Any, profile: Profile, repeats: int) -> Profile:
    """Return the profile with the seconds that small operations take beside their rounds as those of a call."""
    endpoint_of(comm, wait_for).tuner = Tuner(profile)
    vector = SparseVector(np.arange(16) * 60 + comm.rank % 60, np.ones(16, np.float32), 1000)
    calls: dict[tuple[str, str], Call] = {
        ("sparse_allgather", "dissemination"): partial(sparse_allgather, vector, comm),
        ("sparse_reduce_scatter", "split"): partial(sparse_reduce_scatter, vector, comm),
        ("gtopk_allreduce", "recursive_doubling"): partial(gtopk_allreduce, vector, comm),
    }
    timed = {name: settled(comm, call) for name, call in calls.items()}
    for _ in range(2 * repeats):
        for each in timed.values():
            once_more(comm, each)
    case = cost.Case(comm.size, vector.length, 16, nodes=profile.nodes)
    left = [each.median - cost.predict(*name, case, profile).seconds for name, each in timed.items()]
    return replace(profile, call=comm.bcast(max(1e-6, statistics.mean(left))))


def prepared(comm: Any, calls: Iterable[tuple[float, Call]]) -> Sizes:
    """Return the calls by size that are to be timed: the smallest first, up to the one that takes too long."""
    sizes: Sizes = {}
    for size, call in calls:
        sizes[size] = settled(comm, call)
        if sizes[size].first > TOO_LONG:
            break
    return sizes


def settled(comm: Any, call: Call) -> Timed:
    """Return a call to be timed, with as many loops as make it long enough, by the faster one of two looks."""
    call()
    loops, seconds = 1, together(comm, call, 1)
    while min(seconds, together(comm, call, loops)) < LONG_ENOUGH and loops < MOST_LOOPS:
        loops = min(MOST_LOOPS, max(2 * loops, int(loops * LONG_ENOUGH / max(seconds, 1e-6))))
        seconds = together(comm, call, loops)
    return Timed(call, loops, first=seconds)


def once_more(comm: Any, timed: Timed) -> None:
    """Time a call in its turn, after an untimed one: what another leaves behind, in caches and pages, is not its own.

    Two or three loops had a first one that took twice as long behind a dense sum.
    """
    timed.call()
    timed.seconds.append(together(comm, timed.call, timed.loops) / timed.loops)


def together(comm: Any, call: Call, loops: int) -> float:
    """Return how long the slowest rank takes for so many calls, from a common start."""
    from mpi4py import MPI

    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(loops):
        call()
    return float(comm.allreduce(time.perf_counter() - begin, op=MPI.MAX))


def vector_of(entries: int, density: float, seed: int, after: int = 0) -> SparseVector:
    """Return a vector of so many entries at random places behind the first `after` positions."""
    rng = np.random.default_rng([3, seed])
    gaps = rng.integers(1, max(2, round(2 / density)), entries)
    indices = after + np.cumsum(gaps) - 1
    values = rng.standard_normal(entries).astype(np.float32)
    return SparseVector(indices, values, int(indices[-1]) + 1 if entries else 1)


def same_length(vectors: Sequence[SparseVector]) -> list[SparseVector]:
    """Return vectors as vectors of the length of the longest."""
    length = max(vector.length for vector in vectors)
    return [SparseVector(vector.indices, vector.values, length) for vector in vectors]


def kernel_calls(endpoint: Endpoint) -> dict[str, Iterable[tuple[float, Call]]]:
    """Return calls of each kernel of a profile, with the entries that each counts as."""
    parts = min(8, max(3, endpoint.size))

    def several(entries: int, count: int = parts) -> list[SparseVector]:
        return same_length([vector_of(max(1, entries // count), DENSITY, seed) for seed in range(count)])

    def consecutive(entries: int) -> list[SparseVector]:
        """Return parts of one vector, each above those before it."""
        whole = vector_of(max(parts, entries), DENSITY, 0)
        edges = zip(np.array_split(whole.indices, parts), np.array_split(whole.values, parts), strict=True)
        return [SparseVector(indices, values, whole.length) for indices, values in edges]

    def on(kernel: Callable[[Any], Any], density: float = DENSITY) -> Iterator[tuple[float, Call]]:
        return ((entries, partial(kernel, vector_of(entries, density, endpoint.rank))) for entries in ENTRIES)

    quick, smallest = (Channel(endpoint, Terms("tune", codec), codec=codec) for codec in ("quick", "smallest"))
    thick = [vector_of(max(1, round(size * DENSE / 2)), DENSE, 0) for size in ENTRIES]
    return {
        "validate": on(SparseVector.validate),
        "merge": ((entries, partial(merge, *several(entries, 2))) for entries in ENTRIES),
        "accumulate": ((entries, partial(add_up, several(entries))) for entries in ENTRIES),
        "join": ((entries, partial(join, consecutive(entries))) for entries in ENTRIES),
        "fill": ((vector.length, partial(vector.filled, 0, vector.length)) for vector in thick),
        "copy": on(lambda vector: np.array(vector.values)),
        "select": on(lambda vector: top_k(vector, vector.nnz // 2)),
        "pack": on(partial(pack, quick)),
        "unpack": on_blocks(quick, DENSITY),
        "pack_bitmap": on(partial(pack, quick), DENSE),
        "unpack_bitmap": on_blocks(quick, DENSE),
        "pack_coded": on(partial(pack, smallest)),
        "unpack_coded": on_blocks(smallest, DENSITY),
    }


def pack(channel: Channel, vector: SparseVector) -> Any:
    """Return the block of a vector."""
    return channel.pack(Offer(vector))


def on_blocks(channel: Channel, density: float) -> Iterator[tuple[float, Call]]:
    """Yield calls that read a block of so many entries."""
    for entries in ENTRIES:
        yield entries, partial(channel.unpack, pack(channel, vector_of(entries, density, 0)))


def links(endpoint: Endpoint) -> dict[str, Iterable[tuple[float, Call]]]:
    """Return calls that send so many bytes to a rank of the same node, to another node, or through MPI's Allreduce."""
    nodes = sorted(set(endpoint.nodes))
    mates = [rank for rank, node in enumerate(endpoint.nodes) if node == endpoint.nodes[endpoint.rank]]

    channel = Channel(endpoint, Terms("tune", "measure"))

    def reduce(array: Any) -> Steps[None]:
        yield (endpoint.reduce(array),)

    arrays = ((nbytes, np.ones(nbytes // 4, np.float32)) for nbytes in REDUCTIONS)
    whole = len(nodes) < endpoint.size or endpoint.size == 1  # some node has several ranks, or there is just one
    return {
        "inside": exchanges(channel, mates) if whole else (),
        "between": exchanges(channel, nodes) if len(nodes) > 1 else (),
        "reduce": ((nbytes, partial(run, channel, reduce, array)) for nbytes, array in arrays),
    }


def run(channel: Channel, steps: Callable[..., Steps[Any]], *arguments: Any) -> Any:
    """Run a collective to its end."""
    return start(steps(*arguments), channel).wait()


def exchanges(channel: Channel, ranks: Sequence[int]) -> Iterator[tuple[float, Call]]:
    """Yield calls in which all of `ranks` send so many bytes to the one before; other ranks do nothing."""
    endpoint = channel.endpoint

    def exchange(nbytes: int) -> Steps[None]:
        place = ranks.index(endpoint.rank)
        arrival = endpoint.receive(ranks[(place + 1) % len(ranks)], 0)
        yield arrival, endpoint.send(np.empty(nbytes, np.uint8), ranks[place - 1], 0)

    for nbytes in MESSAGES:
        yield nbytes, partial(run, channel, exchange, nbytes) if endpoint.rank in ranks else lambda: None


def further_messages(endpoint: Endpoint) -> tuple[Call, Call]:
    """Return calls of a step of one small message to every other rank, and of what a rank computes for each."""
    channel = Channel(endpoint, Terms("tune", "step"), codec="plain")
    nothing = Offer(SparseVector.empty(0))  # travels as a codec message, unlike `channel.nothing`
    return partial(run, channel, channel.all_to_all, [nothing] * endpoint.size), lambda: channel.unpack(
        channel.pack(nothing)
    )
