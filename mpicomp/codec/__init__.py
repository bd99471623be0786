"""The codec: a SparseVector as one contiguous, self-describing message. No format loses a bit.

See docs/contributing/wire_format.md.

count, signature, kind and CRC are used by `collectives.runtime.group`: `encode` writes
zeros by default, and `decode` ignores them. A message of M bytes holds at most 8 M
entries: rows of width 0, which have no values, are not written as a range.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Buffer, Dtype
from mpicomp.arrays.device import namespace
from mpicomp.arrays.memory import read_fields, write_fields
from mpicomp.arrays.values import VALUE_DTYPES, index_dtype
from mpicomp.codec import values as value_formats
from mpicomp.codec.indices import (
    BITMAP,
    INDEX_FORMATS,
    INT32,
    INT64,
    RANGE,
    Format,
    padded,
)
from mpicomp.codec.values import format_of
from mpicomp.errors import CodecError
from mpicomp.few_bits import BITS, BLOCKS, SCALES, FewBits
from mpicomp.vector import MAX_LENGTH, SparseVector

MAGIC = b"MV"
VERSION = 4
VECTOR, TEXT, ERROR, FEW_BITS, BYTES = range(5)  # kinds of messages

_HEADER = struct.Struct("<2sBBIqqqqqB3xI8x")
HEADER_NBYTES = _HEADER.size
KIND_AT = 48
CRC_AT = 52
_FORM_BITS = 3  # of the index format
# Bits and dtype of values in few bits, by their number in a header.
_FEW_BITS_FORMS: dict[int, tuple[int, Dtype]] = {
    number | is_double << 3: (bits, dtype)
    for is_double, dtype in enumerate(SCALES)
    for number, bits in enumerate(BITS)
}
_FEW_BITS_NUMBERS = {form: number for number, form in _FEW_BITS_FORMS.items()}


class Header(NamedTuple):
    """The fields of a message's header, in their order; see the module."""

    magic: bytes
    version: int
    formats: int
    row: int
    length: int
    entries: int
    nbytes: int
    sender_count: int
    signature: int
    kind: int
    crc: int


Coding = tuple[Format, Format]
"""The formats of a vector in a message: of its indices, and of its values."""

_PLAIN = {
    (np.dtype(dtype), values): (form, value_formats.VALUE_FORMATS[number])
    for form, dtype in ((INT32, np.int32), (INT64, np.int64))
    for number, values in enumerate(VALUE_DTYPES)
}


def plain(vector: SparseVector) -> Coding:
    """Return the coding that copies the arrays unchanged: the fastest one."""
    return _PLAIN[vector.indices.dtype, vector.values.dtype]


def quick(vector: SparseVector) -> Coding:
    """Return the plain coding, or for dense vectors a range, or a bitmap of at most a quarter of the plain indices.

    Finding the bits of a larger bitmap takes longer than copying the bytes that it
    saves.
    """
    coding = plain(vector)
    room = vector.indices.nbytes // 4
    for form in (RANGE, BITMAP):
        size = form.nbytes(vector)
        if size is not None and size <= room:
            return form, coding[1]
    return coding


def smallest(vector: SparseVector) -> Coding:
    """Return the coding with the smallest message."""
    sizes = [(form.nbytes(vector), form.number) for form in INDEX_FORMATS]
    _, least = min((size, form) for size, form in sizes if size is not None)
    flat = vector.values.reshape(-1)
    return INDEX_FORMATS[least], value_formats.smallest(flat)


CODECS = {"plain": plain, "quick": quick, "smallest": smallest}


def encoded_nbytes(vector: SparseVector, coding: Coding | None = None) -> int:
    """Return the size in bytes of the message for `vector` in a coding; None is the plain one."""
    indices, values = coding or plain(vector)
    section = indices.nbytes(vector) or 0
    return HEADER_NBYTES + section + int(values.nbytes(vector.values.size))


def encode(
    vector: SparseVector,
    coding: Coding | None = None,
    *,
    count: int = 0,
    signature: int = 0,
    line: int = 1,
) -> Buffer:
    """Return `vector` as one message, in a new buffer (uint8) on the vector's device.

    coding: for this vector; None is the plain one. count, signature: fields of the
    header. line: zeros follow the message up to a multiple of it.
    """
    index_format, value_format = coding or plain(vector)
    values = vector.values
    middle = HEADER_NBYTES + (index_format.nbytes(vector) or 0)
    nbytes = middle + value_format.nbytes(values.size)
    message = _room(nbytes, line, values)
    formats = index_format.number | value_format.number << _FORM_BITS
    row = 0 if values.ndim == 1 else 1 + values.shape[1]
    write_fields(
        message,
        _HEADER,
        MAGIC,
        VERSION,
        formats,
        row,
        vector.length,
        len(values),
        nbytes,
        count,
        signature,
        VECTOR,
        0,
    )
    if nbytes > HEADER_NBYTES:
        index_format.write(vector, message[HEADER_NBYTES:middle])
        value_format.write(values.reshape(-1), message[middle:nbytes])
    return message


def fill_text(
    message: Buffer, text: bytes | Buffer, kind: int, signature: int = 0
) -> Buffer:
    """Write text to the first `HEADER_NBYTES + len(text)` bytes of a message in host memory, and return it."""
    nbytes = HEADER_NBYTES + len(text)
    write_fields(
        message, _HEADER, MAGIC, VERSION, 0, 0, 0, 0, nbytes, 0, signature, kind, 0
    )
    message[HEADER_NBYTES:nbytes] = np.frombuffer(text, np.uint8)
    return message


def encode_few_bits(coded: FewBits, *, count: int = 0, signature: int = 0) -> Buffer:
    """Complete the message that values in few bits lie in, and return it; the arguments are those of `encode`."""
    write_fields(
        coded.message,
        _HEADER,
        MAGIC,
        VERSION,
        _FEW_BITS_NUMBERS[coded.bits, coded.dtype],
        coded.block,
        coded.size,
        coded.size,
        HEADER_NBYTES + padded(coded.scales.nbytes) + coded.codes.nbytes,
        count,
        signature,
        FEW_BITS,
        0,
    )
    return coded.message


def few_bits_message(
    size: int, bits: int, block: int, like: Any, *, line: int = 1
) -> FewBits:
    """Return values in few bits, to be written, in the message that `encode_few_bits` completes.

    size, bits, block: see `FewBits`. like: an array of their dtype on their device.
    line: as for `encode`.
    """
    codes, scales = _few_bits_nbytes(size, bits, block, like.dtype)
    message = _room(HEADER_NBYTES + padded(scales) + codes, line, like)
    message[HEADER_NBYTES + scales : HEADER_NBYTES + padded(scales)] = 0
    return _few_bits_in(message, size, bits, block, like.dtype)


def join_few_bits(parts: Sequence[FewBits], *, line: int = 1) -> FewBits:
    """Return parts that follow each other as one; all sizes but the last are multiples of the block."""
    first = parts[0]
    if len(parts) == 1:
        return first
    size = sum(part.size for part in parts)
    like = first.codes[:0].view(first.dtype)
    whole = few_bits_message(size, first.bits, first.block, like, line=line)
    np.concatenate([part.codes for part in parts], out=whole.codes)
    np.concatenate([part.scales for part in parts], out=whole.scales)
    return whole


def _few_bits_nbytes(size: int, bits: int, block: int, dtype: Dtype) -> tuple[int, int]:
    """Return the bytes of codes and scales."""
    blocks = -(-size // block)
    scales = 2 if bits == 2 else 1
    return blocks * (block * bits // 8), blocks * scales * SCALES[dtype].itemsize


def _few_bits_in(
    message: Buffer, size: int, bits: int, block: int, dtype: Dtype
) -> FewBits:
    """Return the values in a message, as views of it."""
    codes, scales = _few_bits_nbytes(size, bits, block, dtype)
    payload = message[HEADER_NBYTES:]
    first = padded(scales)
    return FewBits(
        payload[first : first + codes],
        payload[:scales].view(SCALES[dtype]),
        size,
        bits,
        block,
        message,
    )


def _room(nbytes: int, line: int, like: Any) -> Buffer:
    """Return a new buffer for a message, with zeros after the message."""
    size = -(-nbytes // line) * line
    message: Buffer = namespace(like).empty(size, np.uint8)
    if size > nbytes:
        message[nbytes:] = 0
    return message


def read_header(message: Buffer, line: Buffer | None = None) -> Header:
    """Return the header of a message; CodecError if it is not valid, or the message is shorter than it states.

    line: the first bytes of a message on a device, in host memory.
    """
    if message.size < HEADER_NBYTES:
        raise CodecError(
            f"got {message.size} bytes: expected at least the header of {HEADER_NBYTES}"
        )
    if line is None:
        line = message
    header = Header(*read_fields(line, _HEADER))
    if header.magic != MAGIC or header.version != VERSION:
        raise CodecError(
            f"got magic {header.magic!r}, version {header.version}: expected {MAGIC!r}, {VERSION}"
        )
    if not HEADER_NBYTES <= header.nbytes <= message.size:
        raise CodecError(
            f"the header says {header.nbytes} bytes, the buffer has {message.size}"
        )
    return header


def decode(
    message: Buffer, header: Header | None = None, fields: Buffer | None = None
) -> SparseVector:
    """Return the vector in `message` (uint8), as views of it where possible; bytes after it are ignored.

    The vector is on the device of the message. header: of the message, if it has been
    read already. fields: a host copy of a device message, from which single numbers are
    read without a synchronisation.

    Raises CodecError for a header that `encode` does not write, and for arrays that the
    constructor of SparseVector refuses. `SparseVector.validate` checks every entry.
    """
    _, _, formats, row, length, nnz, nbytes, *_ = header or read_header(message)
    value_code, form = divmod(formats, 1 << _FORM_BITS)
    if fields is None:
        fields = message
    value_format = format_of(value_code, fields, nbytes)
    if form >= len(INDEX_FORMATS) or value_format is None:
        raise CodecError(
            f"got index format {form} and value format {value_code}: expected known ones"
        )
    if not 0 <= nnz <= length <= MAX_LENGTH:
        raise CodecError(
            f"got {nnz} entries for length {length}: they do not fit together"
        )
    count = nnz * (row - 1) if row else nnz
    middle = nbytes - value_format.nbytes(count)
    if middle < HEADER_NBYTES or middle % 8:
        raise CodecError(
            f"the header says {nbytes} bytes for {nnz} entries: they do not fit together"
        )
    section = message[HEADER_NBYTES:middle]
    dtype = index_dtype(length)
    numbers = section if fields is message else fields[HEADER_NBYTES:middle]
    # Without bytes for values, a range of 8 bytes could claim any number of entries.
    unbounded = form == RANGE.number and middle == nbytes and nnz
    indices = None
    if not unbounded:
        indices = INDEX_FORMATS[form].read(section, nnz, dtype, numbers)
    if indices is None:
        raise CodecError(
            f"{section.size} bytes of indices in format {form} do not hold {nnz} entries for {dtype}"
        )
    try:
        values = value_format.read(message[middle:nbytes], count)
        if row:
            values = values.reshape(nnz, row - 1)
        if indices.dtype != dtype:  # they may exceed the length
            return SparseVector(indices, values, length)
        vector = SparseVector.trusted(indices, values, length)
        vector.check_ends()
        return vector
    except ValueError as error:
        raise CodecError(f"the message holds no vector: {error}") from error


def decode_few_bits(message: Buffer, header: Header | None = None) -> FewBits:
    """Return the values in few bits in `message`, as views of it; header: as for `decode`.

    Raises CodecError for a header that `encode_few_bits` does not write.
    """
    header = header or read_header(message)
    if header.kind != FEW_BITS:
        raise CodecError(
            f"got a message of kind {header.kind}: expected {FEW_BITS}, values in few bits"
        )
    form = header.formats
    if form not in _FEW_BITS_FORMS:
        raise CodecError(f"got {form} for the bits of a value: expected a known number")
    block = header.row
    if block not in BLOCKS:
        raise CodecError(f"got blocks of {block} values: expected one of {BLOCKS}")
    bits, dtype = _FEW_BITS_FORMS[form]
    size = header.length
    if not 0 <= size <= MAX_LENGTH or header.entries != size:
        raise CodecError(f"got {header.entries} of {size} values: expected all of them")
    codes, scales = _few_bits_nbytes(size, bits, block, dtype)
    if header.nbytes != HEADER_NBYTES + padded(scales) + codes:
        raise CodecError(
            f"{header.nbytes} bytes do not hold {size} values of {bits} bits in blocks of {block}"
        )
    return _few_bits_in(message, size, bits, block, dtype)
