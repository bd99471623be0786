"""Values that look like gradients: the distributions that benchmarks and tests draw from, by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Family = Callable[[np.random.Generator, int], Array]  # (generator, number of values) -> float32


def normal(rng: np.random.Generator, n: int) -> Array:
    """Return standard normal values."""
    return rng.standard_normal(n, np.float32)


def laplace(rng: np.random.Generator, n: int) -> Array:
    """Return Laplace values of scale 1: exponential magnitudes."""
    return rng.laplace(size=n).astype(np.float32)


def double_gamma(rng: np.random.Generator, n: int) -> Array:
    """Return values whose magnitudes have a gamma distribution of shape 0.6."""
    return _signed(rng, rng.gamma(0.6, size=n))


def double_pareto(rng: np.random.Generator, n: int) -> Array:
    """Return values whose magnitudes have a generalised Pareto distribution of shape 0.2: a heavy tail."""
    return _signed(rng, np.expm1(-0.2 * np.log1p(-rng.random(n))) / 0.2)


def layers(rng: np.random.Generator, n: int) -> Array:
    """Return a mixture: twenty layers of normal values, one behind the other, whose scales span three decades."""
    scales = np.geomspace(1e-3, 1, 20)[np.arange(n) * 20 // n]
    return (scales * rng.standard_normal(n)).astype(np.float32)


def cauchy(rng: np.random.Generator, n: int) -> Array:
    """Return Cauchy values: so heavy a tail that there is neither mean nor variance."""
    return rng.standard_cauchy(n).astype(np.float32)


FAMILIES: dict[str, Family] = {
    "normal": normal,
    "laplace": laplace,
    "gamma": double_gamma,
    "pareto": double_pareto,
    "layers": layers,
    "cauchy": cauchy,
}


def draw(name: str, length: int) -> Array:
    """Return `length` float32 of a distribution by its name: the same ones in every run."""
    return FAMILIES[name](np.random.default_rng([2, list(FAMILIES).index(name)]), length)


def _signed(rng: np.random.Generator, magnitudes: Array) -> Array:
    values: Array = (magnitudes * rng.choice([-1, 1], magnitudes.size)).astype(np.float32)
    return values
