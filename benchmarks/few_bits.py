"""Time a sum in few bits, and each of its parts on its own: what a rank computes, and the messages by MPI.

    mpirun -n 4 python -m mpi4py benchmarks/few_bits.py --json docs/results/quantised-4.json

The calls are those of `mpicomp bench quantised`, by the direct algorithm. Each part runs
on all ranks at the same time: starting the messages, and waiting for other ranks, is not
in them.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import quantised_allreduce
from mpicomp.arrays import Array
from mpicomp.codec import few_bits_message
from mpicomp.coded import CodedSum, Uncoded, shares
from mpicomp.few_bits import FewBits
from mpicomp_bench.bench.quantised import SUITE
from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import Call, Row, compare, read_once
from mpicomp_bench.options import Parser, positive
from mpicomp_bench.output import COMPARISON, show, write_rows

BITS, BLOCK = (8, 4), 256


def rows(options: Namespace, comm: Any) -> Iterator[Row]:
    """Yield the comparisons of the whole call with dense sums, and of its parts with the whole call."""
    known = {"bits": [*map(str, BITS)], "block": BLOCK, "algorithms": ["direct"]}
    yield from SUITE.rows(Namespace(**vars(options), **known), comm)
    array = np.random.default_rng([1, comm.rank]).standard_normal(
        options.length, np.float32
    )
    out = np.empty_like(array), np.empty_like(array)
    for bits in BITS:
        whole = partial(
            quantised_allreduce, array, comm, bits, BLOCK, algorithm="direct", out=out
        )
        yield from compare(
            parts(array, comm, bits, BLOCK, out),
            {f"{bits} bits direct": whole},
            options.repeats,
            comm,
            floor=read_once(array),
        )


def parts(
    array: Array, comm: Any, bits: int, block: int, out: tuple[Array, Array]
) -> dict[str, Call]:
    """Return what a rank does in the direct algorithm, as calls on their own; the messages by MPI's collectives."""
    uncoded = Uncoded([array], out[1])
    write = uncoded.coder(bits, block)
    ranges = shares(0, uncoded.blocks(block), comm.size)
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    def coded(rank: int, terms: Sequence[FewBits] = ()) -> FewBits:
        first, end = ranges[rank]
        room = few_bits_message((end - first) * block, bits, block, array)
        return write(room, terms, (first, end))

    coded_shares = [coded(rank) for rank in range(comm.size)]
    counts = [share.codes.nbytes + share.scales.nbytes for share in coded_shares]
    sent, received = (
        np.zeros(sum(counts), np.uint8),
        np.empty((comm.size, counts[comm.rank]), np.uint8),
    )

    def messages() -> None:
        comm.Alltoallv([sent, counts], [received, [counts[comm.rank]] * comm.size])
        comm.Allgatherv(received[0], [sent, counts])

    return {
        f"{bits} bits: quantise the others' shares": lambda: [
            coded(rank) for rank in others
        ],
        f"{bits} bits: add up, and quantise the sum": partial(
            coded, comm.rank, [coded_shares[comm.rank]] * len(others)
        ),
        f"{bits} bits: write the sum": partial(
            CodedSum(coded_shares, uncoded.sizes).write, out[0]
        ),
        f"{bits} bits: as many bytes by MPI": messages,
    }


def main() -> int:
    """Measure, print and write."""
    parser, comm = Parser(description=__doc__), MPI.COMM_WORLD
    add = parser.add_argument
    about = "values of the array (%(default)s)"
    add("--length", type=positive, default=25_000_000, metavar="N", help=about)
    about = "timed turns of each call (%(default)s)"
    add("--repeats", type=positive, default=9, metavar="N", help=about)
    add("--json", type=new_file, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    check_files(options, comm)
    found = show(rows(options, comm), COMPARISON, None if comm.rank else sys.stdout)
    about_run = {"length": options.length, "ranks": comm.size}
    return write_rows(options, found, about_run, comm)


if __name__ == "__main__":
    sys.exit(main())
