#!/usr/bin/env python3
"""Run an experiment on the claims of the papers: its rows go to experiments/results/papers, its figure to docs/figures.

    python experiments/papers/papers.py E3              # runs what the file of rows has not; then its table
    python experiments/papers/papers.py E3 --again      # runs all of it, into build/papers; then both tables
    python experiments/papers/papers.py E3 --list       # prints the commands
    python experiments/papers/papers.py --figures       # the figures of all files

Each run is a command of experiments/training, of compared.py beside this file, or of
`mpicomp bench`. Those that the file has are not run again: an interrupted experiment
continues. The rows of all experiments are committed: --again repeats one. README.md
beside this file has the experiments.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from figures import FIGURES
from tables import TABLES

from experiments import EXPERIMENTS, Run
from mpicomp_bench.measuring import Row
from mpicomp_bench.options import Parser
from mpicomp_bench.output import as_json, machine

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS, DRAWN = ROOT / "experiments" / "results" / "papers", ROOT / "docs" / "figures"
TESTBED = [
    sys.executable,
    str(ROOT / "benchmarks" / "testbed" / "testbed.py"),
    "--name",
    "papers",
]
PROGRAMS = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "MPICOMP_WAIT": "backoff",
}
TIME_LIMIT = 3600.0  # seconds of a run
# of a run, that its rows get
COMMON = "task", "ranks", "steps", "batch", "seeds", "parameters"


@contextmanager
def launcher(run: Run) -> Iterator[list[str]]:
    """Have what starts a run's ranks: mpirun, or hosts with links of its rate."""
    if run.rate is None:
        yield ["mpirun", "-n", f"{run.ranks}"]
        return
    subprocess.run([*TESTBED, "up", f"{run.ranks}", run.rate], check=True)
    try:
        yield [*TESTBED, "run"]
    finally:
        subprocess.run([*TESTBED, "down"], check=True)


def rows_of(run: Run) -> list[Row]:
    """Run, and return the rows."""
    with tempfile.TemporaryDirectory() as folder, launcher(run) as launched:
        file = Path(folder, "rows.json")
        program = (
            [str(ROOT / run.script)] if run.script else ["-m", "mpicomp_bench", "bench"]
        )
        words = [
            sys.executable,
            "-m",
            "mpi4py",
            *program,
            *run.options,
            "--json",
            str(file),
        ]
        environment = {**os.environ, **ENVIRONMENT}
        subprocess.run(
            [*launched, *words],
            env=environment,
            stdout=sys.stderr,
            check=True,
            timeout=TIME_LIMIT,
        )
        about = json.loads(file.read_text())
    common = {name: about[name] for name in COMMON if name in about}
    return [
        {"command": run.command, "link": run.rate, **common, **row}
        for row in about["rows"]
    ]


def complete(name: str, path: Path) -> list[Row]:
    """Run what of an experiment the file has not, write it after each run, and return all rows."""
    rows = rows_in(path)
    for run in EXPERIMENTS[name]():
        if run.command not in {row["command"] for row in rows}:
            sys.stderr.write(f"{run.command}\n")
            rows += rows_of(run)
            part = path.with_suffix(".part")
            part.write_text(as_json(rows, {"experiment": name, **machine()}))
            part.replace(path)
    return rows


def rows_in(path: Path) -> list[Row]:
    """Return the rows of a file; none where there is none."""
    found: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


def main() -> int:
    """Run what is missing, and draw."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "experiments", nargs="*", metavar="E", help=f"some of {', '.join(EXPERIMENTS)}"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the commands, and run nothing"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="run all commands, and leave the committed rows alone",
    )
    parser.add_argument(
        "--figures",
        action="store_true",
        help="run nothing, and draw what there is; all by default",
    )
    options = parser.parse_args()
    if unknown := [name for name in options.experiments if name not in EXPERIMENTS]:
        parser.error(f"got {unknown[0]}: expected some of {', '.join(EXPERIMENTS)}")
    for folder in RESULTS, ROOT / "build" / "papers":
        folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    for name in options.experiments or (EXPERIMENTS if options.figures else ()):
        if options.list:
            print("\n".join(run.command for run in EXPERIMENTS[name]()))
            continue
        path = RESULTS / f"{name}.json"
        before = rows_in(path)
        if options.again:
            again(name, before)
            continue
        rows = before if options.figures else complete(name, path)
        if rows and (options.figures or len(rows) > len(before)):
            FIGURES[name](rows, DRAWN / f"papers-{name.lower()}.svg")
        if not options.figures:
            show(
                name,
                rows,
                f"{path.relative_to(ROOT)}; --again runs its {len({row['command'] for row in rows})} commands",
            )
    return 0


def again(name: str, committed: Sequence[Row]) -> None:
    """Run all of an experiment, into build/papers, and print its table below the committed one."""
    folder = ROOT / "build" / "papers"
    path = folder / f"{name}.json"
    rows = complete(name, path)
    FIGURES[name](rows, folder / f"papers-{name.lower()}.svg")
    show(name, committed, "committed")
    show(name, rows, f"{path.relative_to(ROOT)}: delete it to run once more")


def show(name: str, rows: Sequence[Row], source: str) -> None:
    """Print the table that docs/contributing/papers.md reads a claim from."""
    print(f"{name} ({source})", *TABLES[name](rows), "", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
