"""`mpicomp bench compressors`: time, captured norm and bytes of every compressor, against exact top-k and one read."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpicomp import (
    AdaComp,
    AggregationAware,
    ChunkedTopK,
    Compressor,
    Dense,
    Quantised,
    SIDCo,
    SparseVector,
    TopK,
)
from mpicomp.arrays import Array
from mpicomp.codec import encoded_nbytes, smallest
from mpicomp_bench.bench.data import FAMILIES, draw
from mpicomp_bench.bench.suite import Options, Suite
from mpicomp_bench.files import FileType
from mpicomp_bench.measuring import Contestant, Row, interleave, read_once, timed
from mpicomp_bench.options import add_list, share
from mpicomp_bench.output import Column, figure, quartiles, text

BASELINE = "TopK"
# SIDCo's fits came within 5 % in 26 calls at most, on all of `data` at 0.01 and 0.001.
SETTLING_CALLS = 30

CHUNK = 4096


def chunked(density: float, chunk: int = CHUNK) -> ChunkedTopK:
    """Return the compressor that selects this fraction of every chunk, at least one entry."""
    return ChunkedTopK(max(1, round(density * chunk)), chunk)


COMPRESSORS: dict[str, Callable[[float], Compressor]] = {
    BASELINE: TopK,
    "ChunkedTopK": chunked,
    **{
        f"SIDCo-{fit}": partial(SIDCo, distribution=fit)
        for fit in ("exponential", "pareto", "gamma")
    },
    "AggregationAware": AggregationAware,
    **{
        f"Quantised-{form}": lambda density, form=form: Quantised(TopK(density), form)  # type: ignore[misc]
        for form in ("float16", "bfloat16", "two_bit", "sign")
    },
    "ChunkedTopK-two_bit": lambda density, **settings: Quantised(
        chunked(density, **settings), "two_bit"
    ),
    "AdaComp": lambda density: AdaComp(),
    "Dense": lambda density: Dense(),
}
# Compressors whose number of entries does not depend on the density.
WITHOUT_TARGET = "AdaComp", "Dense"

ABOUT = f"""\
All calls are interleaved, in one process. A time is the median over the turns, also as a ratio to
exact top-k (TopK, always included) and to one read of the gradient.

  /target    achieved over wanted density, of the first call and of later ones
  captured   1 - |gradient - sent|^2 / |gradient|^2; "/top-k" is over what exact top-k captures
  B/entry    bytes of the smallest message (mpicomp.codec), header included, over its entries

Before it is timed a compressor is called until its state has settled: SIDCo {SETTLING_CALLS} times, so that its
first call shows the fit alone. AggregationAware observes what it sent itself. "achieved" and
"captured" are means over one call a turn. There is no residual: AdaComp sees a first step.
An untimed call of the same compressor precedes each timed one.
"""

EXAMPLES = """
mpicomp bench compressors --distributions normal cauchy --json compressors.json
mpicomp bench compressors --captured gradients.npz --densities 0.001 --compressors TopK AdaComp
"""

COLUMNS: list[Column] = [
    ("distribution", "<12", text("distribution")),
    ("density", ">7", figure("density", "g")),
    ("compressor", "<18", text("compressor")),
    ("median ms", ">9", figure("seconds", ".3f", 1e3)),
    ("quartiles", ">13", quartiles),
    ("/top-k", ">7", lambda row: f"{1 / row['speedup']:.2f}"),
    ("/read", ">7", lambda row: f"{row['seconds'] / row['floor']:.2f}"),
    ("achieved", ">9", figure("achieved", ".5f")),
    ("first", ">7", figure("first_share_of_target", ".3f")),
    ("/target", ">7", figure("share_of_target", ".3f")),
    ("captured", ">9", figure("captured", ".5f")),
    ("/top-k", ">7", figure("share_of_top_k", ".3f")),
    ("B/entry", ">7", figure("bytes_per_entry", ".2f")),
]


def rows(options: Options, comm: Any) -> Iterator[Row]:
    """Yield a row for each compressor of every distribution and density, the baseline first.

    seconds; floor: seconds of one read of the gradient. achieved: entries over length;
    captured: see `captured`; both are means over one call a turn. first: the density of
    the first call. target: None for a method without one. entries, message_nbytes: of
    the last call.
    """
    clock = time.thread_time if options.cpu_time else time.perf_counter
    names = [
        BASELINE,
        *(
            name
            for name in options.compressors
            if name not in (BASELINE, *options.skipped)
        ),
    ]
    for distribution, gradient in gradients(options):
        for density in options.densities:
            about = {
                "distribution": distribution,
                "length": gradient.size,
                "density": density,
            }
            yield from compared(names, about, gradient, options.repeats, clock)


@FileType
def captured_file(path: Path) -> dict[str, Array]:
    """Return the vectors of floats in an npz file, by name, as experiments/training/train.py --capture writes them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file}
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"got {str(path)!r}: {error}; expected a file of --capture"
        ) from None
    if not found or any(
        each.ndim != 1 or each.dtype.kind != "f" or not each.any()
        for each in found.values()
    ):
        raise argparse.ArgumentTypeError(
            f"got {str(path)!r}: expected vectors of floats, none of zeros alone"
        )
    return found


def gradients(options: Options) -> Iterator[tuple[str, Array]]:
    """Yield the gradients, by name: captured ones, repeated to the length; else one of each distribution."""
    for name, captured in (options.captured or {}).items():
        yield name, np.resize(captured, options.length)
    for distribution in () if options.captured else options.distributions:
        yield distribution, draw(distribution, options.length)


def compared(
    names: Sequence[str],
    about: Row,
    gradient: Array,
    turns: int,
    clock: Callable[[], float],
) -> Iterator[Row]:
    """Yield a row for each compressor on one gradient; their calls and one read of it are interleaved."""
    square = float(np.square(gradient, dtype=np.float64).sum())
    density = about["density"]
    contestants = []
    first = {}
    last = {}
    kept: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        compressor, first[name] = ready(name, density, gradient)
        compress = partial(compressor.compress, gradient, gradient=gradient)
        kept[name] = []

        def rehearse(name: str = name, compress: Any = compress) -> None:
            last[name] = vector = compress()
            kept[name].append((vector.density, captured(gradient, vector, square)))

        contestants.append(Contestant(name, compress, before=rehearse))
    *times, reads = map(
        timed,
        interleave(
            [*contestants, Contestant("read", read_once(gradient))], turns, clock=clock
        ),
    )
    of_top_k = statistics.fmean(share for _, share in kept[BASELINE])
    for name, figures in zip(names, times, strict=True):
        achieved, share = map(statistics.fmean, zip(*kept[name], strict=True))
        target = None if name in WITHOUT_TARGET else density
        nbytes = encoded_nbytes(last[name], smallest(last[name]))
        yield {
            **about,
            "compressor": name,
            **figures,
            "baseline": BASELINE,
            "baseline_seconds": times[0]["seconds"],
            "speedup": times[0]["seconds"] / figures["seconds"],
            "floor": reads["seconds"],
            "entries": last[name].nnz,
            "achieved": achieved,
            "first": first[name],
            "target": target,
            "share_of_target": target and achieved / target,
            "first_share_of_target": target and first[name] / target,
            "captured": share,
            "captured_by_top_k": of_top_k,
            "share_of_top_k": share / of_top_k,
            "message_nbytes": nbytes,
            "bytes_per_entry": nbytes / max(1, last[name].nnz),
        }


def ready(name: str, density: float, gradient: Array) -> tuple[Compressor, float]:
    """Return a compressor whose state has settled on this gradient, and the density of its first call.

    The controller of SIDCo takes SETTLING_CALLS; AggregationAware observes its own
    vector.
    """
    compressor = COMPRESSORS[name](density)
    first = compressor.compress(gradient, gradient=gradient)
    if isinstance(compressor, SIDCo):
        for _ in range(SETTLING_CALLS - 1):
            compressor.compress(gradient, gradient=gradient)
    elif isinstance(compressor, AggregationAware):
        compressor.observe(first)
    return compressor, first.density


def captured(gradient: Array, vector: SparseVector, square: float) -> float:
    """Return 1 - |gradient - sent|^2 / |gradient|^2: the share of the squared norm that leaves no residual.

    For values that are not quantised this is their share of the squared norm. square: |gradient|^2, above 0.
    """
    sent = vector.values.astype(np.float64)
    return float((2 * gradient[vector.indices] - sent) @ sent) / square


def without_missing(options: Options, comm: Any) -> None:
    """Remove the compressors that need a missing package, with a message."""
    options.skipped = {}
    few = np.arange(1, 9, dtype=np.float32)
    for name in options.compressors:
        try:
            COMPRESSORS[name](0.5).compress(few, gradient=few)
        except ImportError as error:
            options.skipped[name] = str(error)
            sys.stderr.write(f"{name} is left out: {error}\n" if comm.rank == 0 else "")


def add_options(parser: Any) -> None:
    """Add the options of the suite."""
    add_list(
        parser,
        "--densities",
        [0.1, 0.01, 0.001],
        "fractions of entries to send ",
        type=share,
    )
    add_list(
        parser,
        "--distributions",
        list(FAMILIES),
        "distributions of the values: ",
        choices=list(FAMILIES),
    )
    about = "gradients of experiments/training/train.py --capture, repeated to --length (the distributions)"
    parser.add_argument("--captured", type=captured_file, metavar="FILE", help=about)
    add_list(
        parser,
        "--compressors",
        list(COMPRESSORS),
        "compressors: ",
        choices=list(COMPRESSORS),
    )
    about = (
        "count the time in which the thread has a core, for a busy machine (wall clock)"
    )
    parser.add_argument("--cpu-time", action="store_true", help=about)


SUITE = Suite(
    help="time, density, captured norm and bytes of every compressor, against exact top-k",
    about=ABOUT,
    examples=EXAMPLES,
    add_options=add_options,
    rows=rows,
    length=1_000_000,
    columns=COLUMNS,
    alone=True,
    refuse=without_missing,
)
