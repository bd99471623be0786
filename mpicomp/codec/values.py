"""Value formats: what stands at the indices of a vector, as bytes. None of them loses a bit.

    0, 1, 2   float16, float32, float64 as they are
    3, 4      float32 that are all float16, or bfloat16, numbers: 2 N
    5, 6, 7   float64 that are all float32, float16, or bfloat16, numbers: 4 N, 2 N, 2 N
    8, 9, 10  float16, float32, float64 of one magnitude: the magnitude as float64, and a sign bit each: 8 + N / 8

To make values fit a shorter format is `mpicomp.compressors.Quantised`: there the sender gets the error back.
"""

from functools import reduce
from operator import and_, or_
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import VALUE_DTYPES, to_numpy

Array = NDArray[Any]
Buffer = NDArray[np.uint8]

_SAMPLE = 8  # values that are looked at before all of them are


class ValueFormat(Protocol):
    """One way to write values of a dtype."""

    dtype: np.dtype[Any]

    def nbytes(self, count: int) -> int:
        """Return the bytes that so many values take."""
        ...

    def may_fit(self, one_has: int, all_have: int) -> bool:
        """Say whether values may fit, of which some have these bits: most that do not are found out at no cost.

        one_has: the bits that one of those has, or more of them do. all_have: the bits that all of those have.
        """
        ...

    def fits(self, values: Array) -> bool:
        """Say whether values (1-d, of the dtype) come back to the bit."""
        ...

    def write(self, values: Array, section: Buffer) -> None:
        """Fill the section with values that fit."""
        ...

    def read(self, section: Buffer, count: int) -> Array:
        """Return so many values from a section of the right size; a view of it where that is possible."""
        ...


class Stored:
    """Formats 0 to 7: the values of one dtype, stored as numbers of another one."""

    def __init__(self, dtype: Any, stored: Any, precision: int | None = None) -> None:
        """Take the dtype of the values, that in which they are stored, and how many bits of a fraction it holds."""
        self.dtype, self.stored = np.dtype(dtype), np.dtype(stored)
        cut = np.finfo(self.dtype).nmant - (np.finfo(self.stored).nmant if precision is None else precision)
        self._lost = (1 << cut) - 1

    def nbytes(self, count: int) -> int:
        """See `ValueFormat.nbytes`."""
        return count * int(self.stored.itemsize)

    def may_fit(self, one_has: int, all_have: int) -> bool:
        """See `ValueFormat.may_fit`."""
        return not one_has & self._lost

    def fits(self, values: Array) -> bool:
        """See `ValueFormat.fits`."""
        return self.dtype == self.stored or bool((self._back(self._shortened(values)) == values).all())

    def write(self, values: Array, section: Buffer) -> None:
        """See `ValueFormat.write`."""
        section.view(self.stored)[:] = self._shortened(values)

    def read(self, section: Buffer, count: int) -> Array:
        """See `ValueFormat.read`."""
        return self._back(section.view(self.stored))

    def _shortened(self, values: Array) -> Array:
        if values.dtype == self.stored:
            return values
        with np.errstate(over="ignore"):  # what overflows does not come back, so it does not fit
            return values.astype(self.stored)

    def _back(self, stored: Array) -> Array:
        if stored.dtype == self.dtype:
            return stored
        with np.errstate(invalid="ignore"):  # signalling NaN in a broken message
            return stored.astype(self.dtype)


class StoredBfloat16(Stored):
    """Formats 4 and 7: bfloat16 is the upper half of a float32, and NumPy has no name for it."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype, np.uint16, precision=7)

    def _shortened(self, values: Array) -> Array:
        with np.errstate(over="ignore"):
            halves: Array = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return halves.astype(np.uint16)

    def _back(self, stored: Array) -> Array:
        wide: Array = stored.astype(np.uint32) << np.uint32(16)
        return super()._back(wide.view(np.float32))


class Signs:
    """Formats 8 to 10."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self._magnitude = (1 << 8 * self.dtype.itemsize - 1) - 1

    def nbytes(self, count: int) -> int:
        """See `ValueFormat.nbytes`."""
        return 8 + 8 * -(-count // 64)

    def may_fit(self, one_has: int, all_have: int) -> bool:
        """See `ValueFormat.may_fit`."""
        return not (one_has & ~all_have) & self._magnitude

    def fits(self, values: Array) -> bool:
        """See `ValueFormat.fits`."""
        return bool(values.size and np.isfinite(values[:1]).all() and (np.abs(values) == np.abs(values[:1])).all())

    def write(self, values: Array, section: Buffer) -> None:
        """See `ValueFormat.write`."""
        section[:] = 0
        section[:8].view(np.float64)[:] = np.abs(values[:1])
        signs = np.packbits(np.signbit(values), bitorder="little")
        section[8 : 8 + signs.size] = signs

    def read(self, section: Buffer, count: int) -> Array:
        """See `ValueFormat.read`."""
        with np.errstate(over="ignore", invalid="ignore"):
            magnitude = section[:8].view(np.float64).astype(self.dtype)
        signs = np.unpackbits(section[8:], bitorder="little")[:count].view(np.bool_)
        values: Array = np.where(signs, -magnitude, magnitude)
        return values


VALUE_FORMATS: tuple[ValueFormat, ...] = (
    *(Stored(dtype, dtype) for dtype in VALUE_DTYPES),
    Stored(np.float32, np.float16),
    StoredBfloat16(np.float32),
    Stored(np.float64, np.float32),
    Stored(np.float64, np.float16),
    StoredBfloat16(np.float64),
    *(Signs(dtype) for dtype in VALUE_DTYPES),
)

_FORMATS_FOR = {
    dtype: [(number, form) for number, form in enumerate(VALUE_FORMATS) if form.dtype == dtype]
    for dtype in VALUE_DTYPES
}


def as_they_are(values: Array) -> int:
    """Return the format that stores values in their own dtype."""
    return VALUE_DTYPES.index(values.dtype)


def smallest(values: Array) -> int:
    """Return the format that stores values (1-d) in the fewest bytes, to the bit."""
    some = to_numpy(values[:_SAMPLE]).view(f"u{values.itemsize}").tolist()
    one_has, all_have = reduce(or_, some, 0), reduce(and_, some, -1)
    candidates = [number for number, form in _FORMATS_FOR[values.dtype] if form.may_fit(one_has, all_have)]
    for number in sorted(candidates, key=lambda number: VALUE_FORMATS[number].nbytes(values.size)):
        if VALUE_FORMATS[number].fits(values):
            return number
    return as_they_are(values)
