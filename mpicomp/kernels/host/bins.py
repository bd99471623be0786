"""The entries of bins of consecutive values that reach the bin's maximum after a part of each is added once more.

A tile of a few thousand values stays in the cache while it is summed, the maximum of each of its bins found, and the
entries marked in bitmaps. Their magnitude depends on all bins: a second pass, over the bitmaps, writes the entries.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, Format, as_writable, jit
from mpicomp.kernels.host.instructions import WORD, array_at, bare, fetch, largest_of, lowest, ones, reaching
from mpicomp.kernels.host.selection import raise_not_finite
from mpicomp.kernels.host.streaming import add_line_by_line, add_parts, addresses
from mpicomp.threads import in_pieces

_TILE = 1 << 11  # values at most, except in longer bins
_AT_ONCE = 4  # entries: written without branches

Magnitudes = Callable[[Array, Array], Array]


def entries_in_bins(
    values: Array,
    parts: Sequence[Array],
    bounds: Sequence[int],
    bins: Sequence[int],
    magnitudes: Magnitudes,
    *,
    summand: tuple[Array, float] | None = None,
    threads: int | None = None,
) -> tuple[Array, Array, Array]:
    """Return the positions where |values + parts| reaches the maximum of |values| in a bin, with signed magnitudes.

    values: 1-d contiguous float16, float32 or float64. parts: 1-d contiguous, of that dtype, one for each segment; they
    are added in float64. bounds: the first position of each segment, and the length. bins: for each segment the number
    of values in a bin; the last bin may be shorter. Zeros are not selected. magnitudes(largest, places): returns the
    magnitude of each segment's entries, from the maximum of each bin, and the first bin of each segment, and at last
    the number of bins. summand: (a, scale); `values` is first overwritten by ``scale * a + parts``, in the same pass;
    the product is rounded before it is added. threads: as for `largest`.

    Returns positions (int32, or int64 of vectors beyond its range), their magnitudes with the signs of the values, and
    the first entry of each segment, and at last the number of entries. Raises ValueError naming the first of `values`,
    else of a part, that is NaN or infinite.
    """
    dtype, edges = values.dtype, np.asarray(bounds, np.int64)
    if dtype == np.float16:
        if summand is not None:
            add_parts(*summand, parts, values)
        wide = [each.astype(np.float32) for each in (values, *parts)]
        values, parts, summand = wide[0], wide[1:], None
    form, factor = FORMATS[values.dtype], values.dtype.type(1 if summand is None else summand[1])
    segments, places = _segments(edges, bins, parts)
    a, values = as_writable(values if summand is None else summand[0]), as_writable(values)
    largest, longest = np.empty(int(places[-1]), values.dtype), max(bins, default=1)

    def marked(start: int, end: int) -> tuple[int, Array, Array, Array]:
        chosen, negative = np.zeros((2, (end - start + longest) // WORD + 2), np.uint64)
        sums, again = np.zeros((2, _TILE + longest + WORD), values.dtype)
        keys, lanes, state = (sums.view(form.signed), again.view(form.signed)), _lanes(form), np.zeros(2, np.uint64)
        both = a, factor, values, summand is not None
        _mark(
            segments,
            start,
            end,
            *both,
            sums,
            again,
            *keys,
            lanes,
            form.infinity,
            largest.view(form.signed),
            chosen,
            negative,
            state,
        )
        return start, chosen, negative, state

    pieces = in_pieces(marked, values.size, threads)
    if not np.isfinite(largest).all() or any(state[1] for *_, state in pieces):
        for each in (values, *parts):
            raise_not_finite(each)
    found = np.ascontiguousarray(magnitudes(largest, places), values.dtype).view(form.signed)
    room, before = int(sum(state[0] for *_, state in pieces)) + _AT_ONCE, np.zeros(edges.size, np.int64)
    positions = np.empty(room, np.int32 if values.size < 1 << 31 else np.int64)
    signed, count = np.empty(room, values.dtype), 0
    for start, chosen, negative, _ in pieces:
        out = positions, signed.view(form.signed), before
        count = int(_write(start, chosen, negative, edges, found, form.width, *out, count))
    return positions[:count], signed[:count].astype(dtype, copy=False), np.cumsum(before)


_SEGMENT = np.dtype([(name, np.int64) for name in ("first", "end", "bin", "place", "address")])


def _segments(edges: Array, bins: Sequence[int], parts: Sequence[Array]) -> tuple[Array, Array]:
    """Return a record for each segment, and the first bin of each, and at last the number of bins."""
    segments, places = np.zeros(edges.size - 1, _SEGMENT), np.append(0, np.cumsum(-(-np.diff(edges) // bins)))
    segments["first"], segments["end"], segments["bin"] = edges[:-1], edges[1:], bins
    segments["place"], segments["address"] = places[:-1], addresses(parts)
    return segments, places


def _lanes(form: Format) -> Array:
    """Return the masks of a word of which all values count, and room for those of the last word of a bin."""
    return np.full(2 * WORD, form.mask, form.signed)


@jit
def _mark(  # type: ignore[no-untyped-def]
    segments,
    start,
    end,
    a,
    factor,
    values,
    is_sum,
    sums,
    again,
    keys,
    more,
    lanes,
    infinity,
    largest,
    chosen,
    negative,
    state,
):
    """Mark the entries of the bins that begin in [start, end), and write the maxima of these bins.

    sums, again: buffers of a tile of zeros, keys and more their bits. chosen, negative: bitmaps of entries, and of
    those below zero, from `start` on. state: the number of entries; and if nothing is summed, not 0 for an infinite or
    NaN value or part.
    """
    a, values, sums, again, keys, more = bare(a), bare(values), bare(sums), bare(again), bare(keys), bare(more)
    for segment in segments:
        origin, close, size = segment["first"], segment["end"], segment["bin"]
        if close <= start or origin >= end:
            continue
        b = array_at(values, segment["address"], close - origin)
        skipped = max(0, -(-(start - origin) // size))  # bins of an earlier piece
        stop = min(close, origin - (origin - end) // size * size)
        for j in range(WORD):
            lanes[WORD + j] = lanes[0] if j < size % WORD or size % WORD == 0 else 0
        step = max(1, _TILE // size) * size
        for first in range(origin + skipped * size, stop, step):
            beyond = min(first + step, stop)
            part = b[first - origin : beyond - origin]
            if is_sum:
                add_line_by_line(a[first:beyond], factor, part, values.dtype.type(1), values[first:beyond])
                _sum(a[first:beyond], factor, part, sums, again)
            else:
                _add(a[first:beyond], part, sums, again)
            length = beyond - first
            for j in range(length, length + WORD if length % size else length):
                keys[j] = 0  # the last bin is short
            top = largest[segment["place"] + (first - origin) // size :]
            marks = chosen, negative
            state[0] += _mark_tile(
                first - start, length, size, a[first:beyond], part, sums, again, keys, more, lanes, top, *marks
            )
            if not is_sum:
                for j in range(0, length, WORD):
                    state[1] |= reaching(more, j, lanes[0], infinity)


@jit
def _sum(a, factor, b, sums, again):  # type: ignore[no-untyped-def]
    """Write the sums of a tile, and those with another b."""
    for i in range(a.size):
        total = factor * a[i] + b[i]
        sums[i], again[i] = total, total + b[i]


@jit
def _add(a, b, sums, again):  # type: ignore[no-untyped-def]
    """Write a tile, and its sums with b."""
    for i in range(a.size):
        sums[i], again[i] = a[i], a[i] + b[i]


@jit
def _mark_tile(first, length, size, a, b, sums, again, keys, more, lanes, largest, chosen, negative):  # type: ignore[no-untyped-def]
    """Mark the entries of a tile, 64 values at a time, and return their number; meanwhile the next tile is loaded.

    Sums are rounded to the dtype: of those equal to the maximum, the ones that are below it in float64 are left out.
    """
    keys, more, lanes, largest = bare(keys), bare(more), bare(lanes), bare(largest)
    integer, every, word_end = keys.dtype.type, ~np.uint64(0), np.uint64(WORD - 1)
    mask, one, count, place = lanes[0], integer(1), np.uint64(0), np.uint64(first) // np.uint64(WORD)
    wanted, below = chosen[place], negative[place]
    for number in range((length + size - 1) // size):
        low = number * size
        end = min(low + size, length)
        last = low + (end - low - 1) // WORD * WORD
        top = integer(largest_of(keys, last, lanes, WORD if end - low == size else 0))
        for at in range(low, last, WORD):
            top = max(top, largest_of(keys, at, lanes, 0))
        for at in range(low, end, WORD):
            fetch(a, length + at)
            fetch(b, length + at)
            word = reaching(more, at, mask, top) & reaching(keys, at, mask, one)
            used = np.uint64(min(WORD, end - at))
            word &= every >> (np.uint64(WORD) - used)
            tied = word & ~reaching(more, at, mask, integer(top + one))
            while tied != np.uint64(0):
                bit = lowest(tied)
                i = at + np.int64(bit)
                if abs(np.float64(sums[i]) + np.float64(b[i])) < abs(np.float64(again[i])):
                    word ^= np.uint64(1) << bit
                tied &= tied - np.uint64(1)
            signs = word & ~reaching(keys, at, integer(-1), integer(0))
            count += ones(word)
            shift = np.uint64(first + at) & word_end
            wanted |= word << shift
            below |= signs << shift
            if shift + used >= np.uint64(WORD):
                chosen[place], negative[place] = wanted, below
                place += np.uint64(1)
                wanted, below = (
                    (word >> np.uint64(1)) >> (word_end - shift),
                    (signs >> np.uint64(1)) >> (word_end - shift),
                )
        largest[number] = top
    chosen[place], negative[place] = wanted, below
    return count


@jit
def _write(start, chosen, negative, edges, magnitudes, width, positions, signed, entries, count):  # type: ignore[no-untyped-def]
    """Append the entries of bitmaps from `start` on, and count those of each segment; return the new count.

    Four are written at once, though there may be fewer: there is room for as many more.
    """
    chosen, negative, positions, signed = bare(chosen), bare(negative), bare(positions), bare(signed)
    every, highest, count = ~np.uint64(0), np.uint64(1) << np.uint64(WORD - 1), np.uint64(count)
    index, integer, end = positions.dtype.type, signed.dtype.type, WORD * (chosen.size - 1)
    for row in range(magnitudes.size):
        low, high = max(0, edges[row] - start), min(edges[row + 1] - start, end)
        before, magnitude = count, magnitudes[row]
        for i in range(low // WORD, (high + WORD - 1) // WORD if low < high else 0):
            word, below, first = chosen[i], negative[i], index(start + WORD * i)
            if i == low // WORD:
                word &= every << np.uint64(low % WORD)
            if i == high // WORD:
                word &= ~(every << np.uint64(high % WORD))
            at = count
            count += ones(word)
            while at < count:
                for j in range(_AT_ONCE):
                    place = lowest(word | highest)
                    word &= word - np.uint64(1)
                    positions[at + np.uint64(j)] = index(first + index(place))
                    sign = ((below >> place) & np.uint64(1)) << np.uint64(width)
                    signed[at + np.uint64(j)] = magnitude | integer(sign)
                at += np.uint64(_AT_ONCE)
        entries[row + 1] += np.int64(count - before)
    return count
