"""Compressors: a dense gradient in, the entries that travel out. One file a method, one small protocol."""

from typing import Any, Protocol

from mpicomp.compressors.topk import TopK
from mpicomp.vector import SparseVector

__all__ = ["Compressor", "TopK"]


class Compressor(Protocol):
    """Pick the entries of a dense vector that travel."""

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the selected entries of `corrected`, the gradient with the residual added.

        gradient: the new gradient alone, for the methods that look at both. An exact zero is never selected. Raises
        ValueError naming the first value that is not finite; the compressor is then as it was before.
        """
        ...
