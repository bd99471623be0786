#!/usr/bin/env python3
"""Train a GPT with P replicas in one process, without a network: held-out loss at equal steps.

    pip install -e ".[examples]" torch
    python experiments/every_step/simulate.py --json experiments/results/every_step.json   # the rows that are missing
    python experiments/every_step/simulate.py --methods few-bits-2 --optimizer muon --rates 0.008 --json build/rows.json
    python experiments/every_step/simulate.py --like experiments/results/map.json --json build/map.json  # the map

The rank's gradients are those of the race: the same start, and batches of each rank and
step by the seed. One model computes the gradients of all ranks, one after the other:
replicas are equal, but for local steps. A row is one training; the file is written
after each, and a row in it is not trained again. 300 steps take 1 to 4 minutes on a
core, of the small models 10 to 60 seconds.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from plan import KEY, MODELS, SCHEDULES, plan
from rules import OPTIMISERS, made
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import Row
from mpicomp_bench.options import Parser, above_zero, add_list, positive
from mpicomp_bench.output import write_rows

RACE = Path(__file__).resolve().parent.parent / "race"
WARM = 0.1  # of the steps
EVALUATIONS = 3  # of a training, at equal distances


class Replicas:
    """The replicas of all ranks, which are equal: the parameters as one vector, and each rank's gradient."""

    def __init__(self, model: str, seed: int, ranks: int, batch: int) -> None:
        sys.path.append(str(RACE))
        import gpt

        sizes, load = gpt.TASKS[model]
        task = gpt.Task(sizes._replace(batch=batch), load)
        self.trainer, self.ranks = gpt.Trainer(seed, 0, 1, task), ranks
        network = self.trainer.network
        with torch.no_grad():
            flat = parameters_to_vector(network.parameters())
            # the parameters become views of it
            vector_to_parameters(flat, network.parameters())
        self.parameters = flat.numpy()
        self.shapes = [tuple(each.shape) for each in network.parameters()]

    def gradients(self, number: int, method: Any) -> list[Any]:
        """Return the gradient of each rank in a step, or only their mean, as one gradient, if the method pools them."""
        batches = [self.trainer.batch(number, rank) for rank in range(self.ranks)]
        if method.pooled:
            return [self.gradient(torch.cat(batches))]
        # between exchanges: the ranks' own parameters
        replicas = getattr(method, "replicas", None)
        if replicas is None:
            return [self.gradient(batch) for batch in batches]
        anchor, found = self.parameters.copy(), []
        for replica, batch in zip(replicas, batches, strict=True):
            self.parameters[...] = replica
            found.append(self.gradient(batch))
        self.parameters[...] = anchor
        return found

    def gradient(self, batch: Any) -> Any:
        """Return the gradient of a batch as one vector."""
        network = self.trainer.network
        network.zero_grad()
        network(batch).backward()
        return torch.cat(
            [each.grad.reshape(-1) for each in network.parameters()]
        ).numpy()


def part_of_rate(schedule: str, done: float) -> float:
    """Return the part of the rate after a part of the steps: `SCHEDULES` of plan.py says what each does."""
    if schedule == "linear":
        return 1 - done
    if schedule == "cosine":
        return min(
            (done + 0.005) / WARM,
            0.55 + 0.45 * math.cos(math.pi * max(0.0, done - WARM) / (1 - WARM)),
        )
    return 1.0


def trained(row: Row) -> Row:
    """Train, and return the row with its outcome."""
    method = made(row["method"], row["optimizer"])
    replicas = Replicas(*(row[name] for name in ("model", "seed", "ranks", "batch")))
    method.start(replicas.shapes, row["ranks"])
    began, curve, bits = perf_counter(), [], 0.0
    for number in range(row["steps"]):
        gradients = replicas.gradients(number, method)
        rate = row["rate"] * part_of_rate(row["schedule"], number / row["steps"])
        bits = method.step(replicas.parameters, gradients, rate) or bits
        is_last = number + 1 == row["steps"]
        if is_last and getattr(method, "sent", None) is not None:
            method.outer_step(replicas.parameters)  # as `OuterLoop.synchronise` does
        if (number + 1) * EVALUATIONS % row["steps"] < EVALUATIONS:
            curve.append([number + 1, replicas.trainer.loss()])
    outcome = {
        "bits": bits,
        "loss": curve[-1][1],
        "curve": curve,
        "seconds": perf_counter() - began,
    }
    return {**row, "parameters": int(np.size(replicas.parameters)), **outcome}


def parsed() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = Parser(description=__doc__)
    add_list(
        parser,
        "--methods",
        [],
        "such as in-basis-8:chunk=64; all of the plan by default ",
    )
    add_list(
        parser, "--rates", [], "of the optimiser, with --methods ", type=above_zero
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="gpt",
        help="and its text; with --methods (%(default)s)",
    )
    about = (
        "of the mean, or of local steps; signs have none; with --methods (%(default)s)"
    )
    parser.add_argument("--optimizer", choices=OPTIMISERS, default="adamw", help=about)
    about = "linear: to 0 at the last step; cosine: to a tenth, after a warm-up; with --methods (%(default)s)"
    parser.add_argument("--schedule", choices=SCHEDULES, default="constant", help=about)
    parser.add_argument(
        "--seed", type=int, default=0, help="with --methods (%(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=300,
        help="of a training, with --methods (%(default)s)",
    )
    parser.add_argument(
        "--ranks", type=positive, help="with --methods (those of the model)"
    )
    parser.add_argument(
        "--batch",
        type=positive,
        help="windows of a rank and step, with --methods (those of the model)",
    )
    about = "train what the rows of this file name (the plan)"
    parser.add_argument("--like", type=Path, metavar="FILE", help=about)
    parser.add_argument(
        "--json",
        type=new_file,
        required=True,
        metavar="FILE",
        help="read, and written after each row",
    )
    options = parser.parse_args()
    try:
        [made(name, options.optimizer) for name in options.methods]
    except ValueError as error:
        parser.error(str(error))
    check_files(options)
    return options


def main() -> int:
    """Train what is missing."""
    options = parsed()
    rows: list[Row] = (
        json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    )
    for training in asked(options):
        row: Row = dict(zip(KEY, training, strict=True))
        if any(all(done[name] == row[name] for name in KEY) for done in rows):
            continue
        rows.append(trained(row))
        sys.stderr.write(f"{' '.join(map(str, training))}: {rows[-1]['loss']:.4f}\n")
        if write_rows(options, rows, {"torch": metadata.version("torch")}):
            return 1
    return 0


def asked(options: argparse.Namespace) -> Iterable[Sequence[Any]]:
    """Return the trainings that the command line names, or all that are planned."""
    if options.like:
        rows = json.loads(options.like.read_text())["rows"]
        return [[row[name] for name in KEY] for row in rows]
    if not options.methods:
        return plan()
    ranks, batch = MODELS[options.model]
    about = (
        [options.optimizer],
        options.rates,
        [options.schedule],
        [options.seed],
        [options.steps],
        [options.ranks or ranks],
        [options.batch or batch],
    )
    return product([options.model], options.methods, *about)


if __name__ == "__main__":
    sys.exit(main())
