"""Synthetic data: values distributed like gradients, and sparse vectors with known overlap of their supports."""

from collections.abc import Callable

import numpy as np

from mpicomp import SparseVector
from mpicomp.arrays import Array
from mpicomp.arrays.values import index_dtype


def _signed(rng: np.random.Generator, magnitudes: Array) -> Array:
    signed: Array = magnitudes * rng.choice([-1, 1], magnitudes.size)
    return signed


FAMILIES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, n: rng.standard_normal(n, np.float32),
    "laplace": lambda rng, n: rng.laplace(size=n).astype(np.float32),
    "gamma": lambda rng, n: _signed(rng, rng.gamma(0.6, size=n)).astype(np.float32),
    "pareto": lambda rng, n: _signed(
        rng, np.expm1(-0.2 * np.log1p(-rng.random(n))) / 0.2
    ).astype(np.float32),
    "layers": lambda rng, n: (
        np.geomspace(1e-3, 1, 20)[np.arange(n) * 20 // n] * rng.standard_normal(n)
    ).astype("f4"),
    "cauchy": lambda rng, n: rng.standard_cauchy(n).astype(np.float32),
}
"""Distributions by name, each from a generator and a length to float32.

gamma, pareto: of the magnitudes, of shape 0.6, and generalised of shape 0.2 with a heavy tail. layers: twenty
consecutive layers of normal values whose scales span three decades. cauchy: neither mean nor variance.
"""


def draw(name: str, length: int) -> Array:
    """Return `length` float32 values of a named distribution, the same in every run."""
    return FAMILIES[name](
        np.random.default_rng([2, list(FAMILIES).index(name)]), length
    )


PATTERNS = ["independent", "shared", "disjoint", "hot"]


def support(pattern: str, rank: int, size: int, length: int, k: int) -> Array:
    """Return the k indices of a rank's vector, in no order.

    independent: random; shared: the same on all ranks; disjoint: no index on two ranks;
    hot: about 9 of 10 in a twentieth of the length, from a third of it on, and
    independent elsewhere.
    """

    def some(seed: int, length: int, k: int) -> Array:
        return np.random.default_rng([2, seed]).choice(
            length, k, replace=False, shuffle=False
        )

    if pattern == "shared":
        return some(0, length, k)
    if pattern == "disjoint":
        return rank + size * some(rank + 1, length // size, k)
    if pattern == "independent":
        return some(rank + 1, length, k)
    first = length // 3
    width = length // 20
    many = min(9 * k // 10, width)
    cold = some(rank + 1, length - width, min(k - many, length - width))
    return np.concatenate(
        [first + some(rank + 1, width, many), cold + width * (cold >= first)]
    )


def draw_sparse(
    pattern: str, rank: int, size: int, length: int, k: int, dtype: str
) -> SparseVector:
    """Return a rank's vector: normal values, no zeros, at the k indices of a pattern; the same in every run."""
    indices = np.sort(support(pattern, rank, size, length, k)).astype(
        index_dtype(length)
    )
    values = np.random.default_rng([3, rank]).standard_normal(k, np.float32)
    # Values near zero could become zero in float16.
    values = np.where(np.abs(values) < 1e-4, np.float32(1e-4), values)
    return SparseVector(indices, values.astype(dtype), length)


def gradient_above(vector: SparseVector, rank: int) -> Array:
    """Return normal values whose largest magnitudes, as many as the vector has entries, have its indices.

    They are in random order: after a partition they are nearly sorted, and one end
    would have most of the largest.
    """
    rng = np.random.default_rng([4, rank])
    values = rng.standard_normal(vector.length, np.float32).astype(vector.dtype)
    largest = np.argpartition(np.abs(values), vector.length - vector.nnz)[
        vector.length - vector.nnz :
    ]
    magnitudes = rng.permutation(values[largest])
    values[largest] = 0
    values[vector.indices] = magnitudes
    return values
