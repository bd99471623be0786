"""Give one verdict on several runs of `mpicomp tune --check --json FILE`.

    python benchmarks/verdict.py FILE [FILE ...]

A place of the grid is a length, a density and a kind of values in one of the runs.
"""

import json
import sys

from mpicomp_bench.tune import by_place, verdict

AIMS = {  # the least share of the places
    "best": (0.94, '"auto" by the table within 15 % of the best algorithm'),
    "rule_best": (0.80, '"auto" without a table within 15 % of the best algorithm'),
    "rule_dense": (0.90, '"auto" without a table at most 10 % behind dense_allreduce'),
    "gtopk": (0.0, "gTop-k by the table within 15 % of the best algorithm"),
    "rule_gtopk": (0.0, "gTop-k without a table within 15 % of the best algorithm"),
}


def main(paths: list[str]) -> int:
    """Print a line for each run, and the shares of all places; return 0 when the aims are met."""
    total, places, status = dict.fromkeys(AIMS, 0.0), 0, 0
    print(f"{'run':40} {'places':>6} " + " ".join(f"{name:>10}" for name in AIMS))
    for path in paths:
        with open(path) as file:
            rows = json.load(file)["rows"]
        found, count = verdict(rows), len(by_place(rows))
        print(f"{path.rpartition('/')[2]:40} {count:6} " + " ".join(f"{found[name]:10.0%}" for name in AIMS))
        places += count
        total = {name: share + count * found[name] for name, share in total.items()}
    for name, (least, what) in AIMS.items():
        share = total[name] / places
        met = "" if not least else f", aim {least:.0%}: {'met' if share >= least else 'not met'}"
        print(f"{what}: {share:.0%} of {places} places{met}")
        status |= share < least
    return status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
