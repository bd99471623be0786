"""The metadata exchange before an exact sum: the number of entries of each rank, and samples of their indices.

One allgather of small messages, which also compares the call signatures. A rank may
send its whole vector instead (docs/contributing/costs.md). If all ranks do, the
exchange is the allgather; if only some do, the chosen algorithm follows as usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from collectives.planning.partition import Bounds, balanced_bounds, sample
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import to_numpy
from mpicomp.vector import SparseVector

# of all other ranks' vectors: they take no longer than the rounds of the metadata
WHOLE_NBYTES = 1 << 16
MOST_BITS = 2**15 - 1  # of a value as coded: the field has 15 bits


@dataclass(frozen=True)
class Metadata:
    """The metadata of all ranks: entries of each, and the length.

    received: of each rank its vector, where it is whole, or one at samples of its
    indices. bits: mean bits of a value.
    """

    counts: list[int]
    length: int
    received: Sequence[SparseVector] = ()
    sent_whole: Sequence[bool] = ()
    bits: float = 0.0

    @property
    def vectors(self) -> Sequence[SparseVector]:
        """The vectors of all ranks if each sent its own, else none."""
        return self.received if all(self.sent_whole) else ()

    def bounds(self, size: int) -> Bounds:
        """Return the bounds of the shares of `size` owners."""
        supports = [to_numpy(vector.indices) for vector in self.received]
        ranks = enumerate(zip(supports, self.sent_whole, strict=True))
        samples = [
            sample(vector, rank, len(supports)) if is_whole else vector
            for rank, (vector, is_whole) in ranks
        ]
        return balanced_bounds(samples, self.counts, self.length, size)


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
    received = yield from group.gather(sent, pack(vector.nnz, bits, sends_vector))
    vectors, fields = zip(*received, strict=True)
    counts, every_bits, wholes = unpack(fields)
    return Metadata(
        counts,
        vector.length,
        vectors,
        wholes,
        sum(map(mul, counts, every_bits)) / max(1, sum(counts)),
    )


def samples_of(vector: SparseVector, group: Group) -> SparseVector:
    """Return a vector of placeholder values at samples of a rank's indices."""
    indices = sample(vector.indices, group.rank, group.size)
    if not indices.size:
        return group.nothing
    return SparseVector(indices, vector.support().values[: indices.size], vector.length)


def is_short(vector: SparseVector, group: Group) -> bool:
    """Return whether a vector is so short that sending it to all ranks takes no longer than sending metadata."""
    return (group.size - 1) * vector.nbytes <= WHOLE_NBYTES


def pack(entries: int, bits: float, is_whole: bool) -> int:
    """Return the fields of a rank's metadata in one integer: entries, bits of a value as coded, whole vector or not."""
    return entries << 16 | min(round(bits), MOST_BITS) << 1 | is_whole


def unpack(fields: Sequence[int]) -> tuple[list[int], list[int], list[bool]]:
    """Return the three fields of `pack`, each of all ranks."""
    entries, bits, are_whole = zip(
        *[
            (packed >> 16, packed >> 1 & MOST_BITS, packed & 1 == 1)
            for packed in fields
        ],
        strict=True,
    )
    return list(entries), list(bits), list(are_whole)
