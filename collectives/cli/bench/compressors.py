"""`mpicomp bench compressors`: what every compressor takes, keeps and sends, against exact top-k and one read."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cli.bench.contestants import BASELINE, WITHOUT_TARGET, ready
from collectives.cli.bench.data import draw
from collectives.cli.bench.floor import read_once
from collectives.cli.bench.progress import progress
from collectives.cli.bench.timing import Call, Row, clocked, quartiles, taking_turns
from mpicomp import Compressor, SparseVector
from mpicomp.codec import encoded_nbytes, smallest

Array = NDArray[Any]

HEADER = (
    f"{'distribution':12} {'density':>7} {'compressor':18} {'median ms':>9} {'quartiles':>13} {'/top-k':>7} "
    f"{'/read':>7} {'achieved':>9} {'first':>7} {'/target':>7} {'captured':>9} {'/top-k':>7} {'B/entry':>7}"
)

_WARM_CALLS, _WARM_SECONDS = 3, 0.002  # one of the long calls is enough


@dataclass(frozen=True, kw_only=True)
class Selection(Row):
    """One compressor on one gradient: its time, that of exact top-k (the baseline), what it kept, what it sends.

    achieved: entries over length, captured: see `captured`; both the mean over the timed calls. first: what the first
    call achieved. target: None for a method without one. captured_by_top_k: by the baseline. entries, message_nbytes:
    of the last call.
    """

    distribution: str
    length: int
    density: float
    compressor: str
    achieved: float
    first: float
    target: float | None
    captured: float
    captured_by_top_k: float
    message_nbytes: int

    @property
    def share_of_target(self) -> float | None:
        """What was achieved over what was asked for; None for a method without a target."""
        return self.achieved / self.target if self.target else None

    @property
    def first_share_of_target(self) -> float | None:
        """What the first call achieved over what was asked for; None for a method without a target."""
        return self.first / self.target if self.target else None

    @property
    def share_of_top_k(self) -> float:
        """What was captured over what exact top-k captures."""
        return self.captured / self.captured_by_top_k

    @property
    def bytes_per_entry(self) -> float:
        """Bytes of the smallest message, header included, over its entries."""
        return self.message_nbytes / max(1, self.entries or 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the ratios, by name."""
        ratios = "share_of_target", "first_share_of_target", "share_of_top_k", "bytes_per_entry"
        return {**super().as_dict(), **{name: getattr(self, name) for name in ratios}}

    def __str__(self) -> str:
        spread = f"{1e3 * self.low:.3g}-{1e3 * self.high:.3g}"
        times = (
            f"{1e3 * self.seconds:9.3f} {spread:>13} {1 / self.speedup:7.2f} {self.seconds / (self.floor or 1):7.2f}"
        )
        shares = self.first_share_of_target, self.share_of_target
        of_target = " ".join(f"{'-':>7}" if share is None else f"{share:7.3f}" for share in shares)
        kept = f"{self.achieved:9.5f} {of_target} {self.captured:9.5f} {self.share_of_top_k:7.3f}"
        which = f"{self.distribution:12} {self.density:7g} {self.compressor:18}"
        return f"{which} {times} {kept} {self.bytes_per_entry:7.2f}"


@dataclass
class Trial:
    """A compressor at work on one gradient; what it returns is looked at between the timed calls."""

    compressor: Compressor
    first: float  # what its first call achieved
    gradient: Array
    square: float  # of the norm of the gradient
    vector: SparseVector = field(init=False)
    achieved: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        """Compress the gradient, without a residual."""
        self.vector = self.compressor.compress(self.gradient, gradient=self.gradient)

    def note(self) -> None:
        """Take down what the last call kept."""
        self.achieved.append(self.vector.density)
        self.captured.append(captured(self.gradient, self.vector, self.square))


def rows(
    names: Sequence[str],
    distributions: Sequence[str],
    densities: Sequence[float],
    length: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Selection]:
    """Yield a row for each compressor of every distribution and density, the baseline first.

    All compressors of a distribution and density take turns with one read of the gradient.
    """
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    with closing(progress(len(distributions) * len(densities) * repeats * (len(names) + 1))) as bar:
        turns = partial(taking_turns, repeats=repeats, around=partial(watched, clock, bar))
        for distribution in distributions:
            gradient = draw(distribution, length)
            for density in densities:
                found = compare_all(names, distribution, gradient, density, turns)
                bar.clear()
                yield from found


def watched(clock: Callable[[], float], bar: Any, call: Call) -> float:
    """Return how long a call takes; note what a compressor did in it."""
    begin = time.perf_counter()
    for _ in range(_WARM_CALLS):  # else what is timed depends on the caches and the heap that another one left
        call()
        if time.perf_counter() > begin + _WARM_SECONDS:
            break
    seconds = clocked(call, clock)
    if isinstance(call, Trial):
        call.note()
    bar.update()
    return seconds


def compare_all(
    names: Sequence[str],
    distribution: str,
    gradient: Array,
    density: float,
    turns: Callable[[Sequence[Call]], list[list[float]]],
) -> list[Selection]:
    """Return a row for each compressor on one gradient at one density; the first one is the baseline.

    turns: from calls to the times of each.
    """
    square = float(np.square(gradient, dtype=np.float64).sum())
    trials = [Trial(*ready(name, density, gradient), gradient, square) for name in names]
    *times, reads = turns([*trials, read_once(gradient)])
    spreads, floor, found = [quartiles(taken) for taken in times], quartiles(reads)[1], []
    for name, trial, (low, median, high) in zip(names, trials, spreads, strict=True):
        row = Selection(
            name=f"{distribution} {density:g} {name}",
            seconds=median,
            low=low,
            high=high,
            baseline=BASELINE,
            baseline_seconds=spreads[0][1],
            floor=floor,
            entries=trial.vector.nnz,
            distribution=distribution,
            length=gradient.size,
            density=density,
            compressor=name,
            achieved=statistics.fmean(trial.achieved),
            first=trial.first,
            target=None if name in WITHOUT_TARGET else density,
            captured=statistics.fmean(trial.captured),
            captured_by_top_k=statistics.fmean(trials[0].captured),
            message_nbytes=encoded_nbytes(trial.vector, smallest(trial.vector)),
        )
        found.append(row)
    return found


def captured(gradient: Array, vector: SparseVector, square: float) -> float:
    """Return 1 - |gradient - sent|^2 / |gradient|^2: the share of the squared norm that leaves no residual.

    Where the values travel as they are, it is their share of the squared norm. square: |gradient|^2, above 0.
    """
    sent = vector.values.astype(np.float64)
    return float((2 * gradient[vector.indices] - sent) @ sent) / square
