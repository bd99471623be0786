"""Value formats (docs/contributing/wire_format.md): the values of a vector as bytes. None of them loses a bit.

Every format has a number, which messages contain, and three methods: `nbytes` returns
the bytes that `count` values take; `write` fills the section with values that fit;
`read` returns `count` values from a section of the right size, as a view if possible,
and raises ValueError for others.

A plane has one bit a value, and is a multiple of 8 bytes. Runs have a plane of signs,
and for two magnitudes one of bits that are set at the larger one. Then come, for each
run, the position of its first value and the bits of its magnitudes, the least first;
then the number of runs. Offsets have w bits and a sign each, in planes of 8 bits and of
one; then the least magnitude and w. All of these are int64.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import (
    VALUE_DTYPES,
    Array,
    Buffer,
    Dtype,
    converted,
    kernels_for,
    namespace,
    on_device,
    read_fields,
    to_numpy,
    write_fields,
)

# values of a window; as many windows are looked at before all values are
_WINDOW = np.arange(8)
_PAIR = struct.Struct("<qq")  # that offsets end with
_MOST_RUNS = 1024
_FEW = 32  # values: below, offsets spare next to nothing


class Stored:
    """Formats 0 to 8: the values of one dtype, stored as another one whose fraction has `precision` bits."""

    def __init__(
        self, number: int, dtype: Any, stored: Any, precision: int | None = None
    ) -> None:
        self.number = number
        self.dtype = np.dtype(dtype)
        self.stored = np.dtype(stored)
        self._itemsize = int(self.stored.itemsize)
        cut = np.finfo(self.dtype).nmant - (
            np.finfo(self.stored).nmant if precision is None else precision
        )
        self.lost = (1 << cut) - 1  # the bits of a value that are not stored

    def fits(self, values: Array) -> bool:
        """Return whether values (1-d, of the dtype) are stored without loss."""
        return self.dtype == self.stored or bool(
            (_bits(self._back(self._shortened(values))) == _bits(values)).all()
        )

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return count * self._itemsize

    def write(self, values: Array, section: Buffer) -> None:
        """Fill the section; see the module."""
        section.view(self.stored)[:] = self._shortened(values)

    def read(self, section: Buffer, count: int) -> Array:
        """Return the values in a section; see the module."""
        return self._back(section.view(self.stored))

    def _shortened(self, values: Array) -> Array:
        return converted(values, self.stored)

    def _back(self, stored: Array) -> Array:
        return converted(stored, self.dtype)


class StoredBfloat16(Stored):
    """Formats 4 and 7: bfloat16 is the upper half of a float32, and NumPy has no name for it."""

    def __init__(self, number: int, dtype: Any) -> None:
        super().__init__(number, dtype, np.uint16, precision=7)

    def _shortened(self, values: Array) -> Array:
        halves = converted(values, np.float32).view(np.uint32) >> np.uint32(16)
        return halves.astype(np.uint16)

    def _back(self, stored: Array) -> Array:
        bits: Array = stored.astype(np.uint32) << np.uint32(16)
        return super()._back(bits.view(np.float32))


class Runs:
    """Formats 9 to 14: runs of values with at most one magnitude, or two.

    most: magnitudes of a run. table: in host memory, a row for each run: its start, and
    its magnitudes.
    """

    def __init__(self, dtype: Dtype, most: int, table: NDArray[np.int64]) -> None:
        self.number = 6 + 3 * most + VALUE_DTYPES.index(dtype)
        self.dtype = dtype
        self.most = most
        self.table = table

    @classmethod
    def of(cls, values: Array, most: int) -> "Runs | None":
        """Return the format for values (1-d); None without values, and for too many runs, or several with zeros."""
        if not values.size:
            return None
        magnitudes = _magnitudes(values)
        xp = namespace(values)
        changes = np.flatnonzero(magnitudes[1:] != magnitudes[:-1]) + 1
        firsts = np.concatenate([xp.zeros(1, changes.dtype), changes])
        # each of equal magnitudes, and next to it another one
        stretches = magnitudes[firsts]
        # Of runs, and behind each perhaps one more.
        breaks = np.flatnonzero(stretches[most:] != stretches[:-most]) + most
        # zeros: of a dense vector
        if breaks.size > most * _MOST_RUNS or (breaks.size and not stretches.all()):
            return None
        starts = [0]
        for stretch in to_numpy(breaks).tolist():
            # the second stretch of a run is never a third magnitude
            if stretch >= starts[-1] + most:
                starts.append(stretch)
        if len(starts) > _MOST_RUNS:
            return None
        first = xp.asarray(np.array(starts))
        pair = [
            stretches[np.minimum(first + number, stretches.size - 1)]
            for number in range(most)
        ]
        ordered = pair if most == 1 else [np.minimum(*pair), np.maximum(*pair)]
        columns = [
            to_numpy(column).astype(np.int64) for column in (firsts[first], *ordered)
        ]
        return cls(values.dtype, most, np.stack(columns, axis=1))

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        return self.most * _plane_nbytes(count) + self.table.nbytes + 8

    def write(self, values: Array, section: Buffer) -> None:
        """Fill the section; see the module."""
        section[:] = 0
        plane = _plane_nbytes(values.size)
        _write_plane(section[:plane], np.signbit(values))
        if self.most == 2:
            _write_plane(
                section[plane : 2 * plane],
                _magnitudes(values) != self._of_each(1, values.size, values),
            )
        tail = np.append(self.table.reshape(-1), len(self.table)).view(np.uint8)
        section[self.most * plane :] = namespace(section).asarray(tail)

    def read(self, section: Buffer, count: int) -> Array:
        """Return the values in a section; see the module."""
        (starts, *bits) = self.table.T
        sign = _sign_of(self.dtype)
        plane = _plane_nbytes(count)
        if starts[0] or (np.diff(starts) <= 0).any() or starts[-1] >= count:
            raise ValueError(
                f"got runs of {count} values: expected starts in order, from 0 on, below the number"
            )
        if (
            (bits[0] < 0).any()
            or (bits[0] > bits[-1]).any()
            or (bits[-1] >= sign).any()
        ):
            raise ValueError(
                f"got runs of other bits: expected those of magnitudes of {self.dtype}, in order"
            )
        keys = _keys(self.dtype)
        decoded: Array = _read_plane(section[:plane], count).astype(keys)
        decoded *= keys.type(sign)
        decoded |= (least := self._of_each(1, count, section))
        if self.most == 2:
            decoded ^= _read_plane(section[plane : 2 * plane], count) * (
                least ^ self._of_each(2, count, section)
            )
        return decoded.view(self.dtype)

    def _of_each(self, column: int, count: int, like: Array) -> Array:
        """Return the bits in a column of the table for each of `count` values, or for all."""
        xp = namespace(like)
        bits = self.table[:, column].astype(_keys(self.dtype))
        counts = np.diff(self.table[:, 0], append=count)
        repeated: Array = (
            _repeated(xp.asarray(bits), xp.asarray(counts), count)
            if bits.size > 1
            else bits[0]
        )
        return repeated


class Offsets:
    """Formats 15 to 17: differences of `width` bits between the bits of the magnitudes and the least of these."""

    def __init__(self, dtype: Dtype, least: int, width: int) -> None:
        self.number = 15 + VALUE_DTYPES.index(dtype)
        self.dtype = dtype
        self.least = least
        self.width = width

    @classmethod
    def of(cls, values: Array) -> "Offsets":
        """Return the format for values (1-d, not empty)."""
        least, largest = kernels_for(values).magnitude_range(values)
        return cls(values.dtype, least, (largest - least).bit_length())

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` values."""
        octets, bits = divmod(self.width + 1, 8)
        return 8 * (octets * -(-count // 8) + bits * -(-count // 64)) + _PAIR.size

    def write(self, values: Array, section: Buffer) -> None:
        """Fill the section; see the module."""
        section[:] = 0
        kernels_for(values).to_offsets(
            values, self.least, self.width, section[: -_PAIR.size]
        )
        write_fields(section[-_PAIR.size :], _PAIR, self.least, self.width)

    def read(self, section: Buffer, count: int) -> Array:
        """Return the values in a section; see the module."""
        values: Array = namespace(section).empty(count, self.dtype)
        kernels_for(section).from_offsets(
            section[: -_PAIR.size], self.least, self.width, values
        )
        return values


def _bits(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


def _keys(dtype: Dtype) -> Dtype:
    return np.dtype(f"u{dtype.itemsize}")


def _sign_of(dtype: Dtype) -> int:
    return 1 << 8 * dtype.itemsize - 1


def _magnitudes(values: Array) -> Array:
    return _bits(values) & _keys(values.dtype).type(_sign_of(values.dtype) - 1)  # type: ignore[no-any-return]


def _plane_nbytes(count: int) -> int:
    return 8 * -(-count // 64)


def _write_plane(section: Buffer, flags: Array) -> None:
    """Write a bit for each flag into the first bytes of a section, the low bits first."""
    plane = np.packbits(flags, bitorder="little")
    section[: plane.size] = plane


def _read_plane(section: Buffer, count: int) -> Array:
    return np.unpackbits(section, bitorder="little")[:count].view(np.bool_)


ValueFormat = Stored | Runs | Offsets
_HALF, _SINGLE, _DOUBLE = VALUE_DTYPES
VALUE_FORMATS = (
    *(Stored(number, dtype, dtype) for number, dtype in enumerate(VALUE_DTYPES)),
    Stored(3, _SINGLE, _HALF),
    StoredBfloat16(4, _SINGLE),
    Stored(5, _DOUBLE, _SINGLE),
    Stored(6, _DOUBLE, _HALF),
    StoredBfloat16(7, _DOUBLE),
    Stored(8, _SINGLE, np.uint8, precision=7),
)

AS_THEY_ARE = VALUE_FORMATS[: len(VALUE_DTYPES)]  # of each dtype, in its order
_FORMATS_FOR = {
    dtype: [form for form in VALUE_FORMATS if form.dtype == dtype]
    for dtype in VALUE_DTYPES
}


def format_of(number: int, message: Buffer, nbytes: int) -> ValueFormat | None:
    """Return the format with a number, with parameters from the end of a message of `nbytes`; None if it is unknown."""
    if number < len(VALUE_FORMATS):
        return VALUE_FORMATS[number]
    message = message[:nbytes]
    (kind, dtype_number) = divmod(number, len(VALUE_DTYPES))
    if kind > 5 or message.size < _PAIR.size:
        return None
    dtype = VALUE_DTYPES[dtype_number]
    most = kind - 2
    least, last = read_fields(message[-_PAIR.size :], _PAIR)
    if kind == 5:
        return (
            Offsets(dtype, least, last)
            if least >= 0 and 0 <= last < 8 * dtype.itemsize
            else None
        )
    table_nbytes = 8 * (1 + most) * last
    if not 0 < last <= _MOST_RUNS or table_nbytes + 8 > message.size:
        return None
    table = to_numpy(message[-8 - table_nbytes : -8]).copy().view(np.int64)
    return Runs(dtype, most, table.reshape(last, 1 + most))


def as_they_are(values: Array) -> ValueFormat:
    """Return the format that stores values in their own dtype."""
    return AS_THEY_ARE[VALUE_DTYPES.index(values.dtype)]


def smallest(values: Array) -> ValueFormat:
    """Return the format that stores values (1-d) in the fewest bytes, without loss."""
    shortest = _shortest(values)
    if values.size < _FEW or shortest.nbytes(values.size) < values.nbytes:
        return shortest
    offsets = Offsets.of(values)
    return offsets if offsets.nbytes(values.size) < values.nbytes else shortest


def _shortest(values: Array) -> ValueFormat:
    """Return the format that stores values in the fewest bytes, except offsets."""
    sample = _sample(values)
    bits_set = int(np.bitwise_or.reduce(sample, axis=None))
    candidates: list[Runs | Stored] = [
        form for form in _FORMATS_FOR[values.dtype] if not bits_set & form.lost
    ]
    magnitudes = min(
        [len({*window}) for window in (sample & (_sign_of(values.dtype) - 1)).tolist()],
        default=3,
    )
    candidates += [
        runs
        for most in (1, 2)
        if magnitudes <= most and (runs := Runs.of(values, most)) is not None
    ]
    for form in sorted(candidates, key=lambda form: form.nbytes(values.size)):
        if isinstance(form, Runs) or form.fits(values):
            return form
    return as_they_are(values)


def _sample(values: Array) -> NDArray[Any]:
    """Return the bits of values in windows all over a vector, whose first values may be like no other, (windows, 8)."""
    firsts = np.linspace(
        0, max(values.size - _WINDOW.size, 0), min(values.size, _WINDOW.size)
    ).astype(np.int64)
    places = np.minimum(firsts[:, None] + _WINDOW, values.size - 1)
    return to_numpy(_bits(values)[namespace(values).asarray(places)])


def _repeated(values: Array, counts: Array, total: int) -> Array:
    """Return each value, repeated by its count, `total` values in all."""
    if not on_device(values):
        return np.repeat(values, counts)
    places = np.searchsorted(
        counts.cumsum(dtype=np.int64), namespace(values).arange(total), side="right"
    )
    result: Array = values[places]  # CuPy's repeat takes no array of counts
    return result
