"""The metadata exchange before an exact sum: the number of entries of each rank, and samples of their indices.

One allgather of small messages, which also compares the call signatures. All ranks choose by its result.

A message contains the number of entries and the bits of a value as coded, in one integer, and indices: a digest
(`collectives.choice.overlap`), and, for a partition, evenly spaced samples. A rank may send its whole vector instead,
if it is short or if the last call like this one gathered the vectors. If all ranks do, the metadata exchange is the
allgather; if only some do, the chosen algorithm follows as usual.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from collectives.choice.formulas import LONG_NBYTES
from collectives.choice.overlap import in_digest, level_of, overlap_of
from collectives.partition import (
    Ranges,
    balanced_ranges,
    equal_ranges,
    quantile_ranges,
    sample,
)
from collectives.runtime.group import Group, Part
from collectives.runtime.messages import Steps
from mpicomp.arrays import to_numpy
from mpicomp.vector import SparseVector

WHOLE_NBYTES = 1 << 16  # of all other ranks' vectors: they take no longer than the rounds of the metadata
MOST_BITS = 2**15 - 1
PARTITIONS = ("auto", "equal", "sampled")


@dataclass(frozen=True)
class Metadata:
    """The metadata of all ranks: entries of each, samples of their indices, the length, and the requested partition.

    overlap: of the supports, see `collectives.choice`. bits: the mean bits of an entry's values as coded. vectors:
    those of all ranks if each sent its own, else empty.
    """

    counts: list[int]
    samples: list[NDArray[np.integer]]
    length: int
    partition: str = "auto"
    overlap: float = 0.0
    bits: float = 0.0
    vectors: tuple[SparseVector, ...] = ()

    def of_vectors(self, *, digests: bool) -> "Metadata":
        """Return what the metadata would be without the vectors, which they keep. digests: as in `metadata_of`."""
        found = [to_numpy(vector.indices) for vector in self.vectors]
        samples = [sample(each, rank, len(found)) for rank, each in enumerate(found)]
        overlap = overlap_of(found, self.counts, self.length) if digests else 0.0
        return replace(self, samples=samples, overlap=overlap)

    def ranges(self, size: int) -> Ranges:
        """Return the shares of `size` owners."""
        if self.partition == "equal":
            return equal_ranges(self.length, size)
        choose = balanced_ranges if self.partition == "auto" else quantile_ranges
        return choose(self.samples, self.counts, self.length, size)


def exchange_metadata(
    vector: SparseVector,
    group: Group,
    partition: str,
    *,
    sampling: bool = True,
    bits: float | None = None,
    whole: bool = False,
) -> Steps[Metadata]:
    """Exchange the metadata of all ranks. ceil(lg P) rounds of small messages.

    sampling: send samples for a partition. bits: bits of an entry's values as coded, if the metadata are for choosing
    an algorithm; a message between nodes then contains a digest. None otherwise. whole: send the vector instead.
    """
    sent = vector
    apart = len(group.nodes()) > 1  # inside a node bytes count for little, and a digest is not worth making
    digests = bits is not None and apart
    if not whole:
        chosen = sample(vector.indices, group.rank, group.size) if sampling and partition != "equal" else None
        if digests:
            passes = in_digest(vector.indices, level := level_of(vector.nnz))
            others = vector.indices[:0] if chosen is None else chosen[~in_digest(chosen, level)]
            chosen = np.sort(np.concatenate([vector.indices[passes], others]))
        sent = group.nothing
        if chosen is not None and chosen.size:
            sent = SparseVector(chosen, vector.support().values[: chosen.size], vector.length)
    metadata = vector.nnz << 16 | min(round(bits or 0), MOST_BITS) << 1 | whole
    received = yield from group.gather(sent, metadata)
    return metadata_of(received, vector.length, partition, digests=digests)


def is_short(vector: SparseVector, group: Group) -> bool:
    """Return whether a vector is so short that sending it to all ranks takes no longer than sending metadata."""
    return (group.size - 1) * vector.nbytes <= WHOLE_NBYTES


def is_long(nbytes: int, group: Group) -> bool:
    """Return whether vectors with messages of this size are never sent in place of metadata."""
    return (group.size - 1) * nbytes > LONG_NBYTES


def metadata_of(received: Sequence[Part], length: int, partition: str, *, digests: bool) -> Metadata:
    """Return the metadata in the messages of all ranks. digests: whether the messages contain digests."""
    counts, whole = [said >> 16 for _, said in received], [bool(said & 1) for _, said in received]
    coded = sum([count * (said >> 1 & MOST_BITS) for count, (_, said) in zip(counts, received, strict=True)])
    bits = coded / max(1, sum(counts))
    if all(whole):
        return Metadata(counts, [], length, partition, bits=bits, vectors=tuple([vector for vector, _ in received]))
    found = [to_numpy(vector.indices) for vector, _ in received]
    samples = found
    if digests:
        samples = [each[~in_digest(each, level_of(count))] for each, count in zip(found, counts, strict=True)]
    samples = [sample(found[rank], rank, len(found)) if whole[rank] else each for rank, each in enumerate(samples)]
    return Metadata(counts, samples, length, partition, overlap_of(found, counts, length) if digests else 0.0, bits)
