"""Quantisation: send the entries that another compressor selects with fewer bits a value; the error is in the residual.

Sources: one magnitude and signs: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient descent",
Interspeech 2014, with one scale for all entries. Two magnitudes: S. P. Lloyd, "Least squares quantization in PCM", IEEE
Trans. Information Theory 28(2), 1982, on the magnitudes. float16 and bfloat16: rounded to nearest, ties to even.

Differences from the paper: quantised values keep their dtype, so sums over the ranks are computed as before;
`codec="smallest"` detects that they fit a shorter format and encodes them in it. Sums of quantised values need not fit
and are then sent in full.
"""

import math
from typing import Any

import numpy as np

from mpicomp.arrays import Array, kernels_for, namespace
from mpicomp.compressors.base import Compressor, Wrapper
from mpicomp.compressors.common import mean_and_largest
from mpicomp.vector import SparseVector


def _to_float16(values: Array) -> Array:
    limit = np.finfo(np.float16).max
    return np.clip(values, -limit, limit).astype(np.float16).astype(values.dtype)


def _to_bfloat16(values: Array) -> Array:
    largest = np.uint32(0x7F7F0000).view(np.float32)
    limit = np.float32(65280) if values.dtype == np.float16 else largest  # the largest bfloat16 in the dtype's range
    bits = _rounded_to_odd(np.clip(values, -limit, limit)).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    nearest: Array = np.clip(rounded.view(np.float32), -limit, limit).astype(values.dtype)
    return nearest


def _rounded_to_odd(values: Array) -> Array:
    """Return values as float32, rounded to odd: a second rounding then gives the bits of a single one."""
    short: Array = values.astype(np.float32)
    if values.dtype != np.float64:
        return short
    away = np.abs(short) > np.abs(values)
    bits = short.view(np.uint32) - away.astype(np.uint32)
    return (bits | (short != values)).view(np.float32)  # type: ignore[no-any-return]


def _to_signs(values: Array) -> Array:
    mean, _ = mean_and_largest(values.reshape(-1))
    signed: Array = np.copysign(values.dtype.type(mean), values)
    return signed


def _to_two_magnitudes(values: Array) -> Array:
    mean, largest = mean_and_largest(values.reshape(-1))
    if not math.isfinite(largest * values.size):  # the sums of such numbers are infinite
        scaled: Array = _to_two_magnitudes(values * 2.0**-64) * 2.0**64
        return scaled
    low, high, threshold = kernels_for(values).two_magnitudes(values.reshape(-1), mean, largest)
    limit = values.dtype.type(threshold)
    if float(limit) > threshold:  # rounded down, it divides values of the dtype as the threshold does
        limit = np.nextafter(limit, values.dtype.type(0))
    pair = namespace(values).asarray(np.array([low, high], values.dtype))
    signed: Array = np.copysign(np.where(np.abs(values) <= limit, pair[:1], pair[1:]), values)
    return signed


_ROUNDINGS = {"float16": _to_float16, "bfloat16": _to_bfloat16, "sign": _to_signs, "two_bit": _to_two_magnitudes}


def quantise(vector: SparseVector, form: str) -> tuple[SparseVector, SparseVector]:
    """Return (quantised, error): the vector with values that fit a shorter format, and the difference at every index.

    form: "float16", "bfloat16", "sign" (the mean magnitude, and the signs), or "two_bit" (of two magnitudes the nearer
    one, and the signs), else ValueError. Values beyond the range of a format are clipped to its largest. quantised +
    error is the vector, up to the rounding of the error to the dtype of the values; it is exact if value and quantised
    value are within a factor of two of each other (Sterbenz' lemma).

    >>> quantised, error = quantise(TopK(k=2).compress(gradient), "sign")
    >>> quantised.values.tolist(), error.values.tolist()
    ([-2.5, 2.5], [-0.5, -0.5])
    """
    if form not in _ROUNDINGS:
        raise ValueError(f"form is {form!r}: expected one of {list(_ROUNDINGS)}")
    rounded = _ROUNDINGS[form](vector.values)
    return vector.with_values(rounded), vector.with_values(vector.values - rounded)


class Quantised(Wrapper):
    """Quantise the entries that another compressor selects.

    compressor: any. form: "float16", "bfloat16", "sign" or "two_bit", else ValueError. Feedback adds the error to the
    residual. `error` is that of the last call, None before any.

    >>> Quantised(TopK(k=2), "sign").compress(gradient).values.tolist()
    [-2.5, 2.5]
    """

    def __init__(self, compressor: Compressor, form: str) -> None:
        super().__init__(compressor)
        quantise(SparseVector.empty(0), form)
        self.form = form
        self.error: SparseVector | None = None

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the quantised entries; see `Compressor.compress`."""
        return self._quantised(self.compressor.compress(corrected, gradient=gradient))

    def compress_sum(self, residual: Array, gradient: Array, out: Array) -> SparseVector:
        """See `Compressor.compress_sum`; calls that of the inner compressor."""
        return self._quantised(self.compressor.compress_sum(residual, gradient, out))

    def _quantised(self, vector: SparseVector) -> SparseVector:
        quantised, self.error = quantise(vector, self.form)
        self.report = self.compressor.report
        return quantised
