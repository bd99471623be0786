"""ScaleCom's cyclic leader: in step t rank t mod P picks the k largest of its own, and all ranks send what is there.

Source: C.-Y. Chen, J. Ni, S. Lu, X. Cui et al., "ScaleCom: scalable sparsified gradient compression for
communication-efficient distributed training", NeurIPS 2020 (arXiv 2104.11125).

All ranks have one support, so the union has k entries at any number of ranks, and the values travel by an ordinary
allreduce: `collectives.aligned_allreduce`. The indices travel once, from the leader.

Differences from the paper: exact top-k, not one in chunks; the low-pass filter of the residual is not here; any number
of ranks. Where the leader's vector is zero, nobody sends in that step.
"""

from functools import partial
from typing import Any

from mpicomp.arrays import beside
from mpicomp.compressors.common import Density, all_at, finite_vector
from mpicomp.compressors.protocol import failed
from mpicomp.compressors.topk import TopK
from mpicomp.vector import SparseVector


class CyclicLeader(Density):
    """Select where a leader has its largest entries; the ranks lead in turn.

    comm: the communicator of the exchange. plan: `collectives.SupportPlan`, or what agrees on a support as its
    `leader(vector, comm, root)` does. density or k: see `Density`.

    `compress` talks to the other ranks: all of them call it, in the same order. `step` counts the calls that all ranks
    completed; set it when a run is taken up again.
    """

    remembers = ("step",)

    def __init__(self, comm: Any, plan: Any, density: float | None = None, *, k: int | None = None) -> None:
        super().__init__(density, k=k)
        if not (hasattr(comm, "size") and hasattr(plan, "leader")):
            raise TypeError(
                f"got comm {comm!r} and plan {plan!r}: expected a communicator, and collectives.SupportPlan"
            )
        self.comm, self.plan, self.step = comm, plan, 0

    def compress(self, corrected: Any, *, gradient: Any = None) -> SparseVector:
        """Return the entries at the leader's indices, exact zeros too; see `Compressor.compress`.

        Raises ValueError on a rank whose vector is bad, and `CollectiveError` on the others.
        """
        root = self.step % self.comm.size
        try:
            dense = finite_vector(corrected)
            picked = TopK(self.density, k=self.k).compress(dense) if self.comm.rank == root else None
        except Exception as error:
            self.fail(error)
            raise
        shared = self.plan.leader(picked, self.comm, root)
        self.step += 1
        indices = beside(shared.indices, dense)
        inside = indices[indices < dense.size]  # all, unless lengths differ: the collective will tell
        return self.reported(all_at(dense, inside))

    def __deepcopy__(self, memo: dict[int, Any]) -> "CyclicLeader":
        """Copy all but the communicator."""
        twin = CyclicLeader(self.comm, self.plan, self.density, k=self.k)
        twin.step = self.step
        return twin

    def fail(self, error: Exception) -> None:
        """Take part in the agreement as a failed rank: `error` is raised here, and CollectiveError on the others."""
        try:
            failed(partial(self.plan.leader, root=self.step % self.comm.size), error, self.comm)
        finally:
            del error
