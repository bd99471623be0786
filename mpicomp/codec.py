"""SparseVector <-> one contiguous message that describes itself.

Layout, little-endian: a header of 32 bytes, the indices, zeros up to a multiple of 8, the values.

    offset 0   4s   magic "MPCV"
           4   u8   version (1)
           5   u8   index format: 0 int32, 1 int64
           6   u8   value format: 0 float16, 1 float32, 2 float64
           7   u8   zero
           8   i64  length of the vector
          16   i64  entries
          24   i64  bytes of the whole message, header included

Version 1 has the plain format only. A decoder believes nothing that it has not checked: the sizes are compared with
each other and with the buffer before anything behind the header is read.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import VALUE_DTYPES
from mpicomp.errors import CodecError
from mpicomp.vector import MAX_LENGTH, SparseVector, index_dtype

Buffer = NDArray[np.uint8]

MAGIC, VERSION = b"MPCV", 1
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))

_HEADER = struct.Struct("<4sBBBxqqq")
HEADER_NBYTES = _HEADER.size


def encoded_nbytes(vector: SparseVector) -> int:
    """Return the size of the message for `vector`, in bytes."""
    return _nbytes(vector.nnz, vector.indices.itemsize, vector.values.itemsize)


def encode(vector: SparseVector, out: Buffer | None = None) -> Buffer:
    """Write `vector` as one message into the first bytes of `out`, or of a new buffer, and return those bytes.

    out: uint8, at least `encoded_nbytes(vector)` long, else ValueError.
    """
    nbytes = encoded_nbytes(vector)
    if out is None:
        out = np.empty(nbytes, np.uint8)
    elif out.size < nbytes:
        raise ValueError(f"out has {out.size} bytes: expected at least {nbytes}")
    index_code, value_code = INDEX_DTYPES.index(vector.indices.dtype), VALUE_DTYPES.index(vector.dtype)
    header = (MAGIC, VERSION, index_code, value_code, vector.length, vector.nnz, nbytes)
    _HEADER.pack_into(out.data, 0, *header)
    body_indices, body_values = _bodies(out, vector.nnz, vector.indices.dtype, vector.dtype)
    out[HEADER_NBYTES + body_indices.nbytes : nbytes - body_values.nbytes] = 0
    body_indices[:], body_values[:] = vector.indices, vector.values
    return out[:nbytes]


def decode(message: Buffer) -> SparseVector:
    """Return the vector that `message` (uint8) holds, as views of it; bytes behind the message are ignored.

    Raises CodecError for a header that `encode` does not write, and for what the constructor of SparseVector refuses.
    It does not look at every entry: that is `SparseVector.validate`.
    """
    if message.size < HEADER_NBYTES:
        raise CodecError(f"got {message.size} bytes: expected at least the header of {HEADER_NBYTES}")
    magic, version, index_code, value_code, length, nnz, nbytes = _HEADER.unpack_from(message.data)
    if magic != MAGIC or version != VERSION:
        raise CodecError(f"got magic {magic!r}, version {version}: expected {MAGIC!r}, version {VERSION}")
    if index_code >= len(INDEX_DTYPES) or value_code >= len(VALUE_DTYPES):
        raise CodecError(f"got index format {index_code} and value format {value_code}: both are unknown to version 1")
    indices, values = INDEX_DTYPES[index_code], VALUE_DTYPES[value_code]
    if not 0 <= nnz <= length <= MAX_LENGTH or indices != index_dtype(length):
        raise CodecError(f"got {nnz} entries with {indices} indices for length {length}: they do not fit together")
    if nbytes != _nbytes(nnz, indices.itemsize, values.itemsize) or nbytes > message.size:
        raise CodecError(f"the header says {nbytes} bytes for {nnz} entries, and {message.size} bytes are there")
    try:
        return SparseVector(*_bodies(message, nnz, indices, values), length)
    except ValueError as error:
        raise CodecError(f"the message holds no vector: {error}") from error


def _nbytes(nnz: int, index_itemsize: int, value_itemsize: int) -> int:
    return HEADER_NBYTES + _padded(nnz * index_itemsize) + nnz * value_itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _bodies(
    message: Buffer, nnz: int, indices: np.dtype[Any], values: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the places of the indices and of the values in a message, as typed views."""
    start = HEADER_NBYTES + _padded(nnz * indices.itemsize)
    return (
        message[HEADER_NBYTES : HEADER_NBYTES + nnz * indices.itemsize].view(indices),
        message[start : start + nnz * values.itemsize].view(values),
    )
