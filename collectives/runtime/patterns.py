"""Communication patterns for any number of ranks. A part is a vector and an integer, its count."""

from collections.abc import Callable

from collectives.planning.schedule import (
    butterfly,
    core_size,
    fold_partner,
    tree_children,
    tree_parent,
)
from collectives.runtime.group import Group, Part
from collectives.runtime.messages import Steps
from mpicomp.vector import SparseVector, merge

Combine = Callable[[Part, Part, int], Part]


def add(ours: Part, theirs: Part, block: int = 1) -> Part:
    """Combine by adding, with the larger count; bitwise commutative."""
    return merge(ours[0], theirs[0]), max(ours[1], theirs[1])


def doubling(part: Part, group: Group, combine: Combine) -> Steps[Part]:
    """Exchange over doubling distances and combine, and return the result of all ranks. lg(core) rounds, or 2 more.

    The ranks beyond the core ranks, a power of two, first fold into these, and receive
    the result last. The vector that is returned is a new one, also of a single rank.

    combine(ours, theirs, block): called by `block` consecutive core ranks, including
    this one, with the same result. Invariant: after round j the 2^(j+1) ranks of a
    block hold the same bits, if `combine` is bitwise commutative.
    """
    if group.size == 1:
        return part[0].copy(), part[1]
    folded = fold_partner(group.rank, group.size)
    if folded is not None and folded < group.rank:
        yield from group.send(part[0], folded, part[1])
        return (yield from group.receive(folded))
    if folded is not None:
        part = combine(part, (yield from group.receive(folded)), 1)
    block = 1
    for partner in butterfly(group.rank, core_size(group.size)):
        block *= 2
        part = combine(
            part, (yield from group.exchange(part[0], partner, part[1])), block
        )
    if folded is not None:
        yield from group.send(part[0], folded, part[1])
    return part


def compare_by_doubling(group: Group) -> Steps[None]:
    """Compare the call signatures as recursive doubling, the default, does, to detect ranks with another algorithm."""
    yield from doubling((group.nothing, 0), group, lambda ours, theirs, block: ours)


def reduce_up(part: Part, group: Group, combine: Combine, root: int = 0) -> Steps[Part]:
    """Combine towards the root of a binomial tree, which returns the combination of all parts. ceil(lg P) rounds."""
    if group.size == 1:
        return part[0].copy(), part[1]
    for child in tree_children(group.rank, group.size, root):
        part = combine(part, (yield from group.receive(child)), 1)
    parent = tree_parent(group.rank, group.size, root)
    if parent is not None:
        yield from group.send(part[0], parent, part[1])
    return part


def hand_down(vector: SparseVector, group: Group, root: int = 0) -> Steps[SparseVector]:
    """Broadcast the root's vector over a binomial tree, and return it, on the root a copy. ceil(lg P) rounds."""
    parent = tree_parent(group.rank, group.size, root)
    if parent is not None:
        vector, _ = yield from group.receive(parent)
    for child in reversed(list(tree_children(group.rank, group.size, root))):
        yield from group.send(vector, child)
    return vector.copy() if parent is None else vector
