"""The largest magnitudes of each segment of a vector, or of chunks of it: exact, in launches whose number is constant.

A table in device memory describes the segments. Chunks of up to 65536 values are
selected by a block of threads each, in one launch. Of longer ones a sample gives each a
threshold that slightly more than `k` magnitudes are expected to reach; one read marks
those with a bit, and each block counts its own; the marked ones are compacted, and a
radix selection among them is exact. The host waits once, for what is known of the
result. If a sample misled, all is repeated with thresholds that cannot.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from mpicomp.arrays.memory import addresses
from mpicomp.arrays.values import index_dtype
from mpicomp.kernels import NOTHING, Selected, Summands
from mpicomp.kernels.device.compiling import (
    MOST_BLOCKS,
    THREADS,
    Array,
    bits_of,
    in_tiles,
    launch,
    stream_of_now,
    table_on_device,
    upload,
    zeros,
)
from mpicomp.kernels.device.merging import divide
from mpicomp.kernels.device.selection import TILES
from mpicomp.kernels.host.bits import FORMATS, Format
from mpicomp.kernels.host.selection import Found

Column = np.ndarray[Any, Any]
# Indices and values, in arrays that may be longer; the number before each row and of
# all; and the report of the kernels.
_Chosen = tuple[Array, Array, Column, list[int]]

# Values of a chunk above which one block of threads would take too long.
_LONG = 1 << 16
# Several blocks share the candidates of a row that has more tiles than `_FEW` and than
# a `_PART`-th of all: so only few rows need words in which blocks count.
_FEW = 2
_PART = 64
# Values of the sample for the lower threshold, and the threads that read them.
_SAMPLE = 1 << 14
_SAMPLERS = 1024
# Threads of a block that selects from many values.
_SELECTORS = 512
_SIGMAS = 4
_DIGIT = 11
_NO_ADDENDS = np.zeros(1, np.int64)
_SAID = 3  # words: whether a value is not finite, the first position, the last one


def largest(values: Array, k: int, *, threads: int | None = None) -> Found:
    """Return the positions of the `k` largest magnitudes of `values`, in increasing order, and the values there.

    The same as `mpicomp.kernels.host.largest`. threads: ignored.
    """
    layout = layout_of([0, values.size], [k], [values.size], [k])
    found = _in_segments(Vector.of(values), layout, np.dtype(np.intp))
    return found.indices, found.values


def divide_largest(
    indices: Array, values: Array, k: int
) -> tuple[Array, Array, Array, Array]:
    """Return the entries with the `k` largest magnitudes, and the others, as `mpicomp.kernels.host` does."""
    return divide(indices, values, largest(values, k)[0])


def largest_in_segments(
    values: Array,
    bounds: Sequence[int],
    k: Sequence[int],
    chunk: Sequence[int],
    last: Sequence[int],
    *,
    summands: Summands | None = None,
    threads: int | None = None,
) -> Selected:
    """Return the largest of each chunk of each segment, as `mpicomp.kernels.host.largest_in_segments` does.

    threads: ignored. It is known of the entries whether they are finite.
    """
    layout = layout_of(bounds, k, chunk, last)
    index = index_dtype(values.size)
    return _in_segments(Vector.of(values, summands), layout, index)


class Vector(NamedTuple):
    """The values to select from; `out` if they are first overwritten by ``factor * source`` plus addends.

    factor: the bits of a float64. addends: the address of the addend of each segment; zero
    without a sum.
    """

    form: Format
    values: Array
    source: Array
    out: Array | None
    factor: int
    addends: tuple[int, ...]

    @classmethod
    def of(cls, values: Array, summands: Summands | None = None) -> "Vector":
        form = FORMATS[values.dtype]
        if summands is None:
            return cls(form, values, values, None, 0, (0,))
        addends = tuple(addresses(summands.parts))
        factor = bits_of(summands.decay, values.dtype)
        return cls(form, values, summands.residual, values, factor, addends)

    def addends_of(self, rows: Column, count: int) -> Column:
        """Return the addresses of the addends of some of `count` segments."""
        addends = np.array(self.addends, np.int64)
        return np.broadcast_to(addends, count)[rows]

    @property
    def limits(self) -> tuple[int, int, int]:
        """All bits of a magnitude, how many, and those of infinity."""
        return int(self.form.mask), self.form.width, int(self.form.infinity)


class Layout:
    """The segments of which entries are selected, and what follows from them: made once for equal arguments.

    columns: the bounds of all segments, k, chunk and last of `largest_in_segments`. Its
    arrays are not written to.
    """

    def __init__(self, *columns: tuple[int, ...]) -> None:
        edges, k, chunk, last = (np.array(each, np.int64) for each in columns)
        sizes = np.diff(edges)
        self.segments = sizes.size
        self.some = np.flatnonzero((sizes > 0) & (k + last > 0))
        self.first = edges[self.some]
        self.end = edges[self.some + 1]
        self.chunk = chunk[self.some]
        self.k = k[self.some]
        self.last = last[self.some]
        # Values of the longest chunk.
        self.longest = int(np.minimum(chunk, sizes)[self.some].max(initial=0))

    @cached_property
    def chunks(self) -> tuple[Column, int, Column]:
        """The rows of `Chunks`, the number of chunks, and the entries wanted before each segment and of all."""
        whole, rest = np.divmod(self.end - self.first, self.chunk)
        before = running_totals(whole + (rest > 0))
        room = running_totals(whole * self.k + np.where(rest, self.last, 0))
        columns = self.first, self.end, before, self.chunk, self.k, self.last, room
        return rows_of(*columns, _NO_ADDENDS), int(before[-1]), room

    def places(self, starts: Column) -> list[int]:
        """Return the number of entries before each segment, and of all, from those before each of `some`."""
        if self.some.size == self.segments:
            return starts.tolist()  # type: ignore[no-any-return]
        places = np.zeros(self.segments + 1, np.int64)
        places[self.some + 1] = starts[1:]
        return np.maximum.accumulate(places).tolist()  # type: ignore[no-any-return]

    @cached_property
    def parts(self) -> tuple[Column, Column, Column, "Rows"]:
        """The number of chunks before each segment, the segment of each chunk and its place there, and the chunks."""
        numbers = in_tiles(self.end - self.first, self.chunk)
        of = np.repeat(np.arange(self.first.size), numbers)
        before = running_totals(numbers)
        offset = (np.arange(of.size) - before[of]) * self.chunk[of]
        starts = self.first[of] + offset
        ends = np.minimum(starts + self.chunk[of], self.end[of])
        is_whole = ends - starts == self.chunk[of]
        wanted = np.where(is_whole, self.k[of], self.last[of])
        return before, of, offset, Rows(starts, ends, wanted)


class Rows:
    """Parts of a vector, the entries to select from each, and by which rank of a sample."""

    def __init__(self, first: Column, end: Column, k: Column) -> None:
        self.first = first
        self.end = end
        self.wanted = np.minimum(k, end - first)
        self.rank, self.room = _by_sample(end - first, self.wanted)


_layout = lru_cache(maxsize=256)(Layout)


def layout_of(bounds: Any, k: Any, chunk: Any, last: Any) -> Layout:
    """Return the layout for arguments of `largest_in_segments`."""
    return _layout(tuple(bounds), tuple(k), tuple(chunk), tuple(last))


def _in_segments(vector: Vector, layout: Layout, index: np.dtype[Any]) -> Selected:
    """Return the largest entries of each chunk of each segment, with indices of the dtype `index`."""
    if not layout.some.size:
        places = [0] * (layout.segments + 1)
        return Selected(cupy.empty(0, index), vector.values[:0], places, NOTHING)
    select = _in_chunks if layout.longest <= _LONG else _in_long_chunks
    indices, kept, starts, said = select(vector, layout, index)
    places = layout.places(starts)
    count = places[-1]
    if count < indices.size:
        indices = indices[:count]
        kept = kept[:count]
    bad, first, end = said
    facts = (-1, 0 if bad else -1, first, end) if count else NOTHING
    return Selected(indices, kept, places, facts)


def _in_chunks(vector: Vector, layout: Layout, index: np.dtype[Any]) -> _Chosen:
    """Select from each chunk by a block of threads."""
    _, chunks, room = layout.chunks
    wanted = int(room[-1])
    report, (said, missing) = zeros(_SAID, 1)
    positions = cupy.empty(wanted, index)
    kept = cupy.empty(wanted, vector.form.floating)
    is_long = layout.longest > TILES[kept.itemsize]
    launch(
        "largest_in_long_chunks" if is_long else "largest_in_chunks",
        [index, vector.form.keys],
        chunks,
        vector.source,
        vector.factor,
        vector.out,
        _chunks_on_device(stream_of_now(), layout, vector.addends),
        layout.some.size,
        *vector.limits,
        wanted,
        positions,
        kept,
        said,
        missing,
        threads=_SELECTORS if is_long else THREADS,
    )
    *facts, zeros_in_place = report.get().tolist()
    if zeros_in_place:
        return _without_zeros(positions, kept, room, facts[0])
    return positions, kept, room, facts


# Most steps pass arrays at the same addresses as the step before.
@lru_cache(maxsize=64)
def _chunks_on_device(stream: Any, layout: Layout, addends: tuple[int, ...]) -> Array:
    """Return the rows of `Chunks`, complete for what follows on `stream`."""
    rows = layout.chunks[0].copy()
    rows[:-1, -1] = np.broadcast_to(addends, layout.segments)[layout.some]
    return upload(rows)


def _without_zeros(positions: Array, kept: Array, room: Column, bad: int) -> _Chosen:
    """Return the entries without the zeros that stand for missing entries of a chunk."""
    form = FORMATS[kept.dtype]
    (filled,) = kept.view(form.keys).nonzero()
    starts = cupy.searchsorted(filled, table_on_device(room)).get()
    positions = positions[filled]
    ends = positions[:: max(1, positions.size - 1)].get().tolist() or [0]
    return positions, kept[filled], starts, [bad, ends[0], ends[-1]]


def _in_long_chunks(vector: Vector, layout: Layout, index: np.dtype[Any]) -> _Chosen:
    """Select from each chunk as from a segment of its own, by a threshold from a sample."""
    before, of, offset, rows = layout.parts
    own = vector.addends_of(layout.some, layout.segments)[of]
    if vector.out is not None:
        own = own + offset * vector.values.itemsize
    candidates = Candidates.of(vector, rows.first, rows.end, own, index)
    room = rows.room
    chosen, floors, reached = _select(candidates, rows.wanted, rows.rank, room, None)
    is_short = (reached < rows.wanted) & (floors > 1)
    if (is_short | (reached > room)).any():  # a sample misled
        floors = np.where(is_short, 1, floors)
        sizes = rows.end - rows.first
        room = np.where(is_short, sizes, np.maximum(room, reached))
        again = candidates.without_sum()
        chosen, _, _ = _select(again, rows.wanted, rows.rank, room, floors)
    positions, kept, places, said = chosen
    return positions, kept, places[before], said


def _by_sample(sizes: Column, k: Column) -> tuple[Column, Column]:
    """Return for each row the rank of the threshold in its sample, 0 for none, and room for values that reach it."""
    share = _SAMPLE * k / sizes
    rank = np.ceil(share + _SIGMAS * (1 + np.sqrt(share)))
    most = np.ceil((rank + _SIGMAS * np.sqrt(rank)) * sizes / _SAMPLE)
    is_sample = sizes <= _SAMPLE  # all values
    rank = np.where(is_sample, k, np.where(rank < _SAMPLE, rank, 0))
    room = np.where(is_sample | (rank == 0), sizes, np.minimum(sizes, most))
    return rank.astype(np.int64), room.astype(np.int64)


class Candidates(NamedTuple):
    """The rows of a selection, each a part of the vector: its bounds, and the address of its addend."""

    vector: Vector
    first: Column
    end: Column
    addend: Column
    index_dtype: np.dtype[Any]
    tiles: Column  # the number before each row, and of all

    @classmethod
    def of(
        cls,
        vector: Vector,
        first: Column,
        end: Column,
        addend: Column,
        index: np.dtype[Any],
    ) -> "Candidates":
        """Return rows with their tiles, which begin at a multiple of 16 bytes."""
        itemsize = vector.values.itemsize
        begin = addresses([vector.values])[0] // itemsize + first
        sizes = end - first + begin % (16 // itemsize)
        tiles = running_totals(in_tiles(sizes, TILES[itemsize]))
        return cls(vector, first, end, addend, index, tiles)

    def without_sum(self) -> "Candidates":
        """Return the same rows of a sum that was written."""
        values = self.vector.values
        vector = self.vector._replace(source=values, out=None)
        return self._replace(vector=vector, addend=_NO_ADDENDS)

    def table(self, *columns: Column) -> Array:
        """Return the rows on the device. columns: jobs before, entries, ranks, and places of counts, if needed."""
        jobs, k, rank, digits = columns or [_NO_ADDENDS] * 4
        bounds = self.first, self.end, self.tiles
        return table_of(*bounds, jobs, k, rank, self.addend, digits)

    def compacted(
        self,
        floors: Array | int,
        room: int,
        starts: int,
        rows: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return room with indices and bits of what reaches the floor of its row; the sum is written first.

        starts: the address that gets the number before each row, and of all.
        """
        vector = self.vector
        keys = vector.form.keys
        table = self.table() if rows is None else rows
        count = self.first.size
        tiles = int(self.tiles[-1])
        share = in_tiles(tiles, min(MOST_BLOCKS, tiles))
        blocks = in_tiles(tiles, share)
        marks = cupy.empty(tiles * THREADS, np.uint16)
        counts = cupy.empty(blocks, np.uint32)
        args = table, count, vector.limits[0], floors, marks, counts, share
        if vector.out is None:
            launch("mark", [keys], blocks, vector.values, *args)
        else:
            summed = vector.source, vector.factor, vector.out
            launch("add_and_mark", [keys], blocks, *summed, *args)
        found = cupy.empty(room, self.index_dtype), cupy.empty(room, keys)
        dtypes = [self.index_dtype, keys]
        given = vector.values, marks, table, count, counts, share, *found, room, starts
        launch("compact_marked", dtypes, blocks, *given)
        return found


def _select(
    candidates: Candidates, k: Column, rank: Column, room: Column, floors: Column | None
) -> tuple[_Chosen, Column, Column]:
    """Return the entries, the thresholds of the candidates, and how many reached them.

    floors: thresholds; None to take those of a rank in a sample. room: for candidates.
    """
    vector = candidates.vector
    keys = vector.form.keys
    mask, width, infinity = vector.limits
    count = k.size
    jobs, digits = _jobs(room, vector.form)
    places = running_totals(digits)
    before = running_totals(jobs)
    rows = candidates.table(before, k, rank, places)
    whole, (said, starts, thresholds, ticket, counts) = zeros(
        _SAID, count + 1, count, 1, max(1, int(places[-1]))
    )
    if floors is None:
        args = vector.source, vector.factor, rows, mask, width, thresholds
        launch("sample_floors", [keys], count, *args, threads=_SAMPLERS)
    most = int(room.sum())
    least = thresholds if floors is None else upload(floors)
    found = candidates.compacted(least, most, starts, rows)
    entries = int(k.sum())
    positions = cupy.empty(entries, candidates.index_dtype)
    kept = cupy.empty(entries, vector.form.floating)
    limits = mask, width, infinity
    given = *found, most, rows, count, starts, *limits, ticket, counts, positions, kept
    dtypes = [positions.dtype, keys]
    number = int(before[-1])
    launch("largest_in_rows", dtypes, number, *given, said, threads=_SELECTORS)
    words = whole[: _SAID + 2 * count + 1].get()
    reached = np.diff(words[_SAID : _SAID + count + 1]).astype(np.int64)
    ends = running_totals(np.minimum(reached, k))
    chosen = positions, kept, ends, words[:_SAID].tolist()
    return chosen, words[_SAID + count + 1 :], reached


def _jobs(room: Column, form: Format) -> tuple[Column, Column]:
    """Return how many blocks select from the candidates of each row, and in how many words several count digits."""
    tiles = in_tiles(room, TILES[form.keys.itemsize] * _SELECTORS // THREADS)
    digits = in_tiles(form.width, _DIGIT)
    is_shared = tiles > max(_FEW, int(tiles.sum()) // _PART)
    words = digits * ((1 << _DIGIT) + 1) + 2 * tiles
    return np.where(is_shared, tiles * (digits + 1), 1), np.where(is_shared, words, 0)


def running_totals(counts: Column) -> Column:
    """Return the sum of the counts before each, and at last of all."""
    return np.append(0, np.cumsum(counts))


def rows_of(*columns: Column) -> Column:
    """Return columns as rows; a column with one more number than there are rows has it in a row behind the last."""
    table = np.zeros((columns[0].size + 1, len(columns)), np.int64)
    for number, column in enumerate(columns):
        table[: column.size, number] = column
    return table


def table_of(*columns: Column) -> Array:
    """Return `rows_of` columns on the device."""
    return table_on_device(rows_of(*columns))
