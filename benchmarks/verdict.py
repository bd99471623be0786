"""Give one verdict on several runs of `mpicomp tune --check --json FILE`.

    python benchmarks/verdict.py FILE [FILE ...]

A place of the grid is a length and a density in one of the runs; its best algorithm is the fastest of sparse_allreduce.
"""

import json
import statistics
import sys

from collectives.cli.tune import checking


def checked(path: str) -> list[checking.Checked]:
    """Return the rows of a file."""
    with open(path) as file:
        rows = json.load(file)["rows"]
    return [checking.Checked(**{name: row[name] for name in checking.Checked.__dataclass_fields__}) for row in rows]


def main(paths: list[str]) -> int:
    """Print a line for each run and for all of them, and what the model gets wrong; return 0 when the aims are met."""
    runs = {path: checked(path) for path in paths}
    verdicts = {path: checking.verdict(rows) for path, rows in runs.items()}
    places = {path: len({(row.length, row.density) for row in rows}) for path, rows in runs.items()}
    print(HEADER)
    for path, found in verdicts.items():
        print(line(path.rpartition("/")[2], places[path], found))
    rows = [row for run in runs.values() for row in run]
    whole = sum(places.values())
    total = {name: sum(verdicts[path][name] * places[path] for path in paths) / whole for name in SHARES}
    total["median_error"] = statistics.median(row.error for row in rows if row.error is not None)
    print(line("all", whole, total))
    print(by_algorithm(rows))
    met = total["median_error"] < 0.25, total["best"] >= 0.9, total["dense"] == 1
    print("aims:", ", ".join(f"{what} {'met' if so else 'not met'}" for what, so in zip(AIMS, met, strict=True)))
    return 0 if all(met) else 1


def by_algorithm(rows: list[checking.Checked]) -> str:
    """Return lines that say by what factor predictions of each algorithm are off, in the median."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.predicted is not None:
            ratios.setdefault(f"{row.operation} {row.algorithm}", []).append(row.predicted / row.seconds)
    return "\n".join(f"  {name}: predicted over measured {statistics.median(own):.2f}" for name, own in ratios.items())


SHARES = ("best", "dense", "rule_best", "rule_dense")
HEADER = (
    f"{'run':40} {'places':>6} {'median error':>12} {'near best':>10} {'near dense':>10} "
    f"{'rule: best':>10} {'dense':>6}"
)
AIMS = (
    "median error under 25 %",
    '"auto" within 15 % of the best in 90 % of the grid',
    "nowhere over 10 % behind dense",
)


def line(name: str, places: int, found: dict[str, float]) -> str:
    """Return a line of the table."""
    shares = f"{found['best']:10.0%} {found['dense']:10.0%} {found['rule_best']:10.0%} {found['rule_dense']:6.0%}"
    return f"{name:40} {places:6} {found['median_error']:12.0%} {shares}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
