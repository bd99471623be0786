"""Hot loops over arrays in main memory, compiled by Numba at their first use and cached on disk.

The public functions take arrays and return arrays; the compiled kernels beneath them (a leading underscore) fill the
buffers that they are given and return a count. No kernel uses fastmath, so their results are the same in every run.

Magnitudes are compared as integers: with the sign bit cleared, the bits of an IEEE 754 number order as its magnitude
does, and infinities and NaN come last. That makes selection exact, and one kernel serves float16, float32 and float64.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]
Search = Generator[Array, Array, tuple[int, int]]

_jit = njit(cache=True, nogil=True)

_DIGIT = 11  # bits a pass of the radix selection looks at: 2048 counters stay in the first-level cache

# Every 6-bit window of this number is another one, so a product with 2^p has a 6-bit head that tells p.
_DE_BRUIJN = np.uint64(0x03F7_9D71_B4CB_0A89)
_PLACES = np.zeros(64, np.int64)
for _place in range(64):
    _PLACES[(int(_DE_BRUIJN) << _place & (1 << 64) - 1) >> 58] = _place


class _Format(NamedTuple):
    """What the radix selection knows about a floating-point format."""

    bits: np.dtype[Any]  # the unsigned integer of the same width
    width: int  # bits of a magnitude: all but the sign


_FORMATS = {
    np.dtype(np.float16): _Format(np.dtype(np.uint16), 15),
    np.dtype(np.float32): _Format(np.dtype(np.uint32), 31),
    np.dtype(np.float64): _Format(np.dtype(np.uint64), 63),
}


def top_k(values: Array, k: int) -> Array:
    """Return the positions of the `k` largest magnitudes of `values`, in increasing order.

    values: 1-d contiguous float16, float32 or float64. Ties at the threshold go to the lowest positions, and zeros are
    never selected, so fewer than `k` positions come back when fewer values are non-zero. Returns an intp array.
    Infinities, and beyond them NaN, count as the largest: where there are any, one is selected.

    Radix selection in two reads of the data: a histogram of the leading 11 bits of the magnitudes, then one pass that
    compacts what is at or above the bin of the k-th largest; the exact threshold is found among those few.
    """
    form = _FORMATS[values.dtype]
    bits, mask = values.view(form.bits), form.bits.type((1 << form.width) - 1)
    shift = form.width - _DIGIT
    counts = np.zeros(1 << _DIGIT, np.int64)
    _histogram(bits, mask, shift, counts)
    floor = form.bits.type(max(1, _bin_of_kth(counts, k) << shift))
    positions, keys = _candidates(bits, mask, floor, int(counts[floor >> shift :].sum()))
    if positions.size <= k:
        return positions
    threshold, ties = alone(kth_largest(keys, k, form.width))
    return positions[select(keys, threshold, ties)]


def magnitude_keys(values: Array) -> tuple[Array, int]:
    """Return the bits of the magnitudes as unsigned integers that order as the magnitudes do, and how many bits."""
    form = _FORMATS[values.dtype]
    return values.view(form.bits) & form.bits.type((1 << form.width) - 1), form.width


def kth_largest(keys: Array, k: int, width: int) -> Search:
    """Search the k-th largest of `keys` (unsigned, `width` bits) digit by digit, from the leading one.

    A generator, so that the same search runs on one rank or over all: it yields the histogram of a digit, int64 of 2048
    counts, and is sent the histogram to go by: its own, or the sum over the ranks. Returns (threshold, ties): the k-th
    largest key, and how many of the keys that equal it are among the k largest. Where there are fewer than `k` keys,
    and none is 0, the threshold is 0: all are above it.
    """
    prefix, shift = 0, width
    while shift > 0:
        digit = min(_DIGIT, shift)
        shift -= digit
        counts: Array = np.zeros(1 << _DIGIT, np.int64)
        _digit_counts(keys, np.uint64(prefix), np.uint64(shift), np.uint64(digit), counts)
        counts = yield counts
        bucket = _bin_of_kth(counts, k)
        k -= int(counts[bucket + 1 :].sum())
        prefix = prefix << digit | bucket
    return prefix, k


def alone(search: Search) -> tuple[int, int]:
    """Run a search of `kth_largest` over this rank's keys only."""
    counts = next(search)
    try:
        while True:
            counts = search.send(counts)
    except StopIteration as end:
        threshold, ties = end.value
        return threshold, ties


def select(keys: Array, threshold: int, ties: int) -> Array:
    """Return, in increasing order, where keys are above `threshold`, and where the first `ties` equal to it are."""
    chosen = np.empty(keys.size, np.intp)
    return chosen[: _select(keys, keys.dtype.type(threshold), ties, chosen)]


def raise_not_finite(values: Array) -> None:
    """Raise ValueError naming the first value of `values` that is NaN or infinite, if there is one."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        first = tuple(map(int, np.unravel_index(bad[0], values.shape)))
        place = ", ".join(map(str, first))
        raise ValueError(f"values[{place}] is {values[first]}: expected finite values; skip the step or clip them")


def merge(indices_a: Array, values_a: Array, indices_b: Array, values_b: Array) -> tuple[Array, Array]:
    """Return the sum of two sparse vectors as (indices, values) over the union of their supports.

    Indices strictly increase in each input and in the output; both pairs have the same dtypes, and values of shape
    (entries,) or, both of one width, (entries, width). Where both vectors have
    an entry the output has ``a + b``, which is the same bits as ``b + a``: the merge is commutative bit for bit.
    float16 is added in float32 and rounded once, which gives the correctly rounded float16 sum.
    """
    if values_a.dtype == np.float16:
        indices, wide = merge(indices_a, values_a.astype(np.float32), indices_b, values_b.astype(np.float32))
        with np.errstate(over="ignore"):  # infinite, as sums of the other dtypes that leave their range
            return indices, wide.astype(np.float16)
    indices = np.empty(indices_a.size + indices_b.size, indices_a.dtype)
    values = np.empty((indices.size, *values_a.shape[1:]), values_a.dtype)
    count = _merge(indices_a, values_a, indices_b, values_b, indices, values)
    return indices[:count], values[:count]


def scatter_add(dense: Array, indices: Array, values: Array) -> None:
    """Add `values` to ``dense[indices]`` in place; the indices must be in range and unique."""
    if dense.dtype == np.float16 or values.dtype != dense.dtype:
        dense[indices] += values
    else:
        _scatter_add(dense, indices, values)


def first_disorder(indices: Array, length: int) -> int:
    """Return the first position where `indices` leaves ``[0, length)`` or does not increase; -1 when there is none."""
    return int(_first_disorder(indices, length))


def to_bitmap(indices: Array, first: int, words: Array) -> None:
    """Set the bits of increasing `indices`, counted from `first`, in `words` (uint64, zeros; low bits first)."""
    _set_bits(indices, first, words)


def from_bitmap(words: Array, first: int, indices: Array) -> int:
    """Write the numbers of the bits that are set in `words` (uint64), plus `first`, into `indices` in increasing order.

    Returns how many are set; `indices` holds the first of them, as many as it has room for.
    """
    return int(_find_bits(words, first, indices))


def _bin_of_kth(counts: Array, k: int) -> int:
    """Return the histogram bin that holds the k-th largest key; 0 when there are fewer than `k` keys."""
    from_above = np.cumsum(counts[::-1])
    return max(0, counts.size - 1 - int(np.searchsorted(from_above, k)))


def _candidates(bits: Array, mask: Any, floor: Any, bound: int) -> tuple[Array, Array]:
    """Return positions and magnitude keys of what is at or above `floor`; there are at most `bound` of them."""
    positions, keys = np.empty(bound, np.intp), np.empty(bound, bits.dtype)
    count = _compact(bits, mask, floor, positions, keys)
    return positions[:count], keys[:count]


@_jit
def _histogram(bits, mask, shift, counts):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        counts[(bits[i] & mask) >> shift] += 1


@_jit
def _compact(bits, mask, floor, positions, keys):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(bits.size):
        key = bits[i] & mask
        if key >= floor:
            positions[count] = i
            keys[count] = key
            count += 1
    return count


@_jit
def _digit_counts(keys, prefix, shift, digit, counts):  # type: ignore[no-untyped-def]
    """Count the digit at `shift` of the keys whose leading bits are `prefix`."""
    lowest = (np.uint64(1) << digit) - np.uint64(1)
    for i in range(keys.size):
        head = np.uint64(keys[i]) >> shift
        if head >> digit == prefix:
            counts[head & lowest] += 1


@_jit
def _select(keys, threshold, ties, chosen):  # type: ignore[no-untyped-def]
    # The threshold has the dtype of the keys: Numba compares signed with unsigned 64-bit integers as float64.
    count = 0
    for i in range(keys.size):
        if keys[i] > threshold or (keys[i] == threshold and ties > 0):
            if keys[i] == threshold:
                ties -= 1
            chosen[count] = i
            count += 1
    return count


@_jit
def _merge(indices_a, values_a, indices_b, values_b, indices, values):  # type: ignore[no-untyped-def]
    a, b, count = 0, 0, 0
    while a < indices_a.size and b < indices_b.size:
        index_a, index_b = indices_a[a], indices_b[b]
        if index_a == index_b:
            indices[count], values[count] = index_a, values_a[a] + values_b[b]
            a += 1
            b += 1
        elif index_a < index_b:
            indices[count], values[count] = index_a, values_a[a]
            a += 1
        else:
            indices[count], values[count] = index_b, values_b[b]
            b += 1
        count += 1
    while a < indices_a.size:
        indices[count], values[count] = indices_a[a], values_a[a]
        a += 1
        count += 1
    while b < indices_b.size:
        indices[count], values[count] = indices_b[b], values_b[b]
        b += 1
        count += 1
    return count


@_jit
def _scatter_add(dense, indices, values):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        dense[indices[i]] += values[i]


@_jit
def _set_bits(indices, first, words):  # type: ignore[no-untyped-def]
    for i in range(indices.size):
        place = np.uint64(indices[i] - first)
        words[place >> np.uint64(6)] |= np.uint64(1) << (place & np.uint64(63))


@_jit
def _find_bits(words, first, indices):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(words.size):
        word = words[i]
        while word != np.uint64(0):
            lowest = word & (~word + np.uint64(1))
            if count < indices.size:
                indices[count] = first + 64 * i + _PLACES[(lowest * _DE_BRUIJN) >> np.uint64(58)]
            count += 1
            word ^= lowest
    return count


@_jit
def _first_disorder(indices, length):  # type: ignore[no-untyped-def]
    previous = -1
    for i in range(indices.size):
        if indices[i] <= previous or indices[i] >= length:
            return i
        previous = indices[i]
    return -1
