"""Orthonormal transforms of chunks of consecutive values, and signs.

A Walsh-Hadamard transform of m values is lg m stages of m/2 butterflies (a + b, a - b), of the strides 1, 2, 4, ...,
m/2, and one product with 1/sqrt(m): every value is the root of a fixed tree of additions, so the bits do not depend on
the processor or on the number of threads. The stages below 64 are done in registers; of the others two together, so
that a chunk of 256 in the first-level cache is passed over twice.

A product with a matrix adds the products in the order of the values of the chunk, without fused multiply-add.
"""

import numpy as np

from mpicomp.kernels.host.bits import FORMATS, Array, as_writable, jit
from mpicomp.kernels.host.instructions import WORD, butterflies
from mpicomp.threads import in_pieces

LONGEST = 1 << 12  # values of a chunk that a block of threads on a GPU can hold


def hadamard(values: Array, out: Array, chunk: int, *, threads: int | None = None) -> None:
    """Write the orthonormal Walsh-Hadamard transform of each chunk of `values` to `out`; it is its own inverse.

    values, out: 1-d, contiguous, of one length and dtype, the same array or apart; float16 is computed in float32 and
    rounded at the end. chunk: a power of two up to `LONGEST`. What is left at the end is transformed in parts of
    descending powers of two. threads: the most threads; None for `threads.count`.
    """
    if values.dtype == np.float16:
        _in_float32(hadamard, values, out, chunk, threads)
        return
    values, scales = as_writable(values), _scales(values.dtype)

    def transform(start: int, end: int) -> None:
        _hadamard(values[start:end], out[start:end], chunk, scales)

    in_pieces(transform, values.size, threads, step=max(chunk, WORD))


def multiply_chunks(values: Array, matrix: Array, out: Array, *, threads: int | None = None) -> None:
    """Write the product of each chunk of `values`, as a row, with a square matrix to `out`.

    values, out, threads: as for `hadamard`; the length is a multiple of the chunk. matrix: contiguous, of shape (chunk,
    chunk) and of the dtype of the values, float32 for float16.
    """
    if values.dtype == np.float16:
        _in_float32(multiply_chunks, values, out, matrix, threads)
        return
    values, matrix, chunk = as_writable(values), as_writable(matrix), len(matrix)

    def multiply(start: int, end: int) -> None:
        _multiply_chunks(values[start:end], matrix, out[start:end], np.empty(4 * chunk, values.dtype))

    in_pieces(multiply, values.size, threads, step=chunk)


def signs(values: Array, out: Array, *, threads: int | None = None) -> None:
    """Write the sign of each of `values` to `out`: 1, -1, or 0 for a zero of either sign; of NaN that of its bits.

    values, out, threads: as for `hadamard`.
    """
    form = FORMATS[values.dtype]
    bits, written = as_writable(values).view(form.signed), out.view(form.signed)
    one = np.ones(1, values.dtype).view(form.signed)[0]

    def write(start: int, end: int) -> None:
        _signs(bits[start:end], written[start:end], form.mask, one)

    in_pieces(write, values.size, threads)


def scale_of(chunk: int) -> float:
    """Return 1 / sqrt(chunk) for a power of two; exactly for a power of four."""
    half, odd = divmod(chunk.bit_length() - 1, 2)
    return float(0.5**half * (np.sqrt(0.5) if odd else 1.0))


def _scales(dtype: np.dtype[np.generic]) -> Array:
    """Return 1 / sqrt(m) for m = 1, 2, 4, ... up to `LONGEST`."""
    return np.array([scale_of(1 << place) for place in range(LONGEST.bit_length())], dtype)


def _in_float32(kernel, values, out, setting, threads):  # type: ignore[no-untyped-def]
    """Compute a transform of float16 in float32, and round the result; beyond its range to infinity."""
    wide = values.astype(np.float32)
    if kernel is hadamard:
        hadamard(wide, wide, setting, threads=threads)
    else:
        multiply_chunks(wide, setting, wide, threads=threads)
    with np.errstate(over="ignore"):
        out[...] = wide


@jit
def _hadamard(values, out, chunk, scales):  # type: ignore[no-untyped-def]
    start, place = 0, 0
    while 1 << place < chunk:
        place += 1
    while start < values.size:
        while chunk > values.size - start:
            chunk, place = chunk >> 1, place - 1
        end = values.size - (values.size - start) % chunk
        _transform(values, out, start, end, chunk, scales[place])
        start = end


@jit
def _transform(values, out, start, end, chunk, scale):  # type: ignore[no-untyped-def]
    """Transform chunks from `start` to `end`. The scale is a factor of the last stage of a chunk, 1 of the others."""
    one = out.dtype.type(1)
    for begin in range(start, end, chunk):
        stride = 1
        if chunk >= WORD:
            stride = WORD
            for first in range(begin, begin + chunk, WORD):
                butterflies(values, out, first, scale if stride == chunk else one)
        else:
            for i in range(begin, begin + chunk):
                out[i] = values[i]
        while 4 * stride <= chunk:
            for first in range(begin, begin + chunk, 4 * stride):
                _two_stages(out, np.uint64(first), np.uint64(stride), scale if 4 * stride == chunk else one)
            stride *= 4
        if stride < chunk:
            _stage(out, np.uint64(begin), np.uint64(stride), scale)


@jit
def _two_stages(out, first, stride, scale):  # type: ignore[no-untyped-def]
    """Do the butterflies of a stride and of twice the stride, in four times as many values from `first` on."""
    for i in range(stride):
        a = first + np.uint64(i)
        b, c, d = a + stride, a + np.uint64(2) * stride, a + np.uint64(3) * stride
        left, right = out[a] + out[b], out[c] + out[d]
        other, another = out[a] - out[b], out[c] - out[d]
        out[a], out[c] = (left + right) * scale, (left - right) * scale
        out[b], out[d] = (other + another) * scale, (other - another) * scale


@jit
def _stage(out, first, stride, scale):  # type: ignore[no-untyped-def]
    """Do the butterflies of a stride, in twice as many values from `first` on."""
    for i in range(stride):
        a = first + np.uint64(i)
        b = a + stride
        out[a], out[b] = (out[a] + out[b]) * scale, (out[a] - out[b]) * scale


@jit
def _multiply_chunks(values, matrix, out, rows):  # type: ignore[no-untyped-def]
    """Multiply four chunks at a time, then those that are left. rows: a buffer of four, as `out` may be `values`."""
    chunk = matrix.shape[0]
    whole = values.size - values.size % (4 * chunk)
    for start in range(0, whole, 4 * chunk):
        rows[:] = 0
        for j in range(chunk):
            _add_products(values, start + j, matrix[j], rows)
        out[start : start + 4 * chunk] = rows
    for start in range(whole, values.size, chunk):
        row = rows[:chunk]
        row[:] = 0
        for j in range(chunk):
            for k in range(chunk):
                row[k] += values[start + j] * matrix[j, k]
        out[start : start + chunk] = row


@jit
def _add_products(values, place, factors, rows):  # type: ignore[no-untyped-def]
    """Add to four rows the products of some factors with one value of each of four chunks, the first at `place`."""
    size = np.uint64(factors.size)
    a, b, c, d = rows[:size], rows[size : 2 * size], rows[2 * size : 3 * size], rows[3 * size :]
    one, two, three, four = (
        values[place],
        values[place + factors.size],
        values[place + 2 * factors.size],
        values[place + 3 * factors.size],
    )
    for k in range(factors.size):
        a[k] += one * factors[k]
        b[k] += two * factors[k]
        c[k] += three * factors[k]
        d[k] += four * factors[k]


@jit
def _signs(bits, out, mask, one):  # type: ignore[no-untyped-def]
    zero = mask ^ mask
    for i in range(bits.size):
        out[i] = bits[i] & ~mask | one if bits[i] & mask else zero
