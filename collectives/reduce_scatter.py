"""Sparse reduce-scatter: every rank gets the sum on its share of the index space.

Source: the split phase of SparCML (C. Renggli et al., SC 2019, arXiv 1802.08021).

Rounds: one step of P - 1 messages a rank. Bytes sent by a rank: (P-1)/P k s, when its k entries are spread evenly.
Invariant: an owner adds what the ranks hold of its share in rank order: the same bits in every run.

Differences from the paper: the parts are sent to their owners directly in one step, and each says how long it is; the
shares are ranges of equal length, hashed blocks, or the caller's own ranges.
"""

from collections.abc import Sequence
from typing import Any

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin, sound
from collectives.partition import Partition, Ranges, equal_ranges, given_ranges, hashed_blocks
from collectives.progress import Request
from mpicomp.vector import SparseVector, add_up


def sparse_reduce_scatter(
    vector: SparseVector,
    comm: Any,
    *,
    algorithm: str = "auto",
    partition: str | Sequence[int] = "equal",
    codec: str = "auto",
) -> SparseVector:
    """Sum the vectors of all ranks, and return on each rank the part of the sum that it owns.

    vector: of numbers or of rows, of one length, width and dtype on all ranks; any number of entries, also none.
    comm: an mpi4py intracommunicator.
    algorithm: "auto" or "split". partition: who owns what, the same on all ranks: "equal": rank r of P has
    n r // P <= index < n (r + 1) // P; "hashed": short blocks, so that no rank gets all of a hot stretch
    (`collectives.partition.hashed_blocks(n, P).owners(indices)` tells whose they are); or P + 1 bounds from 0 to n:
    rank r has bounds[r] <= index < bounds[r + 1].
    codec: how vectors are written in messages: "plain", "quick" (a range or a bitmap where that is smaller), "smallest"
    (all formats of `mpicomp.codec`, none of which loses a bit), or "auto": "quick" inside a node, else "smallest".

    Returns a vector of the same length with the entries of this rank's share only, at their own indices.

    Raises ValueError or TypeError on a rank whose arguments are bad, and CollectiveError on the others; CollectiveError
    on every rank when what must be the same differs. TypeError at once when `comm` is no intracommunicator.
    """
    return sparse_ireduce_scatter(vector, comm, algorithm=algorithm, partition=partition, codec=codec).wait()


def sparse_ireduce_scatter(
    vector: SparseVector,
    comm: Any,
    *,
    algorithm: str = "auto",
    partition: str | Sequence[int] = "equal",
    codec: str = "auto",
) -> Request[SparseVector]:
    """Start `sparse_reduce_scatter` and return its Request; leave the vector's arrays alone before it has ended."""
    steps = {"split": reduce_scatter}
    terms: dict[str, Any] = {"partition": partition}
    return begin("sparse_reduce_scatter", steps, vector, comm, algorithm, codec=codec, prepare=divided, **terms)


def divided(vector: Any, terms: dict[str, Any], size: int) -> SparseVector:
    """Return the vector if it is sound, and write the partition that the caller asked for as text in the terms."""
    checked = sound(vector, terms, size)
    if not isinstance(terms["partition"], str):
        ranges = given_ranges(terms["partition"], checked.length, size)
        terms["partition"] = " ".join(map(str, ranges.bounds))
    elif terms["partition"] not in ("equal", "hashed"):
        raise ValueError(f"partition is {terms['partition']!r}: expected 'equal', 'hashed' or {size + 1} bounds")
    return checked


def reduce_scatter(offer: Offer, channel: Channel) -> Steps[SparseVector]:
    """Let every rank add up its share; see the head of this file."""
    asked, length = channel.terms.partition or "equal", offer.vector.length
    if asked == "hashed":
        shares: Partition = hashed_blocks(length, channel.size)
    else:
        shares = equal_ranges(length, channel.size) if asked == "equal" else Ranges(tuple(map(int, asked.split())))
    return (yield from split(offer, channel, shares))


def split(offer: Offer, channel: Channel, partition: Partition) -> Steps[SparseVector]:
    """Send every owner its part, and add up what the ranks hold of this rank's."""
    parts = yield from scatter(offer, channel, partition)
    return add_up([theirs.vector for theirs in parts])


def scatter(offer: Offer, channel: Channel, partition: Partition) -> Steps[list[Offer]]:
    """Send every owner its part with the count of the whole, and return what the ranks hold of this rank's.

    Where there are fewer shares than ranks, the last ranks own nothing.
    """
    parts = partition.cut(offer.vector)
    parts += [channel.nothing] * (channel.size - len(parts))
    return (yield from channel.all_to_all([Offer(part, offer.k) for part in parts]))
