"""Train a model with some methods on the ranks of MPI, and write a row for each; race.py starts it on every host.

    mpirun -n 4 python -m mpi4py experiments/race/rank.py --methods local-sparse-10 --seconds 20 --json build/rows.json

The clock runs while the ranks train, from a barrier to a barrier, and stands while they
evaluate. They evaluate after whole rounds of local steps, when all replicas are equal;
with a delay so many steps later, by which replicas then differ. They do at about
`POINTS` times of equal distance; rank 0 says after each how many steps make up the next
stretch.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import gpt
from joining import is_known, join, period, rate_of
from mpi4py import MPI
from plan import optimizer_of

from collectives.torch import init_process_group
from mpicomp_bench.bench.collective import COUNTERS, sent_by_host
from mpicomp_bench.options import Parser, above_zero, add_list, not_negative, positive

POINTS = 20  # of a curve, beside its start


def new_trainer(options: argparse.Namespace, comm: Any) -> gpt.Trainer:
    """Return this rank's trainer."""
    sizes = gpt.Sizes(**{name: getattr(options, name) for name in gpt.Sizes._fields})
    task = gpt.TASKS["gpt"]._replace(sizes=sizes)
    trainer = gpt.Trainer(options.seed, comm.rank, comm.size, task)
    if options.sleep:
        trainer.sleep(1e-3 * options.sleep)
    return trainer


def curve_of(
    trainer: Any, outer: Any, every: int, options: argparse.Namespace, comm: Any
) -> list[list[float]]:
    """Train, and return the curve: seconds, steps, bytes that the busiest host has sent, held-out loss in nats."""

    def point() -> list[float]:
        return [
            elapsed,
            steps,
            max(comm.allgather(sent)),
            comm.allreduce(trainer.loss()) / comm.size,
        ]

    # share of the limit that is done
    elapsed, steps, sent, share = 0.0, 0, 0, 0.0
    stretch = every + (outer.delay if outer else 0)
    curve = [point()]
    while stretch:
        comm.Barrier()
        began, before = perf_counter(), sent_by_host(COUNTERS.read_text())
        of_a_step = share / max(1, steps)
        for number in range(stretch):
            if options.schedule == "linear":
                trainer.set_rate(max(0.0, 1 - share - number * of_a_step))
            trainer.step(steps)
            steps += 1
            if outer:
                outer.step()
        comm.Barrier()
        elapsed += perf_counter() - began
        sent += sent_by_host(COUNTERS.read_text()) - before
        curve.append(point())
        done = (steps, options.steps) if options.steps else (elapsed, options.seconds)
        stretch, share = comm.bcast(
            (next_stretch(*done, steps, every), done[0] / done[1])
        )
    return curve


def next_stretch(done: float, limit: float, steps: int, every: int) -> int:
    """Return how many steps to train until the next point of the curve: whole rounds, or 0 at the end.

    done, limit: in seconds, or in steps. steps: that took `done`.
    """
    if done >= limit:
        return 0
    distance = limit / POINTS
    # half a distance or more
    missing = (math.floor(done / distance + 0.5) + 1) * distance - done
    return every * max(1, round(missing / done * steps / every))


def about(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a method's optimiser, its learning rate and how many were tried."""
    optimizer = optimizer_of(method, options.optimizer)
    return {
        "optimizer": optimizer,
        **rate_of(method, optimizer, options.schedule)._asdict(),
    }


def join_as_asked(
    method: str, trainer: Any, options: argparse.Namespace, comm: Any
) -> Any:
    """Let a trainer take part in a method; return the outer loop, where there is one."""
    how = about(method, options)
    return join(method, how["optimizer"], how["learning_rate"], trainer, comm)


def compile_kernels(method: str, options: argparse.Namespace, comm: Any) -> None:
    """Take a round on a model that is then dropped."""
    trainer = new_trainer(options, comm)
    outer = join_as_asked(method, trainer, options, comm)
    for step in range(period(method)):
        trainer.step(step)
        if outer:
            outer.step()


def row_of(method: str, options: argparse.Namespace, comm: Any) -> dict[str, Any]:
    """Train with a method, and return the row, on all ranks."""
    compile_kernels(method, options, comm)
    trainer, every = new_trainer(options, comm), period(method)
    outer = join_as_asked(method, trainer, options, comm)
    curve = curve_of(trainer, outer, every, options, comm)
    parameters = sum(math.prod(array.shape) for array in trainer.arrays.values())
    row = {
        "model": "gpt",
        "method": method,
        "seed": options.seed,
        **about(method, options),
    }
    return {**row, "ranks": comm.size, "parameters": parameters, "curve": curve}


def main() -> int:
    """Train, and write the rows on rank 0."""
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add_list(
        parser,
        "--methods",
        ["dense"],
        "such as powersgd-8, topk-0.01 or local-sparse-10 ",
    )
    add(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="of the GPT; signs have SGD (%(default)s)",
    )
    about_rate = "of the rate; linear: to 0 at the end of the time (%(default)s)"
    add(
        "--schedule",
        choices=("constant", "linear"),
        default="constant",
        help=about_rate,
    )
    add(
        "--sleep",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="in each backward pass, with buckets of 2 MB (%(default)g ms)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="of the start and of the batches (%(default)s)",
    )
    add("--seconds", type=above_zero, default=80.0, help="to train for (%(default)s)")
    add("--steps", type=positive, help="to train for, in place of --seconds")
    for name, size in {
        "layers": 4,
        "width": 256,
        "heads": 4,
        "context": 64,
        "batch": 4,
    }.items():
        add(f"--{name}", type=positive, default=size, help="of the GPT (%(default)s)")
    add(
        "--json",
        type=Path,
        required=True,
        metavar="FILE",
        help="the rows are written to this file",
    )
    options = parser.parse_args()
    for name in options.methods:
        if not is_known(name):
            parser.error(
                f"got --methods {name}: there is no such method; see README.md"
            )
    comm = MPI.COMM_WORLD
    init_process_group(comm)
    rows = [row_of(name, options, comm) for name in options.methods]
    if comm.rank == 0:
        options.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
