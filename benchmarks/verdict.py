"""Give one verdict on several runs of `mpicomp tune --check --json FILE`.

    python benchmarks/verdict.py FILE [FILE ...] [--json FILE]

A place of the grid is a length, a density and a kind of values in one of the runs.
"""

import argparse
import json
import pathlib
import sys

from mpicomp_bench.tune import by_place, verdict

AIMS = {  # the least share of the places
    "best": (0.94, '"auto" by the table within 15 % of the best algorithm'),
    "rule_best": (0.80, '"auto" without a table within 15 % of the best algorithm'),
    "rule_dense": (0.90, '"auto" without a table at most 10 % behind dense_allreduce'),
    "gtopk": (0.0, "gTop-k by the table within 15 % of the best algorithm"),
    "rule_gtopk": (0.0, "gTop-k without a table within 15 % of the best algorithm"),
}


def main() -> int:
    """Print a line for each run, and the shares of all places; return 0 when the aims are met."""
    asked = argparse.ArgumentParser(description="Give one verdict on several runs of `mpicomp tune --check`.")
    asked.add_argument("paths", nargs="+", metavar="FILE", help="what `mpicomp tune --check --json FILE` wrote")
    asked.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the shares of each run")
    options = asked.parse_args()
    total, places, status = dict.fromkeys(AIMS, 0.0), 0, 0
    shares = {}
    print(f"{'run':40} {'places':>6} " + " ".join(f"{name:>10}" for name in AIMS))
    for path in options.paths:
        with open(path) as file:
            rows = json.load(file)["rows"]
        found, count = verdict(rows), len(by_place(rows))
        shares[pathlib.Path(path).stem] = {"places": count, **{name: found[name] for name in AIMS}}
        print(f"{path.rpartition('/')[2]:40} {count:6} " + " ".join(f"{found[name]:10.0%}" for name in AIMS))
        places += count
        total = {name: share + count * found[name] for name, share in total.items()}
    for name, (least, what) in AIMS.items():
        share = total[name] / places
        met = "" if not least else f", aim {least:.0%}: {'met' if share >= least else 'not met'}"
        print(f"{what}: {share:.0%} of {places} places{met}")
        status |= share < least
    if options.json:
        options.json.write_text(json.dumps(shares, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
