#!/usr/bin/env python3
"""Measure what a rank computes in an exchange of each method: compression, residual, result.

    MPICOMP_THREADS=1 OMP_NUM_THREADS=1 python experiments/every_step/passes.py --json experiments/results/passes.json

On an idle machine; the file is kept, and methods that are missing in it are measured.

One rank alone on one core, so that no messages are sent. The unit is a copy of the
vector in the same run. PowerSGD is that of the
simulation, in NumPy, on square matrices of up to 512 rows.
"""

import json
import math
import sys
from functools import partial

import numpy as np
from means import Floats, PowerSgd
from mpi4py import MPI

from collectives import OuterLoop
from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import Call, Row, compare, read_once
from mpicomp_bench.methods import construct, outer_settings
from mpicomp_bench.options import Parser, positive
from mpicomp_bench.output import write_rows

COMM = MPI.COMM_SELF


EXCHANGES = "few-bits-8", "few-bits-4", "in-basis-two-bit-8", "topk-0.01"
ROUNDS = "local-sparse-1", "local-few-bits-1"  # of local steps


def round_of_local_steps(name: str, length: int) -> Call:
    """Return a round without its steps."""
    parameters = np.zeros(length, np.float32)
    change = np.random.default_rng(1).standard_normal(length, np.float32)
    outer = OuterLoop(
        construct(name, COMM), {"all": parameters}, **outer_settings(name)
    )

    def call() -> None:
        parameters[...] = change
        outer.step()

    return call


def powersgd(gradient: Floats) -> Call:
    """Return a mean by PowerSGD of rank 8."""
    side = min(512, math.isqrt(gradient.size))
    matrices = gradient.size // side**2
    method = PowerSgd(8, dense_steps=0)
    method.start([(side, side)] * matrices, 1)
    return partial(method.mean, [gradient[: matrices * side**2]])


def main() -> int:
    """Measure, print and write."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--length",
        type=positive,
        default=16_000_000,
        help="values of the vector (%(default)s)",
    )
    parser.add_argument(
        "--repeats", type=positive, default=9, help="of each call (%(default)s)"
    )
    parser.add_argument("--json", type=new_file, required=True, metavar="FILE")
    options = parser.parse_args()
    check_files(options)
    gradient = np.random.default_rng(0).standard_normal(options.length, np.float32)
    out = np.empty_like(gradient)
    calls: dict[str, Call] = {
        name: partial(construct(name, COMM), gradient, out=out) for name in EXCHANGES
    }
    calls |= {name: round_of_local_steps(name, options.length) for name in ROUNDS}
    calls |= {"powersgd-8": powersgd(gradient)}
    done = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    calls = {
        name: call
        for name, call in calls.items()
        if name not in {row["method"] for row in done}
    }
    read = read_once(gradient)
    found: list[Row] = compare(
        calls, {"copy": partial(np.copyto, out, gradient)}, options.repeats, floor=read
    )
    rows = [
        {"method": row["name"], "copies": 1 / row["speedup"], **row} for row in found
    ]
    for row in rows:
        print(
            f"{row['method']:18} {row['copies']:6.1f} copies, {1e3 * row['seconds']:.1f} ms"
        )
    return write_rows(options, [*done, *rows], {"length": options.length})


if __name__ == "__main__":
    sys.exit(main())
