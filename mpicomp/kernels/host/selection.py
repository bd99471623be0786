"""The largest magnitudes of a vector, and those above a threshold: exact, in about one read of the data.

A pass over the data compares 64 values at once, and in most cases none of these is
above the threshold, so the pass runs at the speed of memory.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.arrays import Array
from mpicomp.kernels.host.bits import (
    FORMATS,
    Format,
    as_writable,
    empty_entries,
    extremes,
)
from mpicomp.kernels.host.compiled import jit, single
from mpicomp.kernels.host.instructions import WORD, lowest, ones, reaching
from mpicomp.threads import in_pieces

Found = tuple[Array, Array]
# Bits per pass of the radix selection: 2048 counters fit the first-level cache.
_DIGIT = 11
# Values of the sample for the lower threshold: a 256th of all, within these bounds.
_SAMPLE = 1 << 12
_LARGEST_SAMPLE = 1 << 14
# Consecutive values of a sample, which are loaded together.
_RUN = 16
_SIGMAS = 4
# Values of a vector up to which a histogram would have at least as many counts.
_FEW = 1 << _DIGIT


def largest(values: Array, k: int, *, threads: int | None = None) -> Found:
    """Return the positions of the `k` largest magnitudes of `values`, in increasing order, and the values there.

    values: 1-d contiguous float16, float32 or float64. k: at least 1. Ties at the
    threshold go to the lowest positions, and zeros are never selected, so fewer than
    `k` are returned if fewer values are non-zero. Returns an intp array, and one of the
    dtype of the values. Infinities, and above them NaN, count as the largest: if there
    are any, one is selected. threads: the most threads that read the data; None for
    `threads.count`. The result does not depend on it.

    A sample gives a threshold that slightly more than `k` magnitudes are expected to
    reach; one read of the data compacts those, and the selection among them is exact.
    If the sample misleads, and on vectors too short for one, there are two reads: a
    histogram of the leading 11 bits, then the compaction from the bin of the k-th
    largest magnitude on.
    """
    form = FORMATS[values.dtype]
    bits = as_writable(values).view(form.signed)
    parts = None
    if bits.size <= _FEW:
        parts = [_of_few(bits, form, k)]
    elif is_sampled(bits.size):
        parts = _by_sample(bits, form, k, threads)
    positions, found = largest_of(
        parts or _by_histogram(bits, form, k, threads), form, k
    )
    return positions, found.view(values.dtype)


def largest_of(parts: Sequence[Found], form: Format, k: int) -> Found:
    """Return the `k` largest of candidates, none of them zero, or all if fewer; as positions and bits.

    parts: (positions, bits), one part or more, in the order of the positions.
    """
    places, bits = joined(parts)
    if places.size <= k:
        return places, bits
    kth = _threshold(bits, form, k)
    # There is one more element, which `keep_at` may write.
    positions, found = np.empty(k + 1, np.intp), np.empty(k + 1, bits.dtype)
    keep_at(places, bits, form.mask, *kth, positions, found, np.uint64(0))
    return positions[:k], found[:k]


def divide_largest(
    indices: Array, values: Array, k: int
) -> tuple[Array, Array, Array, Array]:
    """Return (indices, values) of the `k` largest magnitudes, as `largest` selects them, and of the others.

    indices: one for each value; their order is kept. 0 < k < entries.
    """
    form = FORMATS[values.dtype]
    indices, bits = as_writable(indices), as_writable(values).view(form.signed)
    threshold, ties = _threshold(bits, form, k)
    chosen = k if threshold else k - ties
    ties, rest = (ties if threshold else 0), bits.size - chosen
    # Each has one more element, as in `merging.divide`.
    one = np.empty(chosen + 1, indices.dtype), np.empty(chosen + 1, bits.dtype)
    other = np.empty(rest + 1, indices.dtype), np.empty(rest + 1, bits.dtype)
    _divide_at(indices, bits, form.mask, threshold, ties, *one, *other)
    kept, dropped = (
        one[1][:chosen].view(values.dtype),
        other[1][:rest].view(values.dtype),
    )
    return one[0][:chosen], kept, other[0][:rest], dropped


def raise_not_finite(values: Array, *, threads: int | None = None) -> None:
    """Raise ValueError naming the first value of `values`, of any shape, that is NaN or infinite.

    threads: as for `largest`.
    """
    position = first_not_finite(values.reshape(-1), threads)
    if position >= 0:
        raise not_finite_error(position, values.shape, values.flat[position])


def not_finite_error(position: int, shape: tuple[int, ...], bad: Any) -> ValueError:
    """Return the error that names a value by its position in an array of a shape."""
    place = ", ".join(str(int(each)) for each in np.unravel_index(position, shape))
    return ValueError(
        f"values[{place}] is {bad}: expected finite values; clip them, or use GradientExchange(nonfinite='skip'). "
        "Where parameters are not finite, set them to those of another rank, with local steps to outer.anchor"
    )


def first_not_finite(values: Array, threads: int | None = None) -> int:
    """Return the first position of `values` (as for `largest`) that holds NaN or an infinity; -1 if there is none."""
    form = FORMATS[values.dtype]
    bits = as_writable(values).view(form.signed)

    def first(start: int, end: int) -> int:
        place = int(_first_reaching(bits[start:end], form.mask, form.infinity))
        return start + place if place >= 0 else -1

    return next(
        (place for place in in_pieces(first, bits.size, threads) if place >= 0), -1
    )


def all_below(numbers: Array, limit: int, mask: int | None = None) -> bool:
    """Return whether all of a vector's unsigned integers are below a limit. mask: the bits of them that count."""
    kept = numbers if mask is None else numbers & numbers.dtype.type(mask)
    return bool((kept < limit).all())


def joined(parts: Sequence[Found]) -> Found:
    """Return the results of several pieces as one."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part[0] for part in parts]), np.concatenate(
        [part[1] for part in parts]
    )


def entries(parts: Sequence[Found]) -> int:
    """Return the number of entries of several parts."""
    return sum(positions.size for positions, _ in parts)


def is_sampled(size: int) -> bool:
    """Return whether `largest` takes a sample of a vector of this length."""
    return size >= 4 * _SAMPLE


def take_sample(bits: Array, mask: Any) -> Array:
    """Return the bits under `mask` at positions of a vector that depend on its length only."""
    runs = min(max(_SAMPLE, bits.size >> 8), _LARGEST_SAMPLE) // _RUN
    sample = np.empty(_RUN * runs, bits.dtype)
    _sample(bits, mask, sample)
    return sample


def foresee(sample: Array, form: Format, k: int, size: int) -> tuple[int, int]:
    """Return the bits of a threshold that slightly more than `k` of `size` magnitudes should reach, and their room.

    sample: some of the magnitudes, as signed integers.
    """
    share = sample.size * k / size
    rank = math.ceil(share + _SIGMAS * (1 + math.sqrt(share)))
    floor = max(1, int(_threshold(sample, form, rank)[0])) if rank < sample.size else 1
    return floor, math.ceil((rank + _SIGMAS * math.sqrt(rank)) * size / sample.size)


def _of_few(bits: Array, form: Format, k: int) -> Found:
    """Return the magnitudes of a short vector that reach the k-th largest, without zeros."""
    keys = bits & form.mask
    floor = max(1, _kth(keys, k)) if k < keys.size else 1
    (positions,) = (keys >= floor).nonzero()
    return positions, bits[positions]


def _by_sample(
    bits: Array, form: Format, k: int, threads: int | None
) -> list[Found] | None:
    """Return the magnitudes at or above a threshold from a sample; None if the sample misled."""
    floor, room = foresee(take_sample(bits, form.mask), form, k, bits.size)
    parts = _at_or_above(bits, form, floor, room, threads)
    if parts is None:
        return _with_ties(bits, form, floor, k, room, threads)
    return parts if floor == 1 or entries(parts) >= k else None


def _with_ties(
    bits: Array, form: Format, tie: int, k: int, room: int, threads: int | None
) -> list[Found] | None:
    """Return the magnitudes above a threshold that more than `room` reach, and the first ties; None if too many.

    For data with few different values: zeros and ones, or quantised values.
    """
    over = _at_or_above(bits, form, tie + 1, room, threads) if tie < form.mask else None
    if over is None or entries(over) >= k:
        return over
    positions, found, _ = _compacted(bits, form, tie, 0, k)
    tied = (found & form.mask) == tie
    positions, found = joined([*over, (positions[tied], found[tied])])
    order = np.argsort(positions)
    return [(positions[order], found[order])]


def _by_histogram(
    bits: Array, form: Format, k: int, threads: int | None
) -> list[Found]:
    """Return the magnitudes in the histogram bin of the k-th largest and in those above."""
    counts = _histogram(bits, form, threads)
    floor = max(1, bin_of_kth(counts, k)[0] << (form.width - _DIGIT))
    room = int(counts[floor >> (form.width - _DIGIT) :].sum())
    parts = _at_or_above(bits, form, floor, room, threads)
    assert parts, "the histogram counted fewer magnitudes than there are"
    return parts


def _threshold(bits: Array, form: Format, k: int) -> tuple[Any, int]:
    """Return the bits of the k-th largest magnitude, and how many ties with it are among the `k` largest.

    The bins have equal width between the least and the largest, as selected magnitudes
    are close together.
    """
    while bits.size > _FEW:
        least, largest = extremes(bits, form.mask)
        shift = max(0, (int(largest) - int(least)).bit_length() - _DIGIT)
        counts = np.zeros(1 << _DIGIT, np.int64)
        _head_counts(bits, form.mask, least, shift, counts)
        head, k = bin_of_kth(counts, k)
        keys = np.empty(int(counts[head]) + 1, bits.dtype)
        _with_head(bits, form.mask, least, shift, head, keys)
        bits = keys[:-1]
        if not shift:
            return bits[0], k
    keys = bits & form.mask
    threshold = _kth(keys, k)
    return threshold, k - int(np.count_nonzero(keys > threshold))


def _at_or_above(
    bits: Array, form: Format, floor: int, room: int, threads: int | None
) -> list[Found] | None:
    """Return positions and bits of magnitudes at or above `floor`; None if a thread finds more than `room`."""
    parts = in_pieces(
        lambda start, end: _compacted(bits[start:end], form, floor, start, room),
        bits.size,
        threads,
    )
    return None if any(rest for *_, rest in parts) else [part[:2] for part in parts]


def _compacted(
    bits: Array, form: Format, floor: int, first: int, room: int
) -> tuple[Array, Array, int]:
    """Return positions (counted from `first`) and bits of magnitudes at or above `floor`, and how many values are left.

    Some are left if more than `room` were found. Unwritten pages of the buffers take no
    memory.
    """
    room = min(room, bits.size) + WORD
    positions, found = empty_entries(room, bits.dtype)
    count, seen = compact(
        bits, form.mask, form.signed.type(floor), first, positions, found
    )
    return positions[: int(count)], found[: int(count)], bits.size - int(seen)


def _histogram(bits: Array, form: Format, threads: int | None) -> Array:
    def counted(start: int, end: int) -> Array:
        counts = np.zeros(1 << _DIGIT, np.int64)
        _head_counts(bits[start:end], form.mask, 0, form.width - _DIGIT, counts)
        return counts

    return np.sum(in_pieces(counted, bits.size, threads), axis=0)  # type: ignore[no-any-return]


def _kth(keys: Array, k: int) -> Any:
    ordered = keys.copy()
    ordered.partition(-k)
    return ordered[-k]


def bin_of_kth(counts: Array, k: int) -> tuple[int, int]:
    """Return the histogram bin that holds the k-th largest key, and its rank among the keys of that bin.

    counts: int64. The bin is 0 if there are fewer than `k` keys.
    """
    found, rank = _bin_of_kth(counts, k)
    return int(found), int(rank)


@jit
def _sample(bits, mask, keys):  # type: ignore[no-untyped-def]
    """Fill `keys` with runs, one from each of equal strides, at offsets from a fixed linear congruential generator."""
    runs, state = keys.size // _RUN, np.uint64(1)
    stride = (bits.size - _RUN + 1) / runs
    for i in range(runs):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        place = (
            np.int64((i + np.float64(state >> np.uint64(33)) * 2.0**-31) * stride)
            // _RUN
            * _RUN
        )
        for j in range(_RUN):
            keys[_RUN * i + j] = bits[place + j] & mask


@jit
def compact(bits, mask, floor, first, positions, kept):  # type: ignore[no-untyped-def]
    """Return how many magnitudes are at or above `floor`, and how many were compared: fewer if the buffer is full."""
    count, whole = np.uint64(0), bits.size // WORD
    for i in range(whole):
        found = reaching(bits, WORD * i, mask, floor)
        if found != np.uint64(0):
            if count + np.uint64(WORD) > np.uint64(positions.size):
                return count, WORD * i
            count = _store(bits, first, WORD * i, found, positions, kept, count)
    if count + np.uint64(bits.size - WORD * whole) > np.uint64(positions.size):
        return count, WORD * whole
    for place in range(WORD * whole, bits.size):
        if bits.dtype.type(bits[place] & mask) >= floor:
            positions[count], kept[count] = first + place, bits[place]
            count += np.uint64(1)
    return count, bits.size


@jit
def _first_reaching(bits, mask, floor):  # type: ignore[no-untyped-def]
    """Return the first position where a magnitude is at or above `floor`; -1 if there is none."""
    whole = bits.size // WORD
    for i in range(whole):
        found = reaching(bits, WORD * i, mask, floor)
        if found != np.uint64(0):
            return WORD * i + np.int64(lowest(found))
    for place in range(WORD * whole, bits.size):
        if bits.dtype.type(bits[place] & mask) >= floor:
            return place
    return -1


@single
def _store(bits, first, start, found, positions, kept, count):  # type: ignore[no-untyped-def]
    """Append the positions and values at the bits set in `found`, counted from `start`; return the new count.

    Four are written at once, as branches would be unpredictable; there is room for 64.
    """
    end, last = count + ones(found), np.uint64(1) << np.uint64(WORD - 1)
    while count < end:
        for j in range(4):
            place = np.uint64(start) + lowest(found | last)
            positions[count + np.uint64(j)] = np.uint64(first) + place
            kept[count + np.uint64(j)] = bits[place]
            found &= found - np.uint64(1)
        count += np.uint64(4)
    return end


@jit
def _head_counts(bits, mask, least, shift, counts):  # type: ignore[no-untyped-def]
    """Count the heads of the magnitudes: their differences from the least, shifted right by `shift`."""
    for i in range(bits.size):
        counts[np.uint64((bits[i] & mask) - least) >> np.uint64(shift)] += 1


@jit
def _with_head(bits, mask, least, shift, head, keys):  # type: ignore[no-untyped-def]
    """Write the magnitudes that have a given head; `keys` has room for one more."""
    count = np.uint64(0)
    # Branches would be unpredictable, here and below.
    for i in range(bits.size):
        key = bits[i] & mask
        keys[count] = key
        count += np.uint64(
            np.uint64(key - least) >> np.uint64(shift) == np.uint64(head)
        )


@jit
def _bin_of_kth(counts, k):  # type: ignore[no-untyped-def]
    place = counts.size - 1
    while place > 0 and counts[place] < k:
        k -= counts[place]
        place -= 1
    return place, k


@jit
def keep_at(positions, bits, mask, threshold, ties, kept_positions, kept, count):  # type: ignore[no-untyped-def]
    """Append the entries above `threshold` and the first `ties` that are equal to it; return the count.

    Every entry is written, and the count incremented for those that are kept: so there
    is one more element.
    """
    for i in range(positions.size):
        key = bits[i] & mask
        equal = key == threshold
        here = (key > threshold) | (equal & (ties > 0))
        ties -= equal
        kept_positions[count], kept[count] = positions[i], bits[i]
        count += np.uint64(here)
    return count


@jit
def _divide_at(  # type: ignore[no-untyped-def]
    indices, bits, mask, threshold, ties, one_indices, one, other_indices, other
):
    """Divide entries into those above `threshold` and the first `ties` that are equal to it, and the others."""
    a, b = np.uint64(0), np.uint64(0)
    for i in range(indices.size):
        key = bits[i] & mask
        equal = key == threshold
        here = (key > threshold) | (equal & (ties > 0))
        ties -= equal
        one_indices[a], other_indices[b] = indices[i], indices[i]
        one[a], other[b] = bits[i], bits[i]
        a += np.uint64(here)
        b += np.uint64(not here)
