"""The metadata exchange before an exact sum: the number of entries of each rank, and samples of their indices.

One allgather of small messages, which also compares the call signatures. All ranks choose by its result.

A message contains the number of entries and the bits of a value as coded, in one integer, and indices: a digest
(`collectives.choice.overlap`), and, for a partition, evenly spaced samples. A rank may send its whole vector instead,
if it is short or if the last call like this one gathered the vectors. If all ranks do, the metadata exchange is the
allgather; if only some do, the chosen algorithm follows as usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

import numpy as np
from numpy.typing import NDArray

from collectives.choice.overlap import in_digest, level_of, overlap_of
from collectives.partition import Bounds, balanced_bounds, sample
from collectives.runtime.group import Group
from collectives.runtime.messages import Steps
from mpicomp.arrays import to_numpy
from mpicomp.vector import SparseVector

WHOLE_NBYTES = 1 << 16  # of all other ranks' vectors: they take no longer than the rounds of the metadata
MOST_BITS = 2**15 - 1  # of a value as coded: the field has 15 bits


@dataclass(frozen=True)
class Metadata:
    """The metadata of all ranks: entries of each, samples of their indices, and the length.

    overlap: of the supports, see `collectives.choice`. bits: the mean bits of an entry's values as coded. vectors:
    those of all ranks if each sent its own, else empty.
    """

    counts: list[int]
    samples: list[NDArray[np.integer]]
    length: int
    overlap: float = 0.0
    bits: float = 0.0
    vectors: tuple[SparseVector, ...] = ()

    def sampled(self, received: Sequence[tuple[SparseVector, bool]], *, digests: bool) -> "Metadata":
        """Return the metadata with samples and overlap, from each rank's vector, or its indices in place of it."""
        supports = [to_numpy(vector.indices) for vector, _ in received]
        samples = []
        for rank, (indices, (_, is_whole)) in enumerate(zip(supports, received, strict=True)):
            if is_whole:
                indices = sample(indices, rank, len(supports))
            elif digests:
                indices = indices[~in_digest(indices, level_of(self.counts[rank]))]
            samples.append(indices)
        overlap = overlap_of(supports, self.counts, self.length) if digests else 0.0
        return replace(self, samples=samples, overlap=overlap)

    def bounds(self, size: int) -> Bounds:
        """Return the bounds of the shares of `size` owners."""
        return balanced_bounds(self.samples, self.counts, self.length, size)


def exchange_metadata(
    vector: SparseVector,
    group: Group,
    *,
    sampling: bool = True,
    bits: float | None = None,
    whole: bool = False,
) -> Steps[Metadata]:
    """Exchange the metadata of all ranks. ceil(lg P) rounds of small messages.

    sampling: send samples for the bounds of shares. bits: bits of an entry's values as coded, if the metadata are for
    choosing an algorithm; a message between nodes then contains a digest. None otherwise. whole: send the vector
    instead.
    """
    digests = bits is not None and len(group.nodes()) > 1  # inside a node bytes cost less than making a digest
    sent = vector
    if not whole:
        sent = indices_to_send(vector, group, samples=sampling, digest=digests)
    received = yield from group.gather(sent, pack(vector.nnz, bits or 0, whole))
    vectors, fields = zip(*received, strict=True)
    counts, every_bits, wholes = unpack(fields)
    mean_bits = sum(map(mul, counts, every_bits)) / max(1, sum(counts))
    metadata = Metadata(counts, [], vector.length, bits=mean_bits, vectors=vectors if all(wholes) else ())
    return metadata if all(wholes) else metadata.sampled(list(zip(vectors, wholes, strict=True)), digests=digests)


def indices_to_send(vector: SparseVector, group: Group, *, samples: bool, digest: bool) -> SparseVector:
    """Return a vector of placeholder values at the indices that a rank sends: samples, and its digest."""
    indices = sample(vector.indices, group.rank, group.size) if samples else vector.indices[:0]
    if digest:
        level = level_of(vector.nnz)
        others = indices[~in_digest(indices, level)]
        indices = np.sort(np.concatenate([vector.indices[in_digest(vector.indices, level)], others]))
    if not indices.size:
        return group.nothing
    return SparseVector(indices, vector.support().values[: indices.size], vector.length)


def is_short(vector: SparseVector, group: Group) -> bool:
    """Return whether a vector is so short that sending it to all ranks takes no longer than sending metadata."""
    return (group.size - 1) * vector.nbytes <= WHOLE_NBYTES


def pack(entries: int, bits: float, whole: bool) -> int:
    """Return the fields of a rank's metadata in one integer: entries, bits of a value as coded, whole vector or not."""
    return entries << 16 | min(round(bits), MOST_BITS) << 1 | whole


def unpack(fields: Sequence[int]) -> tuple[list[int], list[int], list[bool]]:
    """Return the three fields of `pack`, each of all ranks."""
    entries, bits, whole = zip(*[(each >> 16, each >> 1 & MOST_BITS, each & 1 == 1) for each in fields], strict=True)
    return list(entries), list(bits), list(whole)
