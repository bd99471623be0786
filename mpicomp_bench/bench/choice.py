"""`mpicomp bench choice`: every algorithm of every collective that chooses one, and "auto", on a grid of vectors."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from collectives.calls.collective import COLLECTIVES
from collectives.calls.first_call import link_of
from mpicomp_bench.bench.data import PATTERNS, draw_sparse
from mpicomp_bench.bench.suite import Options, Suite
from mpicomp_bench.measuring import Call, Row, interleave, paced
from mpicomp_bench.options import add_list, positive, share
from mpicomp_bench.output import Column, figure, text

ABOUT = """\
All algorithms of a place, a line of the table, are interleaved. A time is the median over the
turns of the slowest rank, from a common start; "auto /" is that of "auto" over the best one.
gTop-k selects as many entries as a rank contributes. Algorithms for several ranks on each of
several nodes take part there alone. supports: see `mpicomp bench gtopk --help`.
"""

EXAMPLES = """\
mpirun -n 4 mpicomp bench choice
mpirun -n 4 mpicomp bench choice --lengths 1e5 --densities 0.01 --json p4.json
"""

AUTO = "auto"
# Time of "auto" over that of the best algorithm, at most.
NEAR = 1.15
LENGTHS = [10_000, 100_000, 1_000_000]
DENSITIES = [0.001, 0.01, 0.1, 0.3]
BITS = [8, 4]
CHOOSING = [name for name, each in COLLECTIVES.items() if each.automatic]

COLUMNS: list[Column] = [
    ("collective", "<20", text("collective")),
    ("length", ">8", text("length")),
    ("density", ">8", figure("density", "g")),
    ("supports", "<12", text("supports")),
    ("best", "<19", text("best")),
    ("best ms", ">9", figure("best_seconds", ".3f", 1e3)),
    ("auto /", ">7", figure("ratio", ".2f")),
]


def rows(options: Options, comm: Any) -> Iterator[Row]:
    """Yield a row for each collective and place. seconds: by algorithm; best: the fastest algorithm but "auto".

    supports: for the sum of dense arrays in few bits the bits of a value.
    """
    for length, density, pattern in product(
        options.lengths, options.densities, options.patterns
    ):
        vector = draw_sparse(
            pattern,
            comm.rank,
            comm.size,
            length,
            max(1, round(length * density)),
            "float32",
        )
        place = {"length": length, "density": density, "supports": pattern}
        yield measured("sparse_allreduce", (vector, comm), place, options)
        yield measured("gtopk_allreduce", (vector, comm, vector.nnz), place, options)
    for length, bits in product(options.lengths, BITS):
        array = np.random.default_rng([6, comm.rank]).standard_normal(
            length, np.float32
        )
        place = {"length": length, "density": 1.0, "supports": f"{bits} bits"}
        yield measured("quantised_allreduce", (array, comm, bits), place, options)


def measured(
    collective: str, arguments: Sequence[Any], place: Row, options: Options
) -> Row:
    """Return the row of a collective at a place."""
    comm = arguments[1]
    several = 1 < len(set(link_of(comm).nodes)) < comm.size
    names = [
        name
        for name in COLLECTIVES[collective].algorithms
        if several or not name.startswith("node")
    ]
    calls: dict[str, Call] = {
        name: partial(COLLECTIVES[collective], *arguments, algorithm=name)
        for name in (AUTO, *names)
    }
    times = interleave(paced(calls, comm), options.repeats, comm)
    seconds = {
        name: float(f"{np.median(own.max(axis=0)):.4g}")
        for name, own in zip(calls, times, strict=True)
    }
    best = min(names, key=seconds.__getitem__)
    return {
        "collective": collective,
        **place,
        "best": best,
        "best_seconds": seconds[best],
        "ratio": seconds[AUTO] / seconds[best],
        "seconds": seconds,
    }


def report(options: Options, rows: Sequence[Row]) -> str:
    """Return a line for each collective."""
    lines = []
    for name in CHOOSING:
        ratios = [row["ratio"] for row in rows if row["collective"] == name]
        near = sum(ratio <= NEAR for ratio in ratios)
        lines.append(
            f'{name:22}"auto" is within 15 % of the best algorithm in {near} of {len(ratios)} places'
        )
    lines += [
        f"{name:22}has one algorithm" for name in COLLECTIVES if name not in CHOOSING
    ]
    return "\n".join(lines) + "\n"


def add_options(parser: Any) -> None:
    """Add the options of the suite."""
    add_list(
        parser, "--lengths", LENGTHS, "values of the dense vectors ", type=positive
    )
    add_list(
        parser,
        "--densities",
        DENSITIES,
        "fractions of entries each rank contributes ",
        type=share,
    )
    add_list(
        parser,
        "--patterns",
        ["independent", "shared", "hot"],
        "supports: ",
        choices=PATTERNS,
    )


SUITE = Suite(
    help='every algorithm and "auto", and how often "auto" is near the best',
    about=ABOUT,
    examples=EXAMPLES,
    add_options=add_options,
    rows=rows,
    columns=COLUMNS,
    repeats=15,
    report=report,
)
