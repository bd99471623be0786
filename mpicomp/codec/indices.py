"""Index formats: the indices of a vector as bytes. A range is of a dense piece of width above 0.

See docs/contributing/wire_format.md.

A bitmap has the first index, the span S, and S bits in 64-bit words. Elias-Fano has the
first index and the span; with l = floor(log2(S / N)) the l low bits of each index from
the first on, then S >> l zeros among N ones that stand for the high bits.

A section of a message is a multiple of 8 bytes. Of a `Format`

* `nbytes(vector)` returns the bytes that its indices take; None if it cannot represent
  them;
* `write(vector, section)` fills the whole section, including padding;
* `read(section, count, dtype, fields)` returns `count` indices of a dtype, or int64 if
  they do not fit it; None if the section is not valid, or its size is not that of the
  format. fields: the section, or its copy in host memory, from which the leading
  numbers are read.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array, Buffer, Dtype
from mpicomp.arrays.device import kernels_for, namespace
from mpicomp.arrays.memory import read_fields, write_fields
from mpicomp.vector import MAX_LENGTH, SparseVector

# What a section begins with: one number, or two.
_FIRST = struct.Struct("<q")
_PAIR = struct.Struct("<qq")


class Format(NamedTuple):
    """A format of indices, or of values: its number in messages, and three functions; see the modules."""

    number: int
    nbytes: Callable[..., Any]
    write: Callable[..., None]
    read: Callable[..., Any]


def _plain(number: int, dtype: Dtype) -> Format:
    def nbytes(vector: SparseVector) -> int | None:
        indices = vector.indices
        return padded(indices.nbytes) if indices.dtype == dtype else None

    def write(vector: SparseVector, section: Buffer) -> None:
        size = vector.indices.nbytes
        section[size:] = 0
        section[:size].view(dtype)[:] = vector.indices

    def read(
        section: Buffer,
        count: int,
        kind: Dtype,
        fields: Buffer,
    ) -> Array | None:
        size = count * dtype.itemsize
        is_valid = kind == dtype and section.size == padded(size)
        return section[:size].view(dtype) if is_valid else None

    return Format(number, nbytes, write, read)


def _range_nbytes(vector: SparseVector) -> int | None:
    is_range = vector.nnz and vector.span == vector.nnz and vector.width != 0
    return 8 if is_range else None


def _write_range(vector: SparseVector, section: Buffer) -> None:
    write_fields(section, _FIRST, vector.first)


def _read_range(
    section: Buffer,
    count: int,
    dtype: Dtype,
    fields: Buffer,
) -> Array | None:
    if section.size != 8 or not count:
        return None
    (first,) = read_fields(fields, _FIRST)
    if not 0 <= first <= MAX_LENGTH - count:
        return None
    end = first + count
    kernels = kernels_for(section)
    return kernels.consecutive(first, end, _room_for(end, dtype))  # type: ignore[no-any-return]


def _bitmap_nbytes(vector: SparseVector) -> int:
    return 16 + 8 * _words(vector.span)


def _write_bitmap(vector: SparseVector, section: Buffer) -> None:
    _write_span(vector, section)
    words = section[16:].view(np.uint64)
    kernels_for(section).to_bitmap(vector.indices, vector.first, words)


def _read_bitmap(
    section: Buffer,
    count: int,
    dtype: Dtype,
    fields: Buffer,
) -> Array | None:
    first, span = _read_span(fields)
    if not count <= span or section.size != 16 + 8 * _words(span):
        return None
    end = first + span
    indices: Array = namespace(section).empty(count, _room_for(end, dtype))
    words = section[16:].view(np.uint64)
    bits_set = kernels_for(section).from_bitmap(words, first, indices)
    is_valid = bits_set == count and (not count or indices[-1] < end)
    return indices if is_valid else None


def _elias_fano(count: int, span: int) -> tuple[int, int, int]:
    """Return the number of low bits of an index, and of words for all low bits (one is spare) and for the high bits."""
    low_bits = max(0, (span // max(1, count)).bit_length() - 1)
    lows = _words(count * low_bits) + 1
    return low_bits, lows, _words(count + (span >> low_bits))


def _elias_fano_nbytes(vector: SparseVector) -> int:
    _, lows, highs = _elias_fano(vector.nnz, vector.span)
    return 16 + 8 * (lows + highs)


def _write_elias_fano(vector: SparseVector, section: Buffer) -> None:
    _write_span(vector, section)
    low_bits, lows, _ = _elias_fano(vector.nnz, vector.span)
    words = section[16:].view(np.uint64)
    kernels_for(section).to_elias_fano(
        vector.indices,
        vector.first,
        low_bits,
        words[:lows],
        words[lows:],
    )


def _read_elias_fano(
    section: Buffer,
    count: int,
    dtype: Dtype,
    fields: Buffer,
) -> Array | None:
    first, span = _read_span(fields)
    low_bits, lows, highs = _elias_fano(count, span)
    if not count <= span or section.size != 16 + 8 * (lows + highs):
        return None
    words = section[16:].view(np.uint64)
    # The words encode indices below this bound: at most 64 zeros more than there are
    # steps, and all low bits set.
    most = first + span + (128 << low_bits)
    indices: Array = namespace(section).empty(count, _room_for(most, dtype))
    decoded = kernels_for(section).from_elias_fano(
        words[:lows],
        words[lows:],
        first,
        low_bits,
        indices,
    )
    is_valid = decoded == count and (not count or indices[-1] == first + span - 1)
    return indices if is_valid else None


INT32 = _plain(0, np.dtype(np.int32))
INT64 = _plain(1, np.dtype(np.int64))
RANGE = Format(2, _range_nbytes, _write_range, _read_range)
BITMAP = Format(3, _bitmap_nbytes, _write_bitmap, _read_bitmap)
ELIAS_FANO = Format(
    4,
    _elias_fano_nbytes,
    _write_elias_fano,
    _read_elias_fano,
)
INDEX_FORMATS = INT32, INT64, RANGE, BITMAP, ELIAS_FANO


def padded(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 8."""
    return -(-nbytes // 8) * 8


def _words(bits: int) -> int:
    return -(-bits // 64)


def _write_span(vector: SparseVector, section: Buffer) -> None:
    write_fields(section, _PAIR, vector.first, vector.span)
    section[16:] = 0


def _read_span(section: Buffer) -> tuple[int, int]:
    """Return the first index and the span with which a section begins; a span of -1 if they are not valid."""
    first, span = read_fields(section, _PAIR) if section.size >= _PAIR.size else (0, -1)
    return (first, span) if span >= 0 and 0 <= first <= MAX_LENGTH - span else (0, -1)


def _room_for(end: int, dtype: Dtype) -> Dtype:
    """Return `dtype`, or int64 if indices below `end` do not fit it."""
    return dtype if end <= 1 << 8 * dtype.itemsize - 1 else np.dtype(np.int64)
