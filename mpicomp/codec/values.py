"""Value formats (docs/contributing/wire_format.md): the values of a vector as bytes. None of them loses a bit.

Of a `Format` `nbytes(count)` returns the bytes that so many values take;
`write(values, section)` fills the section with values that fit; `read(section, count)`
returns as many values from a section of the right size, as a view if possible, and
raises ValueError for others.

A plane has one bit a value, and is a multiple of 8 bytes. Runs have a plane of signs,
and for two magnitudes one of bits that are set at the larger one. Then come, for each
run, the position of its first value and the bits of its magnitudes, the least first;
then the number of runs. Offsets have w bits and a sign each, in planes of 8 bits and of
one; then the least magnitude and w. All of these are int64.
"""

import struct
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import Array, Buffer, Dtype
from mpicomp.arrays.device import kernels_for, namespace, on_device, to_numpy
from mpicomp.arrays.memory import read_fields, write_fields
from mpicomp.arrays.values import VALUE_DTYPES, converted
from mpicomp.codec.indices import Format

# Places of the values in a window; as many windows are sampled before all values are
# read.
_WINDOW = np.arange(8)
_PAIR = struct.Struct("<qq")  # Offsets end with this pair.
_MOST_RUNS = 1024
# Values below which offsets save next to nothing.
_FEW = 32


_HALF, _SINGLE, _DOUBLE = VALUE_DTYPES
# NumPy has no bfloat16: its bits are the upper half of a float32.
_BFLOAT16 = np.dtype(np.uint16)
_SHORT = np.dtype(np.uint8)

# Formats 0 to 8: the dtype of the values, the dtype in which they are stored, and the
# number of low bits that are not stored.
STORED = (
    (_HALF, _HALF, 0),
    (_SINGLE, _SINGLE, 0),
    (_DOUBLE, _DOUBLE, 0),
    (_SINGLE, _HALF, 13),
    (_SINGLE, _BFLOAT16, 16),
    (_DOUBLE, _SINGLE, 29),
    (_DOUBLE, _HALF, 42),
    (_DOUBLE, _BFLOAT16, 45),
    (_SINGLE, _SHORT, 16),
)


def _stored(number: int, dtype: Dtype, short: Dtype) -> Format:
    def nbytes(count: int) -> int:
        return count * short.itemsize

    def write(values: Array, section: Buffer) -> None:
        section.view(short)[:] = _shortened(values, short)

    def read(section: Buffer, count: int) -> Array:
        return _restored(section.view(short), dtype)

    return Format(number, nbytes, write, read)


def _shortened(values: Array, short: Dtype) -> Array:
    if short != _BFLOAT16:
        return converted(values, short)
    halves = converted(values, np.float32).view(np.uint32) >> np.uint32(16)
    return halves.astype(np.uint16)


def _restored(stored: Array, dtype: Dtype) -> Array:
    if stored.dtype == _BFLOAT16:
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return converted(stored, dtype)


def fits(values: Array, short: Dtype) -> bool:
    """Return whether values (1-d) are stored in a dtype of `STORED` without loss."""
    if values.dtype == short:
        return True
    restored = _restored(_shortened(values, short), values.dtype)
    return bool((_bits(restored) == _bits(values)).all())


def runs(dtype: Dtype, most: int, table: NDArray[np.int64]) -> Format:
    """Return the format, 9 to 14, for runs of values with at most `most` magnitudes each, one or two.

    table: in host memory, a row for each run: its start, and its magnitudes.
    """
    number = 6 + 3 * most + VALUE_DTYPES.index(dtype)
    of_each = partial(_of_each, table, _keys(dtype))

    def nbytes(count: int) -> int:
        return most * _plane_nbytes(count) + table.nbytes + 8

    def write(values: Array, section: Buffer) -> None:
        section[:] = 0
        plane = _plane_nbytes(values.size)
        _write_plane(section[:plane], np.signbit(values))
        if most == 2:
            is_larger = _magnitudes(values) != of_each(1, values.size, values)
            _write_plane(section[plane : 2 * plane], is_larger)
        tail = np.append(table.reshape(-1), len(table)).view(np.uint8)
        section[most * plane :] = namespace(section).asarray(tail)

    def read(section: Buffer, count: int) -> Array:
        _check_runs(table, count, dtype)
        plane = _plane_nbytes(count)
        least = of_each(1, count, section)
        decoded: Array = _read_plane(section[:plane], count).astype(_keys(dtype))
        decoded *= decoded.dtype.type(_sign_of(dtype))
        decoded |= least
        if most == 2:
            is_larger = _read_plane(section[plane : 2 * plane], count)
            decoded ^= is_larger * (least ^ of_each(2, count, section))
        return decoded.view(dtype)

    return Format(number, nbytes, write, read)


def _check_runs(table: NDArray[np.int64], count: int, dtype: Dtype) -> None:
    """Raise ValueError unless a table describes runs of `count` values."""
    (starts, *bits) = table.T
    if starts[0] or (np.diff(starts) <= 0).any() or starts[-1] >= count:
        raise ValueError(
            f"got runs of {count} values: expected starts in order, from 0 on, below the number"
        )
    is_out_of_order = (bits[0] < 0) | (bits[0] > bits[-1])
    if (is_out_of_order | (bits[-1] >= _sign_of(dtype))).any():
        raise ValueError(
            f"got runs of other bits: expected those of magnitudes of {dtype}, in order"
        )


def _of_each(
    table: NDArray[np.int64],
    keys: Dtype,
    column: int,
    count: int,
    like: Array,
) -> Array:
    """Return a column of a table of runs, repeated for each of `count` values; of a single run, its one number."""
    bits = table[:, column].astype(keys)
    if bits.size == 1:
        return bits[0]  # type: ignore[no-any-return]
    if not on_device(like):
        return np.repeat(bits, np.diff(table[:, 0], append=count))
    # CuPy's `repeat` takes no array of counts.
    xp = namespace(like)
    later = xp.asarray(table[1:, 0])
    places = np.searchsorted(later, xp.arange(count), side="right")
    return xp.asarray(bits)[places]  # type: ignore[no-any-return]


def table_of_runs(values: Array, most: int) -> NDArray[np.int64] | None:
    """Return the table of `runs` for values (1-d); None without any, and for too many runs, or several with zeros."""
    if not values.size:
        return None
    magnitudes = _magnitudes(values)
    xp = namespace(values)
    changes = np.flatnonzero(magnitudes[1:] != magnitudes[:-1]) + 1
    firsts = np.concatenate([xp.zeros(1, changes.dtype), changes])
    # A stretch consists of equal magnitudes, and the next one has another magnitude.
    stretches = magnitudes[firsts]
    # Every run but the first begins at one of these stretches; the stretch after that
    # one may be a second break of the same run.
    breaks = np.flatnonzero(stretches[most:] != stretches[:-most]) + most
    # If several runs include zeros, the vector is a dense one.
    if breaks.size > most * _MOST_RUNS or (breaks.size and not stretches.all()):
        return None
    starts = [0]
    for stretch in to_numpy(breaks).tolist():
        # The second stretch of a run has at most its second magnitude, so it begins no
        # run.
        if stretch >= starts[-1] + most:
            starts.append(stretch)
    if len(starts) > _MOST_RUNS:
        return None
    first = xp.asarray(np.array(starts))
    second = np.minimum(first + most - 1, stretches.size - 1)
    pair = stretches[first], stretches[second]
    columns = [firsts[first], np.minimum(*pair), np.maximum(*pair)]
    table = [to_numpy(column).astype(np.int64) for column in columns[: 1 + most]]
    return np.stack(table, axis=1)


def offsets(dtype: Dtype, least: int, width: int) -> Format:
    """Return the format, 15 to 17, for differences of `width` bits between the bits of magnitudes and the least."""

    def nbytes(count: int) -> int:
        octets, bits = divmod(width + 1, 8)
        return 8 * (octets * -(-count // 8) + bits * -(-count // 64)) + _PAIR.size

    def write(values: Array, section: Buffer) -> None:
        section[:] = 0
        planes = section[: -_PAIR.size]
        kernels_for(values).to_offsets(values, least, width, planes)
        write_fields(section[-_PAIR.size :], _PAIR, least, width)

    def read(section: Buffer, count: int) -> Array:
        values: Array = namespace(section).empty(count, dtype)
        planes = section[: -_PAIR.size]
        kernels_for(section).from_offsets(planes, least, width, values)
        return values

    return Format(15 + VALUE_DTYPES.index(dtype), nbytes, write, read)


def offsets_of(values: Array) -> Format:
    """Return the offsets for values (1-d, not empty)."""
    least, largest = kernels_for(values).magnitude_range(values)
    return offsets(values.dtype, least, (largest - least).bit_length())


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


VALUE_FORMATS = [
    _stored(number, dtype, short) for number, (dtype, short, _) in enumerate(STORED)
]


def format_of(number: int, message: Buffer, nbytes: int) -> Format | None:
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
        is_valid = least >= 0 and 0 <= last < 8 * dtype.itemsize
        return offsets(dtype, least, last) if is_valid else None
    table_nbytes = 8 * (1 + most) * last
    if not 0 < last <= _MOST_RUNS or table_nbytes + 8 > message.size:
        return None
    table = to_numpy(message[-8 - table_nbytes : -8]).copy().view(np.int64)
    return runs(dtype, most, table.reshape(last, 1 + most))


def smallest(values: Array) -> Format:
    """Return the format that stores values (1-d) in the fewest bytes, without loss."""
    shortest = _shortest(values)
    if values.size < _FEW or shortest.nbytes(values.size) < values.nbytes:
        return shortest
    coded = offsets_of(values)
    return coded if coded.nbytes(values.size) < values.nbytes else shortest


def _shortest(values: Array) -> Format:
    """Return the format that stores values in the fewest bytes, apart from offsets."""
    sample = _sample(values)
    bits_set = int(np.bitwise_or.reduce(sample, axis=None))
    candidates = []
    for form, (dtype, _, lost) in zip(VALUE_FORMATS, STORED, strict=True):
        if dtype == values.dtype and not bits_set & (1 << lost) - 1:
            candidates.append(form)
    windows = (sample & (_sign_of(values.dtype) - 1)).tolist()
    magnitudes = min([len({*window}) for window in windows], default=3)
    for most in range(magnitudes, 3):
        table = table_of_runs(values, most)
        if table is not None:
            candidates.append(runs(values.dtype, most, table))
    candidates.sort(key=lambda form: form.nbytes(values.size))
    # The last candidate stores the values in their own dtype.
    return next(
        form
        for form in candidates
        if form.number >= len(STORED) or fits(values, STORED[form.number][1])
    )


def _sample(values: Array) -> NDArray[Any]:
    """Return the bits of windows all over a vector, whose first values may be unlike the others; shape (windows, 8)."""
    firsts = np.linspace(
        0, max(values.size - _WINDOW.size, 0), min(values.size, _WINDOW.size)
    ).astype(np.int64)
    places = np.minimum(firsts[:, None] + _WINDOW, values.size - 1)
    return to_numpy(_bits(values)[namespace(values).asarray(places)])
