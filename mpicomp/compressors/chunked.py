"""Top-k in chunks: select the k largest magnitudes of every chunk of consecutive entries.

Source: A. Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo",
arXiv 2508.15706, where 64 to 128 of 4096 entries are selected from the sum of 15 to 30
local steps.

A chunk fits the cache of a core, and is one block of threads on a GPU, so that a
selection is one read of the gradient. Every part of a vector sends its share. On
independent values it captures the norm of exact top-k within half a per cent.

Differences from the paper: chunks are of consecutive entries of the flat vector, of any
length; the paper cuts tensors by divisors of their dimensions, and a prime dimension
then makes chunks of one entry, or one chunk of everything.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from mpicomp.compressors.topk import Rows, TopK
from mpicomp.settings import to_integer


class ChunkedTopK(TopK):
    """Select the k largest magnitudes of every chunk of consecutive entries, exactly; ties go to the lowest indices.

    The last chunk, of length m < chunk, keeps max(1, round(k m / chunk)).

    Args:
        k: entries of a chunk to select, 1 <= k <= chunk.
        chunk: entries in a chunk, at least 1.

    Raises:
        ValueError: an argument is out of range.

    Source: A. Sarfi et al., SparseLoCo (arXiv 2508.15706).

    >>> vector = ChunkedTopK(k=1, chunk=3).compress(np.array([1.0, -2, 0, 5, 4, 3, 1]))
    >>> vector.indices.tolist()
    [1, 3, 6]
    """

    varying = "k", "chunk"
    k: int

    def __init__(self, k: int = 64, chunk: int = 4096) -> None:
        super().__init__(k=k)
        self.chunk = to_integer("chunk", chunk)
        if k > chunk:
            raise ValueError(
                f"k is {k} and chunk is {chunk}: expected k <= chunk; k=chunk sends every entry"
            )

    @property
    def fraction(self) -> float:
        return self.k / self.chunk

    @staticmethod
    @lru_cache(maxsize=256)
    def rows(bounds: tuple[int, ...], k: Any, chunk: Any) -> Rows:
        """Return the chunks of each segment, which begin at its first entry."""
        sizes = np.diff(bounds)
        rest = sizes % chunk
        last = np.maximum(1, np.rint(np.multiply(k, rest) / chunk)).astype(np.int64)
        first, length, short = [
            tuple(np.broadcast_to(row, sizes.size).tolist()) for row in (k, chunk, last)
        ]
        return first, length, short
