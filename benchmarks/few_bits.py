"""Time a sum in few bits, and each of its parts on its own: what a rank computes, and the messages by MPI.

    mpirun -n 4 python -m mpi4py benchmarks/few_bits.py --json docs/results/quantised-4.json
    mpirun -n 4 python -m mpi4py benchmarks/few_bits.py --hook wide-gpt     # with PyTorch

The calls are those of `mpicomp bench quantised`, by the direct algorithm. Each part runs
on all ranks at the same time: starting the messages, and waiting for other ranks, is not
in them.

With --hook the rows are whole steps with 4 bits instead: of one vector, of a model's
tensors by name, and of backward passes in DistributedDataParallel that compute nothing,
in its buckets of 25 MB. What DDP takes is in the pass with an empty hook, and is
subtracted in the last row, turn by turn. NumPy's memory is in huge pages; PyTorch's
is with THP_MEM_ALLOC_ENABLE=1 only.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import GradientExchange, quantised_allreduce
from mpicomp.arrays import Array
from mpicomp.codec import few_bits_message
from mpicomp.correction import Correction
from mpicomp.few_bits import FewBits, coder, first_blocks, shares
from mpicomp.means import CodedMean
from mpicomp_bench.bench.exchange import TENSORS, length_of, tensors_of
from mpicomp_bench.bench.quantised import SUITE
from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import (
    Call,
    Contestant,
    Row,
    compare,
    interleave,
    read_once,
    timed,
)
from mpicomp_bench.options import Parser, positive
from mpicomp_bench.output import COMPARISON, figure, show, write_rows

BITS, BLOCK = (8, 4), 256
SETTLING = (
    2  # turns before those that count: DDP makes its buckets anew after the first
)
STEPS = [*COMPARISON[:3], ("/one vector", ">11", figure("over", ".3f"))]
EMPTY, FULL = "DDP, its hook empty", "DDP, 4 bits in its hook"


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
    correction = Correction([array], out[1])
    write = coder(correction, bits, block)
    ranges = shares(0, first_blocks(correction.sizes, block)[-1], comm.size)
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
            CodedMean(coded_shares, correction.sizes).write, out[0]
        ),
        f"{bits} bits: as many bytes by MPI": messages,
    }


def steps(options: Namespace, comm: Any) -> list[Row]:
    """Return a row for each whole step: its seconds, also as multiples of the step of one vector."""
    shapes = TENSORS[options.hook]
    rng = np.random.default_rng([1, comm.rank])
    gradient = rng.standard_normal(length_of(options.hook), np.float32)
    contestants = [
        *exchanges(comm, gradient, np.empty_like(gradient), shapes, ""),
        *backward_passes(comm, gradient, shapes),
    ]
    interleave(contestants, SETTLING, comm)
    found = {
        contestant.name: seconds.max(axis=0, keepdims=True)
        for contestant, seconds in zip(
            contestants, interleave(contestants, options.repeats, comm), strict=True
        )
    }
    found["the hook: DDP with it, less DDP"] = found[FULL] - found[EMPTY]
    rows = [{"name": name, **timed(seconds)} for name, seconds in found.items()]
    return [{**row, "over": row["seconds"] / rows[0]["seconds"]} for row in rows]


def exchanges(
    comm: Any, gradient: Any, out: Any, shapes: dict[str, Any], where: str
) -> list[Contestant]:
    """Return the steps of one vector, and of its parts by name."""
    one, many = (GradientExchange(comm, bits=4) for _ in range(2))
    parts, means = (tensors_of(vector, shapes) for vector in (gradient, out))
    return [
        Contestant(f"one vector{where}", partial(one, gradient, out=out)),
        Contestant(f"tensors by name{where}", partial(many, parts, out=means)),
    ]


def backward_passes(
    comm: Any, gradient: Array, shapes: dict[str, Any]
) -> list[Contestant]:
    """Return the steps in PyTorch's memory, and backward passes in DDP: with an empty hook, and with the exchange's."""
    import torch

    from collectives.torch import attach, init_process_group

    def returned(bucket: Any) -> Any:
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.set_num_threads(1)
    init_process_group(comm)
    given = torch.from_numpy(gradient)
    vector = given.clone()
    where = ", PyTorch's memory, in place"
    empty, full = (in_ddp(shapes) for _ in range(2))
    empty.register_comm_hook(None, lambda _, bucket: returned(bucket))
    attach(full, GradientExchange(comm, bits=4))
    return [
        *exchanges(comm, vector, vector, shapes, where),
        backward_pass(EMPTY, empty, given, shapes),
        backward_pass(FULL, full, given, shapes),
    ]


def in_ddp(shapes: dict[str, Any]) -> Any:
    """Return a model in DDP whose gradients are its inputs: its backward pass copies them to the buckets."""
    import torch

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, parameter: Any, gradient: Any) -> Any:
            context.gradient = gradient
            return parameter.new_zeros(())

        @staticmethod
        def backward(context: Any, _: Any) -> Any:
            return context.gradient, None

    class Model(torch.nn.Module):
        def forward(self, gradients: list[Any]) -> Any:
            return sum(map(Given.apply, self.tensors, gradients))

    model = Model()
    model.tensors = torch.nn.ParameterList(map(torch.zeros, shapes.values()))
    wrap = torch.nn.parallel.DistributedDataParallel
    return wrap(model, gradient_as_bucket_view=True)


def backward_pass(
    name: str, model: Any, given: Any, shapes: dict[str, Any]
) -> Contestant:
    """Return the backward pass of a model with the gradients that are parts of a vector."""
    gradients = [*tensors_of(given, shapes).values()]
    outputs = []

    def before() -> None:
        model.zero_grad(set_to_none=False)
        outputs.append(model(gradients))

    return Contestant(name, lambda: outputs.pop().backward(), before)


def main() -> int:
    """Measure, print and write."""
    parser, comm = Parser(description=__doc__), MPI.COMM_WORLD
    add = parser.add_argument
    about = "values of the array (%(default)s)"
    add("--length", type=positive, default=25_000_000, metavar="N", help=about)
    about = "timed turns of each call (%(default)s)"
    add("--repeats", type=positive, default=9, metavar="N", help=about)
    add("--json", type=new_file, metavar="FILE", help="write the rows as JSON")
    about = "whole steps instead, with a model's tensors by name and in DDP's hook"
    add("--hook", choices=TENSORS, metavar="MODEL", help=about)
    options = parser.parse_args()
    check_files(options, comm)
    measured, columns = (steps, STEPS) if options.hook else (rows, COMPARISON)
    found = show(measured(options, comm), columns, None if comm.rank else sys.stdout)
    length = length_of(options.hook) if options.hook else options.length
    about_run = {"length": length, "ranks": comm.size}
    return write_rows(options, found, about_run, comm)


if __name__ == "__main__":
    sys.exit(main())
