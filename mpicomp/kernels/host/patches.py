"""What changed between two versions of weights, bit for bit, in about a byte a change.

Sources: gaps by S. W. Golomb, "Run-length encodings", IEEE Trans. Information Theory
12(3), 1966, with the divisors of R. F. Rice (JPL 79-22, 1979); counts of steps by
Exp-Golomb codes (J. Teuhola, Information Processing Letters 7(6), 1978).

A step is the distance between two neighbouring bit patterns, ordered as integers: with
the sign bit set all other bits are inverted, and the sign bit leads. A change is a
signed count of steps modulo 2^bits, so every bit pattern is exact: -0, subnormals,
infinities, and each NaN.

The receiver has the old weights, so they need not be sent, but may be asked. An
optimiser moves all weights by about as much, and the distance between neighbours doubles
from one exponent to the next: whether a weight changes, and by how many steps, depends on
its exponent. There are 12 classes of exponents, one below 2^-13, one at 2^-3 and above,
and one for each between. Each has a stream of its own, in which the gap to the next
change counts only weights of the class.

Per change a stream has the gap g, the members of the class since the change before it,
as g >> k zeros, a one, and the k low bits of g; then 2 (|steps| - 1), plus 1 if the steps
are negative, as v = this + 2^j: a zero for each bit of v above bit j, a one, and all bits
of v but the highest. k and j are the class's own. Low bits come first.

Changes are words, uint64: the sizes of a section for each dtype, then the sections. A
section has of the 12 classes the numbers of changes, k, j, and the bit after the stream;
then the streams, each from a word on, and one spare word.

Weights are read 64 at a time; the last ones of an array are padded with zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpicomp.arrays import Array
from mpicomp.errors import CodecError
from mpicomp.kernels.host.bits import as_writable
from mpicomp.kernels.host.compiled import jit, single
from mpicomp.kernels.host.instructions import (
    WORD,
    bit_length,
    differing,
    larger,
    lowest,
    ones,
    reaching,
    smaller,
    word_sum,
)

CLASSES = 12
_HEAD = 4 * CLASSES  # words of a section before the streams
_MOST_GAP_BITS = 40
_MOST_STEP_BITS = 32
_LENGTHS = _MOST_STEP_BITS + 1  # of 0 to 32 bits


class Form(NamedTuple):
    """What the classes of a floating-point format depend on.

    fraction: the bits of the fraction. least: the biased exponent of the lowest class,
    which has all below as well.
    """

    fraction: int
    least: int


# uint16 has the bits of bfloat16.
FORMS: dict[np.dtype[Any], Form] = {
    np.dtype(np.uint16): Form(7, 127 - 14),
    np.dtype(np.float16): Form(10, 1),
    np.dtype(np.float32): Form(23, 127 - 14),
}


def digest(array: Array) -> int:
    """Return a 64-bit digest of the bytes of a contiguous array, and of their places; not a cryptographic one.

    The sum of each 128 bytes is mixed with its place as SplitMix64 does (G. L. Steele,
    D. Lea, C. H. Flood, OOPSLA 2014), and these are added. The last bytes are padded
    with zeros.
    """
    total = place = 0
    for part in _words_of(array.reshape(-1).view(np.uint16)):
        total += int(_digest(part, place))
        place += part.size // WORD
    return total % (1 << 64)


def encode_changes(before: Sequence[Array], after: Sequence[Array]) -> Array:
    """Return the changes from arrays to others as a vector of uint64; see the module.

    before, after: C-contiguous, of the dtypes in `FORMS`; of the same sizes and dtypes.
    """
    sizes = np.zeros(len(FORMS), np.uint64)
    sections = [sizes]
    for number, dtype in enumerate(FORMS):
        pairs = [
            pair
            for old, new in zip(before, after, strict=True)
            if old.dtype == dtype
            for pair in zip(_words_of(old), _words_of(new), strict=True)
        ]
        if pairs:
            sections.append(_section(pairs, dtype))
            sizes[number] = sections[-1].size
    return np.concatenate(sections)


def change_writer(changes: Array, arrays: Sequence[Array]) -> Callable[[], None]:
    """Return a function that applies changes to arrays, once, in place: it cannot fail on those they are of.

    changes: what `encode_changes` returned, as bytes (uint8); whatever its words are: all reads and writes are in
    range. arrays: with the contents of its `before`, and writable.

    Raises CodecError if there cannot be changes in the words.
    """
    changes = changes.view(np.uint64)
    sizes = changes[: len(FORMS)].tolist()
    if changes.size < len(FORMS) or sum(sizes) != changes.size - len(FORMS):
        raise CodecError(f"got {changes.size} words of changes: expected {sizes}")
    writers = []
    first = len(FORMS)
    for dtype, size in zip(FORMS, sizes, strict=True):
        own = [array for array in arrays if array.dtype == dtype]
        if size:
            section = changes[first : first + size]
            writers.append(_section_writer(section, own, dtype))
        first += size

    def write() -> None:
        for write_section in writers:
            write_section()

    return write


def _section(pairs: Sequence[tuple[Array, Array]], dtype: np.dtype[Any]) -> Array:
    """Return the changes between pairs of vectors of whole words, of the bits of one dtype."""
    classes = _classes(dtype)
    lengths = np.zeros((CLASSES, _LENGTHS), np.int64)
    for old, new in pairs:
        _survey(old, new, *classes, lengths)
    head, room = _plan(-np.diff(classes[2].astype(np.int64)), lengths)
    starts = _firsts(room)
    words = np.zeros(int(room.sum()) + 1, np.uint64)
    classes = _classes(dtype)
    state = np.stack([np.zeros_like(starts), starts])
    for old, new in pairs:
        _encode(old, new, *classes, head, state, words)
    used = _words_for(state[1] - starts)
    head[3] = _firsts(used) + state[1] - starts
    firsts = (starts // np.uint64(WORD)).tolist()
    streams = [
        words[first : first + count]
        for first, count in zip(firsts, used.tolist(), strict=True)
    ]
    return np.concatenate([head.reshape(-1), *streams, words[-1:]])


def _section_writer(
    section: Array, arrays: Sequence[Array], dtype: np.dtype[Any]
) -> Callable[[], None]:
    """Return a function that applies the changes in a section to arrays of one dtype."""
    words = as_writable(section[_HEAD:])
    if not words.size:
        raise CodecError(f"got {section.size} words of changes: expected over {_HEAD}")
    head = section[:_HEAD].reshape(4, CLASSES)
    most = [_MOST_GAP_BITS, _MOST_STEP_BITS, WORD * (words.size - 1)]
    ends = head[3]
    if (head[1:].max(axis=1) > most).any() or (ends[1:] < ends[:-1]).any():
        raise CodecError("the changes are damaged: a stream is out of range")
    starts = np.append(np.uint64(0), _words_for(ends[:-1]) * np.uint64(WORD))
    parts = [(array.reshape(-1), _words_of(array)) for array in arrays]

    def write() -> None:
        classes = _classes(dtype)[:3]
        state = np.stack([np.zeros_like(starts), starts, head[0]])
        is_cut = _begin(head, state, words)
        for array, words_of_it in parts:
            for part in words_of_it:
                # After a truncated stream the place of the next change is unknown.
                if not is_cut:
                    is_cut = _apply(part, *classes, head, state, words)
            rest = array.size % WORD
            if rest:
                array[-rest:] = words_of_it[-1][:rest].view(dtype)
        is_cut |= state[2].any()
        assert not is_cut, "these are changes of other weights"

    return write


def _classes(dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return what kernels know of the classes of the weights of a dtype, and have counted of them.

    Floors, the least magnitude of each class but the first, in bits; masks, which of the
    last 64 weights reach each class, with all weights before and no weight after those;
    totals, how many weights so far reach each; the bits of the fraction, and the
    exponent of the lowest class.
    """
    fraction, least = FORMS[dtype]
    floors = (least + np.arange(1, CLASSES)) << fraction
    masks = np.zeros(CLASSES + 1, np.uint64)
    masks[0] = np.iinfo(np.uint64).max
    return (
        floors.astype(f"i{dtype.itemsize}"),
        masks,
        np.zeros_like(masks),
        np.uint64(fraction),
        np.int64(least),
    )


def _words_of(array: Array) -> list[Array]:
    """Return the bits of an array in whole words: a view, and a copy of up to 63 last values, padded with zeros."""
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    whole = bits.size // WORD * WORD
    last = np.zeros(WORD if whole < bits.size else 0, bits.dtype)
    last[: bits.size - whole] = bits[whole:]
    parts = [as_writable(bits[:whole]), last]
    return [part for part in parts if part.size]


def _plan(members: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the head of a section, its ends not known yet, and the most words of each stream.

    members: of each class. lengths: its changes by the bit length of their number.
    """
    changed = lengths.sum(axis=1)
    orders = np.arange(_MOST_GAP_BITS + 1)
    # The share of gaps, if they are geometrically distributed, that take one zero more.
    further = (1 - changed / np.maximum(members, 1))[:, None] ** 2.0**orders
    expected = orders + further / np.maximum(1 - further, 1e-300)
    gap_bits = expected.argmin(axis=1)
    bits = np.arange(_LENGTHS)
    # A row for each order j of the code: the most bits of a coded number, by the bit
    # length of that number.
    cost = 1 + bits[:, None] + 2 * np.maximum(bits - bits[:, None], 0)
    by_order = lengths @ cost.T
    most = by_order.min(axis=1) + changed * (1 + gap_bits)
    most += (members - changed) >> gap_bits
    head = np.stack([changed, gap_bits, by_order.argmin(axis=1), changed])
    return head.astype(np.uint64), _words_for(most.astype(np.uint64))


def _words_for(bits: Array) -> Array:
    return (bits + np.uint64(WORD - 1)) // np.uint64(WORD)


def _firsts(words: Array) -> Array:
    """Return the first bit of each stream, for the words of each."""
    return (np.cumsum(words) - words) * np.uint64(WORD)


@single
def _mixed(total, place):  # type: ignore[no-untyped-def]
    """Return the word that the finaliser of SplitMix64 makes of a sum and its place."""
    z = total + (np.uint64(place) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


@jit
def _digest(bits, place):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for first in range(0, bits.size, WORD):
        total += _mixed(word_sum(bits, first), place)
        place += 1
    return total


@single
def _count_classes(bits, first, floors, masks, totals):  # type: ignore[no-untyped-def]
    """Write which of 64 weights reach each class, and add their number to its total."""
    magnitude = ~(floors.dtype.type(1) << floors.dtype.type(8 * bits.itemsize - 1))
    for j in range(floors.size):
        masks[j + 1] = reaching(bits, first, magnitude, floors[j])
    for j in range(masks.size):
        totals[j] += ones(masks[j])


@single
def _class_of(bits, sign, fraction, least):  # type: ignore[no-untyped-def]
    """Return the class of a weight; sign: the number of its sign bit."""
    exponent = np.int64((bits & ((np.uint64(1) << sign) - np.uint64(1))) >> fraction)
    return smaller(larger(exponent - least, np.int64(0)), np.int64(CLASSES - 1))


@single
def _in_order(bits, sign):  # type: ignore[no-untyped-def]
    """Return bits as an integer in the order of the numbers, modulo 2^(sign + 1); the function is its own inverse."""
    negative = np.uint64(0) - (bits >> sign & np.uint64(1))
    return bits ^ (negative & ((np.uint64(1) << sign) - np.uint64(1)))


@single
def _number_of_steps(old, new, sign):  # type: ignore[no-untyped-def]
    """Return the steps from one weight to another as a number: 2 (|steps| - 1), plus 1 if they are negative."""
    one = np.uint64(1)
    steps = _in_order(new, sign) - _in_order(old, sign)
    negative = steps >> sign & one
    size = (steps ^ (np.uint64(0) - negative)) + negative
    below = size - one & ((one << sign) - one)
    return below << one | negative


@jit
def _survey(old, new, floors, masks, totals, fraction, least, lengths):  # type: ignore[no-untyped-def]
    """Count the weights of each class, and its changes by the bit length of their number."""
    sign, one = np.uint64(8 * old.itemsize - 1), np.uint64(1)
    for first in range(0, old.size, WORD):
        _count_classes(old, first, floors, masks, totals)
        changed = differing(old, new, first)
        while changed != np.uint64(0):
            i = first + np.int64(lowest(changed))
            number = _number_of_steps(np.uint64(old[i]), np.uint64(new[i]), sign)
            lengths[
                _class_of(np.uint64(old[i]), sign, fraction, least), bit_length(number)
            ] += 1
            changed &= changed - one


@single
def _put(words, position, value, count):  # type: ignore[no-untyped-def]
    """Write up to 64 bits, the low ones first, to where the words have zeros."""
    at, shift = position >> np.uint64(6), position & np.uint64(63)
    words[at] |= value << shift
    if shift + count > np.uint64(64):
        words[at + np.uint64(1)] |= value >> (np.uint64(64) - shift)


@jit
def _encode(old, new, floors, masks, totals, fraction, least, head, state, words):  # type: ignore[no-untyped-def]
    """Write the streams. state: of each class the members up to its last change, and the next bit of its stream."""
    sign, one = np.uint64(8 * old.itemsize - 1), np.uint64(1)
    for first in range(0, old.size, WORD):
        _count_classes(old, first, floors, masks, totals)
        changed = differing(old, new, first)
        while changed != np.uint64(0):
            bit = lowest(changed)
            i = first + np.int64(bit)
            changed &= changed - one
            c = _class_of(np.uint64(old[i]), sign, fraction, least)
            behind = (masks[c] & ~masks[c + 1]) >> bit
            place = totals[c] - totals[c + 1] - ones(behind)
            gap = place - state[0, c]
            state[0, c] = place + one
            k, j = head[1, c], head[2, c]
            position = state[1, c] + (gap >> k)
            low = gap & ((one << k) - one)
            _put(words, position, low << one | one, k + one)
            number = _number_of_steps(np.uint64(old[i]), np.uint64(new[i]), sign)
            number += one << j
            bits = bit_length(number) - one
            position += k + one + bits - j
            low = number & ((one << bits) - one)
            _put(words, position, low << one | one, bits + one)
            state[1, c] = position + bits + one


@single
def _window(words, position):  # type: ignore[no-untyped-def]
    """Return 64 bits; there is a word after the one of the position."""
    at, shift = position >> np.uint64(6), position & np.uint64(63)
    above = words[at + np.uint64(1)] << np.uint64(1) << (np.uint64(63) - shift)
    return words[at] >> shift | above


@single
def _next_one(words, position, end):  # type: ignore[no-untyped-def]
    """Return the position of the next bit set before the end; or one at the end or after it."""
    while position < end:
        window = _window(words, position)
        if window != np.uint64(0):
            return position + lowest(window)
        position += np.uint64(64)
    return end


@single
def _low_bits(words, position, count):  # type: ignore[no-untyped-def]
    return _window(words, position) & ((np.uint64(1) << count) - np.uint64(1))


@single
def _gap(words, position, end, bits):  # type: ignore[no-untyped-def]
    """Return the gap at a position, and the position after it: beyond the end if it is cut."""
    stop = _next_one(words, position, end)
    after = stop + np.uint64(1) + bits
    low = np.uint64(0)
    if after <= end:
        low = _low_bits(words, stop + np.uint64(1), bits)
    return (stop - position) << bits | low, after


@jit
def _begin(head, state, words):  # type: ignore[no-untyped-def]
    """Read the first gap of each stream into `state`, the largest number if it has none; return whether one is cut."""
    is_damaged = False
    for c in range(CLASSES):
        state[0, c] = ~np.uint64(0)
        if state[2, c] != np.uint64(0):
            gap, after = _gap(words, state[1, c], head[3, c], head[1, c])
            state[0, c], state[1, c] = gap, after
            is_damaged |= after > head[3, c]
    return is_damaged


@single
def _select(word, rank):  # type: ignore[no-untyped-def]
    """Return the number of the set bit that `rank` other set bits precede."""
    for _ in range(rank):
        word &= word - np.uint64(1)
    return lowest(word)


@jit
def _apply(bits, floors, masks, totals, head, state, words):  # type: ignore[no-untyped-def]
    """Apply changes in place; return whether a stream is cut.

    state: of each class the number, among its members, of the next change; the next bit
    of its stream, which are the steps of this change; and how many changes are left.
    """
    sign, one = np.uint64(8 * bits.itemsize - 1), np.uint64(1)
    for first in range(0, bits.size, WORD):
        _count_classes(bits, first, floors, masks, totals)
        is_due = False
        for c in range(CLASSES):
            is_due |= state[0, c] < totals[c] - totals[c + 1]
        if not is_due:
            continue
        for c in range(CLASSES):
            members = totals[c] - totals[c + 1]
            place = state[0, c]
            if place >= members:
                continue
            mask = masks[c] & ~masks[c + 1]
            before = members - ones(mask)
            position, end = state[1, c], head[3, c]
            k, j = head[1, c], head[2, c]
            while place < members:
                i = first + np.int64(_select(mask, place - before))
                stop = _next_one(words, position, end)
                low = stop - position + j
                position = stop + one + low
                if position > end or low > np.uint64(_MOST_STEP_BITS):
                    return True
                number = _low_bits(words, stop + one, low) + (one << low) - (one << j)
                size = (number >> one) + one
                negative = np.uint64(0) - (number & one)
                steps = (size ^ negative) - negative
                ordered = _in_order(np.uint64(bits[i]), sign) + steps
                bits[i] = _in_order(ordered, sign) & ((one << sign << one) - one)
                state[2, c] -= one
                if state[2, c] == np.uint64(0):
                    place = ~np.uint64(0)
                else:
                    gap, position = _gap(words, position, end, k)
                    if position > end or place + one + gap <= place:
                        return True
                    place += one + gap
            state[0, c] = place
            state[1, c] = position
    return False
