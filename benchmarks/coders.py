"""A step in few bits of 16-bit and of 32-bit gradients, beside the kernels of pypiquant, on one rank and one thread.

    python -m mpi4py benchmarks/coders.py --json docs/results/coders.json
    benchmarks/tables.sh few_bits     # also for processors with AVX2

A step adds the residual, finds a scale for each block, codes, keeps the errors as the
next residual, decodes, and writes the mean. pypiquant has one scale a tensor, and no
residual: its row is the search for the scale, quantization and dequantization. Bytes
are those that a value takes to be read and written; a copy takes 8. With PyTorch there
are rows of bfloat16, whose means are new tensors. All calls are interleaved; medians.
"""

import os

os.environ["MPICOMP_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import importlib.util
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import GradientExchange
from mpicomp import TopK

LENGTH = 25_000_000
REPEATS = 15
BITS = 8, 4
Calls = dict[str, tuple[Callable[[], Any], float]]  # with the bytes of a value


def steps(gradient: Any, kind: str, out: Any) -> Calls:
    """Return whole steps of a gradient, each with an exchange of its own."""
    few = {f"bits={bits}": GradientExchange(MPI.COMM_SELF, bits=bits) for bits in BITS}
    found: Calls = {}
    for name, exchange in few.items():
        # The gradient, the residual twice, and the mean; codes are written and read.
        nbytes = 16 + 2 * int(name.removeprefix("bits=")) / 8
        if kind != "float32":
            nbytes = 0.0
        found[f"{name}, {kind}"] = partial(exchange, gradient, out=out), nbytes
    sparse = GradientExchange(MPI.COMM_SELF, TopK(0.001))
    found[f"TopK(0.001), {kind}"] = partial(sparse, gradient, sparse=True), 0.0
    return found


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
    return {
        f"pypiquant {metadata.version('pypiquant')}, {bits} bits": (
            partial(run, kinds[bits]),
            12 + 2 * bits / 8,
        )
        for bits in BITS
    }


def calls() -> Calls:
    """Return all that is timed."""
    gradient = np.random.default_rng(0).standard_normal(LENGTH, np.float32)
    out = np.empty_like(gradient)
    found: Calls = {"a copy": (partial(np.copyto, out, gradient), 8.0)}
    found |= steps(gradient, "float32", out)
    found |= piquant(gradient, out)
    short = gradient.astype(np.float16)
    found |= steps(short, "float16", np.empty_like(short))
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
        brain = torch.from_numpy(gradient).to(torch.bfloat16)
        found |= steps(brain, "bfloat16", None)
    return found


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    timed = calls()
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(REPEATS + 2):
        for name, (call, _) in timed.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    rows = [
        {"name": name, "seconds": statistics.median(times[name][2:]), "nbytes": nbytes}
        for name, (_, nbytes) in timed.items()
    ]
    copy = rows[0]["seconds"]
    for row in rows:
        line = f"{row['name']:28} {1e3 * row['seconds']:7.1f} ms {row['seconds'] / copy:6.2f} copies"
        print(line, f"{row['nbytes']:6.1f} bytes a value")
    if options.json:
        found = {"length": LENGTH, "cpus": os.cpu_count(), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
