"""The largest magnitudes of each segment of a vector, or of each chunk of each segment: exact, in one read from memory.

A short chunk stays in the cache while it is selected from. The magnitudes at or above a floor are compacted, 64 values
compared at a time, and the selection is among those. The floor is a little below the threshold of the chunk before, or
in the first chunk of a segment, whose values may have another scale, that of a sample. How much below depends on the
number of candidates in the chunk before. If fewer values reach the floor than are wanted, the compaction is repeated
with a lower one, and at last with all values that are not zero. The result does not depend on the floor.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import FORMATS, Format, as_writable, jit
from mpicomp.kernels.host.fused import _add_and_compact
from mpicomp.kernels.host.instructions import WORD, array_at, bare
from mpicomp.kernels.host.selection import Found, compact, joined, keep_at
from mpicomp.kernels.host.streaming import add_parts, addresses
from mpicomp.threads import in_pieces

_SAMPLED = 1 << 10  # values; in shorter chunks a sample costs more than it saves
_SAMPLE = 1 << 10  # values at most: a quarter of the chunk
_SHARP, _SAFE = 1.5, 5.0  # standard deviations of a sample by which a floor lets more values through than are wanted
_RUN = 16  # of them are consecutive: they are loaded together
_SCARCE, _PLENTY = 6, 18  # square roots of k: candidates beyond k below and above which the next floor is moved

Summands = tuple[Array, float, Sequence[Array]]  # a vector, its factor, and a part of another vector for each segment


def largest_in_segments(
    values: Array,
    bounds: Sequence[int],
    k: Sequence[int],
    chunk: Sequence[int],
    last: Sequence[int],
    *,
    summands: Summands | None = None,
    threads: int | None = None,
) -> Found:
    """Return the positions of the largest magnitudes of each chunk, in increasing order, and the values there.

    values, ties, zeros, NaN and infinities: as for `largest`. bounds: the first position of each segment, and the
    length. k, chunk, last: for each segment the number selected from a chunk of that many consecutive values, k <=
    chunk, and the number selected from a shorter chunk at its end, at least 1. A segment of one chunk is selected from
    as a whole. summands: (a, scale, parts), 1-d contiguous arrays of the dtype of `values`, which is first overwritten
    by ``scale * a + b``, in the same pass, where the parts are b segment by segment; the product is rounded before it
    is added. threads: as for `largest`; a segment of several chunks is divided among them.
    """
    form = FORMATS[values.dtype]
    if summands is not None and values.dtype == np.float16:
        add_parts(*summands, values)
        summands = None
    bits = as_writable(values).view(form.signed)
    slack = 1 << max(0, np.finfo(values.dtype).nmant - 2)  # of a floor, at most: a quarter of a power of two
    edges = np.asarray(bounds, np.int64)
    each, size, rest = (np.asarray(given, np.int64) for given in (k, chunk, last))
    lengths = np.diff(edges)
    each, size = (
        np.where(size > lengths, rest, each),
        np.minimum(size, lengths).clip(1),
    )  # a segment of one chunk is whole
    most = int(size.max(initial=0)) + WORD
    counts = np.append(0, np.cumsum(lengths // size * each + rest))  # at most so many, segment by segment
    adding = _addends(values, summands)

    def selected(start: int, end: int) -> Found:
        first, beyond = np.searchsorted(edges[:-1], (start, end), side="right") - (1, 0)
        room = int(counts[beyond] - counts[max(first, 0)]) + 1  # one more element, for `keep_at`
        positions, kept = np.empty(room, np.intp), np.empty(room, form.signed)
        places, keys = np.empty(most, np.intp), np.empty(most, form.signed)
        some, candidates = np.empty(_SAMPLE, adding[0].dtype), np.empty(most, adding[0].dtype)
        rows = edges, each, size, rest
        work = some, _bits_of(some, form), places, candidates, _bits_of(candidates, form), keys
        span = start, end, slack
        count = int(_largest(bits, form.mask, form.width, *span, *adding, *rows, *work, positions, kept))
        return positions[:count], kept[:count]

    step = int(size[0]) if len(each) == 1 else 1
    positions, found = joined(in_pieces(selected, bits.size, threads, step=step))
    return positions, found.view(values.dtype)


def _bits_of(values: Array, form: Format) -> Array:
    """Return the bits of a buffer; of float16, for which kernels take no values, a buffer of its own."""
    return (
        values.view(form.signed)
        if values.dtype.itemsize == form.signed.itemsize
        else np.empty(values.size, form.signed)
    )


def _addends(values: Array, summands: Summands | None) -> tuple[Array, Array, Any, Array]:
    """Return the sum's vector, its first summand, the factor, and the addresses of the parts.

    Without summands there are no addresses.
    """
    if summands is None:
        floats = as_writable(values) if values.dtype != np.float16 else np.empty(0, np.float32)
        return floats, floats, floats.dtype.type(1), np.empty(0, np.int64)
    a, scale, parts = summands
    return values, as_writable(a), values.dtype.type(scale), addresses(parts)


@jit
def _largest(  # type: ignore[no-untyped-def]
    bits,
    mask,
    width,
    start,
    end,
    slack,
    values,
    a,
    factor,
    starts,
    edges,
    ks,
    chunks,
    lasts,
    some,
    sample,
    places,
    candidate_values,
    candidates,
    keys,
    positions,
    kept,
):
    """Select from the chunks that begin in [start, end), and return the number of entries.

    starts: the addresses of the parts; none without summands. slack: the most by which a floor is below the threshold
    of the chunk before; at `safe`, it is. sample, candidates: the bits of `some`, `candidate_values`. places,
    candidates, keys: buffers for 64 values more than a chunk has.
    """
    bits, values, a, positions, kept = bare(bits), bare(values), bare(a), bare(positions), bare(kept)
    places, candidates, candidate_values, keys = bare(places), bare(candidates), bare(candidate_values), bare(keys)
    integer, most = bits.dtype.type, slack
    count = np.uint64(0)
    for row in range(ks.size):
        low, high, chunk = edges[row], edges[row + 1], chunks[row]
        if high <= start or low >= end:
            continue
        floor = safe = integer(1)
        address = starts[row] if starts.size else np.int64(0)
        skipped = max(0, -(-(start - low) // chunk))  # chunks of an earlier piece
        for first in range(low + skipped * chunk, min(high, end), chunk):
            beyond = min(first + chunk, high)
            size = beyond - first
            wanted = ks[row] if size == chunk else lasts[row]
            if floor == integer(1) and size >= _SAMPLED:
                taken = min(_SAMPLE, size // 4)
                if address != 0:
                    b = array_at(values, address, high - low)
                    _sample_sums(a[first:beyond], factor, b[first - low : beyond - low], some[:taken])
                else:
                    _sample(bits[first:beyond], sample[:taken])
                floor = _foreseen(sample[:taken], mask, width, wanted, size, _SHARP, keys)
                safe = integer(0)  # not known yet
            if address == 0:
                found = np.int64(compact(bits[first:beyond], mask, floor, first, places, candidates)[0])
            else:
                b = array_at(values, address, high - low)[first - low : beyond - low]
                piece, out = bits[first:beyond], values[first:beyond]
                rest = piece, mask, floor, first, places, candidate_values
                found = np.int64(_add_and_compact(a[first:beyond], factor, b, out, *rest)[0])
            if found < wanted + _SCARCE * np.sqrt(wanted):
                slack = min(most, 2 * slack)
            elif found > wanted + _PLENTY * np.sqrt(wanted):
                slack = max(1, slack // 2)
            while found < wanted and floor > integer(1):
                if safe == integer(0):
                    safe = _foreseen(sample[:taken], mask, width, wanted, size, _SAFE, keys)
                floor, safe = safe, integer(1)
                found = np.int64(compact(bits[first:beyond], mask, floor, first, places, candidates)[0])
            threshold, ties = integer(0), 0
            if found > wanted:
                threshold, ties = _kth_largest(candidates[:found], mask, width, wanted, keys)
            count, _ = keep_at(places[:found], candidates[:found], mask, threshold, ties, positions, kept, count)
            floor, safe = integer(max(1, np.int64(threshold) - slack)), integer(max(1, np.int64(threshold) - most))
    return count


@jit
def _sample(bits, sample):  # type: ignore[no-untyped-def]
    stride = bits.size // sample.size
    for i in range(0, sample.size, _RUN):
        for j in range(min(_RUN, sample.size - i)):
            sample[i + j] = bits[i * stride + j]


@jit
def _sample_sums(a, factor, b, some):  # type: ignore[no-untyped-def]
    stride = a.size // some.size
    for i in range(0, some.size, _RUN):
        for j in range(min(_RUN, some.size - i)):
            some[i + j] = factor * a[i * stride + j] + b[i * stride + j]


@jit
def _foreseen(sample, mask, width, k, size, sigmas, keys):  # type: ignore[no-untyped-def]
    """Return a magnitude that a few more than `k` of `size` are expected to reach; 1 if that would be nearly all.

    sigmas: standard deviations of the sample by which they are more.
    """
    share = sample.size * k / size
    rank = np.int64(share + sigmas * (1 + np.sqrt(share))) + 1
    if 2 * rank > sample.size:
        return sample.dtype.type(1)
    threshold, _ = _kth_largest(sample, mask, width, rank, keys)
    return sample.dtype.type(max(1, np.int64(threshold)))


@jit
def _kth_largest(bits, mask, width, k, keys):  # type: ignore[no-untyped-def]
    """Return a threshold, and how many ties with it are among the `k` largest magnitudes besides all above it.

    One bit is found in each pass, the highest first: for few values in the cache, no branch is faster than few passes.
    Bits that all magnitudes have in common need none, and the search ends where `k` are at or above a bound.
    """
    every, some = keys.dtype.type(mask), keys.dtype.type(0)
    for i in range(bits.size):
        key = bits[i] & mask
        keys[i] = key
        every &= key
        some |= key
    end = (bits.size + WORD - 1) // WORD * WORD
    keys[bits.size : end] = 0  # below every bound: the passes have no remainder
    threshold, above = keys.dtype.type(0), 0
    for bit in range(width - 1, -1, -1):
        place = keys.dtype.type(keys.dtype.type(1) << keys.dtype.type(bit))
        if every & place or not some & place:
            threshold |= every & place
            continue
        raised = keys.dtype.type(threshold | place)
        reached = _count_reaching(keys[:end], raised)
        if reached == k:
            return keys.dtype.type(raised - 1), 0
        if reached > k:
            threshold = raised
        else:
            above = reached  # in the end: the keys above the threshold
    return threshold, k - above


@jit
def _count_reaching(keys, floor):  # type: ignore[no-untyped-def]
    count = np.int32(0)
    for i in range(keys.size):
        count = np.int32(count + np.int32(keys[i] >= floor))
    return count
