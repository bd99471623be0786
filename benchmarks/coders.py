"""A step in few bits of 16-bit and of 32-bit gradients, beside the kernels of pypiquant, on one rank and one thread.

    python -m mpi4py benchmarks/coders.py --json docs/results/coders.json
    benchmarks/tables.sh few_bits     # also for processors with AVX2

A step adds the residual, finds a scale for each block, codes, keeps the errors as the
next residual, decodes, and writes the mean. pypiquant has one scale a tensor, and no
residual: its row is the search for the scale, quantization and dequantization. With
PyTorch there are rows of bfloat16, whose means are new tensors. All calls are
interleaved; medians.
"""

import os

os.environ["MPICOMP_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import importlib.util
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import GradientExchange
from mpicomp import TopK
from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import Contestant, interleave, timed
from mpicomp_bench.options import Parser
from mpicomp_bench.output import write_rows

LENGTH = 25_000_000
REPEATS = 15
BITS = 8, 4
# Bytes that a value takes to be read and written, where no pass converts it: a step
# moves the gradient, the residual twice, the mean, and the codes twice.
NBYTES = {
    "a copy": 8.0,
    **{f"bits={bits}, float32": 16 + bits / 4 for bits in BITS},
    **{f"pypiquant, {bits} bits": 12 + bits / 4 for bits in BITS},
}
Calls = dict[str, Callable[[], Any]]


def steps(gradient: Any, kind: str, out: Any) -> Calls:
    """Return whole steps of a gradient, each with an exchange of its own."""
    calls: Calls = {}
    for bits in BITS:
        coded = GradientExchange(MPI.COMM_SELF, bits=bits)
        calls[f"bits={bits}, {kind}"] = partial(coded, gradient, out=out)
    sparse = GradientExchange(MPI.COMM_SELF, TopK(0.001))
    calls[f"TopK(0.001), {kind}"] = partial(sparse, gradient, sparse=True)
    return calls


def piquant(gradient: Any, out: Any) -> Calls:
    """Return what pypiquant does to a gradient; nothing without it."""
    if importlib.util.find_spec("piquant") is None:
        return {}
    from piquant import Context, DataType, ReduceOp, RoundMode

    context = Context(1)
    codes = np.empty(gradient.size, np.uint8)
    source = gradient.ctypes.data, DataType.F32
    target = out.ctypes.data, DataType.F32

    def run(dtype: Any) -> None:
        scale = context.compute_quant_params_ptr_float32(
            source[0], dtype, gradient.size
        )
        coded = codes.ctypes.data, dtype
        context.quantize_ptr(*source, *coded, gradient.size, *scale, RoundMode.NEAREST)
        context.dequantize_ptr(*coded, *target, gradient.size, *scale, ReduceOp.SET)

    kinds = {8: DataType.UINT8, 4: DataType.UINT4}
    return {f"pypiquant, {bits} bits": partial(run, kinds[bits]) for bits in BITS}


def all_calls() -> Calls:
    """Return all that is timed, by name."""
    gradient = np.random.default_rng(0).standard_normal(LENGTH, np.float32)
    out = np.empty_like(gradient)
    calls: Calls = {"a copy": partial(np.copyto, out, gradient)}
    calls |= steps(gradient, "float32", out)
    calls |= piquant(gradient, out)
    short = gradient.astype(np.float16)
    calls |= steps(short, "float16", np.empty_like(short))
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        brain = torch.from_numpy(gradient).to(torch.bfloat16)
        calls |= steps(brain, "bfloat16", None)
    return calls


def main() -> None:
    """Measure, print and write the rows."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, metavar="FILE")
    options = parser.parse_args()
    check_files(options)
    contestants = [Contestant(name, call) for name, call in all_calls().items()]
    seconds = interleave(contestants, REPEATS)
    rows = [
        {"name": name, "nbytes": NBYTES.get(name), **timed(own)}
        for (name, *_), own in zip(contestants, seconds, strict=True)
    ]
    for row in rows:
        copies = row["seconds"] / rows[0]["seconds"]
        print(f"{row['name']:28} {1e3 * row['seconds']:7.1f} ms {copies:6.2f} copies")
    versions = {}
    if importlib.util.find_spec("piquant") is not None:
        versions["pypiquant"] = metadata.version("pypiquant")
    write_rows(options, rows, versions)


if __name__ == "__main__":
    main()
