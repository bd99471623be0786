"""The memory of arrays: addresses, views, vectors that lie one after the other, and arrays that must not overlap."""

import ctypes
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import namespace, on_device, to_numpy

_LINE = 64  # bytes of a cache line
# The array has to be writable, C-contiguous and not empty.
_FIRST = ctypes.c_char.from_buffer


def flat(array: Array) -> Array:
    """Return a C-contiguous array as a vector: a view, which costs 3 us on a device, or a vector itself."""
    return array if array.ndim == 1 else array.reshape(-1)


def is_contiguous(array: Any) -> bool:
    """Return whether an array is C-contiguous."""
    if on_device(array):
        return bool(array._c_contiguous)  # `flags` makes an object
    return bool(array.flags.c_contiguous)


def address(array: Any) -> int:
    """Return the address of the first value of a NumPy or CuPy array."""
    if on_device(array):
        return int(array.data.ptr)
    if array.size and array.flags.carray:
        # This takes a fifth of the time.
        return ctypes.addressof(_FIRST(array))
    return int(array.ctypes.data)


def addresses(arrays: Sequence[Any]) -> list[int]:
    """Return the address of the first value of each of some NumPy or CuPy arrays."""
    try:
        if arrays and on_device(arrays[0]):
            return [array.data.ptr for array in arrays]
        return [ctypes.addressof(_FIRST(array)) for array in arrays]
    # The array is in both memories, empty, or read-only.
    except (AttributeError, TypeError, ValueError):
        return [address(array) for array in arrays]


def sizes_of(arrays: Iterable[Any]) -> tuple[int, ...]:
    """Return the number of values of each array."""
    return tuple([array.size for array in arrays])


def concatenated(parts: Sequence[Array], out: Array | None = None) -> Array:
    """Return contiguous arrays, in C order, as one new vector, or as `out`."""
    return np.concatenate([flat(part) for part in parts], out=out)


def new_vector(xp: Any, size: int, dtype: Any) -> Array:
    """Return zeros, made by NumPy or CuPy; in host memory they begin at a cache line, as kernels store whole lines."""
    if xp is not np:
        return xp.zeros(size, dtype)  # type: ignore[no-any-return]
    itemsize = np.dtype(dtype).itemsize
    longer = np.zeros(size + _LINE // itemsize, dtype)
    first = -address(longer) % _LINE // itemsize
    return longer[first : first + size]


def adjacent(parts: Sequence[Array]) -> Array | None:
    """Return one vector over 1-d arrays that follow each other in host memory, without a copy; None for others.

    It holds a reference to the first one only. An array alone is a vector, of any shape.
    """
    if len(parts) == 1:
        return flat(parts[0])
    if on_device(parts[0]):
        return None
    some = [part for part in parts if part.size] or list(parts[:1])
    starts = addresses(some)
    ends = [start + part.nbytes for start, part in zip(starts, some, strict=True)]
    if starts[1:] != ends[:-1]:
        return None
    return np.lib.stride_tricks.as_strided(some[0], (sum(sizes_of(some)),))


def views_between(vector: Array, edges: Sequence[int]) -> list[Array]:
    """Return the parts of a vector between consecutive edges, as views."""
    return [vector[first:end] for first, end in pairwise(edges)]


def shaped_views(
    vector: Array, edges: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[Array]:
    """Return the parts of a vector between consecutive edges, as views of these shapes.

    On a device each is made at once: a slice and its reshape take the host twice as long.
    """
    if not on_device(vector):
        parts = zip(views_between(vector, edges), shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]
    new = namespace(vector).ndarray
    dtype = vector.dtype
    first: Any = vector.data
    places = zip(edges[:-1], shapes, strict=True)
    return [new(shape, dtype, first + low * dtype.itemsize) for low, shape in places]


def check_apart(arrays: Sequence[Any]) -> None:
    """Raise ValueError if two contiguous arrays, of which one at least is written to, share memory."""
    if len(arrays) < 2:
        return
    sizes = tuple([array.nbytes for array in arrays])
    if not _are_apart(tuple(addresses(arrays)), sizes):
        raise ValueError(
            "two arrays share memory that is written to: expected separate arrays for each out=, and for each "
            "gradient that holds the residual (in_place)"
        )


# Most steps write to the same memory as the step before.
@lru_cache(maxsize=64)
def _are_apart(starts: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether no two spans of memory overlap."""
    spans = sorted(span for span in zip(starts, sizes, strict=True) if span[1])
    return all(
        start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans)
    )


def write_fields(buffer: Any, form: struct.Struct, *fields: Any) -> None:
    """Pack `fields` into the beginning of a buffer (uint8)."""
    if type(buffer) is np.ndarray or not on_device(buffer):
        form.pack_into(buffer, 0, *fields)
    else:
        buffer[: form.size].set(np.frombuffer(form.pack(*fields), np.uint8))


def read_fields(buffer: Any, form: struct.Struct) -> tuple[Any, ...]:
    """Return the fields at the beginning of a buffer (uint8)."""
    if type(buffer) is np.ndarray or not on_device(buffer):
        return form.unpack_from(buffer)
    return form.unpack(to_numpy(buffer[: form.size]).data)


def read_only(array: Array) -> Array:
    """Return a read-only view; on a device, where CuPy has none, a view that must not be written to."""
    view = array.view()
    if not on_device(array):
        view.flags.writeable = False
    return view


def contiguous(array: Array) -> Array:
    """Return a C-contiguous array: `array` itself if it is one, else a copy."""
    if is_contiguous(array):
        return array
    copy: Array = namespace(array).ascontiguousarray(array)
    return copy
