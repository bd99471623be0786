"""float16 at the speed of memory: conversion to and from float32, and sums.

NumPy converts one value at a time, and sums of float16 by way of float32. So do these
passes, in vectors of integers, on any processor. A sum of two float16 numbers in
float32, rounded to float16, is the correctly rounded sum, as float32 has more than twice
as many digits; so is a product.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import as_writable
from mpicomp.kernels.host.compiled import jit
from mpicomp.kernels.host.lanes import Lanes, lanewise, to_bits, where
from mpicomp.threads import in_pieces

_HALF = np.dtype(np.float16)
_SINGLE = np.dtype(np.float32)
# Values below which NumPy takes less time than a kernel takes to be loaded.
_FEW = 1 << 14

# Bits of float16: those of infinity, and of the least normal number.
_INFINITY = 0x7C00
_NORMAL = 0x0400
# Bits of float32: those of infinity; of 2^16, beyond the range of float16; of the least
# normal number of float16; and of 1/2, whose last bit is that of float16's subnormals.
_INFINITY_OF_SINGLE = 0x7F800000
_BEYOND = 0x47800000
_NORMAL_AS_SINGLE = 0x38800000
_ONE_HALF = 0x3F000000


def convert(values: Array, out: Array) -> bool:
    """Write float16 values to a float32 array, or the reverse; return whether it did, and not for other arrays.

    values, out: of one shape. Numbers out of range become infinities.
    """
    kinds = values.dtype, out.dtype
    if kinds == (_HALF, _SINGLE):
        return _in_kernel(_widen, [values.view(np.int16), out])
    if kinds == (_SINGLE, _HALF):
        return _in_kernel(_narrow, [values, out.view(np.int16)])
    return False


def add_halves(a: Array, factor: float, b: Array, out: Array, *, sign: int) -> bool:
    """Write ``factor * a + sign * b``, each rounded to float16, to `out`; return whether it did, as `convert`.

    a, b, out: float16, of one shape; `out` may be `a` or `b`. factor: rounded to float16.
    """
    if not a.dtype == b.dtype == out.dtype == _HALF:
        return False
    arrays = [array.view(np.int16) for array in (a, b, out)]
    numbers = np.float32(np.float16(factor)), np.float32(sign)
    return _in_kernel(_add, arrays, *numbers)


def _in_kernel(kernel: Callable[..., None], arrays: list[Array], *numbers: Any) -> bool:
    """Call a kernel with arrays, the last of which it writes, unless they are short or have gaps."""
    *reads, out = arrays
    is_dense = all([array.flags.c_contiguous for array in arrays])
    if out.size < _FEW or not is_dense:
        return False
    vectors = [as_writable(array).reshape(-1) for array in reads]
    vectors.append(out.reshape(-1))

    def piece(start: int, end: int) -> None:
        kernel(*[vector[start:end] for vector in vectors], *numbers)

    in_pieces(piece, out.size)
    return True


def _to_single(halves: Any) -> Any:
    """Return float16 numbers, given by their bits, in float32."""
    if not isinstance(halves, Lanes):
        return halves.view(np.float16).astype(np.float32)
    word = ir.IntType(32)
    bits = halves.to("sext", word)
    magnitudes = bits & 0x7FFF
    # Subnormal numbers are multiples of 2^-24; as operands they would be slow.
    is_subnormal = magnitudes < _NORMAL
    normal = where(is_subnormal, magnitudes.constant(1 << 23), magnitudes << 13)
    scaled = normal.to("bitcast", ir.FloatType()) * 2.0**112
    small = magnitudes.to("sitofp", ir.FloatType()) * 2.0**-24
    finite = to_bits(where(is_subnormal, small, scaled))
    infinite = (magnitudes << 13) | _INFINITY_OF_SINGLE
    found = where(magnitudes >= _INFINITY, infinite, finite)
    return (found | (bits & -0x80000000)).to("bitcast", ir.FloatType())


def _to_half(numbers: Any) -> Any:
    """Return the bits of float32 numbers, rounded to float16, ties to even."""
    if not isinstance(numbers, Lanes):
        with np.errstate(all="ignore"):
            return numbers.astype(np.float16).view(np.int16)
    bits = to_bits(numbers)
    magnitudes = bits & 0x7FFFFFFF
    # An addition of 1/2 rounds to a multiple of 2^-24.
    shifted = magnitudes.to("bitcast", ir.FloatType()) + 0.5
    subnormal = to_bits(shifted).new("sub", _ONE_HALF)
    is_odd = (magnitudes >> 13) & 1
    rounded = magnitudes.new("add", 0xFFF - (112 << 23)).new("add", is_odd)
    found = where(magnitudes < _NORMAL_AS_SINGLE, subnormal, rounded >> 13)
    found = where(magnitudes >= _BEYOND, magnitudes.constant(_INFINITY), found)
    is_nan = magnitudes > _INFINITY_OF_SINGLE
    nan = ((magnitudes >> 13) & 0x3FF) | (_INFINITY | 0x200)
    found = where(is_nan, nan, found)
    return (found | ((bits >> 16) & 0x8000)).to("trunc", ir.IntType(16))


@lanewise(1, 1)
def _widened(halves):  # type: ignore[no-untyped-def]
    return (_to_single(halves),)


@lanewise(1, 1)
def _narrowed(numbers):  # type: ignore[no-untyped-def]
    return (_to_half(numbers),)


@lanewise(2, 1)
def _summed(a, b, factor, sign):  # type: ignore[no-untyped-def]
    product = _to_single(_to_half(_to_single(a) * factor))
    return (_to_half(product + _to_single(b) * sign),)


@jit
def _widen(halves, out):  # type: ignore[no-untyped-def]
    _widened(out.size, halves, 0, out, 0)


@jit
def _narrow(values, out):  # type: ignore[no-untyped-def]
    _narrowed(out.size, values, 0, out, 0)


@jit
def _add(a, b, out, factor, sign):  # type: ignore[no-untyped-def]
    _summed(out.size, a, 0, b, 0, out, 0, factor, sign)
