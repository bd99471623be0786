"""Magnitudes as integers, and sets of indices as bitmaps.

With the sign bit cleared, the bits of an IEEE 754 number order as its magnitude does,
and infinities and NaN come last. That makes selection exact, and one kernel serves
float16, float32 and float64.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.compiled import jit
from mpicomp.kernels.host.instructions import larger, lowest, smaller

# Values of an array below which the C library does not return its memory to the system.
_FEW = 1 << 13
# Bytes of a block above which it is returned to the system as soon as it is freed.
_LONGEST_KEPT = 1 << 25

# Kernels use uint64 counts as subscripts: for signed ones Numba tests whether they are
# negative.


def cache_folder() -> str | None:
    """Return the folder of the compiled kernels of this module; None if they are not cached."""
    return extremes.stats.cache_path  # type: ignore[no-any-return]


class Format(NamedTuple):
    """Properties of a floating-point format that a selection needs."""

    floating: np.dtype[Any]
    keys: np.dtype[Any]  # the unsigned integer of the same width
    # The signed integer: magnitudes fit it, and processors can compare vectors of it.
    signed: np.dtype[Any]
    width: int  # bits of a magnitude: all but the sign
    mask: Any  # all bits of a magnitude, signed
    infinity: Any  # the bits of infinity, signed: all above are NaN


def _format(dtype: np.dtype[Any]) -> Format:
    keys, signed, width = (
        np.dtype(f"u{dtype.itemsize}"),
        np.dtype(f"i{dtype.itemsize}"),
        8 * dtype.itemsize - 1,
    )
    return Format(
        dtype,
        keys,
        signed,
        width,
        signed.type((1 << width) - 1),
        np.array([np.inf], dtype).view(signed)[0],
    )


FORMATS = {
    dtype: _format(dtype)
    for dtype in map(np.dtype, (np.float16, np.float32, np.float64))
}


def as_writable(array: Array) -> Array:
    """Return a writable array itself, else a view that NumPy and Numba treat as writable.

    For kernels that only read: Numba compiles a second version of a kernel for
    read-only arrays.
    """
    if array.flags.writeable:
        return array
    described = array.__array_interface__
    writable = {**described, "data": (described["data"][0], False)}
    # The object holds a reference to the array, which owns the memory.
    return np.asarray(SimpleNamespace(array=array, __array_interface__=writable))


def empty_entries(room: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return arrays of `room` positions (intp) and of `room` values of a dtype, in one allocation.

    The GNU C library returns memory to the system when twice the largest block that was
    freed, up to 32 MiB, is unused. Its pages are then cleared and mapped again in the
    next call, which takes as long as a read of the vector. So the allocation is twice
    as long as needed, up to 32 MiB, and longer than all others of a selection together;
    pages that are not written take no memory.
    """
    if room < _FEW:
        return np.empty(room, np.intp), np.empty(room, dtype)
    first = room * np.intp().itemsize
    size = first + room * dtype.itemsize
    whole = np.empty(2 * size if 2 * size <= _LONGEST_KEPT else size, np.uint8)
    return whole[:first].view(np.intp), whole[first:size].view(dtype)


def magnitude_range(values: Array) -> tuple[int, int]:
    """Return the bits of the least and of the largest magnitude of `values`, which are not empty."""
    form = FORMATS[values.dtype]
    least, largest = extremes(as_writable(values).view(form.signed), form.mask)
    return int(least), int(largest)


def to_bitmap(indices: Array, first: int, words: Array) -> None:
    """Set the bits of increasing `indices`, counted from `first`, in `words` (uint64, zeros; low bits first)."""
    _set_bits(as_writable(indices), first, words)


def from_bitmap(words: Array, first: int, indices: Array) -> int:
    """Write the numbers of the bits that are set in `words` (uint64), plus `first`, into `indices` in increasing order.

    Returns how many are set; `indices` holds the first of them, up to its size.
    """
    return int(_find_bits(as_writable(words), first, indices))


@jit
def extremes(bits, mask):  # type: ignore[no-untyped-def]
    """Return the least and the largest magnitude."""
    least, largest = mask, mask ^ mask
    for i in range(bits.size):
        key = bits[i] & mask
        least, largest = smaller(least, key), larger(largest, key)
    return least, largest


@jit
def _set_bits(indices, first, words):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        place = np.uint64(indices[i] - first)
        words[place >> np.uint64(6)] |= np.uint64(1) << (place & np.uint64(63))


@jit
def _find_bits(words, first, indices):  # type: ignore[no-untyped-def]
    count = np.uint64(0)
    for i in range(words.size):
        word = words[i]
        while word != np.uint64(0):
            if count < np.uint64(indices.size):
                indices[count] = first + 64 * i + np.int64(lowest(word))
            count += np.uint64(1)
            word &= word - np.uint64(1)
    return count
