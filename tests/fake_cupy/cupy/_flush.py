"""What CuPy's own kernels do to subnormal numbers: they are compiled with -ftz=true, whatever is asked for.

Operands and results of float32 that are subnormal become zeros of their sign. float64
is not flushed, nor float16, which is computed in float32: there its numbers are normal.
Kernels that move bits and do not compute with them flush nothing, and neither does
CUDA source that spells its instructions.
"""

from typing import Any

import numpy as np

MOVING = frozenset(
    (
        "append array_split broadcast_to concatenate copysign empty empty_like full "
        "full_like moveaxis ones ones_like packbits ravel repeat reshape roll signbit "
        "split sort stack take tile unpackbits vstack hstack where zeros zeros_like "
        "transpose squeeze"
    ).split()
)
_LEAST = np.float32(np.finfo(np.float32).smallest_normal)
_SIGN = np.uint32(1 << 31)


def flushed(value: Any) -> Any:
    """Return a value, or a tuple or list of them, with zeros for the subnormal numbers of float32."""
    if isinstance(value, tuple | list):
        return type(value)(flushed(each) for each in value)
    if getattr(value, "dtype", None) != np.float32:
        return value
    small = _is_subnormal(value)
    if not small.any():
        return value
    signs = np.asarray(value).view(np.uint32) & _SIGN
    return np.where(small, signs.view(np.float32), value)


def flush(array: np.ndarray) -> None:
    """Write zeros over the subnormal numbers of an array, if it is of float32."""
    if array.dtype == np.float32:
        array[...] = flushed(array)


def converted(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array in a dtype as CuPy converts it: the same dtype is a copy of the bits."""
    if array.dtype == dtype:
        return array.astype(dtype)
    return np.asarray(flushed(flushed(array).astype(dtype)))


def _is_subnormal(value: Any) -> Any:
    return (value != 0) & (np.abs(value) < _LEAST)
