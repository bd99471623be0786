"""`mpicomp bench quantised`: the dense sum in few bits, compared with dense sums in 32 and 16 bits in the same run."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import quantised_allreduce
from mpicomp.few_bits import BITS, BLOCKS
from mpicomp_bench.bench.suite import Options, Suite
from mpicomp_bench.measuring import Row, compare, read_once
from mpicomp_bench.options import add_list, positive

ABOUT = """\
Results are written to existing arrays, as those of MPI's dense sum are. All calls are interleaved;
a time is that of the slowest rank, from a common start. The floor is one read of the array by all
ranks at the same time; a call reads it, and writes two others.
"16 bits" sends float16 both ways, as PyTorch's fp16 hook does, and adds in float32.
"""

EXAMPLES = """\
mpirun -n 4 mpicomp bench quantised
mpirun -n 4 mpicomp bench quantised --bits 4 --algorithms direct --json p4.json
"""


def rows(options: Options, comm: Any) -> Iterator[Row]:
    """Yield the comparisons; each rank's array is `length` normal float32."""
    array = np.random.default_rng([1, comm.rank]).standard_normal(
        options.length, np.float32
    )
    total = np.empty_like(array)
    rejected = np.empty_like(array)
    calls = {
        f"{bits} bits {algorithm}": partial(
            quantised_allreduce,
            array,
            comm,
            int(bits),
            options.block,
            algorithm=algorithm,
            out=(total, rejected),
        )
        for bits, algorithm in product(options.bits, options.algorithms)
    }
    dense = {
        "MPI_Allreduce": partial(comm.Allreduce, array, total),
        "16 bits": partial(sum_in_16_bits, array, comm, total),
    }
    yield from compare(calls, dense, options.repeats, comm, floor=read_once(array))


def sum_in_16_bits(
    array: NDArray[np.float32], comm: Any, total: NDArray[np.float32]
) -> None:
    """Write the sum over all ranks to `total`: its shares are summed by their owners, and sent in float16 both ways."""
    counts = [len(part) for part in np.array_split(array, comm.size)]
    own = counts[comm.rank]
    # MPI has no float16, so the halves are sent as uint16.
    halves = array.astype(np.float16).view(np.uint16)
    received = np.empty((comm.size, own), np.uint16)
    comm.Alltoallv([halves, counts], [received, [own] * comm.size])
    share = (
        received.view(np.float16)
        .sum(axis=0, dtype=np.float32)
        .astype(np.float16)
        .view(np.uint16)
    )
    comm.Allgatherv(share, [halves, counts])
    total[...] = halves.view(np.float16)


def add_options(parser: Any) -> None:
    """Add the options of the suite."""
    add_list(
        parser,
        "--bits",
        ["8", "4"],
        "bits of a value: ",
        choices=[str(bits) for bits in BITS],
    )
    add_list(
        parser,
        "--algorithms",
        ["auto"],
        "algorithms: ",
        choices=["auto", *quantised_allreduce.algorithms],
    )
    parser.add_argument(
        "--block",
        type=positive,
        choices=BLOCKS,
        default=256,
        metavar="B",
        help="values with one scale (%(default)s)",
    )


SUITE = Suite(
    help="the dense sum in few bits, against dense sums in 32 and 16 bits",
    about=ABOUT,
    examples=EXAMPLES,
    add_options=add_options,
    rows=rows,
    length=25_000_000,
)
