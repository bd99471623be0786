"""SparseVector <-> one contiguous message that describes itself.

Layout, little-endian: a header of 32 bytes, the indices, zeros up to a multiple of 8, the values.

    offset 0   2s   magic "MV"
           2   u8   version (1)
           3   u8   index format, plus 16 times the value format: 0 float16, 1 float32, 2 float64
           4   u32  0 where an index stands for a number; 1 + width where it stands for a row
           8   i64  length of the vector
          16   i64  entries
          24   i64  bytes of the whole message, header included

Index formats, with the bytes that N entries take:

    0  plain, int32: 4 N                       for lengths up to 2^31 - 1
    1  plain, int64: 8 N                       for lengths above
    2  range: the first index: 8               when the indices are consecutive: a dense piece
    3  bitmap: first index, span S, S bits in 64-bit words: 16 + S / 8

A decoder believes nothing that it has not checked: the sizes are compared with each other and with the buffer before
anything behind the header is read.
"""

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import VALUE_DTYPES, kernels_for
from mpicomp.errors import CodecError
from mpicomp.vector import MAX_LENGTH, SparseVector, index_dtype

Buffer = NDArray[np.uint8]

MAGIC, VERSION = b"MV", 1
INT32, INT64, RANGE, BITMAP = range(4)

_HEADER = struct.Struct("<2sBBIqqq")
HEADER_NBYTES = _HEADER.size


def plain_format(vector: SparseVector) -> int:
    """Return the plain index format for `vector`: it costs no time to code."""
    return INT32 if vector.indices.dtype == np.int32 else INT64


def smallest_format(vector: SparseVector) -> int:
    """Return the index format that makes the smallest message for `vector`, the plain one where none is smaller."""
    if vector.nnz and _span(vector) == vector.nnz:
        return RANGE
    return min((plain_format(vector), BITMAP), key=lambda form: _indices_nbytes(vector, form))


def encoded_nbytes(vector: SparseVector, form: int | None = None) -> int:
    """Return the size in bytes of the message for `vector` in an index format; None is the plain one."""
    form = plain_format(vector) if form is None else form
    return HEADER_NBYTES + _padded(_indices_nbytes(vector, form)) + vector.values.nbytes


def encode(vector: SparseVector, out: Buffer | None = None, form: int | None = None) -> Buffer:
    """Write `vector` as one message into the first bytes of `out`, or of a new buffer, and return those bytes.

    out: uint8, at least `encoded_nbytes(vector, form)` long, else ValueError. form: an index format that fits the
    vector, as `smallest_format` returns one; None is the plain one.
    """
    form = plain_format(vector) if form is None else form
    nbytes = encoded_nbytes(vector, form)
    if out is None:
        out = np.empty(nbytes, np.uint8)
    elif out.size < nbytes:
        raise ValueError(f"out has {out.size} bytes: expected at least {nbytes}")
    formats = form | VALUE_DTYPES.index(vector.dtype) << 4
    row = 0 if vector.width is None else 1 + vector.width
    _HEADER.pack_into(out.data, 0, MAGIC, VERSION, formats, row, vector.length, vector.nnz, nbytes)
    middle = nbytes - vector.values.nbytes
    _write_indices(vector, form, out[HEADER_NBYTES:middle])
    out[middle:nbytes].view(vector.dtype)[:] = vector.values.reshape(-1)
    return out[:nbytes]


def decode(message: Buffer) -> SparseVector:
    """Return the vector that `message` (uint8) holds, as views of it where it can; bytes behind it are ignored.

    Raises CodecError for a header that `encode` does not write, and for what the constructor of SparseVector refuses.
    It does not look at every entry: that is `SparseVector.validate`.
    """
    if message.size < HEADER_NBYTES:
        raise CodecError(f"got {message.size} bytes: expected at least the header of {HEADER_NBYTES}")
    magic, version, formats, row, length, nnz, nbytes = _HEADER.unpack_from(message.data)
    form, value_code = formats & 15, formats >> 4
    if magic != MAGIC or version != VERSION:
        raise CodecError(f"got magic {magic!r}, version {version}: expected {MAGIC!r}, version {VERSION}")
    if form > BITMAP or value_code >= len(VALUE_DTYPES):
        raise CodecError(f"got index format {form} and value format {value_code}: both must be known to version 1")
    if not 0 <= nnz <= length <= MAX_LENGTH:
        raise CodecError(f"got {nnz} entries for length {length}: they do not fit together")
    dtype = VALUE_DTYPES[value_code]
    shape = (nnz, row - 1) if row else (nnz,)
    middle = nbytes - math.prod(shape) * dtype.itemsize
    if nbytes > message.size or middle < HEADER_NBYTES or middle % 8:
        raise CodecError(f"the header says {nbytes} bytes for {nnz} entries, and {message.size} bytes are there")
    indices = _read_indices(form, message[HEADER_NBYTES:middle], nnz, index_dtype(length))
    try:
        return SparseVector(indices, message[middle:nbytes].view(dtype).reshape(shape), length)
    except ValueError as error:
        raise CodecError(f"the message holds no vector: {error}") from error


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _span(vector: SparseVector) -> int:
    """Return how many positions the entries stretch over."""
    return int(vector.indices[-1]) - int(vector.indices[0]) + 1 if vector.nnz else 0


def _indices_nbytes(vector: SparseVector, form: int) -> int:
    if form == RANGE:
        return 8
    return 16 + 8 * _words(_span(vector)) if form == BITMAP else vector.indices.nbytes


def _words(span: int) -> int:
    return -(-span // 64)


def _write_indices(vector: SparseVector, form: int, section: Buffer) -> None:
    """Fill the index section of a message, its padding included."""
    section[-8:] = 0
    if form == RANGE:
        section.view(np.int64)[0] = vector.indices[0]
    elif form == BITMAP:
        first = int(vector.indices[0]) if vector.nnz else 0
        section[:16].view(np.int64)[:] = first, _span(vector)
        section[16:] = 0
        kernels_for(section).to_bitmap(vector.indices, first, section[16:].view(np.uint64))
    else:
        section[: vector.indices.nbytes].view(vector.indices.dtype)[:] = vector.indices


def _read_indices(form: int, section: Buffer, nnz: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the indices in the index section of a message; CodecError when its size or content is not right."""
    if form == RANGE and section.size == 8 and nnz:
        first = int(section.view(np.int64)[0])
        if not 0 <= first <= MAX_LENGTH - nnz:
            raise CodecError(f"the message holds no vector: a range of {nnz} from {first}")
        return np.arange(first, first + nnz, dtype=np.int64)
    if form == BITMAP and section.size >= 16:
        first, span = (int(number) for number in section[:16].view(np.int64))
        if span >= 0 and 0 <= first <= MAX_LENGTH - span and section.size == 16 + 8 * _words(span):
            indices = np.empty(nnz, dtype if first + span <= np.iinfo(dtype).max else np.int64)
            found = kernels_for(section).from_bitmap(section[16:].view(np.uint64), first, indices)
            if found == nnz and (not nnz or indices[-1] < first + span):
                return indices
    if form == (INT32 if dtype == np.int32 else INT64) and section.size == _padded(nnz * dtype.itemsize):
        return section[: nnz * dtype.itemsize].view(dtype)
    raise CodecError(f"{section.size} bytes of indices in format {form} do not hold {nnz} entries with {dtype} indices")
