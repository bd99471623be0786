"""ScaleCom's cyclic leader: in step t rank t mod P selects its k largest entries, and all ranks send those indices.

Source: C.-Y. Chen, J. Ni, S. Lu, X. Cui et al., "ScaleCom: scalable sparsified gradient compression for
communication-efficient distributed training", NeurIPS 2020 (arXiv 2104.11125).

All ranks have one support, so the union has k entries at any number of ranks, and the values are summed by an ordinary
allreduce: `collectives.aligned_allreduce`. The indices are sent once, by the leader.

Rounds of `compress`: those of `SupportPlan.leader`, a broadcast of k indices.

Differences from the paper: exact top-k, not one in chunks; the low-pass filter of the residual is not here; any number
of ranks. Where the leader's vector is zero, no rank sends an entry in that step.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NoReturn

from collectives.plan import SupportPlan
from collectives.transport import check_communicator
from mpicomp.arrays import beside, kernels_for
from mpicomp.compressors import TopK, expect_integer
from mpicomp.compressors.common import Array, Density, all_at, finite_vector
from mpicomp.vector import SparseVector


class CyclicLeader(Density):
    """Select the indices of a leader's largest entries; each rank leads in turn.

    comm: the communicator of the exchange; an mpi4py intracommunicator, else TypeError. density or k: see `Density`.

    `compress` is a collective call over `comm`: all ranks call it, in the same order, and it raises on all or on none.
    `step` counts the calls that all ranks completed.
    """

    state = {"step": expect_integer(0)}
    communicates = True

    def __init__(self, comm: Any, density: float | None = None, *, k: int | None = None) -> None:
        check_communicator(comm)
        super().__init__(density, k=k)
        self.comm, self.step = comm, 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries at the leader's indices, exact zeros too; see `Compressor.compress`.

        corrected: as everywhere, or an exception that stands for a rank whose step failed before: it is raised here.
        Raises ValueError or TypeError on a rank whose vector is bad, and `CollectiveError` on the others.
        """
        if not isinstance(corrected, Exception):
            return self._selected(partial(finite_vector, corrected))
        try:
            return self._failed(corrected)
        finally:
            del corrected  # else the error, its traceback and this frame hold each other

    def compress_sum(self, residual: Array, gradient: Array, out: Array) -> SparseVector:
        """See `Compressor.compress_sum`."""
        return self._selected(partial(_finite_sum, residual, gradient, out))

    def _selected(self, make: Callable[[], Array]) -> SparseVector:
        """Return the entries of what `make` returns at the leader's indices; what it raises, the other ranks learn."""
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
        """Take part as a rank that failed: `error` is raised here, and `CollectiveError` on the others."""
        try:
            SupportPlan.leader(error, self.comm, self.step % self.comm.size)
            raise error
        finally:
            del error

    def __deepcopy__(self, memo: dict[int, Any]) -> "CyclicLeader":
        """Copy all but the communicator, which the copy shares."""
        return copy(self)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that ranks compare: all but the communicator."""
        return {name: value for name, value in super()._settings().items() if name != "comm"}


def _finite_sum(residual: Array, gradient: Array, out: Array) -> Array:
    """Write a sum to `out` and return it; ValueError naming its first value that is not finite."""
    kernels_for(out).add(residual, gradient, out)
    return finite_vector(out)


def _entries(dense: Array, indices: Array) -> SparseVector:
    """Return the entries of a dense vector at a leader's indices."""
    there = beside(indices, dense)
    return all_at(dense, there[there < dense.size])  # all, unless lengths differ: the collective raises then
