"""The metadata exchange before an exact sum: the number of entries of each rank, and samples of their indices.

One allgather of small messages, which also compares the call signatures. A rank may
send its whole vector instead (docs/contributing/costs.md). If all ranks do, the
exchange is the allgather; if only some do, the chosen algorithm follows as usual.
"""

from collections.abc import Sequence

from collectives.planning.partition import Bounds, balanced_bounds, sample
from collectives.runtime.group import Group, Part, vectors_of
from collectives.runtime.messages import Steps
from mpicomp.arrays import to_numpy
from mpicomp.vector import SparseVector

# of all other ranks' vectors: they take no longer than the rounds of the metadata
WHOLE_NBYTES = 1 << 16
# the count of a message is entries and, in its low bits, the bits of a value as coded
BITS_WIDTH = 15
MOST_BITS = (1 << BITS_WIDTH) - 1


# of each rank its vector, or one at samples of its indices, and the count
Metadata = Sequence[Part]


def entries_of(metadata: Metadata) -> list[int]:
    """Return the number of entries of each rank."""
    return [count >> BITS_WIDTH for _, count in metadata]


def mean_bits(metadata: Metadata) -> float:
    """Return the mean bits of a value, as coded."""
    bits = sum((count >> BITS_WIDTH) * (count & MOST_BITS) for _, count in metadata)
    return bits / max(1, sum(entries_of(metadata)))


def whole_vectors(metadata: Metadata) -> list[SparseVector]:
    """Return the vectors of all ranks if each sent its own, else none."""
    vectors = vectors_of(metadata)
    sent = [vector.nnz for vector in vectors]
    return vectors if sent == entries_of(metadata) else []


def bounds_of(metadata: Metadata, size: int) -> Bounds:
    """Return the bounds of the shares of `size` owners."""
    samples = []
    entries = entries_of(metadata)
    for rank, vector in enumerate(vectors_of(metadata)):
        indices = to_numpy(vector.indices)
        is_whole = vector.nnz == entries[rank]
        samples.append(sample(indices, rank, len(entries)) if is_whole else indices)
    return balanced_bounds(samples, entries, metadata[0][0].length, size)


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
    count = vector.nnz << BITS_WIDTH | min(round(bits), MOST_BITS)
    return (yield from group.gather(sent, count))


def samples_of(vector: SparseVector, group: Group) -> SparseVector:
    """Return a vector of placeholder values at samples of a rank's indices."""
    indices = sample(vector.indices, group.rank, group.size)
    if not indices.size:
        return group.nothing
    return SparseVector(indices, vector.support().values[: indices.size], vector.length)


def is_short(vector: SparseVector, group: Group) -> bool:
    """Return whether a vector is so short that sending it to all ranks takes no longer than sending metadata."""
    return (group.size - 1) * vector.nbytes <= WHOLE_NBYTES
