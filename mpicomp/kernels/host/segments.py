"""The largest magnitudes of each segment of a vector, or of each chunk of each segment: exact, in one read from memory.

A short chunk stays in the cache while it is selected from. The magnitudes at or above a
floor are compacted, 64 values compared at a time, and the selection is among those. The
floor is a little below the threshold of the chunk before, or in the first chunk of a
segment, whose values may have another scale, that of a sample. How much below depends
on the number of candidates in the chunk before. If fewer values reach the floor than
are wanted, the compaction is repeated with a lower one, and at last with all values
that are not zero. The result does not depend on the floor.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.arrays.values import index_dtype
from mpicomp.kernels import Selected, Summands
from mpicomp.kernels.host.bits import FORMATS, Format, as_writable
from mpicomp.kernels.host.compiled import inner, jit, loop
from mpicomp.kernels.host.fused import add_largest
from mpicomp.kernels.host.instructions import WORD, array_at, larger, smaller, view
from mpicomp.kernels.host.selection import (
    Found,
    compact,
    joined,
    keep_at,
    largest,
)
from mpicomp.kernels.host.streaming import (
    add_and_compact,
    add_parts,
    addresses,
)
from mpicomp.kernels.host.transforms import hadamard
from mpicomp.threads import in_pieces

# Values of the longest segment from which on a pass for each segment is as fast as one
# for all.
_ALONE = 1 << 20
# Values of a chunk below which a sample costs more than it saves.
_SAMPLED = 1 << 10
# Values of a sample, at most; it has a quarter of the chunk.
_SAMPLE = 1 << 10
# Standard deviations of a sample by which a floor admits more values than are wanted: at
# first, and where too few values reached that floor.
_SHARP = 1.5
_SAFE = 5.0
# Consecutive values of a sample, which are loaded together.
_RUN = 16
# Square roots of k by which the candidates exceed k: below the first the next floor is
# lowered, above the second it is raised.
_SCARCE = 6
_PLENTY = 18


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
    """Return the largest magnitudes of each chunk of each segment.

    values, ties, zeros, NaN and infinities: as for `largest`. bounds: the first
    position of each segment, and the length. k, chunk, last: for each segment the
    number selected from a chunk of that many consecutive values, k <= chunk, and the
    number selected from a shorter chunk at its end; without summands both may be 0. A
    segment of one chunk is selected from as a whole. summands: of what `values` is
    first overwritten by, in the same pass. threads: as for `largest`; a segment of
    several chunks is divided among them.
    """
    sizes = [end - first for first, end in pairwise(bounds)]
    if len(sizes) == 1 or max(sizes, default=0) >= _ALONE:
        rows = [*zip(sizes, k, chunk, last, strict=True)]
        if all([size <= most for size, _, most, _ in rows]):
            wanted = [few if size == most else rest for size, few, most, rest in rows]
            return _one_by_one(values, bounds, wanted, summands, threads)
    edges = np.asarray(bounds, np.int64)
    lengths = np.asarray(sizes, np.int64)
    form = FORMATS[values.dtype]
    if summands is not None and summands.chunk > 1:
        a, scale, parts, length = summands
        for (first, end), part in zip(pairwise(bounds), parts, strict=True):
            onto = a[first:end], scale
            hadamard(part, values[first:end], length, onto=onto, threads=threads)
        summands = None
    elif summands is not None and values.dtype == np.float16:
        add_parts(summands.residual, summands.decay, summands.parts, values)
        summands = None
    # The most entries before each segment and of all.
    counts = np.append(0, np.cumsum(lengths // chunk * k + last))
    segments, longest = (
        _segments(edges, k, chunk, last, summands),
        int(np.minimum(chunk, lengths).max(initial=1)),
    )
    vector = as_vector(values, form, summands)
    # A floor is below the last threshold by at most a quarter of a power of two.
    slack = 1 << max(0, np.finfo(values.dtype).nmant - 2)

    def selected(start: int, end: int) -> Found:
        first, beyond = np.searchsorted(edges[:-1], (start, end), side="right") - (1, 0)
        # There is one more element, which `keep_at` may write.
        room = int(counts[beyond] - counts[max(first, 0)]) + 1
        positions, kept = np.empty(room, np.intp), np.empty(room, form.signed)
        buffers = _buffers(longest + WORD, vector)
        count = int(
            _largest(vector, segments, start, end, slack, buffers, positions, kept)
        )
        return positions[:count], kept[:count]

    step = longest if len(segments) == 1 else 1
    positions, found = joined(in_pieces(selected, values.size, threads, step=step))
    return _selected(positions, found.view(values.dtype), edges)


def _selected(positions: Array, values: Array, edges: Array) -> Selected:
    places = positions.searchsorted(edges).tolist()
    indices = positions.astype(index_dtype(int(edges[-1])), copy=False)
    return Selected(indices, values, places)


def _one_by_one(
    values: Array,
    bounds: Sequence[int],
    counts: Sequence[int],
    summands: Summands | None,
    threads: int | None,
) -> Selected:
    """Select from one segment after the other; several threads share each."""
    all_positions = []
    all_values = []
    for segment, (first, end) in enumerate(pairwise(bounds)):
        own = values[first:end]
        if not counts[segment]:
            positions = np.empty(0, np.intp)
            found = own[:0]
        elif summands is None:
            positions, found = largest(own, counts[segment], threads=threads)
        else:
            positions, found = add_largest(
                summands.residual[first:end],
                summands.parts[segment],
                own,
                counts[segment],
                scale=summands.decay,
                chunk=summands.chunk,
                threads=threads,
            )
        all_positions.append(positions + first if first else positions)
        all_values.append(found)
    if len(counts) == 1:
        indices = positions.astype(index_dtype(bounds[-1]), copy=False)
        return Selected(indices, found, [0, positions.size])
    return _selected(
        np.concatenate(all_positions), np.concatenate(all_values), np.asarray(bounds)
    )


class _Vector(NamedTuple):
    """The values to select from; the sum of ``factor * a`` and parts of another vector may be written to them first."""

    values: Array  # float32 or float64; empty for float16, to which no sum is written
    bits: Array
    mask: Any
    width: int
    a: Array
    factor: Any


_SEGMENT = np.dtype(
    [(name, np.int64) for name in ("first", "end", "k", "chunk", "last", "address")]
)


def _segments(
    bounds: Array, k: Any, chunk: Any, last: Any, summands: Summands | None
) -> Array:
    """Return a record for each segment, with the address of its part of the second summand, or 0."""
    segments = np.zeros(bounds.size - 1, _SEGMENT)
    segments["first"], segments["end"] = bounds[:-1], bounds[1:]
    segments["k"], segments["chunk"], segments["last"] = k, chunk, last
    if summands is not None:
        segments["address"] = addresses(summands.parts)
    return segments


def as_vector(values: Array, form: Format, summands: Summands | None) -> _Vector:
    """Return the arguments of a kernel that reads values, or a sum that it writes first."""
    bits = as_writable(values).view(form.signed)
    if summands is not None:
        return _Vector(
            values,
            bits,
            form.mask,
            form.width,
            as_writable(summands.residual),
            values.dtype.type(summands.decay),
        )
    floats = (
        as_writable(values) if values.dtype != np.float16 else np.empty(0, np.float32)
    )
    return _Vector(floats, bits, form.mask, form.width, floats, floats.dtype.type(1))


def _buffers(longest: int, vector: _Vector) -> tuple[Array, ...]:
    """Return room for sums of a sample and their bits, and for places, values, bits and keys of candidates.

    longest: 64 more than a chunk has.
    """
    signed, floating = vector.bits.dtype, vector.values.dtype
    sums, candidates = np.empty(_SAMPLE, floating), np.empty(longest, floating)
    if signed.itemsize == floating.itemsize:
        sample, bits = sums.view(signed), candidates.view(signed)
    else:  # Kernels read the bits of float16 alone.
        sample, bits = np.empty(_SAMPLE, signed), np.empty(longest, signed)
    places, keys = np.empty(longest, np.intp), np.empty(longest, signed)
    return sums, sample, places, candidates, bits, keys


@jit
def _largest(vector, segments, start, end, slack, buffers, positions, kept):  # type: ignore[no-untyped-def]
    """Select from the chunks that begin in [start, end), and return the number of entries.

    slack: the most by which a floor is below the threshold of the chunk before; at
    `safe`, it is. `margin` follows the number of candidates.
    """
    bits, values, a = vector.bits, vector.values, vector.a
    sums, sample = buffers[:2]
    places, candidate_values = buffers[2:4]
    candidates, keys = buffers[4:]
    mask, width, integer = vector.mask, vector.width, bits.dtype.type
    margin, count, sampled = slack, np.uint64(0), view(sample, 0, 0)
    for segment in segments:
        origin, close, address = segment["first"], segment["end"], segment["address"]
        if close <= start or origin >= end or segment["k"] + segment["last"] == 0:
            continue
        chunk = larger(1, smaller(segment["chunk"], close - origin))
        floor = safe = integer(1)
        skipped = larger(0, -(-(start - origin) // chunk))  # chunks of an earlier piece
        for first in range(origin + skipped * chunk, smaller(close, end), chunk):
            beyond = smaller(first + chunk, close)
            size = beyond - first
            k = segment["k"] if size == segment["chunk"] else segment["last"]
            one, piece = view(a, first, beyond), view(bits, first, beyond)
            # This is an array of one part only if there are summands.
            b = array_at(values, address + (first - origin) * values.itemsize, size)
            if floor == integer(1) and size >= _SAMPLED:
                some = smaller(_SAMPLE, size // 4)
                if address != 0:
                    _sample_sums(one, vector.factor, b, view(sums, 0, some))
                else:
                    _sample(piece, view(sample, 0, some))
                sampled = view(sample, 0, some)
                floor = _foreseen(sampled, mask, width, k, size, _SHARP, keys)
                safe = integer(0)  # not known yet
            if address == 0:
                more, _ = compact(piece, mask, floor, first, places, candidates)
            else:
                out = view(values, first, beyond)
                summed = one, vector.factor, b, out, piece, mask
                given = floor, first, places, candidate_values
                more, _ = add_and_compact(*summed, *given)
            found = np.int64(more)
            margin = _next_margin(margin, slack, found, k)
            while found < k and floor > integer(1):
                if safe == integer(0):
                    safe = _foreseen(sampled, mask, width, k, size, _SAFE, keys)
                floor, safe = safe, integer(1)
                more, _ = compact(piece, mask, floor, first, places, candidates)
                found = np.int64(more)
            threshold, ties = integer(0), np.int64(0)
            entries = view(places, 0, found), view(candidates, 0, found)
            if found > k:
                threshold, ties = _kth_largest(entries[1], mask, width, k, keys)
            kth = mask, integer(threshold), ties
            count = keep_at(*entries, *kth, positions, kept, count)
            floor = integer(larger(1, np.int64(threshold) - margin))
            safe = integer(larger(1, np.int64(threshold) - slack))
    return count


@inner
def _next_margin(margin, slack, found, k):  # type: ignore[no-untyped-def]
    """Return by how much the next floor is below this threshold: more after few candidates, but at most `slack`."""
    if found < k + _SCARCE * np.sqrt(k):
        return smaller(slack, 2 * margin)
    if found > k + _PLENTY * np.sqrt(k):
        return larger(1, margin // 2)
    return margin


@inner
def _sample(bits, sample):  # type: ignore[no-untyped-def]
    stride = bits.size // sample.size
    for i in range(0, sample.size, _RUN):
        for j in range(smaller(_RUN, sample.size - i)):
            sample[i + j] = bits[i * stride + j]


@inner
def _sample_sums(a, factor, b, some):  # type: ignore[no-untyped-def]
    stride = a.size // some.size
    for i in range(0, some.size, _RUN):
        for j in range(smaller(_RUN, some.size - i)):
            some[i + j] = factor * a[i * stride + j] + b[i * stride + j]


@inner
def _foreseen(sample, mask, width, k, size, sigmas, keys):  # type: ignore[no-untyped-def]
    """Return a magnitude that a few more than `k` of `size` are expected to reach; 1 if that would be nearly all.

    sigmas: standard deviations of the sample by which they are more.
    """
    share = sample.size * k / size
    rank = np.int64(share + sigmas * (1 + np.sqrt(share))) + 1
    if 2 * rank > sample.size:
        return sample.dtype.type(1)
    threshold, _ = _kth_largest(sample, mask, width, rank, keys)
    return sample.dtype.type(larger(1, np.int64(threshold)))


@inner
def _kth_largest(bits, mask, width, k, keys):  # type: ignore[no-untyped-def]
    """Return a threshold, and how many ties with it are among the `k` largest magnitudes besides all above it.

    One bit is found in each pass, the highest first: for few values in the cache, no
    branch is faster than few passes. Bits that all magnitudes have in common need none,
    and the search ends where `k` are at or above a bound.
    """
    every, some = keys.dtype.type(mask), keys.dtype.type(0)
    for i in range(bits.size):
        key = bits[i] & mask
        keys[i] = key
        every &= key
        some |= key
    end = (bits.size + WORD - 1) // WORD * WORD
    # The last word is padded with zeros, which are below every threshold.
    for i in range(bits.size, end):
        keys[i] = 0
    threshold, above = keys.dtype.type(0), 0
    for bit in range(width - 1, -1, -1):
        place = keys.dtype.type(keys.dtype.type(1) << keys.dtype.type(bit))
        if every & place or not some & place:
            threshold |= every & place
            continue
        raised = keys.dtype.type(threshold | place)
        reached = _count_reaching(view(keys, 0, end), raised)
        if reached == k:
            return keys.dtype.type(raised - 1), 0
        if reached > k:
            threshold = raised
        else:
            above = reached  # In the end it counts the keys above the threshold.
    return threshold, k - above


@loop
def _count_reaching(keys, floor):  # type: ignore[no-untyped-def]
    count = np.int32(0)
    for i in range(keys.size):
        count = np.int32(count + np.int32(keys[i] >= floor))
    return count
