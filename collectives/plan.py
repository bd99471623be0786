"""Shared supports: agree on the indices once, then sum values at these indices many times.

Sources: ScaleCom (C.-Y. Chen, J. Ni, S. Lu, X. Cui et al., NeurIPS 2020, arXiv 2104.11125) for a leader's support;
random-k with a shared seed as in S. U. Stich, J.-B. Cordonnier, M. Jaggi, NeurIPS 2018 (arXiv 1809.07599).

Creating a plan costs an exact sum of rows of width 0 (union), a broadcast of the indices (leader), or small messages
(random). An `allreduce` by a plan is MPI's own: 2 (P-1)/P K v bytes for K indices with v bytes each, after ceil(lg P)
small messages that compare the plans.

Differences from the papers: any number of ranks; rows; ranks whose plans differ raise instead of adding values of
different indices. `CyclicLeader` selects the exact Top-k, not one in chunks, and has no low-pass filter of the
residual; if the leader's vector is zero, no rank sends an entry in that step.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives import allreduce, rooted
from collectives.collective import Call, collective, on_every_rank, sound
from collectives.dense import mpi, outlined
from collectives.runtime.engine import Request
from collectives.runtime.group import Group
from collectives.runtime.link import check_communicator
from collectives.runtime.messages import Steps
from mpicomp.arrays import Array, beside, like, read_only, to_array, to_numpy
from mpicomp.compressors import TopK, expect_integer
from mpicomp.compressors.base import Summands, write_sum
from mpicomp.compressors.common import Density, all_at, finite_vector
from mpicomp.vector import SparseVector

if TYPE_CHECKING:
    from mpi4py import MPI


def bare(call: Call[Any], size: int) -> SparseVector:
    """Return the support of a vector: its values are ignored."""
    if isinstance(call.contribution, SparseVector):
        call.contribution = call.contribution.support()
    return sound(call, size)


@collective()
def _union(vector: SparseVector, comm: Any) -> "Call[SupportPlan]":
    plan = partial(SupportPlan, comm=comm)
    return Call(vector, comm, arguments={"partition": "auto"}, prepare=bare, finish=plan, operation="SupportPlan.union")


_union.algorithm(partial(allreduce.run_chosen, allreduce.choose_freely), name="union", meets=True)


@collective()
def _leader(vector: SparseVector | Exception | None, comm: Any, root: int = 0) -> "Call[SupportPlan]":
    name, plan = "SupportPlan.leader", partial(SupportPlan, comm=comm)
    return Call(vector, comm, arguments={"root": root}, prepare=bare, finish=plan, follow=True, operation=name)


_leader.algorithm(rooted.bcast)


@collective()
def _random(length: int, k: int, comm: Any, seed: int = 0) -> "Call[SupportPlan]":
    def prepare(call: Call[Any], size: int) -> SparseVector:
        vector = SparseVector.empty(length)
        if call.arguments["k"] > vector.length:
            raise ValueError(f"k is {call.arguments['k']}: expected at most the length, {vector.length}")
        return vector

    arguments, plan = {"k": k, "seed": seed}, partial(SupportPlan, comm=comm)
    return Call(None, comm, arguments=arguments, prepare=prepare, finish=plan, operation="SupportPlan.random")


@_random.algorithm(meets=True)
def _draw(vector: SparseVector, group: Group, k: int, seed: int) -> Steps[SparseVector]:
    yield from group.agree()
    chosen = np.sort(np.random.default_rng(seed).choice(vector.length, k, replace=False, shuffle=False))
    return SparseVector(chosen, np.empty((k, 0), np.float32), vector.length)


@collective(on_every_rank)
def _sum_at(plan: "SupportPlan", values: Any) -> Call[Any]:
    entries = plan.indices.size

    def prepare(call: Call[Any], size: int) -> SparseVector:
        array = to_array(values)
        if array.ndim not in (1, 2) or len(array) != entries:
            raise ValueError(f"values have shape {array.shape}: expected ({entries},) or ({entries}, width)")
        outline = SparseVector.empty(entries, array.dtype, array.shape[1] if array.ndim == 2 else None)
        return outlined(call, array, outline)

    name, finish = "SupportPlan.allreduce", partial(like, original=values)
    return Call(values, plan.comm, arguments={"support": plan.digest}, prepare=prepare, finish=finish, operation=name)


_sum_at.algorithm(mpi, meets=True)


class SupportPlan:
    """Indices that all ranks of a communicator agreed on; made by `union`, `leader` or `random`.

    indices: 1-d, strictly increasing, the same on all ranks. length: of the vectors, in numbers or in rows. comm: the
    communicator. digest: of the indices. The constructors and `allreduce` have nonblocking forms (`iallreduce`), which
    return a `Request`.

    >>> plan = SupportPlan.union(TopK(k=2).compress(gradient), comm)
    >>> plan.allreduce(plan.take(gradient)).tolist()
    [-3.0, 2.0]
    """

    def __init__(self, support: SparseVector, comm: Any) -> None:
        """Create a plan; use `union`, `leader` or `random`, which ensure the same support on all ranks."""
        self.indices, self.length, self.comm = read_only(support.indices.copy()), support.length, comm
        self.digest = _digest(support)

    @staticmethod
    def union(vector: SparseVector, comm: Any) -> "SupportPlan":
        """Create a plan with the union of all ranks' supports.

        vector: of one length on all ranks; its values are ignored. Raises the errors of `sparse_allreduce`.
        """
        return _union(vector, comm)

    @staticmethod
    def leader(vector: SparseVector | Exception | None, comm: Any, root: int = 0) -> "SupportPlan":
        """Create a plan with the root's indices.

        vector: used on the root only; its values are ignored. Raises the errors of `sparse_bcast`.
        """
        return _leader(vector, comm, root)

    @staticmethod
    def random(length: int, k: int, comm: Any, seed: int = 0) -> "SupportPlan":
        """Create a plan with `k` of `length` indices, drawn uniformly from a seed that all ranks share.

        length, k, seed: the same on all ranks; k at most length, seed below 2^63. Raises ValueError or TypeError on a
        rank whose arguments are bad, and CollectiveError on the others; CollectiveError where they differ.
        """
        return _random(length, k, comm, seed)

    iunion = staticmethod(_union.nonblocking)
    ileader = staticmethod(_leader.nonblocking)
    irandom = staticmethod(_random.nonblocking)

    def allreduce(self, values: Any) -> Any:
        """Sum values at the plan's indices over all ranks, by MPI's own allreduce.

        values: an array of shape (entries,), or (entries, width) for rows, where entries is the number of indices;
        float16, float32 or float64; see `mpicomp.arrays` for the kinds. They are copied first.

        Returns the sums as a new array of the same kind, shape and dtype.

        Raises ValueError or TypeError on a rank whose array is bad, and CollectiveError on the others; CollectiveError
        on every rank when the shape, the dtype or the plans differ.
        """
        return _sum_at(self, values)

    def iallreduce(self, values: Any) -> Request[Any]:
        """Start `allreduce` and return its Request."""
        return _sum_at.nonblocking(self, values)

    def take(self, array: Any) -> Any:
        """Return the values of a dense array at the plan's indices.

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


@collective(gives_sum=True)
def aligned_allreduce(vector: SparseVector, comm: "MPI.Comm") -> Call[SparseVector]:
    """Sum vectors with the same support on all ranks by MPI's own allreduce: no index is sent.

    vector: of numbers or of rows, of one support, length, width and dtype on all ranks, for example from `CyclicLeader`
    or `RandomK(..., aligned=True)`.

    Returns the sum, with the same indices.

    >>> vector = RandomK(k=2, seed=1, aligned=True).compress(gradient)
    >>> aligned_allreduce(vector, comm).nnz
    2
    """

    def prepare(call: Call[Any], size: int) -> SparseVector:
        values = sound(call, size).values
        call.arguments["support"] = _digest(vector)
        return outlined(call, values, SparseVector.empty(vector.length, vector.dtype, vector.width))

    def finish(total: NDArray[Any]) -> SparseVector:
        return SparseVector(vector.indices, total, vector.length)

    return Call(vector, comm, prepare=prepare, finish=finish)


aligned_iallreduce = aligned_allreduce.nonblocking
aligned_allreduce.algorithm(mpi, meets=True)


def _digest(support: SparseVector) -> int:
    """Return a 64-bit digest of the indices of a support."""
    digest = blake2b(support.length.to_bytes(8, "little"), digest_size=8)
    digest.update(to_numpy(support.indices).data)
    return int.from_bytes(digest.digest(), "little")


class CyclicLeader(Density):
    """Select the indices of a leader's largest entries; each rank leads in turn.

    comm: the communicator of the exchange; an mpi4py intracommunicator, else TypeError. density or k: see `Density`.

    `compress` is a collective call over `comm`: all ranks call it, in the same order, and it raises on all or on none.
    `step` counts the calls that all ranks completed.

    >>> exchange = GradientExchange(comm, CyclicLeader(comm, k=2), collective=aligned_allreduce)
    >>> exchange(gradient).tolist()
    [0.0, -3.0, 0.0, 2.0]
    """

    state = {"step": expect_integer(0)}
    communicates = True

    def __init__(self, comm: Any, density: float | None = None, *, k: int | None = None) -> None:
        check_communicator(comm)
        super().__init__(density, k=k)
        self.comm, self.step = comm, 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries at the leader's indices, including exact zeros; see `Compressor.compress`.

        corrected: as in `Compressor.compress`; or an exception if the rank failed before, which it then raises. Raises
        ValueError or TypeError on a rank whose vector is bad, and `CollectiveError` on the others.
        """
        if not isinstance(corrected, Exception):
            return self._selected(partial(finite_vector, corrected))
        try:
            return self._failed(corrected)
        finally:
            del corrected  # else the error, its traceback and this frame hold each other

    def compress_segments(
        self, corrected: Array, bounds: Sequence[int], *, summands: Summands | None = None
    ) -> SparseVector:
        """See `Compressor.compress_segments`; of one segment."""
        return self._selected(partial(_finite_sum, summands, corrected))

    def _selected(self, make: Callable[[], Array]) -> SparseVector:
        """Return the entries of `make()` at the leader's indices; reports its errors to the other ranks."""
        root = self.step % self.comm.size
        try:
            dense = make()
            selected = TopK(self.density, k=self.k).compress(dense) if self.comm.rank == root else None
        except Exception as error:  # whatever it is: the other ranks wait for this one
            return self._failed(error)
        plan = SupportPlan.leader(selected, self.comm, root)
        self.step += 1
        return self.reported(_entries(dense, plan.indices))

    def _failed(self, error: Exception) -> NoReturn:
        """Participate as a rank that failed: this rank raises `error`, the others `CollectiveError`."""
        try:
            SupportPlan.leader(error, self.comm, self.step % self.comm.size)
            raise error
        finally:
            del error

    def __deepcopy__(self, memo: dict[int, Any]) -> "CyclicLeader":
        """Copy all attributes but the communicator, which is shared."""
        return copy(self)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that ranks compare: all but the communicator."""
        return {name: value for name, value in super()._settings().items() if name != "comm"}


def _finite_sum(summands: Summands | None, out: Array) -> Array:
    """Write a sum to `out`, if it is of one, and return it; ValueError naming its first value that is not finite."""
    if summands is not None:
        write_sum(summands, out)
    return finite_vector(out)


def _entries(dense: Array, indices: Array) -> SparseVector:
    """Return the entries of a dense vector at a leader's indices."""
    there = beside(indices, dense)
    return all_at(dense, there[there < dense.size])  # all, unless lengths differ: the collective raises then
