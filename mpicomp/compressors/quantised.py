"""Quantisation: send the entries that another compressor selects with fewer bits a value; the error is in the residual.

Sources: one magnitude and signs: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit
stochastic gradient descent", Interspeech 2014, with one scale for all entries. Two
magnitudes: S. P. Lloyd, "Least squares quantization in PCM", IEEE Trans. Information
Theory 28(2), 1982, on the magnitudes. float16 and bfloat16: rounded to nearest, ties to
even (float64 to bfloat16 by way of float32).

Differences from the paper: quantised values keep their dtype, so sums over the ranks
are computed as before, and sent in full; `codec="smallest"` detects that values fit a
shorter format.
"""

from collections.abc import Sequence

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.device import kernels_for
from mpicomp.arrays.memory import flat
from mpicomp.arrays.values import check_finite, converted
from mpicomp.compressors.base import (
    Compressor,
    SegmentedCompressor,
    Wrapper,
)
from mpicomp.correction import Correction
from mpicomp.settings import to_choice
from mpicomp.vector import SparseVector, places_of


def _to_float16(values: Array) -> Array:
    limit = np.finfo(np.float16).max
    return converted(
        converted(np.clip(values, -limit, limit), np.float16), values.dtype
    )


def _to_bfloat16(values: Array) -> Array:
    """Return values rounded to bfloat16 by integer operations, which have the same result on all devices."""
    # The bits of the largest bfloat16 number in the range of the dtype.
    limit = np.uint32(0x7F7F0000)
    if values.dtype == np.float16:
        limit = np.uint32(0x477F0000)
    bits = converted(values, np.float32).view(np.uint32)
    signs = bits & np.uint32(0x80000000)
    clipped = np.minimum(bits ^ signs, limit)
    odd = (clipped >> np.uint32(16)) & np.uint32(1)
    rounded = (clipped + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000) | signs
    is_nan = bits ^ signs > np.float32(np.inf).view(np.uint32)
    return converted(np.where(is_nan, bits, rounded).view(np.float32), values.dtype)


def _to_magnitudes(values: Array, edges: Sequence[int], *, two: bool) -> Array:
    """Return signs with one or two magnitudes for each segment, whose bits do not depend on the other segments."""
    kernels = kernels_for(values)
    signed: Array
    signed, levels = kernels.with_magnitudes(values, edges, two=two)
    # Above this level a sum of magnitudes may not be finite.
    most = _MOST / max(values.size, 1)
    if not levels[:, :2].max(initial=0) <= most:
        check_finite(values)
        signed, _ = kernels.with_magnitudes(values / 2.0**64, edges, two=two)
        signed *= 2.0**64
    return signed


_MOST = float(np.finfo(np.float64).max)
_ROUNDINGS = {"float16": _to_float16, "bfloat16": _to_bfloat16}
_MAGNITUDES = {"sign": False, "two_bit": True}  # whether there are two


def quantise(
    vector: SparseVector, form: str, bounds: Sequence[int] | None = None
) -> SparseVector:
    """Return the vector with values that fit a shorter format.

    Values beyond the range of a format are clipped to its largest. The difference is exact if
    value and quantised value are within a factor of two of each other (Sterbenz' lemma), else
    rounded.

    Args:
        vector: a SparseVector of numbers.
        form: "float16", "bfloat16", "sign" (the mean magnitude, and the signs) or "two_bit" (of
            two magnitudes the nearer one, and the signs).
        bounds: the first position of each segment, and the length; each segment has magnitudes
            of its own. None: one segment.

    Raises:
        ValueError: `form` is none of these.

    >>> quantise(TopK(k=2).compress(gradient), "sign").values.tolist()
    [-2.5, 2.5]
    """
    if form in _MAGNITUDES:
        edges = [0, vector.nnz]
        if bounds is not None and len(bounds) > 2:
            edges = places_of(vector, bounds)
        width = vector.width or 1
        places = [width * edge for edge in edges]
        rounded = _to_magnitudes(flat(vector.values), places, two=_MAGNITUDES[form])
        if vector.width:
            rounded = rounded.reshape(vector.values.shape)
    elif form in _ROUNDINGS:
        rounded = _ROUNDINGS[form](vector.values)
    else:
        raise ValueError(
            f"form is {form!r}: expected one of {[*_ROUNDINGS, *_MAGNITUDES]}"
        )
    return vector.with_values(rounded, is_finite=True)


class Quantised(Wrapper, SegmentedCompressor):
    """Quantise the entries that another compressor selects; feedback adds the error to the residual.

    Args:
        compressor: selects the entries.
        form: "float16", "bfloat16", "sign" (the mean magnitude, and the signs) or "two_bit" (of
            two magnitudes the nearer one, and the signs).

    Raises:
        TypeError: `compressor` is no compressor.
        ValueError: `form` is none of these.

    >>> Quantised(TopK(k=2), "sign").compress(gradient).values.tolist()
    [-2.5, 2.5]
    """

    def __init__(self, compressor: Compressor, form: str) -> None:
        super().__init__(compressor)
        self.form = to_choice("form", form, [*_ROUNDINGS, *_MAGNITUDES])

    def select(self, correction: Correction, bounds: Sequence[int]) -> SparseVector:
        """Return the quantised entries; each segment has magnitudes of its own. See `Compressor.select`."""
        vector = self.compressor.select(correction, bounds)
        return quantise(vector, self.form, bounds)
