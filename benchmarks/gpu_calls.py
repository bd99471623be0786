"""What one rank computes on a GPU: wall and device time, in reads of the vector and over the bytes that must move.

    python benchmarks/gpu_calls.py --length 2.7e8 --json calls.json
    python benchmarks/gpu_calls.py --length 1e4 --json host.json      # nothing to compute: the cost of the host
    python benchmarks/gpu_calls.py --length 1e9 --only largest

Times are medians. Device time is that between two events on the stream, so it includes
gaps in which the device waits for the host. `reads`: device time over that of one read
of the vector in the same run. `over_least`: device time over that of the bytes that the
call has to move at the rate of this read. Rows are written as they are measured; one
that fails says why.
"""

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from mpi4py import MPI  # noqa: E402

from collectives import GradientExchange  # noqa: E402
from mpicomp import (  # noqa: E402
    AdaComp,
    AggregationAware,
    ChunkedTopK,
    ErrorFeedback,
    Hadamard,
    Quantised,
    SIDCo,
    TopK,
)
from mpicomp.codec import CODECS, decode, encode, few_bits_message  # noqa: E402
from mpicomp.correction import Correction  # noqa: E402
from mpicomp.few_bits import BITS, coder  # noqa: E402
from mpicomp.kernels import Summands  # noqa: E402
from mpicomp.means import CodedMean  # noqa: E402

Call = Callable[[], Any]
Rows = Iterator[tuple[str, float, Callable[[], Call]]]  # name, least bytes, set-up
READ = "one read"
BLOCK, CHUNK = 256, 4096
SECONDS = 0.25  # of the repeats of a call


def main() -> None:
    """Measure, and write each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--length", type=float, default=268_435_456)
    add("--density", type=float, default=0.001)
    add("--repeats", type=int, default=9)
    add("--only", default="", help="rows whose name contains this")
    add("--json", help="where the rows are written")
    options = parser.parse_args()
    cupy = importlib.import_module("cupy")
    values = cupy.asarray(
        np.random.default_rng(0).standard_normal(int(options.length), np.float32)
    )
    rows: list[dict[str, Any]] = []
    for name, least, prepare in (*reads(values), *calls(cupy, values, options.density)):
        if options.only in name or name == READ:
            rows.append(row(cupy, name, least, prepare, options.repeats))
            complete(rows, 4 * values.size)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


def row(
    cupy: Any, name: str, least: float, prepare: Callable[[], Call], repeats: int
) -> dict[str, Any]:
    """Return a row of a call; with the error in place of times if it raises one."""
    found: dict[str, Any] = {"name": name, "least_nbytes": least}
    try:
        call = prepare()
        return found | timed(cupy, call, repeats)
    except Exception as error:  # the other rows are measured all the same
        return found | {"error": f"{type(error).__name__}: {error}"}


def timed(cupy: Any, call: Call, repeats: int) -> dict[str, float]:
    """Return the median wall and device seconds of a call, after one that is not measured."""
    call()
    cupy.cuda.get_current_stream().synchronize()
    walls, devices, began = list[float](), list[float](), perf_counter()
    while not walls or (len(walls) < repeats and perf_counter() - began < SECONDS):
        first, last, start = cupy.cuda.Event(), cupy.cuda.Event(), perf_counter()
        first.record()
        call()
        last.record()
        last.synchronize()
        walls.append(perf_counter() - start)
        devices.append(1e-3 * cupy.cuda.get_elapsed_time(first, last))
    return {
        "seconds": statistics.median(walls),
        "device_seconds": statistics.median(devices),
        "repeats": len(walls),
    }


def complete(rows: list[dict[str, Any]], nbytes: int) -> None:
    """Compare the last row with the read, which is the first one, and print it."""
    read, last = rows[0].get("device_seconds"), rows[-1]
    if read and "device_seconds" in last:
        last["reads"] = last["device_seconds"] / read
        last["over_least"] = last["reads"] * nbytes / last["least_nbytes"]
        print(
            f"{last['name']:44s} {1e3 * last['seconds']:9.3f} ms, device {1e3 * last['device_seconds']:9.3f} ms, "
            f"{last['reads']:6.2f} reads, {last['over_least']:6.2f} of the least",
            flush=True,
        )
    else:
        print(f"{last['name']:44s} {last.get('error')}", flush=True)


def reads(values: Any) -> Rows:
    """Yield the baselines: one read, one copy, and selections of PyTorch and of NVIDIA's cuda.compute."""
    kernels = importlib.import_module("mpicomp.kernels.device")
    nbytes = values.nbytes
    yield READ, nbytes, lambda: partial(kernels.raise_not_finite, values)
    yield "copy", 2 * nbytes, lambda: values.copy
    yield "torch.topk of magnitudes", nbytes, lambda: torch_top_k(values)
    yield "cuda.compute.select of magnitudes", nbytes, lambda: selected(values)


def torch_top_k(values: Any) -> Call:
    """Return PyTorch's selection of a thousandth; raises where PyTorch sees no GPU."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    tensor, k = torch.from_dlpack(values), max(1, values.size // 1000)
    return lambda: torch.topk(tensor.abs(), k)


def selected(values: Any) -> Call:
    """Return a compaction of about a thousandth by cuda.compute (cuda-cccl[cu13]), for a known threshold."""
    compute = importlib.import_module("cuda.compute")
    cupy = importlib.import_module("cupy")
    kernels = importlib.import_module("mpicomp.kernels.device")
    _, kept = kernels.largest(values, max(1, values.size // 1000))
    threshold = float(abs(kept).min())
    found, count = cupy.empty_like(values), cupy.empty(1, np.int32)

    def is_large(value: Any) -> Any:
        return np.uint8(abs(value) >= threshold)

    given = {"d_in": values, "d_out": found, "d_num_selected_out": count}
    return partial(compute.select, cond=is_large, num_items=values.size, **given)


def calls(cupy: Any, values: Any, density: float) -> Rows:
    """Yield the calls of the library, the most telling ones first."""
    yield from selections(cupy, values, density)
    yield from steps(cupy, values, density)
    yield from of_tensors(values, density)
    yield from few_bits(cupy, values)
    yield from messages(values, density)


def selections(cupy: Any, values: Any, density: float) -> Rows:
    """Yield the kernels of a selection, and every compressor."""
    kernels = importlib.import_module("mpicomp.kernels.device")
    nbytes, k = values.nbytes, max(1, round(density * values.size))
    yield "largest", nbytes, lambda: partial(kernels.largest, values, k)
    out = cupy.empty_like(values)
    other = values[::-1].copy()
    rows = [0, values.size], [k], [values.size], [k]
    both = Summands(values, 1.0, [other])
    adding = partial(kernels.largest_in_segments, out, *rows, summands=both)
    yield "add_largest", 3 * nbytes, lambda: adding
    few = max(1, round(CHUNK * density))
    chunked = ChunkedTopK(few, CHUNK)
    compressors = {
        "TopK": TopK(density),
        "ChunkedTopK": chunked,
        "SIDCo exponential": SIDCo(density),
        "SIDCo pareto": SIDCo(density, "pareto"),
        "SIDCo gamma": SIDCo(density, "gamma"),
        "Quantised TopK, two bits": Quantised(TopK(density), "two_bit"),
        "Quantised ChunkedTopK, two bits": Quantised(chunked, "two_bit"),
    }
    for name, compressor in compressors.items():
        compress = partial(compressor.compress, values)
        yield name, nbytes, lambda compress=compress: compress  # type: ignore[misc]
    yield "AggregationAware", nbytes, lambda: with_an_aggregate(values, density)
    adacomp = partial(AdaComp(50).compress, values, gradient=other)
    yield "AdaComp", 2 * nbytes, lambda: adacomp


def with_an_aggregate(values: Any, density: float) -> Call:
    """Return a selection with the bonus of a last aggregate."""
    compressor = AggregationAware(density)
    compressor.observe(compressor.compress(values))
    return partial(compressor.compress, values)


def steps(cupy: Any, values: Any, density: float) -> Rows:
    """Yield steps of one rank by what they return."""
    nbytes, comm = values.nbytes, MPI.COMM_SELF

    def step(in_place: bool = False, **how: Any) -> Call:
        exchange = GradientExchange(
            comm, TopK(density), ErrorFeedback(in_place=in_place)
        )
        gradient = values.copy() if in_place else values
        return partial(exchange, gradient, **how)

    out = cupy.empty_like(values)
    yield "step, sparse", 3 * nbytes, partial(step, sparse=True)
    yield "step in place, sparse", nbytes, partial(step, in_place=True, sparse=True)
    yield "step, out=", 4 * nbytes, partial(step, out=out)
    yield "step, a new array", 4 * nbytes, step
    for bits in (4, 1):
        exchange = GradientExchange(comm, bits=bits)
        call = partial(exchange, values, out=out)
        least = nbytes * (4 + 2 * bits / 32)
        yield f"step, bits={bits}, out=", least, lambda call=call: call  # type: ignore[misc]


def of_tensors(values: Any, density: float) -> Rows:
    """Yield steps of a model of one tensor and of many, every third of them small; sizes of layers, then odd ones."""
    nbytes = values.nbytes
    for count, grain in ((1, 64), (54, 64), (160, 64), (54, 1)):
        weights = np.where(np.arange(count) % 3 == 2, 1 / 256, 1.0)
        shares = np.cumsum(weights / weights.sum() * values.size)
        ends = (shares // grain * grain).astype(int)
        ends[-1] = values.size
        bounds = [0, *ends.tolist()]
        parts = {f"t{i}": values[a:b] for i, (a, b) in enumerate(pairwise(bounds))}
        few = max(1, round(CHUNK * density))
        what = f"{count} {'tensor' if count == 1 else 'tensors'}"
        if grain == 1:
            what += " of odd sizes"
        made: dict[str, tuple[float, Callable[[], GradientExchange]]] = {
            "top-k": (4, lambda: GradientExchange(MPI.COMM_SELF, TopK(density))),
            "bits=4": (4.25, lambda: GradientExchange(MPI.COMM_SELF, bits=4)),
            "chunks in two bits": (
                4,
                lambda few=few: GradientExchange(
                    MPI.COMM_SELF, Quantised(ChunkedTopK(few, CHUNK), "two_bit")
                ),
            ),
        }
        for name, (passes, make) in made.items():
            yield (
                f"{what}, {name}",
                passes * nbytes,
                lambda make=make, parts=parts: partial(make(), parts),  # type: ignore[misc]
            )


def few_bits(cupy: Any, values: Any) -> Rows:
    """Yield codes of all values, their decoding, and the basis."""
    nbytes, errors = values.nbytes, cupy.empty_like(values)
    for bits in BITS:
        coded = nbytes * bits / 32
        yield (
            f"quantise {bits}",
            2 * nbytes + coded,
            partial(quantising, values, errors, bits),
        )
        yield (
            f"dequantise {bits}",
            nbytes + coded,
            partial(dequantising, values, errors, bits),
        )
    basis = Hadamard(BLOCK)
    yield "Hadamard", 2 * nbytes, lambda: partial(basis.forward, values, errors)


def quantising(values: Any, errors: Any, bits: int) -> Call:
    """Return a call that codes values in few bits, and writes their errors."""
    into = few_bits_message(values.size, bits, BLOCK, values)
    return partial(coder(Correction([values], errors), bits, BLOCK), into)


def dequantising(values: Any, out: Any, bits: int) -> Call:
    """Return a call that decodes values in few bits to `out`, whose memory is that of the errors before."""
    into = few_bits_message(values.size, bits, BLOCK, values)
    coded = coder(Correction([values], out), bits, BLOCK)(into)
    total = CodedMean([coded], [values.size])
    return lambda: total.writer([out])()


def messages(values: Any, density: float) -> Rows:
    """Yield the codec of the entries of a selection; it moves these only."""
    vector = TopK(density).compress(values)
    coding = CODECS["smallest"](vector)
    message = encode(vector, coding)
    moved = vector.nbytes + message.nbytes
    smallest = CODECS["smallest"]
    yield (
        "encode smallest",
        moved,
        lambda: lambda: encode(vector, smallest(vector)),
    )
    yield "decode", moved, lambda: partial(decode, message)


if __name__ == "__main__":
    main()
