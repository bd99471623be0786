"""Rounds that several algorithms share: over any number of ranks, for any way to combine what two ranks hold."""

from collections.abc import Callable
from functools import partial

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.schedule import butterfly, fold_partner, tree_children, tree_parent
from mpicomp.vector import merge

Combine = Callable[[Offer, Offer, int], Offer]


def add(ours: Offer, theirs: Offer, block: int = 1) -> Offer:
    """Combine by adding; commutative bit for bit."""
    return Offer(merge(ours.vector, theirs.vector))


def folded(offer: Offer, channel: Channel, combine: Combine, core: Callable[[Offer], Steps[Offer]]) -> Steps[Offer]:
    """Run `core` on the core ranks, a power of two; the ranks beyond fold into it first and hear its result last.

    Rounds beside those of the core: 2 when P is no power of two, else none.
    """
    partner = fold_partner(channel.rank, channel.size)
    if partner is not None and partner < channel.rank:
        yield from channel.send(offer, partner)
        return (yield from channel.receive(partner))
    if partner is not None:
        offer = combine(offer, (yield from channel.receive(partner)), 1)
    offer = yield from core(offer)
    if partner is not None:
        yield from channel.send(offer, partner)
    return offer


def doubling(offer: Offer, channel: Channel, combine: Combine) -> Steps[Offer]:
    """Exchange over doubling distances and combine, and return the result of all core ranks. lg(core) rounds.

    combine(ours, theirs, block): `block` consecutive core ranks, this one among them, do the same at the same time.
    Invariant: after round j the 2^(j+1) ranks of a block hold the same bits, if `combine` is commutative bit for bit.
    """
    block = 1
    for partner in butterfly(channel.rank, channel.core):
        block *= 2
        offer = combine(offer, (yield from channel.exchange(offer, partner)), block)
    return offer


def agreed(channel: Channel) -> Steps[None]:
    """Compare the terms over the schedule of recursive doubling.

    So ranks that take recursive doubling as the default meet those that named another algorithm.
    """

    def heard(ours: Offer, theirs: Offer, block: int) -> Offer:
        return ours

    core = partial(doubling, channel=channel, combine=heard)
    yield from folded(Offer(channel.nothing), channel, heard, core)


def reduce_up(offer: Offer, channel: Channel, combine: Combine, root: int = 0) -> Steps[Offer]:
    """Combine towards the root of a binomial tree; what the root returns is the whole. ceil(lg P) rounds."""
    for child in tree_children(channel.rank, channel.size, root):
        offer = combine(offer, (yield from channel.receive(child)), 1)
    parent = tree_parent(channel.rank, channel.size, root)
    if parent is not None:
        yield from channel.send(offer, parent)
    return offer


def hand_down(offer: Offer, channel: Channel, root: int = 0) -> Steps[Offer]:
    """Return the root's offer on every rank, down a binomial tree. ceil(lg P) rounds."""
    parent = tree_parent(channel.rank, channel.size, root)
    if parent is not None:
        offer = yield from channel.receive(parent)
    for child in reversed(list(tree_children(channel.rank, channel.size, root))):
        yield from channel.send(offer, child)
    return offer
