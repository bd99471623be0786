"""Index formats: the indices of a vector as bytes. A range is of a dense piece of width above 0.

See docs/contributing/wire_format.md.

A bitmap has the first index, the span S, and S bits in 64-bit words. Elias-Fano has the
first index and the span; with l = floor(log2(S / N)) the l low bits of each index from
the first on, then S >> l zeros among N ones that stand for the high bits.

A section of a message is a multiple of 8 bytes. Every format has three methods:

* `nbytes` returns the bytes that the indices of a vector take; None if it cannot
  represent them.
* `write` fills the whole section, including padding.
* `read` returns `count` indices of a dtype, or int64 if they do not fit it; None if the
  section is not valid, or its size is not that of the format. fields: the section, or
  its copy in host memory, from which the leading numbers are read.
"""

import struct
from typing import Any

import numpy as np

from mpicomp.arrays import (
    Array,
    Buffer,
    Dtype,
    kernels_for,
    namespace,
    read_fields,
    write_fields,
)
from mpicomp.vector import MAX_LENGTH, SparseVector

INT32, INT64, RANGE, BITMAP, ELIAS_FANO = range(5)

_FIRST, _PAIR = struct.Struct("<q"), struct.Struct("<qq")  # what a section begins with


class Plain:
    """Formats 0 and 1."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def nbytes(self, vector: SparseVector) -> int | None:
        """Return the bytes of the indices of a vector; see the module."""
        return (
            padded(vector.indices.nbytes)
            if vector.indices.dtype == self.dtype
            else None
        )

    def write(self, vector: SparseVector, section: Buffer) -> None:
        """Fill the section; see the module."""
        nbytes = vector.indices.nbytes
        if nbytes < section.size:
            section[nbytes:] = 0
            section = section[:nbytes]
        section.view(self.dtype)[:] = vector.indices

    def read(
        self, section: Buffer, count: int, dtype: Dtype, fields: Buffer
    ) -> Array | None:
        """Return the indices in a section; see the module."""
        nbytes = count * dtype.itemsize
        return (
            section[:nbytes].view(dtype)
            if dtype == self.dtype and section.size == padded(nbytes)
            else None
        )


class Range:
    """Format 2."""

    def nbytes(self, vector: SparseVector) -> int | None:
        """Return the bytes of the indices of a vector; see the module."""
        return (
            8
            if vector.nnz and vector.span == vector.nnz and vector.width != 0
            else None
        )

    def write(self, vector: SparseVector, section: Buffer) -> None:
        """Fill the section; see the module."""
        write_fields(section, _FIRST, vector.first)

    def read(
        self, section: Buffer, count: int, dtype: Dtype, fields: Buffer
    ) -> Array | None:
        """Return the indices in a section; see the module."""
        if section.size != 8 or not count:
            return None
        (first,) = read_fields(fields, _FIRST)
        if not 0 <= first <= MAX_LENGTH - count:
            return None
        end = first + count
        kernels = kernels_for(section)
        return kernels.consecutive(first, end, _room_for(end, dtype))  # type: ignore[no-any-return]


class Bitmap:
    """Format 3."""

    def nbytes(self, vector: SparseVector) -> int | None:
        """Return the bytes of the indices of a vector; see the module."""
        return 16 + 8 * _words(vector.span)

    def write(self, vector: SparseVector, section: Buffer) -> None:
        """Fill the section; see the module."""
        _write_span(vector, section)
        kernels_for(section).to_bitmap(
            vector.indices, vector.first, section[16:].view(np.uint64)
        )

    def read(
        self, section: Buffer, count: int, dtype: Dtype, fields: Buffer
    ) -> Array | None:
        """Return the indices in a section; see the module."""
        first, span = _read_span(fields)
        if not count <= span or section.size != 16 + 8 * _words(span):
            return None
        indices: Array = namespace(section).empty(count, _room_for(first + span, dtype))
        bits_set = kernels_for(section).from_bitmap(
            section[16:].view(np.uint64), first, indices
        )
        return (
            indices
            if bits_set == count and (not count or indices[-1] < first + span)
            else None
        )


class EliasFano:
    """Format 4."""

    def nbytes(self, vector: SparseVector) -> int | None:
        """Return the bytes of the indices of a vector; see the module."""
        _, lows, highs = self._layout(vector.nnz, vector.span)
        return 16 + 8 * (lows + highs)

    @staticmethod
    def _layout(count: int, span: int) -> tuple[int, int, int]:
        """Return the numbers of low bits of an index, of words for all low bits (one spare), and for the high bits."""
        low_bits = max(0, (span // max(1, count)).bit_length() - 1)
        return (
            low_bits,
            _words(count * low_bits) + 1,
            _words(count + (span >> low_bits)),
        )

    def write(self, vector: SparseVector, section: Buffer) -> None:
        """Fill the section; see the module."""
        _write_span(vector, section)
        low_bits, lows, _ = self._layout(vector.nnz, vector.span)
        words = section[16:].view(np.uint64)
        kernels_for(section).to_elias_fano(
            vector.indices, vector.first, low_bits, words[:lows], words[lows:]
        )

    def read(
        self, section: Buffer, count: int, dtype: Dtype, fields: Buffer
    ) -> Array | None:
        """Return the indices in a section; see the module."""
        first, span = _read_span(fields)
        low_bits, lows, highs = self._layout(count, span)
        if not count <= span or section.size != 16 + 8 * (lows + highs):
            return None
        words = section[16:].view(np.uint64)
        # What the words can say at most: 64 zeros more than there are steps, and all
        # low bits set.
        indices: Array = namespace(section).empty(
            count, _room_for(first + span + (128 << low_bits), dtype)
        )
        decoded = kernels_for(section).from_elias_fano(
            words[:lows], words[lows:], first, low_bits, indices
        )
        if decoded != count or (count and indices[-1] != first + span - 1):
            return None
        return indices


IndexFormat = Plain | Range | Bitmap | EliasFano
INDEX_FORMATS: tuple[IndexFormat, ...] = (
    Plain(np.int32),
    Plain(np.int64),
    Range(),
    Bitmap(),
    EliasFano(),
)


def padded(nbytes: int) -> int:
    """Return a number of bytes, rounded up to a multiple of 8."""
    return -(-nbytes // 8) * 8


def _words(bits: int) -> int:
    return -(-bits // 64)


def _write_span(vector: SparseVector, section: Buffer) -> None:
    write_fields(section, _PAIR, vector.first, vector.span)
    section[16:] = 0


def _read_span(section: Buffer) -> tuple[int, int]:
    """Return the first index and the span at the beginning of a section; a span of -1 if they are not valid."""
    first, span = read_fields(section, _PAIR) if section.size >= _PAIR.size else (0, -1)
    return (first, span) if span >= 0 and 0 <= first <= MAX_LENGTH - span else (0, -1)


def _room_for(end: int, dtype: Dtype) -> Dtype:
    """Return the dtype, or int64 if indices below `end` do not fit it."""
    return dtype if end <= 1 << 8 * dtype.itemsize - 1 else np.dtype(np.int64)
