"""Draw the bytes that a rank sends against the number of ranks, for docs/collectives.md.

    python docs/figures/bytes.py          # needs matplotlib; writes bytes.svg beside this file

The bytes are those of the closed formulas by which `mpicomp explain` predicts.
"""

import sys
from pathlib import Path

from style import target

sys.path[:0] = [str(Path(__file__).parents[2] / name) for name in ("", "benchmarks")]
from rendering import draw

from collectives.planning.choice import Case
from mpicomp_bench import formulas

LENGTH, DENSITY = 25_000_000, 0.001
RANKS = [2**power for power in range(1, 11)]
FORMULAS = {
    f"{collective}, {name}": formulas.FORMULAS[collective][name]
    for collective, names in (
        ("sparse_allreduce", ("allgather", "recursive_doubling", "split_allgather")),
        ("gtopk_allreduce", ("recursive_doubling", "exact")),
    )
    for name in names
}
CURVES = {
    "dense_allreduce": formulas.dense_mpi,
    **FORMULAS,
    "sparse_reduce_scatter": formulas.split,
}

if __name__ == "__main__":
    cases = [Case(ranks, LENGTH, DENSITY * LENGTH) for ranks in RANKS]
    curves = {
        name: [formula(case)[2] for case in cases] for name, formula in CURVES.items()
    }
    panel = {
        "lines": [
            {"label": name, "x": RANKS, "y": nbytes} for name, nbytes in curves.items()
        ],
        "title": f"{LENGTH / 1e6:g}e6 float32, density {100 * DENSITY:g} %, independent supports",
        "xlabel": "ranks, each on a node",
        "ylabel": "bytes that the busiest rank sends",
        "xscale": "log",
        "yscale": "log",
        "xticks": (RANKS, [str(ranks) for ranks in RANKS]),
    }
    draw([[panel]], target("bytes"))
