"""A survey of a gradient: sums in one read, and the few values that the next steps are expected to need.

For speed 32 values at a time are added in the format of the data, and their sums in float64; the order is fixed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, as_writable, empty_together, jit
from mpicomp.kernels.host.instructions import lowest
from mpicomp.kernels.host.selection import Found, first_above
from mpicomp.kernels.host.statistics import blocks

_COLUMNS, _ROWS, _AT_ONCE = 32, 32, 8  # of a tile: each row has a bit in a word
_TILE = _COLUMNS * _ROWS
_COLUMN_BITS = np.uint32(1) << np.arange(_COLUMNS, dtype=np.uint32)
_GROUPS = 16  # of columns
_STRETCH, _LANES = 16, 64  # tiles of a stretch, and lanes to which the stretches are assigned in turn
_LINE, _STRIDE = 16, 1024  # consecutive values of a sample, and the distance from one such run to the next


class Sums(NamedTuple):
    """Sums over the magnitudes above a threshold, shifted by it; above 0 these are the non-zeros."""

    entries: float
    total: float  # sum of |x| - threshold; NaN or infinite if a value is, or if the sum overflows
    squares: float  # sum of (|x| - threshold)^2


class Survey(NamedTuple):
    """The result of one read of a vector; see `survey`.

    If `complete` is False there was not enough room for the values between the thresholds, or above the cut.
    """

    columns: Array  # float64 of shape (6, 32): for each column of the tiles the sums of all, then those above `high`
    low: float
    high: float
    cut: float
    shift: float  # the shift of the sums above `high`: `high`, rounded down to the format of the values
    between: Array  # float64: the magnitudes m with low < m <= high
    positions: Array  # intp, of the magnitudes above the cut; ordered by tiles, not within a tile
    values: Array  # the values at these positions
    complete: bool

    def all(self) -> Sums:
        """Return the sums over all magnitudes except zeros."""
        return Sums(*_folded(self.columns[:3]))

    def groups(self, *, beyond: bool = False) -> list[Sums]:
        """Return the sums of 16 groups of columns each, over all magnitudes or over those above `high`."""
        rows = self.columns[3:] if beyond else self.columns[:3]
        return [Sums(*group) for group in rows.reshape(3, -1, _GROUPS).sum(axis=1).T.tolist()]

    def beyond(self, threshold: float) -> Sums | None:
        """Return the sums over the magnitudes above a threshold; None unless it lies between `low` and `high`."""
        if not (self.complete and self.low <= threshold <= self.high):
            return None
        entries, total, squares = _folded(self.columns[3:])
        over = np.maximum(self.between - threshold, 0)
        step = self.shift - threshold  # no term is negative, but for rounding, so that no digits cancel
        squares += step * (2 * total + step * entries) + float(np.square(over).sum())
        return Sums(entries + np.count_nonzero(over), total + step * entries + float(over.sum()), squares)

    def exceeding(self, threshold: float) -> Found | None:
        """Return the result of `exceeding` for the whole vector; None if the threshold is below the cut."""
        if not (self.complete and self.cut <= threshold):
            return None
        form = FORMATS[self.values.dtype]
        positions, found = np.empty_like(self.positions), np.empty_like(self.values)
        floor = first_above(threshold, self.values.dtype)
        kept = _keep(
            self.positions, self.values.view(form.signed), form.mask, floor, positions, found.view(form.signed)
        )
        return positions[: int(kept)], found[: int(kept)]


def survey(values: Array, low: float = 0.0, high: float = 0.0, cut: float = math.inf, share: float = 0.01) -> Survey:
    """Return in one read the sums over all magnitudes of `values` and over those above `high`, and some of the values.

    values: as for `moments`. low, high, cut: thresholds, 0 <= low <= high <= cut. The magnitudes between the
    first two are stored, so that the sums above any threshold there are exact; so are, with positions, the values above
    the cut. share: the fraction of the values for which there is room.

    The order of the additions is fixed. In tiles of 1024 values column j of 32 adds the values j, j + 32, ... of the
    tile: eight at a time, then the four sums of eight, in the format of the values (float16 as float32), scaled by a
    power of two so that squares are in range. In float64 the tiles of a stretch of 16 are added in order, stretch s on
    lane s mod 64, on each lane in order; then the lanes by halves, 32, 16, ..., 1; then the columns by halves. A sum
    of float32 has a relative error of at most 1e-6, and of about 1e-8 / sqrt(n / 32) for random rounding errors.
    """
    values, thresholds = as_writable(values), (low, high, max(high, cut))
    return in_range(
        lambda scaled_by: _surveyed(values, thresholds, share, scaled_by),
        float(np.abs(values[:: max(1, values.size >> 10)]).max(initial=0)),
        lambda: float(np.abs(values).max(initial=0)),
    )


def in_range(read: Callable[[float], Survey], few: float, largest: Callable[[], float]) -> Survey:
    """Return a survey at a scale at which its squares are in range.

    read: returns a survey scaled by a magnitude. few: the largest of a few magnitudes; it is used unless it is zero, or
    so small that squares overflow. largest: returns the largest of all.
    """
    found = read(few) if few else None
    if found is None or not np.isfinite(found.columns[2]).all():
        most = largest()
        found = read(most) if found is None or math.isfinite(most) else found
    return found


def sample(values: Array) -> Array | None:
    """Return a 64th of the values, in tiles for `survey`, whose columns are separate samples; None if it is short."""
    tiles = values.size // (_STRIDE * _COLUMNS)
    if tiles < _LINE:
        return None
    taken = np.empty(tiles * _LINE * _COLUMNS, values.dtype)
    form = FORMATS[values.dtype]
    _take(as_writable(values).view(form.signed), taken.view(form.signed))
    return taken


class Limits(NamedTuple):
    """The numbers to compare and to scale values with, in the format in which they are added."""

    wide: np.dtype[Any]
    keys: Array  # a magnitude's bits, and the least keys above low, high and the cut
    shift: Any  # the greatest number up to `high`
    scale: Any  # a power of two


def limits_of(dtype: np.dtype[Any], thresholds: tuple[float, float, float], scaled_by: float) -> Limits:
    """Return the limits of a survey of values of a dtype, scaled by a magnitude."""
    wide = np.promote_types(dtype, np.float32)
    form = FORMATS[wide]
    keys = np.array([form.mask, *(first_above(each, wide) for each in thresholds)], form.signed)
    return Limits(wide, keys, (keys[2:3] - 1).view(wide)[0], _scale(scaled_by, wide))


def _surveyed(values: Array, thresholds: tuple[float, float, float], share: float, scaled_by: float) -> Survey:
    wide, limits, shift, scale = limits_of(values.dtype, thresholds, scaled_by)
    signed = FORMATS[wide].signed
    limits[3] -= 1
    state, sums, counts = np.zeros(7 * _COLUMNS, wide), np.zeros((_LANES + 1) * 4 * _COLUMNS), np.zeros(2 * _COLUMNS)
    room = int(share * values.size) + 2 * _TILE
    buffers, filled, first = empty_together(room, np.dtype(np.intp), signed, signed), np.zeros(3, np.int64), 0
    scaling, marks = np.array([scale, shift * scale], wide), state.view(signed)
    for tiles in blocks(values, _TILE):
        _survey(tiles.view(signed), first, limits, scaling, state, marks, sums, counts, *buffers, filled)
        first += tiles.size
    _fold_lanes(sums, first // (_TILE * _STRETCH))
    count, held, full = filled.tolist()
    positions, found, between = buffers
    columns = unscaled(np.append(sums[: 4 * _COLUMNS], counts), first, float(scale))
    found, inside = found[:count].view(wide).astype(values.dtype, copy=False), between[:held].view(wide)
    return Survey(columns, *thresholds, float(shift), inside.astype(np.float64), positions[:count], found, not full)


def unscaled(sums: Array, length: int, scale: float) -> Array:
    """Return the columns of a survey.

    sums: six for each column. The first four are scaled: of the magnitudes, their squares, the excess and its squares.
    The last two count nonzeros, and values not above `high`. length: with the zeros that pad the last tile.
    """
    absolute, squares, excess, excess_squares, nonzeros, not_above = sums.reshape(6, _COLUMNS)
    above = length // _COLUMNS - not_above
    with np.errstate(over="ignore"):
        first, second = np.array([absolute, excess]) / scale, np.array([squares, excess_squares]) / scale / scale
    return np.array([nonzeros, first[0], second[0], above, first[1], second[1]])


def _scale(largest: float, dtype: np.dtype[Any]) -> Any:
    """Return the power of two that scales a magnitude to between 1/2 and 1, within the range of the format."""
    limits = np.finfo(dtype)
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    return dtype.type(2.0 ** -min(max(exponent, 3 - limits.maxexp), -limits.minexp))


def _folded(columns: Array) -> list[float]:
    with np.errstate(over="ignore"):
        while columns.shape[1] > 1:
            half = columns.shape[1] // 2
            columns = columns[:, :half] + columns[:, half:]
    return columns[:, 0].tolist()  # type: ignore[no-any-return]


@jit
def _survey(bits, first, limits, scaling, partial, marks, sums, counts, positions, found, between, filled):  # type: ignore[no-untyped-def]
    """Survey the tiles of `bits`; `first` is the position of the first value.

    limits: mask, the least keys above low and high, the greatest up to the cut. scaling: the scale, and the shift times
    it. partial and marks: one buffer of zeros, as floating point and as integers: four rows of sums, then two of counts
    and one of hits. sums: those of the lanes, and of the present stretch. filled: how many values were found above the
    cut, and between, and whether there was no more room.
    """
    mask, low, high, cut, scale, shift = limits[0], limits[1], limits[2], limits[3], scaling[0], scaling[1]
    stretch, number = sums[4 * _COLUMNS * _LANES :], np.uint64(first // _TILE)
    for i in range(bits.size // _TILE):
        tile = bits[_TILE * i : _TILE * (i + 1)]
        _add_tile(tile, mask, low, high, cut, scale, shift, partial, marks)
        columns = np.uint64(_close_tile(partial, marks, stretch))
        number += np.uint64(1)
        if number % np.uint64(_STRETCH) == np.uint64(0):
            _close_stretch(sums, np.int64(number // np.uint64(_STRETCH)) - 1)
        if columns != np.uint64(0):
            if max(filled[0], filled[1]) + _TILE > positions.size:
                filled[2] = 1
            else:
                hits = marks[6 * _COLUMNS :]
                _write_down(tile, first + _TILE * i, limits, columns, hits, positions, found, between, filled)
    for j in range(2 * _COLUMNS):
        counts[j] += marks[j + 4 * _COLUMNS]
        marks[j + 4 * _COLUMNS] = 0


@jit
def _close_stretch(sums, number):  # type: ignore[no-untyped-def]
    """Add the sums of a stretch of tiles to those of its lane, and clear them."""
    lane = number % _LANES
    total, stretch = sums[4 * _COLUMNS * lane : 4 * _COLUMNS * (lane + 1)], sums[4 * _COLUMNS * _LANES :]
    for j in range(4 * _COLUMNS):
        total[j] += stretch[j]
        stretch[j] = 0


@jit
def _fold_lanes(sums, number):  # type: ignore[no-untyped-def]
    """Close the last stretch, and fold the lanes by halves into the first one."""
    _close_stretch(sums, number)
    half = 4 * _COLUMNS * _LANES // 2
    while half >= 4 * _COLUMNS:
        for j in range(half):
            sums[j] += sums[j + half]
        half //= 2


def _as_floating(key: Any) -> Any:
    """Return the number that has these bits; compiled by the overload below."""
    return key.view(f"f{key.itemsize}")


@overload(_as_floating)
def _compile_as_floating(key):  # type: ignore[no-untyped-def]
    if key.bitwidth == 32:
        return lambda key: np.int32(key).view(np.float32)
    return lambda key: np.int64(key).view(np.float64)


@jit
def _add_tile(tile, mask, low, high, cut, scale, shift, partial, marks):  # type: ignore[no-untyped-def]
    """Add a tile to the sums of its columns, eight at a time, and collect for each column a word of values to store.

    Keys are compared by the sign of their difference, without branches and masks, so that this compiles to vector
    instructions of the full width. The two buffers are one allocation, as at the same offsets of two pages they would
    cause false dependencies.
    """
    integer, zero = tile.dtype.type, partial.dtype.type(0)
    for row in range(0, _ROWS, _AT_ONCE):
        rows = tile[_COLUMNS * row : _COLUMNS * (row + _AT_ONCE)]
        for j in range(_COLUMNS):
            nonzeros, not_above, hits = integer(0), integer(0), marks[j + 6 * _COLUMNS]
            absolute = squares = excess = excess_squares = zero
            for r in range(_AT_ONCE):
                key = integer(rows[_COLUMNS * r + j] & mask)
                below_high = integer(key - high)
                nonzeros = integer(nonzeros + min(key, integer(1)))
                not_above = integer(not_above + (integer(1) if below_high < 0 else integer(0)))
                wanted = integer((below_high & ~integer(key - low)) | integer(cut - key))
                hits = integer(((hits >> integer(1)) & mask) | (wanted & ~mask))
                x = _as_floating(key) * scale
                over = x - shift
                over = over if over > zero else zero
                absolute += x
                squares += x * x
                excess += over
                excess_squares += over * over
            partial[j] += absolute
            partial[j + _COLUMNS] += squares
            partial[j + 2 * _COLUMNS] += excess
            partial[j + 3 * _COLUMNS] += excess_squares
            marks[j + 4 * _COLUMNS] += nonzeros
            marks[j + 5 * _COLUMNS] += not_above
            marks[j + 6 * _COLUMNS] = hits


@jit
def _close_tile(partial, marks, sums):  # type: ignore[no-untyped-def]
    """Add the sums of a tile to those of its stretch, clear them, and return the set of columns with hits."""
    for j in range(4 * _COLUMNS):
        sums[j] += partial[j]
        partial[j] = 0
    hits = marks[6 * _COLUMNS :]
    columns = np.uint32(0)
    for j in range(_COLUMNS):
        columns |= _COLUMN_BITS[j] if hits[j] != 0 else np.uint32(0)
    return columns


@jit
def _write_down(tile, first, limits, columns, hits, positions, found, between, filled):  # type: ignore[no-untyped-def]
    """Append each hit to both buffers, and count it in one; without branches, which would be unpredictable."""
    count, held = np.uint64(filled[0]), np.uint64(filled[1])
    unused = np.uint64(8 * hits.itemsize - _ROWS)
    while columns != np.uint64(0):
        column = lowest(columns)
        columns &= columns - np.uint64(1)
        rows = (np.uint64(hits[column]) >> unused) & np.uint64(0xFFFFFFFF)
        while rows != np.uint64(0):
            place = lowest(rows) * np.uint64(_COLUMNS) + column
            rows &= rows - np.uint64(1)
            key = tile[place] & limits[0]
            positions[count], found[count], between[held] = np.uint64(first) + place, tile[place], key
            above = np.uint64(key > limits[3])
            count += above
            held += np.uint64(1) - above
    filled[0], filled[1] = count, held


@jit
def _keep(positions, bits, mask, floor, kept, found):  # type: ignore[no-untyped-def]
    """Copy the entries at or above `floor` in order, by insertion before the few of its tile that an entry precedes."""
    count = 0
    for i in range(positions.size):
        if bits.dtype.type(bits[i] & mask) >= floor:
            place = count
            while place > 0 and kept[place - 1] > positions[i]:
                kept[place], found[place] = kept[place - 1], found[place - 1]
                place -= 1
            kept[place], found[place] = positions[i], bits[i]
            count += 1
    return count


@jit
def _take(values, taken):  # type: ignore[no-untyped-def]
    """Fill `taken` with 16 consecutive values from each stride, which are written to one column of a tile.

    One value for each column of a row is read before the others, so that the loads overlap.
    """
    seen = values.dtype.type(0)
    for i in range(taken.size // (_LINE * _COLUMNS)):
        for j in range(_COLUMNS):
            seen |= values[_STRIDE * (_COLUMNS * i + j) + _LINE - 1]
        for j in range(_COLUMNS):
            for k in range(_LINE):
                taken[_COLUMNS * (_LINE * i + k) + j] = values[_STRIDE * (_COLUMNS * i + j) + k]
    return seen
