"""Communication schedules: pure functions of (rank, size), without MPI.

A butterfly needs a power of two, the *core*: the largest one that fits. Each other rank
folds into a core rank.
"""

from collections.abc import Iterator
from functools import lru_cache


def core_size(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)


def butterfly(rank: int, core: int) -> Iterator[int]:
    """Yield the partner of each round of recursive doubling: distances 1, 2, 4, ..., core / 2."""
    distance = 1
    while distance < core:
        yield rank ^ distance
        distance *= 2


@lru_cache(maxsize=16)
def fold_partner(rank: int, size: int) -> int | None:
    """Return the partner in the fold round before, and the unfold round after a butterfly; None without one."""
    core = core_size(size)
    if rank >= core:
        return rank - core
    return rank + core if rank + core < size else None


def tree_parent(rank: int, size: int, root: int = 0) -> int | None:
    """Return the parent of `rank` in the binomial tree of `root`; None for the root."""
    distance_from_root = (rank - root) % size
    if not distance_from_root:
        return None
    return ((distance_from_root & (distance_from_root - 1)) + root) % size


def tree_children(rank: int, size: int, root: int = 0) -> Iterator[int]:
    """Yield the children of `rank` in the binomial tree of `root`, the smallest subtree first."""
    distance_from_root = (rank - root) % size
    distance = 1
    while distance_from_root + distance < size and not distance_from_root & distance:
        yield (distance_from_root + distance + root) % size
        distance *= 2


@lru_cache(maxsize=16)
def groups(marks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks with each mark, in the order in which the marks first appear."""
    ranks_of: dict[int, list[int]] = {}
    for rank, mark in enumerate(marks):
        ranks_of.setdefault(mark, []).append(rank)
    return tuple(map(tuple, ranks_of.values()))


def rotation(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (dest, source) of the size - 1 steps in which every rank sends directly to every other one."""
    for distance in range(1, size):
        yield (rank + distance) % size, (rank - distance) % size


@lru_cache(maxsize=16)
def hearing(rank: int, size: int) -> tuple[int, ...]:
    """Return the order in which to wait for direct messages from all other ranks.

    The partners in recursive doubling are first: of ranks that run it instead, messages
    are received as they are sent, which avoids a cycle of waits.
    """
    partner = fold_partner(rank, size)
    core = core_size(size)
    first: list[int] = []
    if rank < core:
        if partner is not None:
            first.append(partner)
        first += butterfly(rank, core)
    return (
        *first,
        *(source for _, source in rotation(rank, size) if source not in first),
    )


def dissemination(rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the ceil(lg size) rounds after which every rank holds every rank's block (Bruck et al., 1997).

    A round is (dest, source, blocks): send the first `blocks` blocks held to `dest`,
    and receive as many from `source`. Before round j a rank holds the blocks of rank,
    rank + 1, ..., rank + 2^j - 1 (modulo size), in this order.
    """
    distance = 1
    while distance < size:
        yield (
            (rank - distance) % size,
            (rank + distance) % size,
            min(distance, size - distance),
        )
        distance *= 2
