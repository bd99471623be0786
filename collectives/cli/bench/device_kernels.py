"""`mpicomp bench kernels --device gpu`: the kernels of a GPU against what CuPy and PyTorch offer, and one read there.

A time is from the call until the stream has done it: launches count, as they do in a step.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from collectives.cli.bench.data import FAMILIES
from collectives.cli.bench.kernels import sparse
from collectives.cli.bench.timing import Call, Row, compare


def lacking() -> str | None:
    """Return why there is no GPU to measure, None where there is one."""
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError:
        return "CuPy is not installed: pip install cupy-cuda12x or cupy-cuda13x, as the driver is"
    if not cupy.cuda.is_available():
        return "CuPy sees no GPU here: run it on a machine with one, or leave --device out"
    return None


def rows(length: int, repeats: int) -> Iterator[Row]:
    """Yield every comparison, for gradients of `length` values on the current device."""
    from mpicomp.kernels import device

    rng = np.random.default_rng(0)
    yield from top_k_rows(device, rng, length, repeats)
    yield from pass_rows(device, rng, length, repeats)
    yield from sum_rows(device, rng, length, repeats)
    yield from dense_rows(device, rng, length, repeats)


def top_k_rows(device: Any, rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Exact top-k, against a partition and PyTorch's top-k, of data like gradients and of data full of ties."""
    import cupy

    for family, dtype in (("normal", np.float32), ("laplace", np.float32), ("normal", np.float16)):
        values = cupy.asarray(FAMILIES[family](rng, length).astype(dtype))
        for density in (0.001, 0.01):
            k = max(1, round(density * length))
            against = {"cupy.argpartition": partial(argpartition, values, k)} | torch_top_k(values, k)
            name = f"top_k {family} {values.dtype} {length / 1e6:g}e6 k/n={density}"
            yield from on_device(name, partial(device.top_k, values, k), against, repeats, read_once(values))
    values, k = cupy.ones(length, np.float32), max(1, length // 1000)
    against = {"cupy.argpartition": partial(argpartition, values, k)}
    name = f"top_k all equal {length / 1e6:g}e6 k/n=0.001"
    yield from on_device(name, partial(device.top_k, values, k), against, repeats, read_once(values))


def pass_rows(device: Any, rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Passes over a whole gradient."""
    import cupy

    values = cupy.asarray(rng.standard_normal(length, np.float32))
    above = cupy.flatnonzero
    calls: dict[str, tuple[Call, str, Call]] = {
        "moments": (partial(device.moments, values), "cupy.sum", partial(cupy.sum, values)),
        "survey": (partial(device.survey, values), "cupy.sum", partial(cupy.sum, values)),
        "above, 0.27 %": (partial(device.above, values, 3), "flatnonzero", lambda: above(cupy.abs(values) >= 3)),
        "raise_not_finite": (
            partial(device.raise_not_finite, values),
            "cupy.isfinite(x).all()",
            lambda: cupy.isfinite(values).all(),
        ),
    }
    for name, (ours, what, theirs) in calls.items():
        yield from on_device(f"{name} {length / 1e6:g}e6", ours, {what: theirs}, repeats, read_once(values))


def sum_rows(device: Any, rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """Sums of sparse vectors, against the host's kernels."""
    import cupy

    from mpicomp.kernels import host

    for parts in (2, 8):
        vectors = [sparse(rng, length, max(1, length // 100), np.float32) for _ in range(parts)]
        indices, values = [vector[0] for vector in vectors], [vector[1] for vector in vectors]
        sent = [cupy.asarray(each) for each in indices], [cupy.asarray(each) for each in values]
        entries = sum(each.size for each in indices)
        against: dict[str, Call] = {"the host's kernel": partial(host.accumulate, indices, values, length)}
        ours: Call = partial(device.accumulate, *sent, length)
        if parts == 2:
            (a, b), (values_a, values_b) = sent
            ours = partial(device.merge, a, values_a, b, values_b)
        name = f"{'merge' if parts == 2 else 'accumulate'} {parts} x {length // 100}"
        yield from on_device(name, ours, against, repeats, entries=entries)


def dense_rows(device: Any, rng: np.random.Generator, length: int, repeats: int) -> Iterator[Row]:
    """What goes between sparse and dense vectors, against CuPy's indexing."""
    import cupy

    indices, values = (cupy.asarray(each) for each in sparse(rng, length, max(1, length // 100), np.float32))
    dense = cupy.zeros(length, np.float32)

    def add() -> None:
        dense[indices] += values

    calls: dict[str, tuple[Call, str, Call]] = {
        "scatter_add": (partial(device.scatter_add, dense, indices, values), "dense[indices] += values", add),
        "gather": (partial(device.gather, dense, indices), "dense[indices]", partial(dense.__getitem__, indices)),
    }
    for name, (ours, what, theirs) in calls.items():
        full = f"{name} {indices.size} of {length / 1e6:g}e6"
        yield from on_device(full, ours, {what: theirs}, repeats, entries=indices.size)


def on_device(
    name: str, ours: Call, against: dict[str, Call], repeats: int, floor: Call | None = None, **how: Any
) -> Any:
    """Compare calls, each until the device has done it."""
    waited = {what: until_done(call) for what, call in against.items()}
    return compare(name, until_done(ours), waited, repeats, floor=until_done(floor) if floor else None, **how)


def until_done(call: Call) -> Callable[[], None]:
    """Return a call that waits for what it started."""
    import cupy

    def wait() -> None:
        call()
        cupy.cuda.get_current_stream().synchronize()

    return wait


def read_once(values: Any) -> Call:
    """Return a call that reads `values` once, 16 bytes at a time: the floor of what reads them."""
    import cupy

    from mpicomp.kernels.device.compiling import MOST_BLOCKS, launch

    bits, position = values.view(f"u{values.itemsize}"), cupy.zeros(1, np.uint64)
    unreachable = 2 ** (8 * values.itemsize - 1)
    return partial(
        launch, "first_reaching", [bits.dtype], MOST_BLOCKS, bits, bits.size, unreachable - 1, unreachable, position
    )


def argpartition(values: Any, k: int) -> Any:
    """Return the places of the k largest magnitudes, in no order."""
    import cupy

    return cupy.argpartition(cupy.abs(values), values.size - k)[values.size - k :]


def torch_top_k(values: Any, k: int) -> dict[str, Call]:
    """Return PyTorch's top-k of the magnitudes on the GPU, where it is installed and sees one."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    tensor = torch.from_dlpack(values)
    return {"torch.topk on the GPU": lambda: torch.topk(tensor.abs(), k)}
