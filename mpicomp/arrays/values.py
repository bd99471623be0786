"""The values of arrays: dtypes, conversion, whether all are finite, and digests."""

from typing import Any

import numpy as np

from mpicomp.arrays import Array, Dtype
from mpicomp.arrays.device import kernels_for, namespace, on_device

VALUE_DTYPES = tuple(np.dtype(t) for t in (np.float16, np.float32, np.float64))
# NumPy builds the name anew at each call.
DTYPE_NAMES = {dtype: str(dtype) for dtype in VALUE_DTYPES}
_SHORT = np.dtype(np.int32)
_LONG = np.dtype(np.int64)
_BLOCK = 65536  # values
_HALVES = {np.dtype(np.float16), np.dtype(np.float32)}


def index_dtype(length: int) -> Dtype:
    """Return the dtype of the indices of a vector of `length`: int32, or int64 when length > 2^31 - 1."""
    return _SHORT if length <= 2**31 - 1 else _LONG


def nonzero(values: Array) -> Array:
    """Return a mask of the non-zero values; on a device from their bits, as CuPy flushes subnormals to zero."""
    if not on_device(values):
        return values != 0  # type: ignore[no-any-return]
    return values.view(f"u{values.itemsize}") << 1 != 0  # type: ignore[no-any-return]


def has_nonzero(values: Array) -> bool:
    """Return whether a value of a vector is not zero; unlike any(), stops at the first block that has one."""
    starts = range(0, values.size, _BLOCK)
    blocks = (values[start : start + _BLOCK] for start in starts)
    return any(bool(np.count_nonzero(nonzero(block))) for block in blocks)


def converted(values: Array, dtype: Any) -> Array:
    """Return values in a dtype, themselves if it is theirs; those out of range become infinities.

    On a device by a kernel, as CuPy flushes subnormals. Many values of float16 as well,
    which NumPy converts one by one.
    """
    if values.dtype == dtype:
        return values
    dtypes = {values.dtype, np.dtype(dtype)}
    in_kernel = dtypes == _HALVES and values.size > _BLOCK
    if on_device(values):
        in_kernel = all([one.kind == "f" for one in dtypes])
    if not in_kernel:
        # Values may be out of range, and a damaged message may have a signalling NaN.
        with np.errstate(all="ignore"):
            return values.astype(dtype)
    result: Array = namespace(values).empty(values.shape, dtype)
    kernels_for(values).multiply(values, 1, result)
    return result


def check_finite(values: Array) -> None:
    """Raise ValueError that names the first value of a vector that is not finite."""
    kernels_for(values).raise_not_finite(values)


def widened_values(values: Array) -> Array:
    """Return float16 values in float32, in which sums of them are in range; others as they are."""
    return converted(values, np.float32) if values.dtype == np.float16 else values


def negated(values: Array) -> Array:
    """Return the values with the other sign; on a device by a kernel, as CuPy flushes subnormals to zero."""
    if not on_device(values):
        return -values
    result: Array = np.empty_like(values)
    kernels_for(values).multiply(values, -1, result)
    return result
