"""What every compressor can do."""

from typing import Any, Protocol

from mpicomp.vector import SparseVector


class Compressor(Protocol):
    """Pick the entries of a dense vector that travel."""

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries of `corrected`, the gradient with the residual added.

        gradient: the new gradient alone, for the methods that look at both. An exact zero is never selected. Raises
        ValueError naming the first value that is not finite; the compressor is then as it was before.
        """
        ...


def innermost(compressor: Any) -> Any:
    """Return the compressor that selects: what `Quantised` and `WarmUp` are wrapped around.

    It may have two more methods. `observe(aggregate, votes)` takes note of the ranks' sum. `fail(error)` is there where
    `compress` talks to the other ranks: a rank that cannot call it takes part with this instead, which raises `error`.
    What such a `compress` raises, all ranks know of.
    """
    while hasattr(compressor, "compressor"):
        compressor = compressor.compressor
    return compressor
