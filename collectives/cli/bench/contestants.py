"""The compressors that are compared, by name, and how each is brought to where a long run has it."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import (
    AdaComp,
    AggregationAware,
    BlockRandomK,
    Compressor,
    Dense,
    GaussianK,
    MSTopK,
    Quantised,
    RandomK,
    RedSync,
    SampledTopK,
    SIDCo,
    Threshold,
    TopK,
)

Array = NDArray[Any]

BASELINE = "TopK"
SETTLING_CALLS = 30  # SIDCo's fits came within 5 % in 26 at most, on all of `data` at 0.01 and 0.001


def _at_density(density: float, gradient: Array) -> Threshold:
    """Return the fixed threshold that lets this density of this gradient through."""
    return Threshold(float(np.abs(TopK(density).compress(gradient).values).min()))


MAKERS: dict[str, Callable[[float, Array], Compressor]] = {
    BASELINE: lambda density, gradient: TopK(density),
    **{
        f"SIDCo-{fit}": lambda density, gradient, fit=fit: SIDCo(density, fit)  # type: ignore[misc]
        for fit in ("exponential", "pareto", "gamma")
    },
    "SampledTopK": lambda density, gradient: SampledTopK(density),
    "RedSync": lambda density, gradient: RedSync(density),
    "GaussianK": lambda density, gradient: GaussianK(density),
    "MSTopK": lambda density, gradient: MSTopK(density),
    "Threshold": _at_density,
    "RandomK": lambda density, gradient: RandomK(density),
    "BlockRandomK": lambda density, gradient: BlockRandomK(density),
    "AggregationAware": lambda density, gradient: AggregationAware(density),
    **{
        f"Quantised-{form}": lambda density, gradient, form=form: Quantised(TopK(density), form)  # type: ignore[misc]
        for form in ("float16", "bfloat16", "sign")
    },
    "AdaComp": lambda density, gradient: AdaComp(),
    "Dense": lambda density, gradient: Dense(),
}
WITHOUT_TARGET = "AdaComp", "Dense"  # they send what they send, whatever density is asked for


def ready(name: str, density: float, gradient: Array) -> tuple[Compressor, float]:
    """Return a compressor by its name, after its state has settled on this gradient, and what its first call achieved.

    The controller of SIDCo takes SETTLING_CALLS; AggregationAware is shown what it sent itself.
    """
    compressor = MAKERS[name](density, gradient)
    compress = partial(compressor.compress, gradient, gradient=gradient)
    first = compress()
    if isinstance(compressor, SIDCo):
        for _ in range(SETTLING_CALLS - 1):
            compress()
    elif isinstance(compressor, AggregationAware):
        compressor.observe(first)
    return compressor, first.density


def lacking(names: Iterable[str]) -> dict[str, str]:
    """Return those that cannot run in this installation, with the reason: a package is missing."""
    found, few = {}, np.arange(1, 9, dtype=np.float32)
    for name in names:
        try:
            MAKERS[name](0.5, few).compress(few, gradient=few)
        except ImportError as error:
            found[name] = str(error)
    return found
