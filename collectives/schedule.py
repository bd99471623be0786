"""Who talks to whom: pure functions of (rank, size), with no MPI in them.

A butterfly needs a power of two, the *core*: the largest one that fits. The ranks beyond it fold their data into a core
rank before the butterfly and get the result from it afterwards.
"""

from collections.abc import Iterator
from functools import lru_cache


def core_size(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)


def butterfly(rank: int, core: int) -> Iterator[int]:
    """Yield the partner of each round of recursive doubling: distance 1, 2, 4, ... core / 2.

    After round j (counted from 0) the 2^(j+1) consecutive ranks of a block have data of each other.
    """
    distance = 1
    while distance < core:
        yield rank ^ distance
        distance *= 2


def fold_partner(rank: int, size: int) -> int | None:
    """Return the partner of `rank` in the fold and unfold rounds; None for a rank that has none.

    A rank at or above core sends to rank - core, and receives from it at the end.
    """
    core = core_size(size)
    if rank >= core:
        return rank - core
    return rank + core if rank + core < size else None


def halving(rank: int, core: int) -> Iterator[int]:
    """Yield the partners of a butterfly from the longest distance to the shortest: core / 2, ... 2, 1.

    When each round splits the index range that is held into a lower and an upper half, and the lower rank of the pair
    keeps the lower one, rank r ends with the r-th of `core` equal ranges.
    """
    return reversed(list(butterfly(rank, core)))


def tree_parent(rank: int, size: int, root: int = 0) -> int | None:
    """Return the parent of `rank` in the binomial tree of `root`; None for the root."""
    place = (rank - root) % size
    return ((place & (place - 1)) + root) % size if place else None


def tree_children(rank: int, size: int, root: int = 0) -> Iterator[int]:
    """Yield the children of `rank` in the binomial tree of `root`, the smallest subtree first.

    The ranks whose places (counted from the root) end in j zero bits have up to j children: place + 1, + 2, + 4, ...
    """
    place, distance = (rank - root) % size, 1
    while place + distance < size and not place & distance:
        yield (place + distance + root) % size
        distance *= 2


@lru_cache(maxsize=16)
def groups(marks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that carry one mark, for each mark, in the order in which the marks come up first."""
    found: dict[int, list[int]] = {}
    for rank, mark in enumerate(marks):
        found.setdefault(mark, []).append(rank)
    return tuple(map(tuple, found.values()))


@lru_cache(maxsize=16)
def group_sizes(marks: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many ranks carry each mark, in the order of `groups`."""
    return tuple(map(len, groups(marks)))


def rotation(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (dest, source) of the size - 1 steps in which every rank sends to every other one directly."""
    for distance in range(1, size):
        yield (rank + distance) % size, (rank - distance) % size


@lru_cache(maxsize=16)
def hearing(rank: int, size: int) -> tuple[int, ...]:
    """Return the other ranks in the order in which one waits for what each of them sends directly.

    First those from which recursive doubling receives, in its order. A rank in that schedule instead continues when its
    message is received; so nobody waits for one that waits, by others in between, for this one to receive.
    """
    partner, core = fold_partner(rank, size), core_size(size)
    first = [] if rank >= core else [*([] if partner is None else [partner]), *butterfly(rank, core)]
    return (*first, *(source for _, source in rotation(rank, size) if source not in first))


def dissemination(rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the ceil(lg size) rounds after which every rank holds every rank's block (Bruck et al., 1997).

    A round is (dest, source, blocks): the first `blocks` held go to `dest`, and as many come from `source`.

    Before round j a rank holds the blocks of rank, rank + 1, ..., rank + 2^j - 1 (modulo size), in this order.
    """
    distance = 1
    while distance < size:
        yield (rank - distance) % size, (rank + distance) % size, min(distance, size - distance)
        distance *= 2
