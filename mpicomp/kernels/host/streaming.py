"""Passes over dense vectors that are longer than the cache: what they write goes past it.

An ordinary store first reads the line that it is to change. One that does not, a non-temporal one, spares a quarter of
the memory traffic of a sum, and leaves the cache to what is read again soon.
"""

import numpy as np

from mpicomp.kernels.host.bits import Array, jit
from mpicomp.kernels.host.instructions import LINE, store_sum

_LONG = 1 << 23  # bytes: what is shorter may be in the cache when it is read next


def add(a: Array, b: Array, out: Array, *, long: int = _LONG) -> None:
    """Write ``a + b`` to `out`, bit for bit what ``numpy.add`` does; 1-d, of one dtype and length.

    long: bytes of `out` from which on it is written past the cache, if all lie behind each other.
    """
    if out.nbytes >= long and out.dtype != np.float16 and all(_in_order(each) for each in (a, b, out)):
        _add(a, b, out, min(out.size, -out.ctypes.data % LINE // out.itemsize))
    else:
        np.add(a, b, out=out)


def _in_order(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


@jit
def _add(a, b, out, head):  # type: ignore[no-untyped-def]
    """Add line by line of `out`; the first whole one begins behind `head` values."""
    step = LINE // out.itemsize
    lines = (out.size - head) // step
    for i in range(head):
        out[i] = a[i] + b[i]
    for i in range(lines):
        store_sum(a, b, out, head + i * step)
    for i in range(head + lines * step, out.size):
        out[i] = a[i] + b[i]
