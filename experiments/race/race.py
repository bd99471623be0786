#!/usr/bin/env python3
"""The race: loss against seconds and bytes of what people train with over slow links, on hosts of the testbed.

    sudo env PATH=$PATH python experiments/race/race.py --json experiments/results/race.json
    sudo env PATH=$PATH python experiments/race/race.py --rates 20mbit --delay 10 --json experiments/results/race.json
    python experiments/race/race.py --show --schedule linear \
      --json experiments/results/race.json --plot docs/figures/race.svg \
      --plot-bytes docs/figures/race-bytes.svg

Every method trains the same model from the same start on the same batches for the same
number of seconds. Rows that the JSON file has already are not measured again, so an
interrupted run continues. Each sitting has a row `alone`, of ranks that never
communicate, which says how fast the machine was. README.md beside this file has the
methods.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from joining import ALONE, is_known, rate_of
from losses import of
from plan import optimizer_of
from results import (
    NBYTES,
    SECONDS,
    SETTING,
    key,
    name_of,
    plot,
    settings,
    sittings,
    table,
)

from mpicomp_bench.files import check_files, new_file, write
from mpicomp_bench.measuring import Row
from mpicomp_bench.options import Parser, above_zero, add_list, not_negative, positive
from mpicomp_bench.output import write_rows

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rendering import new_figure

HERE = Path(__file__).resolve().parent
TESTBED = HERE.parents[1] / "benchmarks" / "testbed" / "testbed.py"
RANK = HERE / "rank.py"
HOOKS = ["dense", "fp16", "powersgd-2", "powersgd-8"]
EXCHANGES = [
    "topk-0.01",
    "few-bits-8",
    "few-bits-4",
    "in-basis-8",
    "in-basis-two-bit-8",
]
LOCAL = [
    "diloco-10",
    *(f"local-sparse-{every}" for every in (2, 5, 10)),
    "local-few-bits-10",
]
METHODS = [*HOOKS, *EXCHANGES, *LOCAL]
# seconds that a training takes beside its own: imports, compilation, evaluation
PATIENCE = 300.0
ENVIRONMENT = {  # of the ranks; mpirun is that of the environment of this Python
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}


def parsed() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="of the GPT; signs have SGD (%(default)s)",
    )
    about = "of the learning rate; linear: to 0 at the end of the time (%(default)s)"
    add("--schedule", choices=("constant", "linear"), default="constant", help=about)
    add(
        "--batch",
        type=positive,
        default=4,
        help="windows of 64 characters of a rank and step (%(default)s)",
    )
    about = (
        "of each backward pass, in which the core is free for messages (%(default)g ms)"
    )
    add("--sleep", type=not_negative, default=0.0, metavar="MS", help=about)
    add("--hosts", type=positive, default=4, help="one rank each (%(default)s)")
    add_list(parser, "--rates", ["100mbit", "1gbit"], "of the links ")
    add(
        "--delay",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="of the links, one way (%(default)g ms)",
    )
    add(
        "--seconds",
        type=above_zero,
        default=80.0,
        help="of each training, without evaluation (%(default)s)",
    )
    add(
        "--seeds",
        type=positive,
        default=2,
        help="trainings of each method (%(default)s)",
    )
    add_list(parser, "--methods", METHODS, "of those in README.md ")
    about = "a name that its rows keep; each has a row alone (today's date)"
    add("--sitting", default=date.today().isoformat(), metavar="NAME", help=about)
    add(
        "--again",
        action="store_true",
        help="also measure what the file has of other sittings only",
    )
    add("--name", default="race", help="of the testbed (%(default)s)")
    add(
        "--json",
        type=new_file,
        required=True,
        metavar="FILE",
        help="the rows: read at the start, written after each",
    )
    add(
        "--plot",
        type=new_figure,
        metavar="FILE",
        help="draw loss against seconds to a file (needs matplotlib)",
    )
    add(
        "--plot-bytes",
        type=new_figure,
        metavar="FILE",
        help="the same against bytes",
    )
    add(
        "--show",
        action="store_true",
        help="measure nothing: table and figure of the rows with this schedule",
    )
    options = parser.parse_args()
    for name in options.methods:
        if not is_known(name):
            parser.error(
                f"got --methods {name}: there is no such method; see README.md"
            )
    check_files(options)
    return options


def wanted(options: argparse.Namespace) -> list[Row]:
    """Return the rows that are asked for, without their outcome: all methods at a rate before the next rate."""
    cells = product(options.rates, range(options.seeds), options.methods)
    return [row_of(*cell, options) for cell in cells]


def row_of(rate: str, seed: int, method: str, options: argparse.Namespace) -> Row:
    """Return a row without its outcome."""
    training = {
        "model": "gpt",
        "batch": options.batch,
        "schedule": options.schedule,
        "sleep": options.sleep,
    }
    of_links = {
        "hosts": options.hosts,
        "rate": rate,
        "delay": options.delay,
        "limit": options.seconds,
    }
    optimizer = optimizer_of(method, options.optimizer)
    learning = rate_of(method, optimizer, options.schedule)._asdict()
    about = {
        "seed": seed,
        "method": method,
        "optimizer": optimizer,
        **learning,
        "sitting": options.sitting,
    }
    return {**training, **of_links, **about}


def testbed(options: argparse.Namespace, *arguments: str) -> list[str]:
    """Return the command line of the testbed."""
    return [sys.executable, str(TESTBED), "--name", options.name, *arguments]


@contextmanager
def hosts(options: argparse.Namespace, rate: str) -> Iterator[None]:
    """Have hosts with links of a rate."""
    late = [f"--delay={options.delay:g}ms"] if options.delay else []
    if status := subprocess.run(
        testbed(options, "up", str(options.hosts), rate, *late), check=False
    ).returncode:
        sys.exit(status)
    try:
        yield
    finally:
        subprocess.run(testbed(options, "down"), check=True)


def measured(row: Row, options: argparse.Namespace) -> Row | None:
    """Train on the hosts, and return the row with its outcome; None, after a message, where that failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        names = "seed", "batch", "schedule", "sleep"
        settings = [f"--{name}={row[name]}" for name in names]
        settings.append(f"--optimizer={options.optimizer}")
        rank = [
            str(RANK),
            *settings,
            f"--methods={row['method']}",
            f"--seconds={row['limit']}",
            f"--json={file}",
        ]
        command = testbed(options, "run", sys.executable, "-m", "mpi4py", *rank)
        environment = {**os.environ, **ENVIRONMENT}
        process = subprocess.Popen(
            command, env=environment, stdout=sys.stderr, start_new_session=True
        )
        try:
            status: int | str = process.wait(PATIENCE + 3 * row["limit"])
        except subprocess.TimeoutExpired:
            status = "no end within the time"
        finally:
            if process.poll() is None:  # also where the user interrupts
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        if status == 0:
            # with the learning rate that the ranks took
            return {**row, **json.loads(file.read_text())[0]}
    sys.stderr.write(
        f"race: {row['method']} at {row['rate']}, seed {row['seed']}, failed: {status}\n"
    )
    return None


def race(rows: list[Row], options: argparse.Namespace) -> int:
    """Measure the rows that are missing, and write the file after each; return how many failed."""
    counted = [
        row for row in rows if not options.again or row["sitting"] == options.sitting
    ]
    present, failed = {*map(key, counted)}, 0
    missing = [row for row in wanted(options) if key(row) not in present]
    alone = [row_of(row["rate"], 0, ALONE, options) for row in missing[:1]]
    names = "method", "model", "batch", "sleep", "optimizer", "sitting"
    missing = [
        row
        for row in alone
        if not of([*rows, *missing], **{name: row[name] for name in names})
    ] + missing
    for rate in dict.fromkeys(row["rate"] for row in missing):
        with hosts(options, rate):
            for row in [row for row in missing if row["rate"] == rate]:
                done = measured(row, options)
                if done is None:
                    failed += 1
                    continue
                rows.append(done)
                seconds, steps, _, loss = done["curve"][-1]
                told = f"{loss:.3f} after {seconds:.1f} s, {steps} steps"
                sys.stderr.write(
                    f"{rate} {row['delay']:g} ms, seed {row['seed']} {name_of(row)}: {told}\n"
                )
                write_rows(options, rows, {"torch": metadata.version("torch")})
    return failed


def is_alone_over(row: Row, links: set[tuple[Any, ...]]) -> bool:
    """Return whether a row is one of ranks alone, of one of these settings."""
    return row["method"] == ALONE and key(row)[: len(SETTING)] in links


def main() -> int:
    """Measure what is missing, and print the tables and draw the figure of what is there."""
    options = parsed()
    rows: list[Row] = (
        json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    )
    failed = 0 if options.show else race(rows, options)
    order = {method: place for place, method in enumerate(METHODS)}
    rows.sort(key=lambda row: order.get(row["method"], len(order)))
    asked = {key(row) for row in wanted(options)}
    links = {each[: len(SETTING)] for each in asked}
    of_schedule = of(rows, schedule=options.schedule)
    shown = [
        row
        for row in of_schedule
        if options.show or key(row) in asked or is_alone_over(row, links)
    ]
    for setting, by_method in settings(shown).items():
        print(table(setting, by_method, sittings(rows, setting)))
    plots = {
        "plot": partial(plot, shown, SECONDS),
        "plot_bytes": partial(plot, shown, NBYTES),
    }
    return write(options, **plots) or int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
