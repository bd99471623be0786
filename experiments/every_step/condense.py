#!/usr/bin/env python3
"""Write mpicomp_bench/measured.json, from which `mpicomp explain --train` takes steps and copies of each method.

python experiments/every_step/condense.py          # from experiments/results/every_step.json, map.json and passes.json
python experiments/every_step/condense.py --check  # writes nothing; exit status 1 where the file differs

How many steps a method takes for the progress of a dense one follows from the losses at
the end of whole trainings, as a schedule decides what a loss in between says: how many
nats e times the steps are worth is said by the losses of dense training with AdamW
after `STEPS` and after `LONG_STEPS`.
"""

import json
import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import cells
import numpy as np
from losses import LONG_STEPS, SEED, STEPS, of, rows_at_best_rate

from mpicomp_bench import advice

ROOT = Path(__file__).resolve().parents[2]
TRAINED = {  # models with the schedules of the rate, by optimiser
    "adamw": (("gpt", "constant"), ("manual", "cosine")),
    "muon": (("gpt", "linear"), ("manual", "cosine")),
}
RESULTS = ROOT / "experiments" / "results"
FILE = ROOT / "mpicomp_bench" / "measured.json"


def loaded(name: str) -> list[Any]:
    """Return the rows of a file of results."""
    found: list[Any] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


class Model:
    """The trainings of a model with a schedule."""

    def __init__(self, name: str, schedule: str, rows: Sequence[Any]) -> None:
        self.rows = of(rows, model=name, schedule=schedule)

    def best(self, method: str, optimizer: str) -> list[Any]:
        """Return the rows of a method at its best rate, one for each seed; those of signs for any optimiser."""
        own = of(self.rows, method=method, steps=STEPS)
        return rows_at_best_rate(
            of(own, optimizer=optimizer) or of(own, optimizer="sgd")
        )

    def lead(self, one: Sequence[Any], other: Sequence[Any]) -> float:
        """Return by how many nats the first of two ends below the second, over the seeds that both have."""
        losses = [{row["seed"]: row["loss"] for row in rows} for rows in (one, other)]
        return fmean(
            losses[1][seed] - losses[0][seed]
            for seed in losses[0].keys() & losses[1].keys()
        )

    def worth(self) -> float:
        """Return the nats that e times the steps are worth to dense training with AdamW."""
        dense = of(self.rows, method=advice.DENSE, optimizer="adamw", seed=SEED)
        (longer,) = of(dense, steps=LONG_STEPS)
        (short,) = of(dense, steps=STEPS, rate=longer["rate"])
        return float((short["loss"] - longer["loss"]) / math.log(LONG_STEPS / STEPS))

    def steps(self, one: tuple[str, str], other: tuple[str, str]) -> float:
        """Return how many steps of the first method and optimiser make the progress of one of the second."""
        return math.exp(-self.lead(self.best(*one), self.best(*other)) / self.worth())


def measurements(
    method: str, optimizer: str, models: Sequence[Model]
) -> dict[str, Any]:
    """Return what is known of a method with an optimiser, over all models that were trained with it."""
    own, dense = (
        [model.best(name, optimizer) for model in models]
        for name in (method, advice.DENSE)
    )
    on_each = [
        round(model.steps((method, optimizer), (advice.DENSE, optimizer)), 2)
        for model in models
    ]
    rates = [
        one[0]["rate"] / other[0]["rate"] for one, other in zip(own, dense, strict=True)
    ]
    tried = [
        len(
            {
                row["rate"]
                for row in of(
                    model.rows,
                    method=method,
                    optimizer=rows[0]["optimizer"],
                    steps=STEPS,
                )
            }
        )
        for model, rows in zip(models, own, strict=True)
    ]
    return {
        "rate": round(geometric_mean(rates), 2),
        "trials": min(tried),
        "seeds": min(map(len, own)),
        "bits": fmean(rows[0]["bits"] for rows in own),
        "on_each": on_each,
        "steps": round(geometric_mean(on_each), 3),
    }


def on_the_map(optimizer: str) -> dict[str, list[tuple[int, float]]]:
    """Return for each method on the map pairs of ranks and the steps that make the progress of a dense one.

    The steps of local steps grow with the ranks; those of 4 bits in every step do not
    beyond what differs by text and batch: they are the mean over all cells.
    """
    every = times_by_cell(cells.FEW_BITS, optimizer).values()
    few_bits = math.exp(fmean(every))
    found = {cells.FEW_BITS: [(ranks, round(few_bits, 3)) for ranks in cells.RANKS]}
    for each, ranks in product(cells.EVERY, cells.RANKS):
        times = times_on(ranks, cells.local(each), optimizer)
        if times is not None:
            steps = round(math.exp(times), 3)
            found.setdefault(cells.local(each), []).append((ranks, steps))
    return found


def times_by_cell(method: str, optimizer: str) -> dict[cells.Cell, float]:
    """Return the logarithm of the steps that make the progress of a dense one, for each cell with the method.

    What steps are worth is said by dense training with the same text and optimiser.
    """
    rows = loaded("map")
    gaps = {cell: cell.gap(rows, method, optimizer) for cell in cells.cells(rows)}
    worth = {
        model: cells.worth(rows, optimizer, model) or math.nan for model in cells.MODELS
    }
    return {
        cell: gap / worth[cell.model] for cell, gap in gaps.items() if gap is not None
    }


def times_on(ranks: int, method: str, optimizer: str) -> float | None:
    """Return the lower quartile of `times_by_cell` over the cells with so many ranks, or None.

    It is that of local steps with H = 10, which were trained in all cells, and the mean
    difference from it in the cells with both. With the quartile what is advised ends
    within 0.05 nats of the best in each cell, with the mean or the median it does not.
    """
    own, tens = (
        {
            cell: times
            for cell, times in times_by_cell(name, optimizer).items()
            if cell.ranks == ranks
        }
        for name in (method, cells.local(10))
    )
    differences = [times - tens[cell] for cell, times in own.items() if cell in tens]
    if not differences:
        return None
    return float(np.quantile([*tens.values()], 0.25)) + fmean(differences)


def condensed() -> dict[str, Any]:
    """Return the content of the file."""
    rows = loaded("every_step")
    models = {
        optimizer: [Model(*each, rows) for each in trained]
        for optimizer, trained in TRAINED.items()
    }
    # takes the steps of dense sums
    names = [name for name in advice.MESSAGES if name != advice.SIXTEEN]
    methods = {
        each: {name: measurements(name, each, own) for name in names}
        for each, own in models.items()
    }
    about = {
        key: [model.rows[0][key] for model in models["muon"]]
        for key in ("parameters", "ranks")
    }
    times = [
        model.steps((advice.DENSE, "adamw"), (advice.DENSE, "muon"))
        for model in models["muon"]
    ]
    copies = {row["method"]: round(row["copies"], 1) for row in loaded("passes")}
    return {
        "steps": STEPS,
        **about,
        "muon": round(geometric_mean(times), 2),
        "methods": methods,
        "copies": copies,
        "map": {
            "parameters": loaded("map")[0]["parameters"],
            "ranks": cells.RANKS,
            "steps": {each: on_the_map(each) for each in TRAINED},
        },
    }


def text() -> str:
    """Return the text of the file."""
    return json.dumps(condensed(), indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(FILE.read_text() != text())
    FILE.write_text(text())
