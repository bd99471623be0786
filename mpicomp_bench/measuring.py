"""Measurements on a busy machine: compared calls are interleaved, and ratios are ratios of medians.

The order of the calls is random in each turn, the same on all ranks; else one call
would always follow the slowest one. With a communicator every call starts after a
barrier, and a time is that of the slowest rank.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Call = Callable[[], Any]
# A row of a table, and of the JSON: figures by name, times in seconds.
Row = dict[str, Any]


class Contestant(NamedTuple):
    """A call to compare with others.

    before: called before each timed call: an untimed call, as in a loop of steps, or a
    function that restores the arguments. In turns of seconds a virtual machine returns
    freed pages to its host, and touching them again took 15 times as long. every: 1
    calls it in each turn, 2 in every second one, ... loops: calls in a turn, see
    `paced`. nbytes: lower bound of the bytes of the busiest rank, if the library cannot
    count them.
    """

    name: Any
    call: Call
    before: Call | None = None
    every: int = 1
    loops: int = 1
    nbytes: float | None = None


def interleave(
    contestants: Sequence[Contestant],
    turns: int,
    comm: Any = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    warm: bool = True,
) -> list[NDArray[np.float64]]:
    """Return the seconds of each contestant, of shape (ranks, its turns), on all ranks.

    warm: begin with a turn that is not counted. clock: returns seconds.
    """
    own: list[list[float]] = [[] for _ in contestants]
    for turn in range(-warm, turns):
        for place in np.random.default_rng([5, turn + 1]).permutation(len(contestants)):
            each = contestants[place]
            if turn % each.every and turn >= 0:
                continue
            if each.before:
                each.before()
            if comm is not None:
                comm.Barrier()
            start = clock()
            for _ in range(each.loops):
                each.call()
            own[place].append((clock() - start) / each.loops)
    every_rank = [own] if comm is None else comm.allgather(own)
    return [np.array(times)[:, warm:] for times in zip(*every_rank, strict=True)]


def paced(calls: Mapping[Any, Call], comm: Any = None) -> list[Contestant]:
    """Return contestants, the same on all ranks, whose turns take 2 ms or a call, and that begin with an untimed call.

    Calls that take over twice the time of the fastest one take part in every third
    turn.
    """
    times = interleave([Contestant(*item) for item in calls.items()], 2, comm)
    seconds = [max(1e-6, float(own.max(axis=0).min())) for own in times]
    return [
        Contestant(
            name,
            call,
            before=call,
            every=3 if taken > 2 * min(seconds) else 1,
            loops=min(512, max(1, round(2e-3 / taken))),
        )
        for (name, call), taken in zip(calls.items(), seconds, strict=True)
    ]


def timed(seconds: NDArray[np.float64]) -> Row:
    """Return the median and the quartiles over the turns, of the slowest rank in each. seconds: (ranks, turns)."""
    low, median, high = np.percentile(seconds.max(axis=0), [25, 50, 75])
    return {"seconds": float(median), "low": float(low), "high": float(high)}


def compare(
    ours: Sequence[Contestant] | Mapping[str, Call],
    baselines: Mapping[str, Call],
    turns: int,
    comm: Any = None,
    *,
    floor: Call | None = None,
    entries: int | None = None,
) -> list[Row]:
    """Return a row for each of the library's calls and each baseline, measured in the same turns.

    floor: the least work on the same data, such as one read. entries: the number of
    entries in a call.
    """
    named = (
        [Contestant(*item) for item in ours.items()]
        if isinstance(ours, Mapping)
        else list(ours)
    )
    others = [Contestant(*item) for item in baselines.items()]
    last = [Contestant("floor", floor)] if floor else []
    figures = [
        timed(seconds) for seconds in interleave([*named, *others, *last], turns, comm)
    ]
    least = figures[-1]["seconds"] if floor else None
    rows = []
    for each, own in zip(named, figures, strict=False):
        for what, base in zip(baselines, figures[len(named) :], strict=False):
            rows.append(
                {
                    "name": each.name,
                    **own,
                    "baseline": what,
                    "baseline_seconds": base["seconds"],
                    "floor": least,
                    "entries": entries,
                    "speedup": base["seconds"] / own["seconds"],
                }
            )
    return rows


def read_once(values: NDArray[Any]) -> Call:
    """Return a call that reads `values` once with vector instructions: the largest of them as integers."""
    return values.view(f"i{values.itemsize}").max


def until_done(call: Call) -> Call:
    """Return a call that also synchronises the stream."""
    cupy: Any = importlib.import_module("cupy")

    def wait() -> None:
        call()
        cupy.cuda.get_current_stream().synchronize()

    return wait


def missing_gpu() -> str | None:
    """Return why there is no GPU to measure on, and the remedy; None where there is one."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        return "CuPy is not installed: pip install cupy-cuda12x or cupy-cuda13x, as the driver is"
    if not cupy.cuda.is_available():
        return (
            "CuPy sees no GPU here: run it on a machine with one, or leave --device out"
        )
    return None
