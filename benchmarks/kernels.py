"""Time kernels of the host or a GPU, compared with NumPy, CuPy and PyTorch, and with one read.

    python benchmarks/kernels.py --length 1e6 --repeats 3 --json kernels.json
    python benchmarks/kernels.py --device gpu --length 1e9

On the host all run on one thread. On a GPU the time is from the
call until the stream is synchronised, so it includes launches, as in a step.
"""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpicomp import threads
from mpicomp.arrays import Array
from mpicomp.codec import Coding, decode, encode, few_bits_message, plain, quick
from mpicomp.codec.indices import BITMAP, ELIAS_FANO, RANGE
from mpicomp.codec.values import offsets_of
from mpicomp.compressors import TopK
from mpicomp.correction import Correction
from mpicomp.few_bits import BITS, coder
from mpicomp.kernels import Summands, host
from mpicomp.means import CodedMean
from mpicomp.vector import SparseVector
from mpicomp_bench.bench.data import FAMILIES
from mpicomp_bench.files import check_files, new_file
from mpicomp_bench.measuring import (
    Call,
    Row,
    compare,
    missing_gpu,
    read_once,
    until_done,
)
from mpicomp_bench.options import Parser, positive
from mpicomp_bench.output import COMPARISON, show, write_rows

Sparse = tuple[Array, Array]
# name, the kernel's call, baselines, and the array that one read of is the floor, or
# how many entries a call works on
Comparisons = Iterator[tuple[str, Call, Mapping[str, Call], Any]]
ONE = {"threads": 1}
# values of a long vector on a GPU, and of the block that it repeats
_LONG, _BLOCK = 100_000_000, 1 << 22


def rows(options: Namespace) -> Iterator[Row]:
    """Yield all comparisons, for gradients of `length` values."""
    rng, length, repeats = np.random.default_rng(0), options.length, options.repeats
    if options.device == "gpu":
        from mpicomp.kernels import device

        cupy: Any = importlib.import_module("cupy")
        for both in (
            (top_k, passes, sums, dense) if length <= _LONG else (of_a_long_vector,)
        ):
            yield from compared(
                both(cupy, device, rng, length), repeats, until_done, read_once_on_gpu
            )
        return
    for size in sorted({min(length, 1_000_000), length}):
        yield from compared(
            top_k(np, host, rng, size), 3 * repeats if size <= 1_000_000 else repeats
        )
    for both in passes, sums, dense:
        yield from compared(both(np, host, rng, length), repeats)
    for subject in fused, transforms, few_bits, coding, offsets:
        yield from compared(subject(rng, length), repeats)


def compared(
    found: Comparisons,
    repeats: int,
    call: Callable[[Call], Call] = lambda call: call,
    read: Any = read_once,
) -> Iterator[Row]:
    """Yield the rows of comparisons. call: makes a call synchronous; read: reads an array once."""
    for name, ours, against, what in found:
        counted = isinstance(what, int)
        floor = None if counted else call(read(what))
        baselines = {each: call(baseline) for each, baseline in against.items()}
        yield from compare(
            {name: call(ours)},
            baselines,
            repeats,
            floor=floor,
            entries=what if counted else None,
        )


def top_k(xp: Any, kernels: Any, rng: np.random.Generator, length: int) -> Comparisons:
    """Exact top-k of data like gradients, against a partition and PyTorch. xp: NumPy or CuPy."""
    on_host, one, size = xp is np, ONE if xp is np else {}, f"{length / 1e6:g}e6"
    normal = FAMILIES["normal"](rng, length)
    for family in "normal", "laplace", "cauchy":
        values = xp.asarray(
            normal if family == "normal" else FAMILIES[family](rng, length)
        )
        for density in (0.001, 0.01):
            k = max(1, round(density * length))
            against: dict[str, Call] = {
                f"{xp.__name__}.argpartition": partial(argpartition, xp, values, k)
            }
            if on_host:
                against["np.partition, np.flatnonzero"] = partial(partition, values, k)
            against |= torch_top_k(values, k, on_host=on_host)
            yield (
                f"top_k {family} {size} k/n={density}",
                partial(kernels.largest, values, k, **one),
                against,
                values,
            )
    # types, and data that mislead a sample, or that are full of ties
    data: dict[str, Callable[[], Array]] = {
        "float16": lambda: normal.astype(np.float16),
        "float64": lambda: normal.astype(np.float64),
        "zeros": lambda: np.zeros(length, np.float32),
        "all equal": lambda: np.full(length, 3, np.float32),
        "sorted": lambda: np.arange(length, dtype=np.float32),
        "quantised": lambda: np.round(4 * normal),
        "a thousandth non-zero": lambda: (
            rng.random(length, np.float32) < 0.001
        ).astype(np.float32),
    }
    for name, make in data.items():
        values, k = xp.asarray(make()), max(1, length // 1000)
        against = {f"{xp.__name__}.argpartition": partial(argpartition, xp, values, k)}
        yield (
            f"top_k {name} {size} k/n=0.001",
            partial(kernels.largest, values, k, **one),
            against,
            values,
        )


def of_a_long_vector(
    cupy: Any, kernels: Any, rng: np.random.Generator, length: int
) -> Comparisons:
    """Top-k, alone and of a sum, of a periodic vector: drawing all of its values would take minutes."""
    block = rng.standard_normal(_BLOCK, np.float32)
    values, size = (
        cupy.tile(cupy.asarray(block), -(-length // _BLOCK))[:length],
        f"{length / 1e6:g}e6",
    )
    out = cupy.empty_like(values)
    for density in (0.0001, 0.001):
        k = round(density * length)
        against = {
            "cupy.argpartition": partial(argpartition, cupy, values, k)
        } | torch_top_k(values, k, on_host=False)
        yield (
            f"top_k normal {size} k/n={density}",
            partial(kernels.largest, values, k),
            against,
            values,
        )
        rows = [0, length], [k], [length], [k]
        both = Summands(values, 1.0, [values])
        ours = partial(kernels.largest_in_segments, out, *rows, summands=both)
        add = partial(np.add, values, values, out=out)
        yield f"add_largest {size} k/n={density}", ours, {"cupy.add": add}, values


def passes(xp: Any, kernels: Any, rng: np.random.Generator, length: int) -> Comparisons:
    """Passes over a whole gradient."""
    on_host, one, size = xp is np, ONE if xp is np else {}, f"{length / 1e6:g}e6"
    values = xp.asarray(rng.standard_normal(length, np.float32))

    calls: dict[str, tuple[Call, str, Call]] = {
        "raise_not_finite": (
            partial(kernels.raise_not_finite, values, **one),
            "isfinite(x).all()",
            lambda: xp.isfinite(values).all(),
        ),
    }
    if on_host:
        other, out = values[::-1].copy(), np.empty_like(values)
        calls |= {
            "sides": (
                partial(host.sides, values, 1.0, **ONE),
                "abs(x).sum()",
                lambda: np.abs(values).sum(),
            ),
            "add": (
                partial(host.add, values, other, out, **ONE),
                "add",
                partial(np.add, values, other, out=out),
            ),
        }
    else:
        other = values.copy()
        calls["hadamard of 256"] = (
            partial(kernels.hadamard, values, other, 256),
            "copy",
            partial(values.copy),
        )
    for name, (ours, what, theirs) in calls.items():
        yield f"{name} {size}", ours, {f"{xp.__name__}.{what}": theirs}, values


def fused(rng: np.random.Generator, length: int) -> Comparisons:
    """A sum and its largest entries in one pass, against a pass for each."""
    a, b = (rng.standard_normal(length, np.float32) for _ in range(2))
    out = np.empty_like(a)

    def one_after_the_other(k: int) -> Sparse:
        host.add(a, b, out, threads=1)
        return host.largest(out, k, threads=1)

    for density in (0.001, 0.01):
        k = round(density * length)
        ours, against = (
            partial(host.add_largest, a, b, out, k, **ONE),
            partial(one_after_the_other, k),
        )
        yield (
            f"add_largest {length / 1e6:g}e6 k/n={density}",
            ours,
            {"add, then largest": against},
            a,
        )


def transforms(rng: np.random.Generator, length: int) -> Comparisons:
    """A Walsh-Hadamard transform to another array and one in place, and signs."""
    values, size = rng.standard_normal(length, np.float32), f"{length / 1e6:g}e6"
    out = values.copy()

    def forward_and_inverse(chunk: int, number: int) -> None:
        host.hadamard(values, out, chunk, threads=number)
        host.hadamard(out, out, chunk, threads=number)

    def copy_twice() -> None:
        for _ in range(2):
            np.copyto(out, values)

    for number in sorted({1, threads.count()}):
        for chunk in 64, 256, 1024, 4096:
            name = f"hadamard {size} of {chunk}, forward and inverse, threads={number}"
            yield (
                name,
                partial(forward_and_inverse, chunk, number),
                {"two copies": copy_twice},
                values,
            )
    yield (
        f"signs {size}",
        partial(host.signs, out, **ONE),
        {"numpy.sign": partial(np.sign, out, out)},
        values,
    )


def sums(xp: Any, kernels: Any, rng: np.random.Generator, length: int) -> Comparisons:
    """The sums of two and of more sparse vectors: dense enough for tiles, and too sparse for them."""

    def by_sorting(indices: list[Array], values: list[Array]) -> Sparse:
        together = np.concatenate(indices)
        order = np.argsort(together, kind="stable")
        together = together[order]
        starts = np.flatnonzero(np.r_[True, together[1:] != together[:-1]])
        return together[starts], np.add.reduceat(np.concatenate(values)[order], starts)

    few, many = max(1, length // 1000), max(1, length // 100)
    shapes = (
        (2, few, length),
        (2, many, length),
        (8, few, length),
        (8, many, length),
        (64, few, length),
    )
    for parts, k, whole in (*shapes, (64, few, length // 10), (64, few, 2**50)):
        for dtype in (np.float32, np.float16)[: 2 if parts == 2 else 1]:
            vectors = [sparse(rng, whole, k, dtype) for _ in range(parts)]
            indices, values = (list(each) for each in zip(*vectors, strict=True))
            sent = [[xp.asarray(each) for each in vector] for vector in vectors]
            if parts == 2:
                ours, name = (
                    partial(kernels.merge, *sent[0], *sent[1]),
                    f"merge 2 x {k} {np.dtype(dtype)}",
                )
            else:
                ours = partial(
                    kernels.accumulate,
                    *(list(each) for each in zip(*sent, strict=True)),
                    whole,
                )
                name = f"accumulate {parts} x {k} in {whole:.1e}"
            against: dict[str, Call] = {
                "the host's kernel": partial(host.accumulate, indices, values, whole)
            }
            if xp is np:
                against = {
                    "concatenate, argsort, reduceat": partial(
                        by_sorting, indices, values
                    )
                }
            yield name, ours, against, sum(len(each) for each in indices)


def dense(xp: Any, kernels: Any, rng: np.random.Generator, length: int) -> Comparisons:
    """Between sparse and dense vectors."""
    one = ONE if xp is np else {}
    for dtype in (np.float32, np.float16):
        array = xp.zeros(length, dtype)
        indices, values = (
            xp.asarray(each)
            for each in sparse(rng, length, max(1, length // 100), dtype)
        )

        def add(
            array: Any = array, indices: Any = indices, values: Any = values
        ) -> None:
            array[indices] += values

        name = f"{indices.size} of {length / 1e6:g}e6 {array.dtype}"
        ours = partial(kernels.scatter_add, array, indices, values, **one)
        yield (
            f"scatter_add {name}",
            ours,
            {"dense[indices] += values": add},
            indices.size,
        )
        take = partial(array.__getitem__, indices)
        yield (
            f"gather {name}",
            partial(kernels.gather, array, indices, **one),
            {"dense[indices]": take},
            indices.size,
        )


def few_bits(rng: np.random.Generator, length: int) -> Comparisons:
    """Every value in few bits, in blocks of 256, against NumPy's passes for 8 bits and for a sum."""
    values = rng.standard_normal(-(-length // 256) * 256, np.float32)
    out, rows = np.empty_like(values), values.reshape(-1, 256)

    def by_numpy() -> Array:
        scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        codes = np.rint(rows / scales)
        errors: Array = rows - codes * scales
        return errors

    for bits in BITS:
        room = few_bits_message(values.size, bits, 256, values)
        coded = coder(Correction([values], out), bits, 256)(room)
        arrays, others = (
            (coded.codes, coded.scales),
            (coded.codes.copy(), coded.scales.copy()),
        )
        code = host.encoder([values], None, bits, 256, out, threads=1)
        calls: dict[str, Call] = {
            "quantise": partial(code, *arrays),
            "quantise a sum of two": partial(code, *others, [arrays]),
            "dequantise": partial(CodedMean([coded], [length]).write, out),
        }
        for name, ours in calls.items():
            against = (
                {"8 bits by NumPy": by_numpy}
                if name == "quantise"
                else {"add": partial(np.add, values, out, out=out)}
            )
            yield f"{name} {bits} bits {length / 1e6:g}e6", ours, against, values


def coding(rng: np.random.Generator, length: int) -> Comparisons:
    """Encode and decode index formats, against copying the plain indices. The name has the bits an index."""
    for density in (0.001, 0.01, 0.125):
        indices, _ = sparse(rng, length, round(density * length), np.float32)
        vector = SparseVector(indices, np.empty((indices.size, 0), np.float32), length)
        against: dict[str, Call] = {
            "a copy of the plain indices": partial(encode, vector)
        }
        for name, form in (("Elias-Fano", ELIAS_FANO), ("bitmap", BITMAP)):
            yield from coded(
                f"{name} at {density:g}",
                vector,
                (form, plain(vector)[1]),
                against,
            )


def offsets(rng: np.random.Generator, length: int) -> Comparisons:
    """Encode and decode the offsets of Top-k's values, against copying them. The name has the bits a value."""
    gradient = rng.standard_normal(length, np.float32)
    for density in (0.001, 0.01, 0.125):
        values = TopK(density=density).compress(gradient).values
        vector = SparseVector(np.arange(values.size), values, values.size)
        copy: dict[str, Call] = {
            "a copy of the values": partial(encode, vector, coding=quick(vector))
        }
        yield from coded(
            f"offsets of the largest {density:g}",
            vector,
            (RANGE, offsets_of(values)),
            copy,
        )


def coded(
    name: str,
    vector: SparseVector,
    form: Coding,
    against: Mapping[str, Call],
) -> Comparisons:
    """Encode a vector, and decode it."""
    message = encode(vector, form)
    what = f"{name}, {8 * message.size / max(1, vector.nnz):.2f} bits"
    yield f"encode {what}", partial(encode, vector, form), against, vector.nnz
    yield f"decode {what}", partial(decode, message), against, vector.nnz


def read_once_on_gpu(values: Any) -> Call:
    """Return a call that reads `values` once, 16 bytes at a time."""
    from mpicomp.kernels.device.compiling import MOST_BLOCKS, launch

    cupy: Any = importlib.import_module("cupy")
    bits, position = values.view(f"u{values.itemsize}"), cupy.zeros(1, np.uint64)
    unreachable = 2 ** (8 * values.itemsize - 1)
    arguments = bits, bits.size, unreachable - 1, unreachable, position
    return partial(launch, "first_reaching", [bits.dtype], MOST_BLOCKS, *arguments)


def argpartition(xp: Any, values: Any, k: int) -> Any:
    """Return the indices of the k largest magnitudes, in no order."""
    return xp.argpartition(xp.abs(values), values.size - k)[values.size - k :]


def partition(values: Array, k: int) -> Array:
    """Return the indices of all magnitudes of at least the k-th largest, in order."""
    sizes = np.abs(values)
    return np.flatnonzero(sizes >= np.partition(sizes, sizes.size - k)[sizes.size - k])


def torch_top_k(values: Any, k: int, *, on_host: bool) -> dict[str, Call]:
    """Return PyTorch's top-k of the magnitudes, on one thread or on the GPU, if PyTorch is installed."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {}
    if on_host:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        return {}
    tensor = torch.from_dlpack(values)
    return {"torch.topk": lambda: torch.topk(tensor.abs(), k)}


def sparse(rng: np.random.Generator, length: int, k: int, dtype: Any) -> Sparse:
    """Return about `k` increasing indices below `length`, and their values."""
    indices = np.unique(rng.integers(0, length, k)).astype(
        np.int32 if length < 2**31 else np.int64
    )
    return indices, rng.standard_normal(indices.size).astype(dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = Parser(prog="kernels.py", description=__doc__.partition("\n")[0])
    about = "whose kernels; those of a GPU against CuPy and PyTorch there (%(default)s)"
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help=about)
    parser.add_argument(
        "--length",
        type=positive,
        default=25_000_000,
        help="values of a gradient (%(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=9,
        help="timed turns of each call (%(default)s)",
    )
    parser.add_argument(
        "--json",
        type=new_file,
        metavar="FILE",
        help="write the rows as JSON (not written)",
    )
    options = parser.parse_args(arguments)
    check_files(options)
    if fault := missing_gpu() if options.device == "gpu" else None:
        parser.error(fault)
    found = show(rows(options), COMPARISON, sys.stdout)
    return write_rows(options, found, {"length": options.length})


if __name__ == "__main__":
    sys.exit(main())
