"""The least that an algorithm on a whole gradient takes: one read of it."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from collectives.cli.bench.timing import Call


def read_once(values: NDArray[Any]) -> Call:
    """Return a call that reads `values` once with vector instructions: the largest magnitude, as an integer."""
    bits = values.view(f"i{values.itemsize}")
    mask = np.iinfo(bits.dtype).max
    return lambda: _largest(bits, mask)


@njit(nogil=True, cache=True)
def _largest(bits, mask):  # type: ignore[no-untyped-def]
    largest = bits.dtype.type(0)
    for i in range(bits.size):
        largest = max(largest, bits.dtype.type(bits[i] & mask))
    return largest
