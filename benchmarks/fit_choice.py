"""Fit the constants of predicted bytes, and of seconds in shared memory, and print them beside the code's.

    benchmarks/tables.sh choice docs/results      # measures every algorithm on 2, 4 and 8 ranks
    python benchmarks/fit_choice.py               # needs scipy

Bits of values are means over encoded vectors. The predicted seconds of
`mpicomp_bench.formulas` are fitted to logarithms of the measured ones, with independent
supports; a constant is kept near that of the code where the times say little of it.
"auto" chooses by estimates with fewer terms: how often these are right is printed last.
"""

import json
import math
import pathlib
import sys
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.planning import links
from collectives.planning.choice import Case, choose
from collectives.planning.links import Links
from mpicomp import SparseVector, TopK
from mpicomp.codec import smallest
from mpicomp.compressors.quantised import quantise
from mpicomp.vector import add_up
from mpicomp_bench import formulas
from mpicomp_bench.bench.choice import AUTO, NEAR
from mpicomp_bench.bench.data import PATTERNS, draw_sparse
from mpicomp_bench.formulas import predicted

RESULTS = pathlib.Path(__file__).parent.parent / "docs" / "results"
FITTED = {  # by module
    links: ("LATENCY_INSIDE", "BYTE_INSIDE", "MERGED", "SWITCH"),
    formulas: ("SUMMED", "FILLED", "ADDED"),
}
NAMES = [(module, name) for module, names in FITTED.items() for name in names]
SUPPORTS = "independent", "8 bits", "4 bits"
LENGTH = 200_000  # of the encoded vectors
FORMS = None, "bfloat16", "sign", "two_bit"
# the pull of each constant towards that of the code: of a time that is off by this
# factor's logarithm
KEPT = 0.3


def places() -> list[tuple[str, str, Case, Links, dict[str, float]]]:
    """Return the measured places: the supports, the collective, the case, the links, the seconds of each algorithm."""
    found = []
    for path in sorted(RESULTS.glob("choice-*.json")):
        run = json.loads(path.read_text())
        ranks, own = run["ranks"], Links(0.0, 1.0, max(1.0, run["ranks"] / run["cpus"]))
        for row in run["rows"]:
            supports = row["supports"]
            bits = int(supports[0]) if supports.endswith("bits") else None
            entries = max(1, round(row["length"] * row["density"]))
            case = Case(ranks, row["length"], entries, ranks, bits=bits)
            seconds = {
                name: own for name, own in row["seconds"].items() if name != AUTO
            }
            found.append((supports, row["collective"], case, own, seconds))
    return found


def slowdowns() -> dict[tuple[str, int], list[float]]:
    """Return the measured time of what "auto" takes over the least of each place, by collective and number of ranks."""
    found: dict[tuple[str, int], list[float]] = {}
    for _, collective, case, own, seconds in places():
        chosen = choose(collective, case, own)
        if (collective, case.ranks) == ("sparse_allreduce", 2):
            # the vectors are exchanged without a choice
            chosen = "recursive_doubling"
        slowdown = seconds[chosen] / min(seconds.values())
        found.setdefault((collective, case.ranks), []).append(slowdown)
    return found


def fractions() -> dict[str, float]:
    """Return the bits of a value as coded over those in memory: means over ranks, densities and supports."""
    found: dict[str, list[float]] = {"FLOATS": [], "SUMS": [], "HALF_SUMS": []}
    for ranks, density, form, pattern in product(
        (4, 8), (0.001, 0.01, 0.1), FORMS, PATTERNS
    ):
        vectors = []
        for rank in range(ranks):
            support = draw_sparse(
                pattern, rank, ranks, LENGTH, round(density * LENGTH), "float32"
            )
            gradient = np.random.default_rng(rank).standard_normal(LENGTH, np.float32)
            largest = support.with_values(TopK(k=support.nnz).compress(gradient).values)
            vectors.append(largest if form is None else quantise(largest, form))
        if form is None:
            found["FLOATS"] += map(coded, vectors)
        if form == "bfloat16":
            found["HALF_SUMS"].append(coded(add_up(vectors)))
        elif pattern != "disjoint":
            found["SUMS"].append(coded(add_up(vectors)))
    return {name: float(np.mean(each)) for name, each in found.items()}


def coded(vector: SparseVector) -> float:
    """Return the bytes of the values as coded over those in memory."""
    return smallest(vector)[1].nbytes(vector.nnz) / vector.values.nbytes


def main() -> int:
    """Fit and print the constants."""
    from scipy.optimize import least_squares

    for name, fraction in fractions().items():
        print(f"{name:16} {getattr(formulas, name):10.3g} fitted {fraction:10.3g}")
    measured = [place for place in places() if place[0] in SUPPORTS]
    before = np.log([getattr(module, name) for module, name in NAMES])

    def misses(logarithms: NDArray[np.float64]) -> list[float]:
        for (module, name), each in zip(NAMES, logarithms, strict=True):
            setattr(module, name, math.exp(each))
        found = list(KEPT * (logarithms - before))
        for _, collective, case, own, seconds in measured:
            taken: dict[str, Any] = predicted(collective, case, own)
            found += [
                math.log(taken[name][0] / seconds[name])
                for name in taken.keys() & seconds.keys()
            ]
        return found

    after = least_squares(misses, before, loss="soft_l1").x
    for (_, name), old, new in zip(NAMES, np.exp(before), np.exp(after), strict=True):
        print(f"{name:16} {old:10.3g} fitted {new:10.3g}")
    for what, each in ("fitted", after), ("of the code", before):
        factor = math.exp(np.median(np.abs(misses(each)[len(NAMES) :])))
        print(f"constants {what}: times within a factor of {factor:.2f} (median)")
    near = np.mean(np.concatenate([*slowdowns().values()]) <= NEAR)
    print(f'"auto" is within 15 % of the best in {near:.0%}')
    return 0


if __name__ == "__main__":
    sys.exit(main())
