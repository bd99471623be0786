"""Compile every kernel, or load it from Numba's cache, by running it on a few values."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpicomp.kernels import host
from mpicomp.kernels.host import (
    bits,
    coding,
    few_bits,
    fused,
    merging,
    segments,
    selection,
    statistics,
    streaming,
    surveying,
    transforms,
)

MODULES = (bits, coding, few_bits, fused, merging, segments, selection, statistics, streaming, surveying, transforms)


class Step(NamedTuple):
    """Progress: calls done, calls in all, and the number of kernels that were compiled, not loaded, so far."""

    done: int
    total: int
    compiled: int


def warm_up(dtype: DTypeLike, index_dtype: DTypeLike) -> Iterator[Step]:
    """Run every kernel once for values and indices of these dtypes, and yield after each of the calls."""
    calls = _calls(np.dtype(dtype), np.dtype(index_dtype))
    before = _compiled()
    for done, call in enumerate(calls, 1):
        call()
        yield Step(done, len(calls), _compiled() - before)


def _compiled() -> int:
    """Return the number of kernels that were not in the cache."""
    kernels = (kernel for module in MODULES for kernel in vars(module).values() if hasattr(kernel, "stats"))
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels)


def _few_bits(dtype: np.dtype[Any]) -> list[Callable[[], Any]]:
    """Return calls of the kernels of values in few bits; those of float16 are of float32."""
    wide = np.promote_types(dtype, np.float32)
    values, codes, scales = np.ones(64, wide), np.zeros(64, np.uint8), np.zeros(4, f"u{wide.itemsize // 2}")
    calls: list[Callable[[], Any]] = []
    for each in (8, 2):
        coded = codes[: 8 * each], scales[: 2 * (1 + (each == 2))]
        calls += [
            partial(host.quantise, values, values, each, 32, *coded, values.copy()),
            partial(host.dequantise, *coded, each, 32, values.copy()),
            partial(host.add_quantised, *coded, each, 32, values.copy()),
        ]
    return calls


def _calls(dtype: np.dtype[Any], index_dtype: np.dtype[Any]) -> list[Callable[[], Any]]:
    long = np.random.default_rng(0).standard_normal(1 << 16).astype(dtype)  # long enough for a sample
    longest = np.tile(long, 16)
    values, indices = long[:64], np.arange(64, dtype=index_dtype)
    words, room = np.zeros(4, np.uint64), np.empty(64, index_dtype)
    planes, wide = np.zeros(long.nbytes, np.uint8), np.promote_types(dtype, np.float32)
    return [
        lambda: host.raise_not_finite(values),
        lambda: host.top_k(long, 9),
        lambda: host.top_k(values, 9),
        lambda: host.largest_in_segments(long, [0, 64, long.size], [9, 9], [64, long.size], [9, 9]),
        lambda: host.divide_largest(indices, values, 9),
        lambda: host.above(values, 1.0),
        lambda: host.exceeding(values, 1.0),
        lambda: host.histogram(values),
        lambda: host.moments(long),
        lambda: host.sides(long, 1.0),
        lambda: host.magnitudes_in_segments(long, [0, 64, long.size], two=True),
        lambda: host.with_magnitudes(long, [0, long.size], np.zeros((1, 3), dtype)),
        lambda: host.survey(long),
        lambda: host.sample(longest),
        lambda: host.first_disorder(indices, 64),
        lambda: host.inspect(indices, values, 64),
        lambda: host.first_disorder(indices[::-1].copy(), 64),
        lambda: host.merge(indices, values, indices, values),
        lambda: host.accumulate([indices] * 3, [values] * 3, 64),
        lambda: host.divide(indices, values, np.arange(3)),
        lambda: host.add(long, long, np.empty_like(long), long=0),
        lambda: host.add_largest(long, long, np.empty_like(long), 9, long=0),
        lambda: host.add_above(long, long, np.empty_like(long), 9.0, long=0),
        lambda: host.clear(long.copy()),
        lambda: host.hadamard(long, np.empty_like(long), 256),
        lambda: host.multiply_chunks(values, np.eye(8, dtype=wide), np.empty_like(values)),
        lambda: host.signs(values.copy()),
        lambda: host.gather(long, indices),
        lambda: host.consecutive(0, 9, index_dtype),
        lambda: host.scatter(long.copy(), indices, values),
        lambda: host.scatter_add(long.copy(), indices, values),
        lambda: host.to_bitmap(indices, 0, words),
        lambda: host.from_bitmap(words, 0, room),
        lambda: host.to_elias_fano(indices, 0, 0, np.zeros(2, np.uint64), np.zeros(4, np.uint64)),
        lambda: host.from_elias_fano(np.zeros(2, np.uint64), words, 0, 0, room),
        lambda: host.magnitude_range(values),
        lambda: host.to_offsets(long, 0, 8 * long.itemsize - 1, planes),
        lambda: host.from_offsets(planes, 0, 8 * long.itemsize - 1, np.empty_like(long)),
        *_few_bits(dtype),
    ]
