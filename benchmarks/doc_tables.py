"""Write the tables of measurements in docs anew, from the JSON files in docs/results.

    benchmarks/tables.sh exchange docs/results && MPI=impi-rt benchmarks/tables.sh exchange docs/results
    python benchmarks/threads.py --json docs/results/threads.json
    python benchmarks/race/race.py --json docs/results/race.json         # benchmarks/race/README.md has all of these
    python benchmarks/doc_tables.py

Each table is between two comments that name it; the rest of its page is left alone. With --check nothing is written:
the exit status is 1 where a page is not what the files give.
"""

import argparse
import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
MPIS = {"exchange": "Open MPI", "exchange-impi-rt": "Intel MPI"}
RANKS = 4, 2


def loaded(name: str) -> dict[str, Any]:
    """Return a file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *rows]]


def ratios(suffix: str = "") -> list[str]:
    """Return the table of steps: milliseconds, and how many times as long MPI's dense sum takes, by MPI and ranks."""
    runs = [loaded(f"{mpi}-{ranks}{suffix}") for mpi in MPIS for ranks in RANKS]
    heads = ["step", *(f"{MPIS[mpi]}, P = {ranks}" for mpi in MPIS for ranks in RANKS)]
    by_name = [{row["name"]: row for row in run["rows"]} for run in runs]
    rows = []
    for name in by_name[0]:
        cells = [f"{1e3 * rows_of[name]['seconds']:.1f} ms, {rows_of[name]['speedup']:.2f}x" for rows_of in by_name]
        density, _, step = name.partition(" ")
        rows.append([f"{100 * float(density):g} %: {step}", *cells])
    dense = [f"{1e3 * max(row['baseline_seconds'] for row in run['rows']):.1f} ms" for run in runs]
    return table(heads, [*rows, ["`MPI_Allreduce`, dense", *dense]])


def threads() -> list[str]:
    """Return the table of threads."""
    found = loaded("threads")["rows"]
    rows = []
    for row in found:
        times = [f"{1e3 * row['seconds'][way]:.2f} ms" for way in ("one thread", "threads", "processes")]
        shares = [row["rate"]["threads"] / row["rate"][way] for way in ("one thread", "processes")]
        rows.append([row["call"], *times, *(f"{share:.2f}" for share in shares)])
    heads = ["25e6 float32", "one thread", "two threads", "two processes, one vector each"]
    return table([*heads, "two threads over one: throughput", "over two processes"], rows)


def race() -> list[str]:
    """Return the tables of the race, one for each rate of the links."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "race"))
    from results import final, settings
    from results import table as of_setting

    found = settings(loaded("race")["rows"])
    best_first = {each: dict(sorted(own.items(), key=lambda pair: final(pair[1]))) for each, own in found.items()}
    return "\n".join(of_setting(*each) for each in best_first.items()).rstrip().split("\n")


def quantisers() -> list[str]:
    """Return the table of relative squared errors."""
    rows = loaded("quantisers")["rows"]
    cells = [[row["quantiser"], str(row["bits"]), *(f"{one:.4f}" for one in row["errors"].values())] for row in rows]
    return table(["quantiser", "bits", *rows[0]["errors"]], cells)


TABLES = {
    "performance.md": {"steps": ratios, "tensors": lambda: ratios("-tensors"), "threads": threads},
    "slow_links.md": {"race": race},
    "compressors.md": {"quantisers": quantisers},
}


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page differs")
    check, differ = parser.parse_args().check, False
    for name, tables in TABLES.items():
        path = ROOT / "docs" / name
        page = before = path.read_text()
        for each, make in tables.items():
            block = "\n".join([f"<!-- {each} -->", "", *make(), "", f"<!-- end of {each} -->"])
            place = rf"<!-- {each} -->.*?<!-- end of {each} -->"
            page, count = re.subn(place, lambda _, b=block: b, page, flags=re.DOTALL)
            assert count == 1, f"{name} has {count} places for the table {each}"
        differ |= page != before
        if not check:
            path.write_text(page)
    return int(check and differ)


if __name__ == "__main__":
    sys.exit(main())
