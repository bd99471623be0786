"""The metadata exchange before an exact sum: the number of entries of each rank, and samples of their indices.

One allgather of small messages, which also compares the call signatures. A rank may
send its whole vector instead (docs/contributing/costs.md). If all ranks do, the
exchange is the allgather; if only some do, the chosen algorithm follows as usual.
"""

from collections.abc import Sequence

import numpy as np

from collectives.planning.overlap import (
    LEAST_ENTRIES,
    inside,
    likely_union,
    outside,
    windows,
)
from collectives.planning.partition import Bounds, balanced_bounds, sample
from collectives.runtime.group import Group, Part, vectors_of
from collectives.runtime.messages import Steps
from mpicomp.arrays.device import on_device, to_numpy
from mpicomp.vector import SparseVector

# Bytes of the vectors of all other ranks, at most, that take no longer than the rounds
# of the metadata.
WHOLE_NBYTES = 1 << 16
# The count of a message contains the entries, whether all in the windows of
# `planning.overlap` are sent, and, in its low bits, the bits of a value as coded.
ENTRIES_AT = 16
MOST_BITS = (1 << 15) - 1
SHOWS = 1 << 15


# For each rank its vector, or placeholders at samples of its indices, and the count.
Metadata = Sequence[Part]


def entries_of(metadata: Metadata) -> list[int]:
    """Return the number of entries of each rank."""
    return [count >> ENTRIES_AT for _, count in metadata]


def mean_bits(metadata: Metadata) -> float:
    """Return the mean bits of a value, as coded."""
    bits = sum((count >> ENTRIES_AT) * (count & MOST_BITS) for _, count in metadata)
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
    length = metadata[0][0].length
    for rank, (vector, count) in enumerate(metadata):
        indices = to_numpy(vector.indices)
        if vector.nnz == entries[rank]:
            indices = sample(indices, rank, len(entries))
        elif count & SHOWS:
            indices = outside(indices, windows(length, entries[rank]))
        samples.append(indices)
    return balanced_bounds(samples, entries, length, size)


def union_of(metadata: Metadata) -> float | None:
    """Return the likely entries of the sum of all vectors; None if a rank does not show its support."""
    if not all([count & SHOWS for _, count in metadata]):
        return None
    indices = [to_numpy(vector.indices) for vector in vectors_of(metadata)]
    return likely_union(metadata[0][0].length, entries_of(metadata), indices)


def exchange_metadata(
    vector: SparseVector,
    group: Group,
    *,
    sampling: bool = True,
    bits: float = 0.0,
    sends_vector: bool = False,
    shows: bool = False,
) -> Steps[Metadata]:
    """Exchange the metadata of all ranks. ceil(lg P) rounds of small messages.

    sampling: send samples for the bounds of shares. bits: of an entry's values as
    coded. sends_vector: in place of samples. shows: send all that is in windows.
    """
    sent = vector
    if not sends_vector:
        sent = samples_of(vector, group, sampling=sampling, shows=shows)
    count = vector.nnz << ENTRIES_AT | min(round(bits), MOST_BITS)
    return (yield from group.gather(sent, count | SHOWS * shows))


def samples_of(
    vector: SparseVector, group: Group, *, sampling: bool, shows: bool
) -> SparseVector:
    """Return a vector of placeholder values at samples of a rank's indices, and at those in windows."""
    indices = vector.indices[:0]
    if sampling:
        indices = sample(vector.indices, group.rank, group.size)
    if shows:
        edges = windows(vector.length, vector.nnz)
        indices = np.union1d(indices, inside(vector.indices, edges))
    if not indices.size:
        return group.nothing
    return SparseVector(indices, vector.support().values[: indices.size], vector.length)


def can_show(vector: SparseVector, group: Group) -> bool:
    """Return whether to send what a vector has in windows: between nodes, of many entries in host memory."""
    return (
        len(group.by_node) > 1
        and vector.nnz >= LEAST_ENTRIES
        and not on_device(vector.indices)
    )


def is_short(vector: SparseVector, group: Group) -> bool:
    """Return whether a vector is so short that sending it to all ranks takes no longer than sending metadata."""
    return (group.size - 1) * vector.nbytes <= WHOLE_NBYTES
