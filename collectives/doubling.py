"""Recursive doubling for any number of ranks: fold, butterfly, unfold.

Rounds: floor(lg P), and 2 more when P is no power of two. A round sends what the rank holds.
Invariant: after round j the 2^(j+1) ranks of a block hold the same bits, if `combine` is commutative bit for bit.
"""

from collections.abc import Callable

from collectives.agreement import Steps
from collectives.channel import Channel, Offer
from collectives.schedule import butterfly, fold_partner

Combine = Callable[[Offer, Offer, int], Offer]


def doubling(offer: Offer, channel: Channel, combine: Combine) -> Steps[Offer]:
    """Combine the offers of all ranks, and return the result on every rank.

    combine(ours, theirs, block): `block` consecutive core ranks, this one among them, do the same at the same time.
    """
    partner = fold_partner(channel.rank, channel.size)
    if partner is not None and partner < channel.rank:  # beyond the core: give, and hear the result
        yield from channel.send(offer, partner)
        return (yield from channel.receive(partner))
    if partner is not None:
        offer = combine(offer, (yield from channel.receive(partner)), 1)
    block = 1
    for neighbour in butterfly(channel.rank, channel.core):
        block *= 2
        offer = combine(offer, (yield from channel.exchange(offer, neighbour)), block)
    if partner is not None:
        yield from channel.send(offer, partner)
    return offer
