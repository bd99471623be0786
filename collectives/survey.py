"""What the ranks tell each other before an exact sum: how many entries they bring, and where those stand.

One allgather of small messages, in which the terms are compared as well. From it every rank chooses alike.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.partition import (
    Partition,
    Ranges,
    balanced_ranges,
    equal_ranges,
    hashed_blocks,
    quantile_ranges,
    sample,
)
from mpicomp.arrays import to_numpy
from mpicomp.vector import SparseVector

PARTITIONS = ("auto", "equal", "sampled", "hashed")


@dataclass(frozen=True)
class Survey:
    """What all ranks bring: entries of each, samples of their indices, the length, and the partition asked for."""

    counts: list[int]
    samples: list[NDArray[np.integer]]
    length: int
    partition: str = "auto"

    def shares(self, size: int) -> Partition:
        """Return the shares of `size` owners."""
        return hashed_blocks(self.length, size) if self.partition == "hashed" else self.ranges(size)

    def ranges(self, size: int) -> Ranges:
        """Return the contiguous shares of `size` owners; sampled quantiles where hashed blocks were asked for."""
        if self.partition == "equal":
            return equal_ranges(self.length, size)
        choose = balanced_ranges if self.partition == "auto" else quantile_ranges
        return choose(self.samples, self.counts, self.length, size)


def look_around(offer: Offer, channel: Channel, *, sampling: bool = True) -> Steps[Survey]:
    """Tell every rank what this one brings, and hear the same of all. ceil(lg P) rounds of small messages."""
    partition, vector = channel.terms.partition or "auto", channel.nothing
    if sampling and partition != "equal":
        support = offer.vector.support()
        chosen = sample(support.indices, channel.rank, channel.size)
        vector = SparseVector(chosen, support.values[: chosen.size], support.length)
    heard = yield from channel.gather(Offer(vector, offer.vector.nnz))
    samples = [to_numpy(each.vector.indices) for each in heard]
    return Survey([each.k for each in heard], samples, offer.vector.length, partition)
