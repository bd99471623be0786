"""Passes over dense vectors that are longer than the cache, with stores that bypass it.

An ordinary store first reads the cache line that it changes. A non-temporal one does not: it saves a quarter of the
memory traffic of a sum, and leaves the cache to data that is read again soon.
"""

import numpy as np

from mpicomp.kernels.host.bits import Array, as_writable, jit
from mpicomp.kernels.host.instructions import LINE, store_sum
from mpicomp.threads import in_pieces

LONG = 1 << 20  # bytes; a shorter vector may be in the cache when it is read next


def add(a: Array, b: Array, out: Array, *, threads: int | None = None, long: int = LONG) -> None:
    """Write ``a + b`` to `out`, bitwise as ``numpy.add`` does; 1-d, of one dtype and length.

    threads: the most threads; None for `threads.count`. long: the least bytes of `out` for stores that bypass
    the cache, if all three are contiguous and aligned.
    """
    if not is_streamed(a, b, out, long):
        np.add(a, b, out=out)
        return
    a, b = as_writable(a), as_writable(b)

    def add_piece(start: int, end: int) -> None:
        piece = out[start:end]
        _add(a[start:end], out.dtype.type(1), b[start:end], piece, values_before_line(piece))

    in_pieces(add_piece, out.size, threads)


def add_scaled(a: Array, scale: float, b: Array, out: Array, *, threads: int | None = None) -> None:
    """Write ``scale * a + b`` to `out`; 1-d, of one dtype and length. The product is rounded before it is added.

    scale: rounded to the dtype. threads: as for `add`.
    """
    factor = out.dtype.type(scale)
    if out.dtype == np.float16 or not (_in_order(a) and _in_order(b) and _in_order(out)):
        np.multiply(a, factor, out=out)
        out += b
        return
    a, b = as_writable(a), as_writable(b)
    in_pieces(lambda start, end: _add_scaled(a[start:end], factor, b[start:end], out[start:end]), out.size, threads)


def clear(out: Array) -> None:
    """Make all values of `out` zero; a contiguous array as bytes, which NumPy clears twice as fast.

    On one thread, which saturates the memory.
    """
    contiguous = out.flags.c_contiguous
    (out.reshape(-1).view(np.uint8) if contiguous else out)[...] = 0


def is_streamed(a: Array, b: Array, out: Array, long: int) -> bool:
    """Return whether a sum is long enough to bypass the cache, and its arrays can be passed to a kernel."""
    return out.nbytes >= long and out.dtype != np.float16 and all(_in_order(each) for each in (a, b, out))


def values_before_line(out: Array) -> int:
    """Return the number of values before the first whole cache line of an array."""
    return min(out.size, -out.ctypes.data % LINE // out.itemsize)


def _in_order(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


@jit
def _add(a, factor, b, out, head):  # type: ignore[no-untyped-def]
    """Add line by line of `out`; the first whole one begins after `head` values."""
    step = LINE // out.itemsize
    lines = (out.size - head) // step
    for i in range(head):
        out[i] = factor * a[i] + b[i]
    for i in range(lines):
        store_sum(a, factor, b, out, head + i * step)
    for i in range(head + lines * step, out.size):
        out[i] = factor * a[i] + b[i]


@jit
def _add_scaled(a, factor, b, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = factor * a[i] + b[i]
