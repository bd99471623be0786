"""Sums of sparse vectors, and copies between sparse and dense ones.

Every sum is in rank order: if lists 0, 2 and 5 have an entry, it is (a0 + a2) + a5,
whatever the entries elsewhere. float16 is added in float32, and the sum is rounded
once.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpicomp.arrays import Array
from mpicomp.arrays.memory import sizes_of
from mpicomp.kernels import NOTHING, Facts
from mpicomp.kernels.host.bits import FORMATS, as_writable
from mpicomp.kernels.host.compiled import inner, jit, single
from mpicomp.kernels.host.instructions import (
    WORD,
    array_at,
    larger,
    lowest,
    nonzero,
    smaller,
    view,
)
from mpicomp.kernels.host.selection import first_not_finite
from mpicomp.kernels.host.streaming import addresses
from mpicomp.threads import in_pieces

_TILE = 1 << 16  # positions of a tile: 256 KiB of float32 fit the second-level cache
_BATCH = 1 << 18  # entries of a batch, for the same reason
_LONG = 1 << 20  # entries that threads share
# Positions per entry from which on sorting is faster than tiles: a tile then has about
# eight entries.
_SPARSEST = 1 << 13


def merge(
    indices_a: Array, values_a: Array, indices_b: Array, values_b: Array
) -> tuple[Array, Array, None]:
    """Return the sum of two sparse vectors as (indices, values, None) over the union of their supports.

    Indices strictly increase in each input and in the output; both pairs have the same
    dtypes. If both vectors have an entry the output has ``a + b``, which has the same
    bits as ``b + a``: the merge is bitwise commutative. float16 is added in float32 and
    rounded once, which gives the correctly rounded float16 sum. values: shape
    (entries,), or (entries, width) for rows. On a device the last result is what
    `inspect` returns of the sum, where it is known.
    """
    if values_a.ndim > 1:
        return *_by_sorting([indices_a, indices_b], [values_a, values_b]), None
    if values_a.dtype == np.float16:
        indices, values, _ = merge(
            indices_a,
            values_a.astype(np.float32),
            indices_b,
            values_b.astype(np.float32),
        )
        return indices, _narrow(values, values_a.dtype), None
    room = indices_a.size + indices_b.size
    indices, values = np.empty(room, indices_a.dtype), np.empty(room, values_a.dtype)
    a, b = (
        (as_writable(indices_a), as_writable(values_a)),
        (as_writable(indices_b), as_writable(values_b)),
    )
    count = _merge(*a, *b, indices, values)
    return indices[:count], values[:count], None


def accumulate(
    indices: Sequence[Array], values: Sequence[Array], length: int
) -> tuple[Array, Array]:
    """Return the sum of one or more sparse vectors as (indices, values) over the union of their supports.

    indices, values: of each vector, as for `merge`; indices below `length`. An entry is
    kept if its sum is zero. The additions are in the order of the vectors, ((a0 + a1) +
    a2) + ..., at each index over those that have an entry; so for two vectors the
    result is that of `merge`. float16 is added in float32 and rounded once, at the end.

    Indices are sorted, so the vectors are added tile by tile in a dense buffer that
    fits the cache, with a bitmap of its entries. A tile begins at the lowest remaining
    index: time and memory do not depend on the length. Rows, and entries too few for
    tiles, are sorted by index and added in the same order.
    """
    total = sum(each.size for each in indices)
    if not total:
        return indices[0], values[0]
    span = max(int(each[-1]) for each in indices if each.size) - min(
        int(each[0]) for each in indices if each.size
    )
    if values[0].ndim > 1 or span > _SPARSEST * total:
        return _by_sorting(indices, values)
    wide = _wide_dtype(values[0])
    size = min(_TILE, -(-length // 4096) * 4096)
    tile, words = np.full(size, -0.0, wide), np.zeros(size // 64, np.uint64)
    union, sums, count = np.empty(total, indices[0].dtype), np.empty(total, wide), 0
    for batch in _batches(indices, values, wide):
        count += int(_accumulate(*batch, tile, words, union[count:], sums[count:]))
    return union[:count], _narrow(sums[:count], values[0].dtype)


def divide(
    indices: Array, values: Array, positions: Array
) -> tuple[Array, Array, Array, Array]:
    """Return (indices, values) of the entries at `positions` (intp, increasing), and of the other entries, in one pass.

    values: shape (entries,), or (entries, width) for rows.
    """
    if values.ndim > 1:
        is_rest = np.ones(indices.size, bool)
        is_rest[positions] = False
        rest_indices = indices[is_rest]
        return indices[positions], values[positions], rest_indices, values[is_rest]
    chosen, rest = positions.size, indices.size - positions.size
    # Each has one more element: every entry is written to both, and the position of one
    # of them is incremented.
    one = np.empty(chosen + 1, indices.dtype), np.empty(chosen + 1, values.dtype)
    other = np.empty(rest + 1, indices.dtype), np.empty(rest + 1, values.dtype)
    given = as_writable(indices), _keys(as_writable(values)), as_writable(positions)
    _divide(*given, one[0], _keys(one[1]), other[0], _keys(other[1]))
    return one[0][:chosen], one[1][:chosen], other[0][:rest], other[1][:rest]


def gather(dense: Array, indices: Array, *, threads: int | None = None) -> Array:
    """Return ``dense[indices]`` of a 1-d `dense`; the indices (int32 or int64) must be in range.

    threads: the most threads; None for `threads.count`.
    """
    out = np.empty(indices.size, dense.dtype)
    keys, places, found = _keys(as_writable(dense)), as_writable(indices), _keys(out)
    in_pieces(
        lambda start, end: _gather(keys, places[start:end], found[start:end]),
        out.size,
        threads,
    )
    return out


def gather_scores(
    dense: Array, indices: Array, bonus: Array, factor: Any
) -> tuple[Array, Array]:
    """Return ``dense[indices]``, and these values times `factor` where `bonus` is not zero, else themselves.

    bonus: float32, or float64 if `dense` is; so are the second values, and the factor.
    """
    values = gather(dense, indices)
    return values, values * np.where(bonus != 0, factor, bonus.dtype.type(1))


def consecutive(first: int, end: int, dtype: DTypeLike) -> Array:
    """Return the integers first, ..., end - 1, as ``numpy.arange`` does, in a third of its time."""
    out = np.empty(end - first, dtype)
    _count_up(out, first)
    return out


def sparse_writer(
    indices: Array,
    values: Array,
    parts: Sequence[Array],
    *,
    are_zero: bool = False,
    threads: int | None = None,
) -> Callable[[], None]:
    """Return a function that writes a sparse vector to consecutive parts, and zeros elsewhere; it allocates nothing.

    indices, values: of the parts together, as a `SparseVector` has them, 1-d and of the
    parts' dtype. parts: C-contiguous, of any shape. are_zero: whether the parts are zeros.
    threads: the most threads; None for `threads.count`.
    """
    edges = np.array([0, *itertools.accumulate(sizes_of(parts))])
    rows = edges, addresses(parts)
    sparse = as_writable(indices), _keys(as_writable(values))

    def write_piece(start: int, end: int) -> None:
        first = indices.searchsorted(indices.dtype.type(start))
        _write_parts(start, end, first, *rows, *sparse, are_zero)

    # A call for no values compiles the kernel, as the function that is returned must
    # not fail.
    _write_parts(0, 0, 0, *rows, *sparse, are_zero)

    # The default argument keeps the arrays alive, which are written by address.
    def write(kept: object = parts) -> None:
        in_pieces(write_piece, int(edges[-1]), threads)

    return write


def scatter_add(
    dense: Array,
    indices: Array,
    values: Array,
    *,
    sign: int = 1,
    threads: int | None = None,
) -> None:
    """Add `sign`, 1 or -1, times `values` to ``dense[indices]`` in place; the indices must be in range and unique.

    The sum is rounded once to the dtype of `dense`, whatever the dtype of the values.
    threads: the most threads; None for `threads.count`.
    """
    if not indices.size:
        return
    if dense.dtype == values.dtype != np.float16:
        places, given, factor = (
            as_writable(indices),
            as_writable(values),
            dense.dtype.type(sign),
        )

        def add_piece(start: int, end: int) -> None:
            _scatter_add(dense, places[start:end], given[start:end], factor)

        in_pieces(add_piece, places.size, threads)
    else:
        sums = gather(dense, indices).astype(_wide_dtype(dense)) + sign * values
        dense[indices] = _narrow(sums, dense.dtype)


def first_disorder(indices: Array, length: int) -> int:
    """Return the first position where `indices` leaves ``[0, length)`` or does not increase; -1 if there is none."""
    if not indices.size:
        return -1
    places = as_writable(indices)
    if places[0] >= 0 and places[-1] < length and _increases(places):
        return -1
    return int(_first_disorder(places, length))


def inspect(indices: Array, values: Array, length: int) -> Facts:
    """Return the positions of the first bad index and the first value that is not finite, and the end indices.

    values: of any shape. An index is bad if it is out of order or range. The positions
    are -1 without one; first and last index are (0, -1) without entries.
    """
    if not indices.size:
        return NOTHING
    first = indices.item(0)
    last = indices.item(-1)
    # Above this length threads share the values.
    if first >= 0 and last < length and indices.size < _LONG:
        form = FORMATS[values.dtype]
        bits = as_writable(values).view(form.signed)
        if bits.ndim > 1:
            bits = bits.reshape(-1)
        if _is_sound(as_writable(indices), bits, form.mask, form.infinity):
            return -1, -1, first, last
    disorder = first_disorder(indices, length)
    return disorder, first_not_finite(values.reshape(-1)), first, last


def _keys(values: Array) -> Array:
    """Return values as integers: Numba has no float16."""
    return values.view(FORMATS[values.dtype].keys)


def _wide_dtype(values: Array) -> np.dtype[Any]:
    """Return the dtype in which values are added."""
    return np.promote_types(values.dtype, np.float32)


def _narrow(values: Array, dtype: np.dtype[Any]) -> Array:
    if values.dtype == dtype:
        return values
    # Sums out of range become infinite, as those of the other dtypes do.
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def _by_sorting(
    indices: Sequence[Array], values: Sequence[Array]
) -> tuple[Array, Array]:
    """Return the result of `accumulate`, for values of any shape and indices at any distance."""
    together = np.concatenate(indices)
    order = np.argsort(together, kind="stable")  # merges sorted runs
    together = together[order]
    new = np.append(True, together[1:] != together[:-1])[: together.size]
    places = np.empty(together.size, np.intp)
    places[order] = np.cumsum(new) - 1
    union, ends = together[new], np.cumsum([each.size for each in indices])
    # Sums begin at -0.0, as -0.0 + x is x also for x = -0.0.
    sums = np.full((union.size, *values[0].shape[1:]), -0.0, _wide_dtype(values[0]))
    with np.errstate(over="ignore"):
        for value, end in zip(values, ends.tolist(), strict=True):
            sums[places[end - len(value) : end]] += value
    return union, _narrow(sums, values[0].dtype)


def _batches(
    indices: Sequence[Array], values: Sequence[Array], dtype: np.dtype[Any]
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Yield the entries of consecutive ranges of indices as (indices, values, starts, ends), list after list.

    Few entries are one batch. Others are in the same buffers, which fit the cache. The
    ranges are between quantiles of the entries, so they have about equal numbers of
    entries however these are distributed.
    """
    whole = np.array([each.size for each in indices])
    if whole.sum() <= _BATCH:
        ends = whole.cumsum()
        yield (
            np.concatenate(indices),
            np.concatenate(values, dtype=dtype),
            ends - whole,
            ends,
        )
        return
    step = max(1, _BATCH // len(indices))
    edges = np.sort(np.concatenate([each[step::step] for each in indices]))[
        :: len(indices)
    ]
    cuts = np.array([[0, *each.searchsorted(edges), each.size] for each in indices])
    sizes = np.diff(cuts, axis=1)
    room = int(sizes.sum(axis=0).max())
    some_indices, some_values = np.empty(room, indices[0].dtype), np.empty(room, dtype)
    for j in range(edges.size + 1):
        ends = np.cumsum(sizes[:, j])
        here = slice(int(ends[-1]))
        parts = [slice(start, stop) for start, stop in cuts[:, j : j + 2].tolist()]
        np.concatenate(
            [each[part] for each, part in zip(indices, parts, strict=True)],
            out=some_indices[here],
        )
        np.concatenate(
            [each[part] for each, part in zip(values, parts, strict=True)],
            out=some_values[here],
        )
        yield some_indices[here], some_values[here], ends - sizes[:, j], ends


@jit
def _merge(indices_a, values_a, indices_b, values_b, indices, values):  # type: ignore[no-untyped-def]
    """Merge below and above the middle in one loop: a step depends on the one before it, not on the other half's.

    The upper half is written after the maximum size of the lower half, and moved down
    at the end.
    """
    pair, out = (indices_a, values_a, indices_b, values_b), (indices, values)
    end_a, end_b, one = (
        np.uint64(indices_a.size),
        np.uint64(indices_b.size),
        np.uint64(1),
    )
    half = end_a // np.uint64(2)
    start = _first_from(indices_b, indices_a[half]) if end_a else end_b
    middle = half + start
    a, b, upper_a, upper_b, done = np.uint64(0), np.uint64(0), half, start, np.uint64(0)
    while a < half and b < start and upper_a < end_a and upper_b < end_b:
        a, b = _merge_one(pair, out, a, b, done)
        upper_a, upper_b = _merge_one(pair, out, upper_a, upper_b, middle + done)
        done += one
    count = _merge_rest(pair, out, a, half, b, start, done)
    total = _merge_rest(pair, out, upper_a, end_a, upper_b, end_b, middle + done)
    if count < middle:
        for step in range(total - middle):
            # Before NumPy 2 the sum of a Python integer and a np.uint64 is a float.
            i = np.uint64(step)
            indices[count + i], values[count + i] = (
                indices[middle + i],
                values[middle + i],
            )
    return count + total - middle


@single
def _first_from(indices, index):  # type: ignore[no-untyped-def]
    """Return the position of the first of increasing indices that is at least `index`."""
    start, end = np.uint64(0), np.uint64(indices.size)
    while start < end:
        middle = (start + end) // np.uint64(2)
        if indices[middle] < index:
            start = middle + np.uint64(1)
        else:
            end = middle
    return start


@inner
def _merge_one(pair, out, a, b, place):  # type: ignore[no-untyped-def]
    """Write the next entry and return the next positions; without branches, which would be unpredictable."""
    (indices_a, values_a, indices_b, values_b), (indices, values) = pair, out
    index_a, index_b, value_a, value_b = (
        indices_a[a],
        indices_b[b],
        values_a[a],
        values_b[b],
    )
    indices[place] = index_a if index_a < index_b else index_b
    either = value_a if index_a < index_b else value_b
    values[place] = value_a + value_b if index_a == index_b else either
    return a + np.uint64(index_a <= index_b), b + np.uint64(index_b <= index_a)


@inner
def _merge_rest(pair, out, a, end_a, b, end_b, place):  # type: ignore[no-untyped-def]
    """Merge the entries between these positions, and return the next position of the output."""
    (indices_a, values_a, indices_b, values_b), (indices, values) = pair, out
    one = np.uint64(1)
    while a < end_a and b < end_b:
        a, b = _merge_one(pair, out, a, b, place)
        place += one
    while a < end_a:
        indices[place], values[place] = indices_a[a], values_a[a]
        a, place = a + one, place + one
    while b < end_b:
        indices[place], values[place] = indices_b[b], values_b[b]
        b, place = b + one, place + one
    return place


@jit
def _accumulate(indices, values, starts, ends, tile, words, out_indices, out_values):  # type: ignore[no-untyped-def]
    """Add concatenated lists; before and after, the tile holds -0.0, and its bitmap zeros."""
    count = np.uint64(0)
    base = _lowest(indices, starts, ends)
    while base >= 0:
        _add_tile(indices, values, starts, ends, base, tile, words)
        count = _take_tile(tile, words, base, out_indices, out_values, count)
        base = _lowest(indices, starts, ends)
    return count


@single
def _lowest(indices, starts, ends):  # type: ignore[no-untyped-def]
    """Return the lowest remaining index of the lists; -1 if none is left."""
    lowest = np.int64(-1)
    for p in range(starts.size):
        if starts[p] < ends[p] and (lowest < 0 or indices[starts[p]] < lowest):
            lowest = np.int64(indices[starts[p]])
    return lowest


@single
def _add_tile(indices, values, starts, ends, base, tile, words):  # type: ignore[no-untyped-def]
    """Add the entries in the tile that begins at `base`, list after list; move `starts` past them.

    As an unsigned difference, an index below the tile, which is out of order, is out of
    range like one above it.
    """
    one, size = np.uint64(1), np.uint64(tile.size)
    for p in range(starts.size):
        i, end = np.uint64(starts[p]), np.uint64(ends[p])
        while i < end and np.uint64(indices[i] - base) < size:
            place = np.uint64(indices[i] - base)
            tile[place] += values[i]
            words[place >> np.uint64(6)] |= one << (place & np.uint64(63))
            i += one
        starts[p] = i


@single
def _take_tile(tile, words, base, out_indices, out_values, count):  # type: ignore[no-untyped-def]
    """Append the entries of the tile in index order, and clear the tile; return the new count."""
    one, six = np.uint64(1), np.uint64(6)
    for h in range(words.size // WORD):
        head = nonzero(words, WORD * h)  # most words may be empty
        while head != np.uint64(0):
            at = (np.uint64(h) << six) + lowest(head)
            head &= head - one
            word = words[at]
            words[at] = np.uint64(0)
            while word != np.uint64(0):
                place = (at << six) + lowest(word)
                word &= word - one
                out_indices[count] = base + np.int64(place)
                out_values[count] = tile[place]
                tile[place] = -0.0
                count += one
    return count


@jit
def _divide(indices, values, positions, indices_a, values_a, indices_b, values_b):  # type: ignore[no-untyped-def]
    a, b = 0, 0
    for i in range(indices.size):
        indices_a[a], indices_b[b] = indices[i], indices[i]
        values_a[a], values_b[b] = values[i], values[i]
        here = a < positions.size and positions[a] == i
        a += here
        b += not here


@jit
def _gather(dense, indices, out):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        out[i] = dense[indices[i]]


@jit
def _count_up(out, first):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = first + i


@jit
def _write_parts(start, end, first, edges, parts, indices, values, are_zero):  # type: ignore[no-untyped-def]
    """Write the entries from number `first` on to [start, end), and zeros between them unless `are_zero`."""
    i = first
    for row in range(parts.size):
        origin, close = edges[row], edges[row + 1]
        low, high = larger(start, origin), smaller(end, close)
        if low >= high:
            continue
        out = array_at(values, parts[row], close - origin)
        cleared = view(out, low - origin, (low if are_zero else high) - origin)
        for j in range(cleared.size):
            cleared[j] = 0
        while i < indices.size and indices[i] < high:
            out[indices[i] - origin] = values[i]
            i += 1


@jit
def _scatter_add(dense, indices, values, sign):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        dense[indices[i]] += sign * values[i]


@jit
def _increases(indices):  # type: ignore[no-untyped-def]
    increases = True
    for i in range(1, indices.size):
        increases &= indices[i] > indices[i - 1]
    return increases


@jit
def _is_sound(indices, bits, mask, infinity):  # type: ignore[no-untyped-def]
    finite = True
    for i in range(bits.size):
        finite &= (bits[i] & mask) < infinity
    return finite and _increases(indices)


@jit
def _first_disorder(indices, length):  # type: ignore[no-untyped-def]
    previous = -1
    for i in range(indices.size):
        if indices[i] <= previous or indices[i] >= length:
            return i
        previous = indices[i]
    return -1
