"""Shared supports: agree on the indices once, then sum many sets of values that stand at them.

Sources: ScaleCom (C.-Y. Chen et al., NeurIPS 2020, arXiv 2104.11125) for a leader's support; random-k with a shared
seed as in S. U. Stich, J.-B. Cordonnier, M. Jaggi, NeurIPS 2018 (arXiv 1809.07599).

To make a plan costs an exact sum of rows of width 0 (union), a broadcast of the indices (leader), or a round of small
messages (random). An `allreduce` by a plan is MPI's own: 2 (P-1)/P K v bytes for K indices with v bytes each, after
ceil(lg P) small messages in which the plans are compared.

Differences from the papers: any number of ranks; rows; ranks whose plans differ raise instead of adding up what does
not belong together.
"""

import math
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import allreduce, dense, rooted
from collectives.channel import Channel, Offer
from collectives.messages import Steps
from collectives.operation import begin, sound
from collectives.progress import Request
from mpicomp.arrays import like, read_only, to_array, to_numpy
from mpicomp.vector import SparseVector


class SupportPlan:
    """Indices that all ranks of a communicator agreed on; made by `union`, `leader` or `random`.

    indices: 1-d, strictly increasing, the same on all ranks. length: of the vectors, in numbers or in rows. comm: the
    communicator. Each way to make a plan, and `allreduce`, has a nonblocking twin with MPI's `i`.
    """

    def __init__(self, support: SparseVector, comm: Any) -> None:
        """Make a plan of a support that is the same on all ranks: `union`, `leader` and `random` see to that."""
        self.indices, self.length, self.comm = read_only(support.indices.copy()), support.length, comm
        self._digest = _digest(support)

    @classmethod
    def union(cls, vector: SparseVector, comm: Any) -> "SupportPlan":
        """Take every index that a rank brings: the union of the supports.

        vector: of one length on all ranks; its values are not looked at. Raises what `sparse_allreduce` does.
        """
        return cls.iunion(vector, comm).wait()

    @classmethod
    def iunion(cls, vector: SparseVector, comm: Any) -> "Request[SupportPlan]":
        """Start `union` and return its Request."""

        def union(offer: Offer, channel: Channel) -> Steps[SupportPlan]:
            return cls((yield from allreduce.auto(offer, channel)), comm)

        return begin("SupportPlan.union", {"auto": union}, vector, comm, "auto", prepare=_bare)

    @classmethod
    def leader(cls, vector: SparseVector | Exception | None, comm: Any, root: int = 0) -> "SupportPlan":
        """Take the indices that the root brings.

        vector: on the root; its values are not looked at, nor is what the others give. Raises what `sparse_bcast` does.
        """
        return cls.ileader(vector, comm, root).wait()

    @classmethod
    def ileader(cls, vector: SparseVector | Exception | None, comm: Any, root: int = 0) -> "Request[SupportPlan]":
        """Start `leader` and return its Request."""

        def leader(offer: Offer, channel: Channel) -> Steps[SupportPlan]:
            return cls((yield from rooted.bcast(offer, channel)), comm)

        steps = {"tree": leader}
        return begin("SupportPlan.leader", steps, vector, comm, "auto", prepare=_bare, root=root, follow=True)

    @classmethod
    def random(cls, length: int, k: int, comm: Any, seed: int = 0) -> "SupportPlan":
        """Draw `k` of `length` indices, each set as likely as another, from a seed that all ranks share.

        length, k, seed: the same on all ranks; k at most length, seed below 2^63. Raises ValueError or TypeError on a
        rank whose arguments are bad, and CollectiveError on the others; CollectiveError where they differ.
        """
        return cls.irandom(length, k, comm, seed).wait()

    @classmethod
    def irandom(cls, length: int, k: int, comm: Any, seed: int = 0) -> "Request[SupportPlan]":
        """Start `random` and return its Request."""

        def blank(nothing: None, terms: dict[str, Any], size: int) -> SparseVector:
            vector = SparseVector.empty(length)
            if terms["k"] > vector.length:
                raise ValueError(f"k is {terms['k']}: expected at most the length, {vector.length}")
            return vector

        def draw(offer: Offer, channel: Channel) -> Steps[SupportPlan]:
            yield from channel.agree()
            rng, whole = np.random.default_rng(channel.terms.seed), offer.vector.length
            chosen = np.sort(rng.choice(whole, offer.k, replace=False, shuffle=False))
            return cls(SparseVector(chosen, np.empty((offer.k, 0), np.float32), whole), comm)

        return begin("SupportPlan.random", {"draw": draw}, None, comm, "auto", prepare=blank, k=k, seed=seed)

    def allreduce(self, values: Any) -> Any:
        """Sum values that stand at the plan's indices over all ranks, by MPI's own allreduce.

        values: an array of shape (entries,), or (entries, width) for rows, where entries is the number of indices;
        float16, float32 or float64; see `mpicomp.arrays` for the kinds.

        Returns the sums as a new array of the same kind, shape and dtype.

        Raises ValueError or TypeError on a rank whose array is bad, and CollectiveError on the others; CollectiveError
        on every rank when the shape, the dtype or the plans differ.
        """
        return self.iallreduce(values).wait()

    def iallreduce(self, values: Any) -> Request[Any]:
        """Start `allreduce` and return its Request; the values are copied first and may be changed at once."""
        entries = self.indices.size

        def look(values: Any, terms: dict[str, Any]) -> dense.Brought:
            array = to_array(values)
            if array.ndim not in (1, 2) or len(array) != entries:
                raise ValueError(f"values have shape {array.shape}: expected ({entries},) or ({entries}, width)")
            return array, SparseVector.empty(entries, array.dtype, array.shape[1] if array.ndim == 2 else None)

        name, back = "SupportPlan.allreduce", partial(like, original=values)
        return dense.begin_reduction(name, values, self.comm, look, back, support=self._digest)

    def take(self, array: Any) -> Any:
        """Return what stands at the plan's indices in a dense array.

        array: of shape (length, width) for rows; of any other shape with `length` values, taken in C order. Raises
        ValueError for another one.
        """
        if math.prod(array.shape) == self.length:
            return array.reshape(-1)[self.indices]
        if len(array.shape) == 2 and array.shape[0] == self.length:
            return array[self.indices]
        raise ValueError(f"array has shape {tuple(array.shape)}: expected {self.length} values, or rows of them")

    def vector(self, values: Any) -> SparseVector:
        """Return values, of shape (entries,) or (entries, width), as a sparse vector with the plan's indices."""
        return SparseVector(self.indices, values, self.length)

    def __repr__(self) -> str:
        return f"SupportPlan({self.indices.size} of {self.length} indices, {self.comm.size} ranks)"


def aligned_allreduce(vector: SparseVector, comm: Any) -> SparseVector:
    """Sum vectors that have their entries at the same indices on all ranks, by MPI's own allreduce: no index travels.

    vector: of numbers or of rows, of one support, length, width and dtype on all ranks: from `CyclicLeader`, say, or
    `RandomK(..., aligned=True)`. comm: an mpi4py intracommunicator.

    Returns the sum, with the same indices.

    Raises ValueError or TypeError on a rank whose vector is bad, and CollectiveError on the others; CollectiveError on
    every rank when the supports differ, or what else must be the same. TypeError at once for a bad `comm`.
    """
    return aligned_iallreduce(vector, comm).wait()


def aligned_iallreduce(vector: SparseVector, comm: Any) -> Request[SparseVector]:
    """Start `aligned_allreduce` and return its Request; do not change the vector's indices before it has ended."""

    def look(vector: Any, terms: dict[str, Any]) -> dense.Brought:
        values = sound(vector, terms, comm.size).values
        terms["support"] = _digest(vector)
        return values, SparseVector.empty(vector.length, vector.dtype, vector.width)

    def back(total: NDArray[Any]) -> SparseVector:
        return SparseVector(vector.indices, total, vector.length)

    return dense.begin_reduction("aligned_allreduce", vector, comm, look, back)


def _digest(support: SparseVector) -> int:
    """Return where the entries stand as 64 bits."""
    digest = blake2b(support.length.to_bytes(8, "little"), digest_size=8)
    digest.update(to_numpy(support.indices).data)
    return int.from_bytes(digest.digest(), "little")


def _bare(vector: Any, terms: dict[str, Any], size: int) -> SparseVector:
    """Return the support of a vector: its values are not looked at."""
    return sound(vector.support() if isinstance(vector, SparseVector) else vector, terms, size)
