"""Timings that mean something on a busy machine: what is compared takes turns, and ratios are of medians."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One comparison. Times in seconds; `floor` is the least that reading the data takes, None where there is none."""

    name: str
    seconds: float
    low: float
    high: float
    baseline: str
    baseline_seconds: float
    floor: float | None = None
    entries: int | None = None

    @property
    def speedup(self) -> float:
        """How many times as long the baseline takes."""
        return self.baseline_seconds / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the ratio, by name."""
        return {**asdict(self), "speedup": self.speedup}

    def __str__(self) -> str:
        floor = f"{self.seconds / self.floor:7.2f}x" if self.floor else f"{'-':>8}"
        rate = f"{self.entries / self.seconds / 1e6:6.0f} M/s" if self.entries else ""
        spread = f"{1e3 * self.low:.3g}-{1e3 * self.high:.3g}"
        times = f"{1e3 * self.seconds:9.3f} {spread:>13} {1e3 * self.baseline_seconds:9.3f}"
        return f"{self.name:53} {times} {self.speedup:7.2f}x {floor} {rate:>10}  {self.baseline}"


HEADER = (
    f"{'':53} {'median ms':>9} {'quartiles':>13} {'base ms':>9} {'speed-up':>8} {'/floor':>8} {'rate':>10}  baseline"
)


def header(what: str) -> str:
    """Return the header with what the rows have in common, such as the number of ranks, above their names."""
    return f"{what:53}{HEADER[53:]}"


@dataclass(frozen=True)
class Prepared:
    """A call, and what restores its arguments before each turn, which is not timed."""

    call: Call
    prepare: Call

    def __call__(self) -> Any:
        """Return what the call does."""
        return self.call()


def taking_turns(calls: Sequence[Call], repeats: int, around: Callable[[Call], float]) -> list[list[float]]:
    """Return the times of each call, in seconds; after one untimed run of each they take turns."""

    def turn(call: Call) -> float:
        if isinstance(call, Prepared):
            call.prepare()
        return around(call)

    for call in calls:
        call()
    return [list(times) for times in zip(*([turn(call) for call in calls] for _ in range(repeats)), strict=True)]


def clocked(call: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long a call takes, in seconds of a clock."""
    start = clock()
    call()
    return clock() - start


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return low, middle, high


def compare(
    name: str,
    ours: Call,
    baselines: Mapping[str, Call],
    repeats: int,
    *,
    floor: Call | None = None,
    entries: int | None = None,
) -> list[Row]:
    """Return a row for each baseline, all of the same turns."""
    calls = [ours, *baselines.values()] + ([floor] if floor else [])
    own, *others = taking_turns(calls, repeats, clocked)
    least = quartiles(others.pop())[1] if floor else None
    low, median, high = quartiles(own)
    return [
        Row(name, median, low, high, what, quartiles(times)[1], least, entries)
        for what, times in zip(baselines, others, strict=True)
    ]


def as_json(rows: Sequence[Any], **about: Any) -> str:
    """Return the rows, and what the run was about, as JSON."""
    return json.dumps({**about, "rows": [row.as_dict() for row in rows]}, indent=1)
