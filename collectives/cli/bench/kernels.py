"""`mpicomp bench kernels`: the host kernels against what NumPy and PyTorch offer, and against one read of the data.

All on one thread, but for the rows that compare several threads with one.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cli.bench.data import FAMILIES
from collectives.cli.bench.floor import read_once
from collectives.cli.bench.timing import Call, Row, compare
from mpicomp import threads
from mpicomp.codec import Coding, decode, encode, plain, quick
from mpicomp.codec.indices import BITMAP, BLOCKS, ELIAS_FANO, RANGE
from mpicomp.codec.values import Offsets
from mpicomp.compressors import TopK
from mpicomp.kernels import host
from mpicomp.vector import SparseVector

Array = NDArray[Any]
Sparse = tuple[Array, Array]


def rows(length: int, repeats: int) -> Iterator[Row]:
    """Yield every comparison, for gradients of `length` values; some on shorter or longer vectors of their own."""
    rng = np.random.default_rng(0)
    yield from top_k_rows(rng, min(length, 1_000_000), 3 * repeats)
    if length > 1_000_000:
        yield from top_k_rows(rng, length, repeats)
    yield from hard_rows(rng, length, repeats)
    yield from pass_rows(rng, length, repeats)
    yield from fused_rows(rng, length, repeats)
    yield from thread_rows(rng, length, repeats)
    yield from merge_rows(rng, repeats)
    yield from accumulate_rows(rng, repeats)
    yield from dense_rows(rng, length, repeats)
    yield from coding_rows(rng, length, repeats)
    yield from value_rows(rng, length, repeats)


def top_k_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Exact top-k of data like gradients, against NumPy and PyTorch."""
    drawn = {family: FAMILIES[family](rng, length) for family in ("normal", "laplace", "cauchy")}
    for family, values in drawn.items():
        for density in (0.001, 0.01):
            k = round(density * length)
            against: dict[str, Call] = {"np.argpartition": partial(argpartition, values, k)}
            against |= {"np.partition, np.flatnonzero": partial(partition, values, k)} | torch_top_k(values, k)
            yield from top_k_row(f"top_k {family} {length / 1e6:g}e6 k/n={density}", values, k, against, repeats)
    for dtype in (np.float16, np.float64):
        cast, k = drawn["normal"].astype(dtype), length // 1000
        against = {"np.argpartition": partial(argpartition, cast, k)}
        yield from top_k_row(f"top_k {cast.dtype} {length / 1e6:g}e6 k/n=0.001", cast, k, against, repeats)


def hard_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Exact top-k of data that mislead a sample, or that are full of ties."""
    data: dict[str, Array] = {
        "zeros": np.zeros(length),
        "all equal": np.full(length, 3),
        "sorted": np.arange(length),
        "quantised": np.round(4 * rng.standard_normal(length, np.float32)),
        "a thousandth non-zero": rng.random(length, np.float32) < 0.001,
    }
    for name, drawn in data.items():
        values, k = drawn.astype(np.float32), length // 1000
        against = {"np.argpartition": partial(argpartition, values, k)}
        yield from top_k_row(f"top_k {name} {length / 1e6:g}e6 k/n=0.001", values, k, against, repeats)


def top_k_row(name: str, values: Array, k: int, against: Mapping[str, Call], repeats: int) -> list[Row]:
    """Compare top_k with its rivals."""
    return compare(name, partial(host.top_k, values, k, threads=1), against, repeats, floor=read_once(values))


def pass_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Passes over a whole gradient."""
    values = rng.standard_normal(length, np.float32)

    def moments() -> tuple[Any, ...]:
        size = np.abs(values)
        logs = np.log(size[size > 0]).sum()
        return np.count_nonzero(size), size.sum(dtype=float), np.square(size).sum(dtype=float), logs, size.max()

    other, out = values[::-1].copy(), np.empty_like(values)
    comparisons: dict[str, tuple[Call, str, Call]] = {
        "moments": (partial(host.moments, values, threads=1), "NumPy, five passes", moments),
        "raise_not_finite": (
            partial(host.raise_not_finite, values, threads=1),
            "np.isfinite(x).all()",
            lambda: np.isfinite(values).all(),
        ),
        "above, 0.27 %": (
            partial(host.above, values, 3, threads=1),
            "np.flatnonzero(abs >= t)",
            lambda: np.flatnonzero(np.abs(values) >= 3),
        ),
        "histogram": (
            partial(host.histogram, values, threads=1),
            "np.bincount of the heads",
            lambda: np.bincount((values.view(np.uint32) & 0x7FFF_FFFF) >> 20, minlength=2048),
        ),
        "add": (partial(host.add, values, other, out, threads=1), "np.add", partial(np.add, values, other, out=out)),
    }
    for name, (ours, what, theirs) in comparisons.items():
        yield from compare(f"{name} {length / 1e6:g}e6", ours, {what: theirs}, repeats, floor=read_once(values))


def fused_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """A sum and the largest of it in one pass, against a pass for each."""
    a, b = (rng.standard_normal(length, np.float32) for _ in range(2))
    out = np.empty_like(a)

    def one_after_the_other(k: int) -> Sparse:
        host.add(a, b, out, threads=1)
        return host.largest(out, k, threads=1)

    for density in (0.001, 0.01):
        k = round(density * length)
        ours, name = partial(host.add_largest, a, b, out, k, threads=1), f"add_largest {length / 1e6:g}e6 k/n={density}"
        against: dict[str, Call] = {"add, then largest": partial(one_after_the_other, k)}
        yield from compare(name, ours, against, repeats, floor=read_once(a))


def thread_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Kernels on as many threads as they take by default, against one thread."""
    a, b = (rng.standard_normal(length, np.float32) for _ in range(2))
    out, k = np.empty_like(a), length // 1000
    calls: dict[str, Callable[..., Any]] = {
        "largest 0.1 %": partial(host.largest, a, k),
        "add": partial(host.add, a, b, out),
        "add_largest 0.1 %": partial(host.add_largest, a, b, out, k),
        "above, 0.27 %": partial(host.above, a, 3),
        "moments": partial(host.moments, a),
        "raise_not_finite": partial(host.raise_not_finite, a),
    }
    for name, ours in calls.items():
        against: dict[str, Call] = {"one thread": partial(ours, threads=1)}
        yield from compare(f"{name} {length / 1e6:g}e6 on {threads.count()} threads", ours, against, repeats)


def merge_rows(rng: np.random.Generator, repeats: int) -> Iterator[Row]:
    """The sum of two sparse vectors."""

    def by_numpy(a: Sparse, b: Sparse) -> Sparse:
        union, where = np.unique(np.concatenate([a[0], b[0]]), return_inverse=True)
        total = np.zeros(union.size, a[1].dtype)
        np.add.at(total, where, np.concatenate([a[1], b[1]]))
        return union, total

    for k in (25_000, 250_000):
        for dtype in (np.float32, np.float16):
            a, b = (sparse(rng, 100 * k, k, dtype) for _ in range(2))
            against = {"np.unique + np.add.at": partial(by_numpy, a, b)}
            ours = partial(host.merge, *a, *b)
            yield from compare(f"merge 2 x {k} {a[1].dtype}", ours, against, repeats, entries=a[0].size + b[0].size)


def accumulate_rows(rng: np.random.Generator, repeats: int) -> Iterator[Row]:
    """The sum of many sparse vectors: dense enough for tiles, and too sparse for them."""

    def by_sorting(indices: list[Array], values: list[Array]) -> Sparse:
        together = np.concatenate(indices)
        order = np.argsort(together, kind="stable")
        together = together[order]
        starts = np.flatnonzero(np.r_[True, together[1:] != together[:-1]])
        return together[starts], np.add.reduceat(np.concatenate(values)[order], starts)

    dense_enough = (8, 250_000, 25_000_000), (64, 25_000, 2_500_000), (64, 25_000, 25_000_000)
    for parts, k, length in (*dense_enough, (8, 25_000, 25_000_000), (64, 25_000, 2**50)):
        vectors = [sparse(rng, length, k, np.float32) for _ in range(parts)]
        indices, values = [vector[0] for vector in vectors], [vector[1] for vector in vectors]
        against = {"concatenate, argsort, reduceat": partial(by_sorting, indices, values)}
        ours = partial(host.accumulate, indices, values, length)
        name, entries = f"accumulate {parts} x {k} in {length:.1e}", sum(each.size for each in indices)
        yield from compare(name, ours, against, repeats, entries=entries)


def dense_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """What goes between sparse and dense vectors."""
    for dtype in (np.float32, np.float16):
        dense, (indices, values) = np.zeros(length, dtype), sparse(rng, length, length // 100, dtype)
        calls: list[Call] = [
            partial(host.scatter_add, dense, indices, values, threads=1),
            partial(np.add.at, dense, indices, values),
            partial(host.gather, dense, indices, threads=1),
            partial(dense.__getitem__, indices),
        ]
        name = f"{indices.size} of {length / 1e6:g}e6 {dense.dtype}"
        yield from compare(f"scatter_add {name}", calls[0], {"np.add.at": calls[1]}, repeats, entries=indices.size)
        yield from compare(f"gather {name}", calls[2], {"dense[indices]": calls[3]}, repeats, entries=indices.size)


def coding_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Index formats: writing, and reading back, against copying the plain indices. The name says the bits an index."""
    for density in (0.001, 0.01, 0.125):
        indices, _ = sparse(rng, length, round(density * length), np.float32)
        vector = SparseVector(indices, np.empty((indices.size, 0), np.float32), length)
        out = np.empty(8 * indices.size + length // 8 + 4096, np.uint8)
        baseline = partial(encode, vector, out)
        for name, form in (("blocks", BLOCKS), ("Elias-Fano", ELIAS_FANO), ("bitmap", BITMAP)):
            coding = Coding(form, plain(vector).values)
            message = encode(vector, coding=coding)
            what = f"{name} at {density:g}, {8 * message.size / indices.size:.2f} bits"
            write, read = partial(encode, vector, out, coding), partial(decode, message)
            against: dict[str, Call] = {"a copy of the plain indices": baseline}
            yield from compare(f"encode {what}", write, against, repeats, entries=indices.size)
            yield from compare(f"decode {what}", read, against, repeats, entries=indices.size)


def value_rows(rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Offsets of what Top-k selects of normal values, against copying it. The name says the bits a value."""
    gradient = rng.standard_normal(length, np.float32)
    for density in (0.001, 0.01, 0.125):
        values = TopK(density=density).compress(gradient).values
        vector = SparseVector(np.arange(values.size), values, values.size)
        coding = Coding(RANGE, Offsets.of(values))
        out, message = np.empty(8 * values.size + 4096, np.uint8), encode(vector, coding=coding)
        against: dict[str, Call] = {"a copy of the values": partial(encode, vector, out, quick(vector))}
        what = f"offsets of the largest {density:g}, {8 * message.size / values.size:.2f} bits"
        yield from compare(
            f"encode {what}", partial(encode, vector, out, coding), against, repeats, entries=values.size
        )
        yield from compare(f"decode {what}", partial(decode, message), against, repeats, entries=values.size)


def argpartition(values: Array, k: int) -> Array:
    """Return the places of the k largest magnitudes, in no order."""
    found: Array = np.argpartition(np.abs(values), values.size - k)[values.size - k :]
    return found


def partition(values: Array, k: int) -> Array:
    """Return the places of what is at least as large as the k-th largest magnitude, in order."""
    sizes = np.abs(values)
    return np.flatnonzero(sizes >= np.partition(sizes, sizes.size - k)[sizes.size - k])


def torch_top_k(values: Array, k: int) -> dict[str, Call]:
    """Return PyTorch's top-k of the magnitudes on one thread, where it is installed."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {}
    torch.set_num_threads(1)
    tensor = torch.from_numpy(values)
    return {"torch.topk": lambda: torch.topk(tensor.abs(), k)}


def sparse(rng: np.random.Generator, length: int, k: int, dtype: Any) -> Sparse:
    """Return about `k` increasing indices below `length`, and as many values."""
    indices = np.unique(rng.integers(0, length, k)).astype(np.int32 if length < 2**31 else np.int64)
    return indices, rng.standard_normal(indices.size).astype(dtype)
