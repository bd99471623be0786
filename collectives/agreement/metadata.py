"""The metadata exchange before an exact sum: the number of entries of each rank, and samples of their indices.

One allgather of small messages, which also compares the call signatures. A rank may
send its whole vector instead (docs/contributing/costs.md). If all ranks do, the
exchange is the allgather; if only some do, the chosen algorithm follows as usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from collectives.planning.partition import Bounds, balanced_bounds, sample
from collectives.runtime.group import Group, vectors_of
from collectives.runtime.messages import Steps
from mpicomp.arrays import to_numpy
from mpicomp.vector import SparseVector

# of all other ranks' vectors: they take no longer than the rounds of the metadata
WHOLE_NBYTES = 1 << 16
# the count of a message is entries and, in its low bits, the bits of a value as coded
BITS_WIDTH = 15
MOST_BITS = (1 << BITS_WIDTH) - 1


@dataclass(frozen=True)
class Metadata:
    """The metadata of all ranks: entries of each, and the length.

    received: of each rank its vector, which then has all of its entries, or one at
    samples of its indices. bits: mean bits of a value.
    """

    counts: list[int]
    length: int
    received: Sequence[SparseVector] = ()
    bits: float = 0.0

    @property
    def vectors(self) -> Sequence[SparseVector]:
        """The vectors of all ranks if each sent its own, else none."""
        return self.received if all(self._are_whole()) else ()

    def bounds(self, size: int) -> Bounds:
        """Return the bounds of the shares of `size` owners."""
        supports = [to_numpy(vector.indices) for vector in self.received]
        ranks = enumerate(zip(supports, self._are_whole(), strict=True))
        samples = [
            sample(vector, rank, len(supports)) if is_whole else vector
            for rank, (vector, is_whole) in ranks
        ]
        return balanced_bounds(samples, self.counts, self.length, size)

    def _are_whole(self) -> list[bool]:
        pairs = zip(self.received, self.counts, strict=False)
        return [vector.nnz == count for vector, count in pairs]


def exchange_metadata(
    vector: SparseVector,
    group: Group,
    *,
    sampling: bool = True,
    bits: float = 0.0,
    sends_vector: bool = False,
) -> Steps[Metadata]:
    """Exchange the metadata of all ranks. ceil(lg P) rounds of small messages.

    sampling: send samples for the bounds of shares. bits: of an entry's values as
    coded. sends_vector: in place of samples.
    """
    sent = (
        vector
        if sends_vector
        else samples_of(vector, group)
        if sampling
        else group.nothing
    )
    fields = vector.nnz << BITS_WIDTH | min(round(bits), MOST_BITS)
    received = yield from group.gather(sent, fields)
    counts = [packed >> BITS_WIDTH for _, packed in received]
    all_bits = sum(
        (packed >> BITS_WIDTH) * (packed & MOST_BITS) for _, packed in received
    )
    vectors = vectors_of(received)
    return Metadata(counts, vector.length, vectors, all_bits / max(1, sum(counts)))


def samples_of(vector: SparseVector, group: Group) -> SparseVector:
    """Return a vector of placeholder values at samples of a rank's indices."""
    indices = sample(vector.indices, group.rank, group.size)
    if not indices.size:
        return group.nothing
    return SparseVector(indices, vector.support().values[: indices.size], vector.length)


def is_short(vector: SparseVector, group: Group) -> bool:
    """Return whether a vector is so short that sending it to all ranks takes no longer than sending metadata."""
    return (group.size - 1) * vector.nbytes <= WHOLE_NBYTES
