"""Shared supports: agree on the indices once, then sum values at these indices many times.

Costs: docs/contributing/costs.md. Invariant: the plans of the ranks are compared before each
sum.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives.allreduce import sparse_allreduce
from collectives.calls.call import Call, Prepared, Sum
from collectives.calls.collective import collective
from collectives.dense import copied, mpi
from collectives.runtime.engine import Request
from collectives.runtime.link import Link
from mpicomp.arrays.frameworks import to_values
from mpicomp.arrays.memory import read_only
from mpicomp.digests import digest
from mpicomp.vector import SparseVector


@collective(promise=Sum, takes=np.ndarray)
def _sum_at(plan: "SupportPlan", values: Any) -> Call[Any]:
    entries = plan.indices.size

    def prepare(values: Any, compared: Mapping[str, Any], link: Link) -> Prepared:
        array = to_values(values)
        if array.ndim not in (1, 2) or len(array) != entries:
            raise ValueError(
                f"values have shape {array.shape}: expected ({entries},) or ({entries}, width)"
            )
        width = array.shape[1] if array.ndim == 2 else None
        return copied(array, values, compared, length=entries, width=width)

    return Call(
        values,
        plan.comm,
        arguments={"support": plan.digest},
        prepare=prepare,
        operation="SupportPlan.allreduce",
    )


_sum_at.algorithm(compares_calls=True)(mpi)


class SupportPlan:
    """Indices that all ranks of a communicator agreed on, for sums that send values alone.

    Made by `union`.

    Attributes:
        indices: int32 or int64, shape (entries,), strictly increasing, the same on all ranks.
        length: of the vectors, in numbers or in rows.
        comm: the communicator.
        digest: a hash of the indices, by which the ranks compare their plans in each sum.

    >>> plan = SupportPlan.union(TopK(k=2).compress(gradient), comm)
    >>> plan.allreduce(plan.take(gradient)).tolist()
    [-3.0, 2.0]
    """

    def __init__(self, support: SparseVector, comm: Any) -> None:
        """Create a plan; use `union`, which ensures the same support on all ranks."""
        # PyTorch warns of read-only indices, so these stay writable.
        self._places = support.indices.copy()
        self.indices = read_only(self._places)
        self.length = support.length
        self.comm = comm
        self._ranks = comm.size  # also after MPI.Finalize
        self.digest = f"{digest(support.indices)} of {support.length}"

    @staticmethod
    def union(vector: SparseVector, comm: Any) -> "SupportPlan":
        """Create a plan with the union of the indices of all ranks.

        Args:
            vector: this rank's indices; one length on all ranks. Its values are ignored.
            comm: an mpi4py intracommunicator; all its ranks call, in the same order.

        Returns:
            The plan, the same on all ranks.

        Raises:
            TypeError: an argument of this rank is of a wrong type; other ranks raise
                CollectiveError.
            ValueError: an argument of this rank has a wrong value; likewise.
            CollectiveError: another rank's arguments are bad, or lengths differ.
        """
        if isinstance(vector, SparseVector):
            vector = vector.support()
        return SupportPlan(sparse_allreduce(vector, comm), comm)

    def allreduce(self, values: Any) -> Any:
        """Sum values at the plan's indices over all ranks, by MPI's own allreduce.

        Args:
            values: shape (entries,), or (entries, width) for rows, where entries is the number of
                indices; float16, float32 or float64; of NumPy, CuPy or a kind that supports
                DLPack. They are copied first.

        Returns:
            A new array of that kind, shape and dtype, with the sums.

        Raises:
            TypeError: `values` of this rank have a wrong type; other ranks raise
                CollectiveError.
            ValueError: `values` of this rank have a wrong shape; likewise.
            CollectiveError: another rank's values are bad, or shapes, dtypes or plans differ.
        """
        return _sum_at(self, values)

    def iallreduce(self, values: Any) -> Request[Any]:
        """Start `allreduce` and return its `Request`.

        Args:
            values: as in `allreduce`; do not change them before it has ended.
        """
        return _sum_at.nonblocking(self, values)

    def take(self, array: Any) -> Any:
        """Return the values of a dense array at the plan's indices.

        Args:
            array: of any shape with `length` values, taken in C order; for rows of shape
                (length, width).

        Returns:
            A new array of shape (entries,), or (entries, width).

        Raises:
            ValueError: the array has another number of values.
        """
        if math.prod(array.shape) == self.length:
            return array.reshape(-1)[self._places]
        if len(array.shape) == 2 and array.shape[0] == self.length:
            return array[self._places]
        raise ValueError(
            f"array has shape {tuple(array.shape)}: expected {self.length} values, or rows of them"
        )

    def vector(self, values: Any) -> SparseVector:
        """Return values as a sparse vector with the plan's indices.

        Args:
            values: shape (entries,), or (entries, width) for rows.
        """
        return SparseVector(self.indices, values, self.length)

    def __repr__(self) -> str:
        return f"SupportPlan({self.indices.size} of {self.length} indices, {self._ranks} ranks)"
