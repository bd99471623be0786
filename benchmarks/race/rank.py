"""Train a model with some methods on the ranks of MPI, and write a row for each; race.py starts it on every host.

    mpirun -n 4 python -m mpi4py benchmarks/race/rank.py --methods local-sparse-10 --seconds 20 --json build/rows.json

The clock runs while the ranks train, from a barrier to a barrier, and stands while they evaluate. They evaluate after
whole rounds of local steps, when all replicas are equal, at about `POINTS` times of equal distance; rank 0 says after
each how many steps make up the next stretch.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from joining import is_known, join, period, rate_of

from mpicomp_bench.bench.collective import COUNTERS, sent_by_host
from mpicomp_bench.options import Parser, above_zero, add_list, positive

POINTS = 20  # of a curve, beside its start
MODELS = "gpt", "characters"


def new_trainer(options: argparse.Namespace, comm: Any) -> Any:
    """Return this rank's trainer."""
    if options.model == "characters":
        import characters

        return characters.Trainer(options.seed, comm.rank, comm.size)
    import gpt

    sizes = gpt.Sizes(**{name: getattr(options, name) for name in gpt.Sizes._fields})
    return gpt.Trainer(options.seed, comm.rank, comm.size, sizes)


def curve_of(trainer: Any, outer: Any, every: int, options: argparse.Namespace, comm: Any) -> list[list[float]]:
    """Train, and return the curve: seconds, steps, bytes that the busiest host has sent, held-out loss in nats."""

    def point() -> list[float]:
        return [elapsed, steps, max(comm.allgather(sent)), comm.allreduce(trainer.loss()) / comm.size]

    elapsed, steps, sent, stretch = 0.0, 0, 0, every
    curve = [point()]
    while stretch:
        comm.Barrier()
        began, before = perf_counter(), sent_by_host(COUNTERS.read_text())
        for _ in range(stretch):
            trainer.step(steps)
            steps += 1
            if outer:
                outer.step()
        comm.Barrier()
        elapsed += perf_counter() - began
        sent += sent_by_host(COUNTERS.read_text()) - before
        curve.append(point())
        done = (steps, options.steps) if options.steps else (elapsed, options.seconds)
        stretch = comm.bcast(next_stretch(*done, steps, every))
    return curve


def next_stretch(done: float, limit: float, steps: int, every: int) -> int:
    """Return how many steps to train until the next point of the curve: whole rounds, or 0 at the end.

    done, limit: in seconds, or in steps. steps: that took `done`.
    """
    if done >= limit:
        return 0
    distance = limit / POINTS
    missing = (math.floor(done / distance + 0.5) + 1) * distance - done  # half a distance or more
    return every * max(1, round(missing / done * steps / every))


def compile_kernels(method: str, options: argparse.Namespace, comm: Any) -> None:
    """Take a round on a model that is then dropped."""
    trainer = new_trainer(options, comm)
    outer = join(method, options.model, trainer, comm)
    for step in range(period(method)):
        trainer.step(step)
        if outer:
            outer.step()


def row_of(method: str, options: argparse.Namespace, comm: Any) -> dict[str, Any]:
    """Train with a method, and return the row, on all ranks."""
    compile_kernels(method, options, comm)
    trainer, every = new_trainer(options, comm), period(method)
    outer = join(method, options.model, trainer, comm)
    curve = curve_of(trainer, outer, every, options, comm)
    parameters = sum(math.prod(array.shape) for array in trainer.arrays.values())
    about = {"model": options.model, "method": method, "seed": options.seed, **rate_of(method, options.model)._asdict()}
    return {**about, "ranks": comm.size, "parameters": parameters, "curve": curve}


def main() -> int:
    """Train, and write the rows on rank 0."""
    from mpi4py import MPI

    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt", help="(%(default)s)")
    add_list(parser, "--methods", ["dense"], "such as powersgd-8, topk-0.01 or local-sparse-10 ")
    add("--seed", type=int, default=0, help="of the start and of the batches (%(default)s)")
    add("--seconds", type=above_zero, default=80.0, help="to train for (%(default)s)")
    add("--steps", type=positive, help="to train for, in place of --seconds")
    for name, size in {"layers": 4, "width": 256, "heads": 4, "context": 64, "batch": 4}.items():
        add(f"--{name}", type=positive, default=size, help="of the GPT (%(default)s)")
    add("--json", type=Path, required=True, metavar="FILE", help="the rows are written to this file")
    options = parser.parse_args()
    for name in options.methods:
        if not is_known(name, options.model):
            parser.error(f"got --methods {name}: the model {options.model!r} has no such method; see README.md")
    comm = MPI.COMM_WORLD
    if options.model == "gpt":
        from collectives.torch import init_process_group

        init_process_group(comm)
    rows = [row_of(name, options, comm) for name in options.methods]
    if comm.rank == 0:
        options.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
