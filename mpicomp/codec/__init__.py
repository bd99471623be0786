"""SparseVector <-> one contiguous message that describes itself.

Layout, little-endian: a header of 32 bytes, the indices, the values. The indices take a multiple of 8 bytes.

    offset 0   2s   magic "MV"
           2   u8   version (1)
           3   u8   index format (`indices`), plus 16 times the value format (`values`)
           4   u32  0 where an index stands for a number; 1 + width where it stands for a row
           8   i64  length of the vector
          16   i64  entries
          24   i64  bytes of the whole message, header included

A decoder believes nothing that it has not checked: the sizes are compared with each other and with the buffer before
anything behind the header is read, and a message of M bytes holds at most 8 M entries: rows of width 0, which have no
values, do not travel as a range. No format loses a bit.
"""

import math
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import namespace, read_fields, write_fields
from mpicomp.codec import values as value_formats
from mpicomp.codec.indices import BITMAP, INDEX_FORMATS, INT32, INT64, RANGE
from mpicomp.codec.values import ValueFormat, format_of
from mpicomp.errors import CodecError
from mpicomp.vector import MAX_LENGTH, SparseVector, index_dtype

Buffer = NDArray[np.uint8]

MAGIC, VERSION = b"MV", 1

_HEADER = struct.Struct("<2sBBIqqq")
HEADER_NBYTES = _HEADER.size


class Coding(NamedTuple):
    """How a vector is written: an index format, by number, and a value format."""

    indices: int
    values: ValueFormat


def plain(vector: SparseVector) -> Coding:
    """Return the coding that copies the arrays as they are: the fastest one."""
    return Coding(_plain_indices(vector), value_formats.as_they_are(vector.values))


def quick(vector: SparseVector) -> Coding:
    """Return the plain coding, or one that costs next to no time for what is dense.

    That is a range, or a bitmap where it takes at most a quarter of the plain indices: below, to find its bits takes
    longer than to copy what it spares.
    """
    values, room = value_formats.as_they_are(vector.values), vector.indices.nbytes // 4
    for form in (RANGE, BITMAP):
        size = INDEX_FORMATS[form].nbytes(vector)
        if size is not None and size <= room:
            return Coding(form, values)
    return Coding(_plain_indices(vector), values)


def smallest(vector: SparseVector) -> Coding:
    """Return the coding that makes the smallest message."""
    sizes = [(each.nbytes(vector), form) for form, each in enumerate(INDEX_FORMATS)]
    _, least = min((size, form) for size, form in sizes if size is not None)
    return Coding(least, value_formats.smallest(vector.values.reshape(-1)))


CODECS = {"plain": plain, "quick": quick, "smallest": smallest}


def encoded_nbytes(vector: SparseVector, coding: Coding | None = None) -> int:
    """Return the size in bytes of the message for `vector` in a coding; None is the plain one."""
    indices, values = coding or plain(vector)
    return HEADER_NBYTES + (INDEX_FORMATS[indices].nbytes(vector) or 0) + values.nbytes(vector.values.size)


def encode(vector: SparseVector, out: Buffer | None = None, coding: Coding | None = None) -> Buffer:
    """Write `vector` as one message into the first bytes of `out`, or of a new buffer, and return those bytes.

    out: uint8, where the vector lives, at least `encoded_nbytes(vector, coding)` long, else ValueError. coding: one
    that fits the vector, as `plain`, `quick` and `smallest` return it; None is the plain one.
    """
    coding = coding or plain(vector)
    nbytes = encoded_nbytes(vector, coding)
    if out is None:
        out = namespace(vector.values).empty(nbytes, np.uint8)
    elif out.size < nbytes:
        raise ValueError(f"out has {out.size} bytes: expected at least {nbytes}")
    return fill(out[:nbytes], vector, coding)


def fill(message: Buffer, vector: SparseVector, coding: Coding) -> Buffer:
    """Write `vector` to all of `message`, which has `encoded_nbytes(vector, coding)` bytes, and return it."""
    formats, nbytes, width = coding.indices | coding.values.number << 4, message.size, vector.width
    row = 0 if width is None else 1 + width
    write_fields(message, _HEADER, MAGIC, VERSION, formats, row, vector.length, vector.nnz, nbytes)
    middle = nbytes - coding.values.nbytes(vector.values.size)
    INDEX_FORMATS[coding.indices].write(vector, message[HEADER_NBYTES:middle])
    coding.values.write(vector.values.reshape(-1), message[middle:])
    return message


def decode(message: Buffer) -> SparseVector:
    """Return the vector that `message` (uint8) holds, as views of it where it can; bytes behind it are ignored.

    The vector lives where the message does.

    Raises CodecError for a header that `encode` does not write, and for what the constructor of SparseVector refuses.
    It does not look at every entry: that is `SparseVector.validate`.
    """
    if message.size < HEADER_NBYTES:
        raise CodecError(f"got {message.size} bytes: expected at least the header of {HEADER_NBYTES}")
    magic, version, formats, row, length, nnz, nbytes = read_fields(message, _HEADER)
    if magic != MAGIC or version != VERSION:
        raise CodecError(f"got magic {magic!r}, version {version}: expected {MAGIC!r}, version {VERSION}")
    form, value_code = formats & 15, formats >> 4
    value_format = format_of(value_code, message[: max(0, nbytes)])
    if form >= len(INDEX_FORMATS) or value_format is None:
        raise CodecError(f"got index format {form} and value format {value_code}: both must be known to version 1")
    if not 0 <= nnz <= length <= MAX_LENGTH:
        raise CodecError(f"got {nnz} entries for length {length}: they do not fit together")
    shape = (nnz, row - 1) if row else (nnz,)
    middle = nbytes - value_format.nbytes(math.prod(shape))
    if nbytes > message.size or middle < HEADER_NBYTES or middle % 8:
        raise CodecError(f"the header says {nbytes} bytes for {nnz} entries, and {message.size} bytes are there")
    section, dtype = message[HEADER_NBYTES:middle], index_dtype(length)
    unbounded = form == RANGE and middle == nbytes and nnz  # no values: 8 bytes could claim any number of entries
    indices = None if unbounded else INDEX_FORMATS[form].read(section, nnz, dtype)
    if indices is None:
        raise CodecError(f"{section.size} bytes of indices in format {form} do not hold {nnz} entries for {dtype}")
    try:
        values = value_format.read(message[middle:nbytes], math.prod(shape))
        return SparseVector(indices, values.reshape(shape), length)
    except ValueError as error:
        raise CodecError(f"the message holds no vector: {error}") from error


def _plain_indices(vector: SparseVector) -> int:
    return INT32 if vector.indices.dtype == np.int32 else INT64
