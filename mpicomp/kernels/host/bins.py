"""The entries of bins of consecutive values that reach the bin's maximum after a part of each is added once more.

One pass adds, finds the maximum of each bin, and stores the positions of its entries.
It writes the sum a cache line at a time, so that memory and processor work
simultaneously; and the entries of a tile after its sum, as ordinary stores wait for the
others. The magnitude of the entries depends on all bins: a second pass, over the
entries, writes it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.values import index_dtype
from mpicomp.kernels import Selected
from mpicomp.kernels.host.bits import FORMATS, as_writable
from mpicomp.kernels.host.compiled import jit, loop, single
from mpicomp.kernels.host.instructions import (
    LINE,
    WORD,
    array_at,
    larger,
    largest_sum,
    lowest,
    ones,
    reaching,
    smaller,
    store_sum,
    sums_reaching,
    view,
)
from mpicomp.kernels.host.selection import first_not_finite, raise_not_finite
from mpicomp.kernels.host.selection import largest as find_largest
from mpicomp.kernels.host.statistics import magnitudes_in_segments, sides
from mpicomp.kernels.host.streaming import (
    add_line_by_line,
    add_parts,
    addresses,
    values_before_line,
)
from mpicomp.threads import in_pieces

# Entries of a buffer, besides those of a bin; a full one is followed by a new one.
_ROOM = 1 << 22
# Words of 64 values in a tile, unless a bin is longer.
_WORDS = 512
_AT_ONCE = 8  # entries: stored without branches


def entries_in_bins(
    values: Array,
    parts: Sequence[Array],
    bounds: Sequence[int],
    bins: Sequence[int],
    *,
    residual: Array | None = None,
    decay: float = 1.0,
    threads: int | None = None,
) -> Selected:
    """Return the positions where |values + parts| reaches the maximum of |values| in a bin, with signed magnitudes.

    values: 1-d contiguous float16, float32 or float64. parts: 1-d contiguous, of that
    dtype, one for each segment; they are added in float64. bounds: the first position
    of each segment, and the length. bins: for each segment the number of values in a
    bin; the last bin may be shorter. Zeros are not selected. residual: if
    there is one, `values` is first overwritten by ``decay * residual + parts``, in the
    same pass; the product is rounded before it is added. threads: as for `largest`.

    An entry has the sign of its value, and the magnitude of its segment: the mean of
    the maxima of its bins, above zero if one is. If none is selected of a segment that
    is not zero, its largest is. Raises ValueError naming
    the first of `values`, else of a part, that is NaN or infinite.
    """
    dtype = values.dtype
    if dtype == np.float16:
        if residual is not None:
            add_parts(residual, decay, parts, values)
        values, *parts = (each.astype(np.float32) for each in (values, *parts))
        residual = None
    edges = np.asarray(bounds, np.int64)
    segments, places = _segments(edges, bins, parts)
    largest = np.empty(int(places[-1]), values.dtype)
    sums = _sums(as_writable(values), residual, decay)
    found = in_pieces(
        lambda start, end: _marked(segments, start, end, sums, largest),
        values.size,
        threads,
    )
    if first_not_finite(largest) >= 0 or any(bad[0] for *_, bad in found):
        for each in (values, *parts):
            raise_not_finite(each)
    scales = _means(largest, places, dtype).astype(values.dtype)
    ends = np.cumsum(sum(entries for _, entries, _ in found))
    marks = [piece for pieces, *_ in found for piece in pieces]
    positions, signed = _signed(marks, ends, scales)
    entries = _with_largest(positions, signed, ends, scales, values, bounds)
    return entries._replace(values=entries.values.astype(dtype, copy=False))


def _sums(values: Array, residual: Array | None, decay: float) -> tuple[Any, ...]:
    """Return the arguments `a`, `factor`, `keep` and `values` of `_mark`."""
    signed = FORMATS[values.dtype].signed
    if residual is None:
        return values, values.dtype.type(1), signed.type(0), values
    factor = values.dtype.type(decay)
    return as_writable(residual), factor, signed.type(-1), values


def _marked(
    segments: Array, start: int, end: int, sums: tuple[Any, ...], largest: Array
) -> tuple[list[Array], Array, Array]:
    """Return positions of the entries of the bins that begin in [start, end), as often as a buffer is full.

    And the number of entries of each segment, one row behind it, and a word that is not
    0 if a part may not be finite.
    """
    form = FORMATS[largest.dtype]
    size = sums[-1].size
    longest = int(segments["bin"].max(initial=1))
    one, other = np.zeros((2, longest + 2 * WORD), largest.dtype)
    words = tuple(np.empty((3, longest // WORD + 2 * _WORDS), np.uint64))
    keys = largest.view(form.signed)
    given = *sums, one, other, form.mask, form.infinity, keys, words
    entries = np.zeros(segments.size + 1, np.int64)
    bad = np.zeros(1, np.uint64)
    pieces: list[Array] = []
    while start < end or not pieces:
        room = min(_ROOM, end - start) + longest + 2 * WORD * _WORDS
        found = np.empty(room, index_dtype(size))
        done = _mark(segments, start, end, *given, found, entries, bad)
        count, start = map(int, done)
        pieces.append(found[:count])
    return pieces, entries, bad


def _with_largest(
    positions: Array,
    signed: Array,
    ends: Array,
    scales: Array,
    values: Array,
    bounds: Sequence[int],
) -> Selected:
    """Return the entries, and that of the largest value of each segment which has none and is not zero."""
    for row in np.flatnonzero((scales != 0) & (np.diff(ends) == 0)).tolist():
        first = bounds[row]
        place, most = find_largest(values[first : bounds[row + 1]], 1)
        at = int(ends[row])
        positions = np.insert(positions, at, place + first)
        signed = np.insert(signed, at, np.copysign(scales[row], most))
        ends[row + 1 :] += 1
    return Selected(positions, signed, ends.tolist())


def _signed(marks: Sequence[Array], ends: Array, scales: Array) -> tuple[Array, Array]:
    """Return the marked positions in order, and for each the magnitude of its segment with the sign of the value."""
    positions = np.empty(int(ends[-1]), marks[0].dtype)
    signed = np.empty(int(ends[-1]), scales.dtype)
    count = 0
    for piece in marks:
        _write(piece, ends, scales, positions, signed, count)
        count += piece.size
    return positions, signed


def _means(largest: Array, places: Array, dtype: np.dtype[Any]) -> Array:
    """Return for each segment the mean of the maxima of its bins, in a dtype; it is above zero if a maximum is."""
    found = magnitudes_in_segments(largest, places.tolist(), two=False)
    means = found[:, 0]
    most = found[:, 1]
    counts = np.diff(places).clip(1)
    # The sum over the bins of these segments may be infinite.
    for row in np.flatnonzero(most > np.finfo(np.float64).max / counts).tolist():
        own = largest[places[row] : places[row + 1]]
        if not np.isfinite(sides(own, np.inf).sum_below):
            means[row] = min(sides(own / own.size, np.inf).sum_below, most[row])
    scales: Array = means.astype(dtype)
    # The mean underflows if there are many bins of zeros.
    scales[(scales == 0) & (most > 0)] = np.finfo(dtype).smallest_subnormal
    return scales


_SEGMENT = np.dtype(
    [(name, np.int64) for name in ("first", "end", "bin", "place", "address")]
)


def _segments(
    edges: Array, bins: Sequence[int], parts: Sequence[Array]
) -> tuple[Array, Array]:
    """Return a record for each segment, and the number of bins before each and of all."""
    segments = np.zeros(edges.size - 1, _SEGMENT)
    places = np.append(0, np.cumsum(-(-np.diff(edges) // bins)))
    segments["first"], segments["end"], segments["bin"] = edges[:-1], edges[1:], bins
    segments["place"], segments["address"] = places[:-1], addresses(parts)
    return segments, places


@jit
def _mark(  # type: ignore[no-untyped-def]
    segments,
    start,
    end,
    a,
    factor,
    keep,
    values,
    one,
    other,
    mask,
    infinity,
    largest,
    words,
    found,
    entries,
    bad,
):
    """Store the entries of the bins that begin in [start, end), and write the sum, and the maxima of these bins.

    keep: -1, or 0 if nothing is summed. one, other: buffers of a bin and 128 values.
    words: buffers of `_mark_tile`. found: for the positions of the entries, inverted
    for those below zero. entries: incremented from row 1 on by the number of each
    segment. bad: becomes other than 0 if nothing is summed and a part is not finite.
    Returns the number of entries, and up to where was read: less than `end` if there is
    no room for another tile.
    """
    count = 0
    for row in range(segments.size):
        origin = segments[row]["first"]
        close = segments[row]["end"]
        size = segments[row]["bin"]
        # The bins before `first` belong to an earlier piece.
        first = origin + larger(0, -(-(start - origin) // size)) * size
        stop = smaller(close, origin - (origin - end) // size * size)
        step = larger(1, _WORDS * WORD // (size + -size % WORD)) * size
        while first < stop:
            if count + step + WORD + _AT_ONCE > found.size:
                return count, first
            x = view(a, first, close)
            y = array_at(values, segments[row]["address"], close - origin)
            y = view(y, first - origin, close - origin)
            out = view(values, first, stop)
            head = 0
            last = 0
            whole = (smaller(stop, close - -size % WORD) - first) // size * size
            length = smaller(step, whole)
            if length > 0 and keep:
                head, last = values_before_line(out), length
            elif length <= 0:  # the last words end beyond the segment
                length = stop - first
                for j in range(one.size):
                    one[j] = x[j] if j < length else 0
                    other[j] = y[j] if j < length else 0
                x, y = one, other
            top = segments[row]["place"] + (first - origin) // size
            top = view(largest, top, largest.size)
            number, line = _mark_tile(
                length,
                size,
                x,
                factor,
                y,
                keep,
                mask,
                infinity,
                top,
                words,
                out,
                head,
                last,
                bad,
            )
            if keep:
                for low, high in ((0, head), (line, length)):
                    add_line_by_line(
                        view(x, low, high),
                        factor,
                        view(y, low, high),
                        values.dtype.type(1),
                        view(out, low, high),
                    )
            stored = _store(first, number, words, view(found, count, found.size))
            count, first = count + stored, first + length
            entries[row + 1] += stored
    return count, end


@single
def _mark_tile(  # type: ignore[no-untyped-def]
    length,
    size,
    a,
    factor,
    b,
    keep,
    mask,
    infinity,
    largest,
    words,
    out,
    line,
    last,
    bad,
):
    """Mark the entries of bins, 64 values in a word; meanwhile write the lines of the sum from `line` to `last`.

    Sums are rounded to the dtype: of those equal to the maximum, the ones that are
    below it in float64 are left out. words: for words that are not 0, those of the
    signs, and where each begins. Returns their number, and up to where was written.
    """
    chosen, negative, firsts = words
    step, every, integer = LINE // out.itemsize, ~np.uint64(0), largest.dtype.type
    bin, number, short = np.uint64(0), np.uint64(0), smaller(WORD, size)
    for low in range(0, length, size):
        while line + step <= smaller(low, last):
            store_sum(a, factor, b, out.dtype.type(1), out, line)
            line += step
        end = smaller(low + size, length)
        top = integer(largest_sum(a, factor, b, keep, low, short))
        for at in range(low + WORD, end, WORD):
            some = smaller(WORD, end - at)
            top = larger(top, largest_sum(a, factor, b, keep, at, some))
        at, found = low, sums_reaching(a, factor, b, keep, low, top)
        while at < end:
            word, signs, is_tied = found
            word &= every >> np.uint64(larger(0, WORD - (end - at)))
            if is_tied:
                tied = (
                    word
                    & ~sums_reaching(a, factor, b, keep, at, integer(top + integer(1)))[
                        0
                    ]
                )
                word ^= _below(a, factor, b, keep, at, tied)
            if not keep:
                bad[0] |= reaching(b, at, mask, infinity)
            chosen[number], negative[number], firsts[number] = (
                word,
                signs,
                np.uint64(at),
            )
            number += np.uint64(word != np.uint64(0))
            at += WORD
            if at < end:
                found = sums_reaching(a, factor, b, keep, at, top)
        largest[bin] = top
        bin += np.uint64(1)
    return number, line


@loop
def _store(first, number, words, found):  # type: ignore[no-untyped-def]
    """Store the positions of the entries of a tile that begins at `first`, and return how many there are.

    Eight are stored at once, though there may be fewer: there is room for as many more.
    """
    chosen, negative, firsts = words
    highest, index, count = (
        np.uint64(1) << np.uint64(WORD - 1),
        found.dtype.type,
        np.uint64(0),
    )
    for i in range(number):
        word, signs, base, stored = (
            chosen[i],
            negative[i],
            index(first) + index(firsts[i]),
            count,
        )
        count += ones(word)
        while stored < count:
            for j in range(_AT_ONCE):
                place = lowest(word | highest)
                word &= word - np.uint64(1)
                sign = index((signs >> place) & np.uint64(1))
                found[stored + np.uint64(j)] = index(base + index(place)) ^ index(-sign)
            stored += np.uint64(_AT_ONCE)
    return np.int64(count)


@single
def _below(a, factor, b, keep, first, tied):  # type: ignore[no-untyped-def]
    """Return the bits of `tied`, counted from `first`, where adding b to the sum again rounds the magnitude up."""
    below = np.uint64(0)
    while tied != np.uint64(0):
        place = lowest(tied)
        i = np.uint64(first) + place
        total = factor * a[i] + b[i] if keep else a[i]
        again = total + b[i]
        if abs(np.float64(total) + np.float64(b[i])) < abs(np.float64(again)):
            below |= np.uint64(1) << place
        tied &= tied - np.uint64(1)
    return below


@jit
def _write(found, ends, magnitudes, positions, signed, first):  # type: ignore[no-untyped-def]
    """Write the positions of entries, and their magnitudes with signs, from entry `first` on. ends: of the segments."""
    for row in range(magnitudes.size):
        low = larger(0, ends[row] - first)
        high = smaller(found.size, ends[row + 1] - first)
        if low < high:
            _write_each(
                view(found, low, high),
                magnitudes[row],
                view(positions, first + low, first + high),
                view(signed, first + low, first + high),
            )


@single
def _write_each(found, magnitude, positions, signed):  # type: ignore[no-untyped-def]
    for i in range(found.size):
        positions[i] = ~found[i] if found[i] < 0 else found[i]
        signed[i] = -magnitude if found[i] < 0 else magnitude
