"""Value formats: what stands at the indices of a vector, as bytes. None of them loses a bit.

    0, 1, 2   float16, float32, float64 as they are
    3, 4      float32 that are all float16, or bfloat16, numbers: 2 N
    5, 6, 7   float64 that are all float32, float16, or bfloat16, numbers: 4 N, 2 N, 2 N
    8, 9, 10  float16, float32, float64 of one magnitude: the magnitude as float64, and a sign bit each: 8 + N / 8
    11        float32 that are all integers of 0 to 255, such as counts: N
    12 to 14  float16, float32, float64 of which the bits of the magnitudes lie within 2^w of each other, as those of
              entries do that were selected for it: w bits and a sign each, in planes of 8 bits and of one, each a
              multiple of 8 bytes; then the least magnitude and w: 16 + N (w + 1) / 8, and up to 7 a plane

To make values fit a shorter format is `mpicomp.compressors.Quantised`: there the sender gets the error back.
"""

import struct
from functools import reduce
from operator import and_, or_
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import VALUE_DTYPES, kernels_for, namespace, read_fields, to_numpy, write_fields

Array = NDArray[Any]
Buffer = NDArray[np.uint8]

_SAMPLE = 8  # values that are looked at before all of them are
_LEAST_AND_WIDTH = struct.Struct("<qq")  # what offsets end with
_OFFSETS_OF = {dtype: number for number, dtype in enumerate(VALUE_DTYPES, 12)}
_FEW = 32  # values: below, offsets spare next to nothing


class ValueFormat(Protocol):
    """One way to write values of a dtype; its number says which in a message."""

    number: int
    dtype: np.dtype[Any]

    def nbytes(self, count: int) -> int:
        """Return the bytes that so many values take."""
        ...

    def write(self, values: Array, section: Buffer) -> None:
        """Fill the section with values that fit."""
        ...

    def read(self, section: Buffer, count: int) -> Array:
        """Return so many values from a section of the right size; a view of it where that is possible."""
        ...


class FixedFormat(ValueFormat, Protocol):
    """A format that is the same for all values."""

    def may_fit(self, one_has: int, all_have: int) -> bool:
        """Say whether values may fit, of which some have these bits: most that do not are found out at no cost.

        one_has: the bits that one of those has, or more of them do. all_have: the bits that all of those have.
        """
        ...

    def fits(self, values: Array) -> bool:
        """Say whether values (1-d, of the dtype) come back to the bit."""
        ...


class Stored:
    """Formats 0 to 7, and 11: the values of one dtype, stored as numbers of another one."""

    def __init__(self, number: int, dtype: Any, stored: Any, precision: int | None = None) -> None:
        """Take the dtype of the values, that in which they are stored, and how many bits of a fraction it holds."""
        self.number, self.dtype, self.stored = number, np.dtype(dtype), np.dtype(stored)
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
        return self.dtype == self.stored or bool((_bits(self._back(self._shortened(values))) == _bits(values)).all())

    def write(self, values: Array, section: Buffer) -> None:
        """See `ValueFormat.write`."""
        section.view(self.stored)[:] = self._shortened(values)

    def read(self, section: Buffer, count: int) -> Array:
        """See `ValueFormat.read`."""
        return self._back(section.view(self.stored))

    def _shortened(self, values: Array) -> Array:
        if values.dtype == self.stored:
            return values
        with np.errstate(over="ignore", invalid="ignore"):  # a value that overflows does not fit
            return values.astype(self.stored)

    def _back(self, stored: Array) -> Array:
        if stored.dtype == self.dtype:
            return stored
        with np.errstate(invalid="ignore"):  # signalling NaN in a broken message
            return stored.astype(self.dtype)


class StoredBfloat16(Stored):
    """Formats 4 and 7: bfloat16 is the upper half of a float32, and NumPy has no name for it."""

    def __init__(self, number: int, dtype: Any) -> None:
        super().__init__(number, dtype, np.uint16, precision=7)

    def _shortened(self, values: Array) -> Array:
        with np.errstate(over="ignore"):
            halves: Array = values.astype(np.float32).view(np.uint32) >> np.uint32(16)
        return halves.astype(np.uint16)

    def _back(self, stored: Array) -> Array:
        wide: Array = stored.astype(np.uint32) << np.uint32(16)
        return super()._back(wide.view(np.float32))


class Signs:
    """Formats 8 to 10."""

    def __init__(self, number: int, dtype: Any) -> None:
        self.number, self.dtype = number, np.dtype(dtype)
        self._magnitude = (1 << 8 * self.dtype.itemsize - 1) - 1
        least = (
            1 << np.finfo(self.dtype).nmant
        )  # bits of the least number that is normal: a device may lose those below
        self._normal = range(least, self._magnitude & -least)

    def nbytes(self, count: int) -> int:
        """See `ValueFormat.nbytes`."""
        return 8 + 8 * -(-count // 64)

    def may_fit(self, one_has: int, all_have: int) -> bool:
        """See `ValueFormat.may_fit`."""
        return not (one_has & ~all_have) & self._magnitude

    def fits(self, values: Array) -> bool:
        """See `ValueFormat.fits`."""
        if not values.size:
            return False
        magnitudes = _bits(values) & self._magnitude
        first = magnitudes[:1].tolist()[0]
        return (not first or first in self._normal) and bool((magnitudes == magnitudes[:1]).all())

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


class Offsets:
    """Formats 12 to 14: how far the bits of a magnitude are above those of the least one."""

    def __init__(self, dtype: np.dtype[Any], least: int, width: int) -> None:
        """Take the bits of the least magnitude, and how many bits hold the distance to the largest."""
        self.number, self.dtype = _OFFSETS_OF[dtype], dtype
        self.least, self.width = least, width

    @classmethod
    def of(cls, values: Array) -> "Offsets":
        """Return the format for values (1-d, some)."""
        least, largest = kernels_for(values).magnitude_range(values)
        return cls(values.dtype, least, (largest - least).bit_length())

    def nbytes(self, count: int) -> int:
        """See `ValueFormat.nbytes`."""
        octets, bits = divmod(self.width + 1, 8)
        return 8 * (octets * -(-count // 8) + bits * -(-count // 64)) + _LEAST_AND_WIDTH.size

    def write(self, values: Array, section: Buffer) -> None:
        """See `ValueFormat.write`."""
        section[:] = 0
        kernels_for(values).to_offsets(values, self.least, self.width, section[: -_LEAST_AND_WIDTH.size])
        write_fields(section[-_LEAST_AND_WIDTH.size :], _LEAST_AND_WIDTH, self.least, self.width)

    def read(self, section: Buffer, count: int) -> Array:
        """See `ValueFormat.read`."""
        values: Array = namespace(section).empty(count, self.dtype)
        kernels_for(section).from_offsets(section[: -_LEAST_AND_WIDTH.size], self.least, self.width, values)
        return values


def _bits(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


_HALF, _SINGLE, _DOUBLE = VALUE_DTYPES
VALUE_FORMATS: tuple[FixedFormat, ...] = (
    *(Stored(number, dtype, dtype) for number, dtype in enumerate(VALUE_DTYPES)),
    Stored(3, _SINGLE, _HALF),
    StoredBfloat16(4, _SINGLE),
    Stored(5, _DOUBLE, _SINGLE),
    Stored(6, _DOUBLE, _HALF),
    StoredBfloat16(7, _DOUBLE),
    *(Signs(number, dtype) for number, dtype in enumerate(VALUE_DTYPES, 8)),
    Stored(11, _SINGLE, np.uint8, precision=7),
)

_FORMATS_FOR = {dtype: [form for form in VALUE_FORMATS if form.dtype == dtype] for dtype in VALUE_DTYPES}


def format_of(number: int, message: Buffer) -> ValueFormat | None:
    """Return the format of a number, of which the end of a message may say more; None where there is no such."""
    if number < len(VALUE_FORMATS):
        return VALUE_FORMATS[number]
    dtype = next((dtype for dtype, its_own in _OFFSETS_OF.items() if its_own == number), None)
    if dtype is None or message.size < _LEAST_AND_WIDTH.size:
        return None
    least, width = read_fields(message[-_LEAST_AND_WIDTH.size :], _LEAST_AND_WIDTH)
    return Offsets(dtype, least, width) if least >= 0 and 0 <= width < 8 * dtype.itemsize else None


def as_they_are(values: Array) -> ValueFormat:
    """Return the format that stores values in their own dtype."""
    return VALUE_FORMATS[VALUE_DTYPES.index(values.dtype)]


def smallest(values: Array) -> ValueFormat:
    """Return the format that stores values (1-d) in the fewest bytes, to the bit."""
    shortest = _shortest(values)
    if values.size < _FEW or shortest.nbytes(values.size) < values.nbytes:
        return shortest
    offsets = Offsets.of(values)
    return offsets if offsets.nbytes(values.size) < values.nbytes else shortest


def _shortest(values: Array) -> ValueFormat:
    """Return the fixed format that stores values in the fewest bytes."""
    some = to_numpy(values[:_SAMPLE]).view(f"u{values.itemsize}").tolist()
    one_has, all_have = reduce(or_, some, 0), reduce(and_, some, -1)
    candidates = [form for form in _FORMATS_FOR[values.dtype] if form.may_fit(one_has, all_have)]
    if len(candidates) == 1:
        return candidates[0]
    for form in sorted(candidates, key=lambda form: form.nbytes(values.size)):
        if form.fits(values):
            return form
    return as_they_are(values)
