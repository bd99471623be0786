"""The overlap of the ranks' supports, estimated from a *digest* of each: all indices whose hash passes a test.

So an index that several ranks have is in the digest of each of them.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST = 64  # indices at most, about
FEW = 4  # equal indices that independent supports would have in the digests
_MIX = np.uint32(0x9E37_79B1)  # a prime near 2^32 over the golden ratio: multiplicative hashing (Knuth, TAOCP 3, 6.4)


def level_of(entries: int) -> int:
    """Return the level of the digest of a number of entries: one index of 2^level, about `DIGEST` at most."""
    return max(6, (entries // DIGEST).bit_length())


def in_digest(indices: NDArray[Any], level: int) -> NDArray[np.bool_]:
    """Return a mask of the indices in a digest: their multiplicative hash begins with `level` zero bits.

    The digest of a level contains those of all higher levels.
    """
    low = indices.view(np.uint32) if indices.dtype == np.int32 else indices.astype(np.uint32)
    chosen: NDArray[np.bool_] = low * _MIX < np.uint32((1 << (32 - level)) - 1)
    return chosen


def overlap_of(digests: Sequence[NDArray[Any]], counts: Sequence[int], length: int) -> float:
    """Return the overlap of supports, estimated from the digests of all ranks at the highest level among them."""
    level = level_of(max(counts))
    entries = np.concatenate([each[in_digest(each, level)] for each in digests])
    if not entries.size:
        return 0.0
    mean, total = sum(counts) / len(counts), sum(counts)
    union = total * np.unique(entries).size / entries.size
    independent = length * (1 - math.prod([1 - count / length for count in counts]))
    if union >= independent and entries.size * (1 - independent / total) < FEW:
        return 0.0  # that no index is seen twice says nothing
    other = mean if union < independent else min(total, length)
    overlap = min(1.0, abs(union - independent) / max(1.0, abs(other - independent)))
    return overlap if union < independent else -overlap
