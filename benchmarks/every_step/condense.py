#!/usr/bin/env python3
"""Write mpicomp_bench/measured.json, from which `mpicomp explain --train` takes steps and reads of each method.

python benchmarks/every_step/condense.py          # from docs/results/every_step.json and passes.json
python benchmarks/every_step/condense.py --check  # writes nothing; exit status 1 where the file differs
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from losses import SEED, STEPS, rows_at_best_rate

from mpicomp_bench import advice

ROOT = Path(__file__).resolve().parents[2]
RESULTS, FILE = ROOT / "docs" / "results", ROOT / "mpicomp_bench" / "measured.json"


def steps_to(loss: float, curve: Sequence[Sequence[float]]) -> float:
    """Return the steps after which a curve of steps and losses has a loss, straight in the logarithm of the steps.

    Before the first point, the line through the first two is continued.
    """
    steps, losses = np.array(curve).T
    after = int(np.clip(np.argmax(losses <= loss), 1, len(losses) - 1))
    (low, high), (first, last) = np.log(steps[after - 1 : after + 1]), losses[after - 1 : after + 1]
    return float(np.exp(low + (first - loss) / (first - last) * (high - low)))


def mean_curve(rows: Sequence[Any]) -> list[list[float]]:
    """Return the mean over the seeds of the curves of the same steps."""
    found: list[list[float]] = np.mean([row["curve"] for row in rows], axis=0).tolist()
    return found


def steps_for_dense(own: Sequence[Any], dense: Sequence[Any]) -> float:
    """Return how many steps a method takes for the progress of one dense step, at the worse of their final losses.

    Both are the means over the seeds that the two have.
    """
    shared = {row["seed"] for row in own} & {row["seed"] for row in dense}
    ours, theirs = (mean_curve([row for row in rows if row["seed"] in shared]) for rows in (own, dense))
    worse = max(ours[-1][1], theirs[-1][1])
    return steps_to(worse, ours) / steps_to(worse, theirs)


def condensed() -> dict[str, Any]:
    """Return the content of the file."""
    every, passes = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("every_step", "passes"))
    constant = [row for row in every["rows"] if (row["schedule"], row["steps"]) == ("constant", STEPS)]
    names = [name for name in advice.MESSAGES if name != advice.SIXTEEN]  # takes the steps of dense sums
    by_method = {name: [row for row in constant if row["method"] == name] for name in names}
    dense = rows_at_best_rate(by_method[advice.DENSE])
    methods = {}
    for name, own in by_method.items():
        best = rows_at_best_rate(own)
        tried = sum(row["seed"] == SEED for row in own)
        about = {"learning_rate": best[0]["rate"], "trials": tried, "seeds": len(best)}
        methods[name] = {**about, **{key: float(np.mean([row[key] for row in best])) for key in ("loss", "bits")}}
        methods[name]["steps"] = round(steps_for_dense(best, dense), 3)
    reads = {row["method"]: round(row["reads"], 1) for row in passes["rows"]}
    about = {"steps": STEPS, "parameters": dense[0]["parameters"], "ranks": dense[0]["ranks"]}
    return {**about, "methods": methods, "reads": reads}


def text() -> str:
    """Return the text of the file."""
    return json.dumps(condensed(), indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(FILE.read_text() != text())
    FILE.write_text(text())
