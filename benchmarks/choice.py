"""What "auto" sends over links, beside the best named algorithm: bytes and seconds of sparse sums, without MPI.

    python benchmarks/choice.py [--entries 20000] [--ranks 2 4 8 16] [--network 100mbit] [--supports ...]

Each rank is on a node of its own of the simulated network. Bytes: of the busiest rank, as
counted. Seconds: its rounds and bytes, over the links. Supports: drawn independently; half of
each common to all ranks; the same on all ranks; disjoint. A row has the means and the worst
over these densities and values: 0.1, 1 and 10 %, float32, bfloat16 and signs.
"""

import argparse
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import sparse_allreduce
from collectives.planning.links import Links, links_of
from mpicomp import SparseVector
from mpicomp.compressors.quantised import quantise
from mpicomp_bench.network import Network

SUPPORTS = "independent", "overlapping", "equal", "disjoint"
VALUES = "float32", "bfloat16", "sign"
DENSITIES = 0.001, 0.01, 0.1
AUTO = "auto"


def indices(supports: str, rank: int, ranks: int, length: int, k: int) -> NDArray[Any]:
    """Return the indices of a rank, in order."""
    own = np.random.default_rng([1, rank])
    if supports == "disjoint":
        drawn = np.random.default_rng(2).permutation(length)[: ranks * k]
        return np.sort(drawn[rank * k : (rank + 1) * k])
    alike = {"independent": 0, "overlapping": k // 2, "equal": k}[supports]
    common = np.random.default_rng(0).choice(length, k, replace=False)[:alike]
    others = np.setdiff1d(own.choice(length, min(length, 2 * k), replace=False), common)
    return np.sort(np.concatenate([common, own.permutation(others)[: k - alike]]))


def vector(place: NDArray[Any], rank: int, length: int, kind: str) -> SparseVector:
    """Return a vector at these indices, with values of a kind."""
    rng = np.random.default_rng([2, rank])
    magnitudes = 2 + np.abs(rng.standard_normal(place.size))
    signed = magnitudes * np.sign(rng.standard_normal(place.size))
    plain = SparseVector(place, signed.astype(np.float32), length)
    return plain if kind == "float32" else quantise(plain, kind)


def counted(
    vectors: list[SparseVector], run: Callable[..., Any], links: Links
) -> tuple[int, float]:
    """Return the bytes of the busiest rank, and the seconds, of the second of two sums."""
    network = Network(len(vectors), range(len(vectors)), choice=links)
    for _ in range(2):
        for link in network.links:
            link.clock = link.sent = link.traffic.nbytes = link.reduced = 0
        network.reductions.clear()
        _, rounds = network.run(
            lambda rank, group: run(vectors[rank], group),
            length=vectors[0].length,
            dtype="float32",
            width=None,
        )
    nbytes = max(link.traffic.nbytes for link in network.links)
    round_, _, byte, _ = links.between(1)
    return nbytes, rounds * round_ + nbytes * byte


def ratios(
    supports: str, ranks: int, density: float, kind: str, k: int, links: Links
) -> tuple[str, str, float, float]:
    """Return the best algorithm by bytes and by seconds, and those of "auto" over the best."""
    length = round(k / density)
    vectors = [
        vector(indices(supports, rank, ranks, length, k), rank, length, kind)
        for rank in range(ranks)
    ]
    runs = {**sparse_allreduce.algorithms, AUTO: sparse_allreduce.automatic}
    del runs["node_lanes"]
    found = {name: counted(vectors, run, links) for name, run in runs.items()}
    nbytes, seconds = found.pop(AUTO)
    fewest = min(found, key=lambda name: found[name][0])
    fastest = min(found, key=lambda name: found[name][1])
    return (
        fewest,
        fastest,
        nbytes / found[fewest][0],
        seconds / found[fastest][1],
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--network", type=links_of, default=links_of("100mbit"))
    parser.add_argument("--supports", nargs="+", choices=SUPPORTS, default=SUPPORTS)
    options = parser.parse_args()
    print(
        "supports     ranks  bytes over best: mean worst  seconds: mean worst  worst at"
    )
    for supports, ranks in product(options.supports, options.ranks):
        rows = {}
        for density, kind in product(DENSITIES, VALUES):
            if supports == "disjoint" and ranks * density > 1:
                continue
            rows[density, kind] = ratios(
                supports, ranks, density, kind, options.entries, options.network
            )
        nbytes = [row[2] for row in rows.values()]
        seconds = [row[3] for row in rows.values()]
        where = max(rows, key=lambda place: rows[place][3])
        print(
            f"{supports:12} {ranks:5} {np.mean(nbytes):22.3f} {max(nbytes):5.3f}"
            f" {np.mean(seconds):14.3f} {max(seconds):5.3f}  {where} {rows[where][1]}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
