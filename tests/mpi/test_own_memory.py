"""Results have arrays of their own: a script may change them, and no input or other result changes with them."""

from itertools import combinations

import numpy as np
import pytest
from cases import contribution, for_each

from collectives import (
    SupportPlan,
    compressed_iallreduce,
    dense_iallreduce,
    gtopk_iallreduce,
    quantised_iallreduce,
    sparse_iallgather,
    sparse_iallreduce,
    sparse_ibcast,
    sparse_ireduce,
    sparse_ireduce_scatter,
)
from mpicomp import SparseVector, TopK

LENGTH = 240
ENTRIES = {
    "all": lambda rank, size: contribution("nested", rank, size),
    "the first": lambda rank, size: (
        contribution("nested", rank, size) if rank == 0 else SparseVector.empty(LENGTH)
    ),
    "the last": lambda rank, size: (
        contribution("nested", rank, size)
        if rank == size - 1
        else SparseVector.empty(LENGTH)
    ),
    "few": lambda rank, size: SparseVector([rank], np.float32([rank + 1]), LENGTH),
}
SUMS = {
    f"{start.__name__} {more}": (start, more)
    for start, choices in [
        (sparse_iallgather, [{}]),
        (
            sparse_iallreduce,
            [
                {"algorithm": name, "votes": votes}
                for name in (
                    "auto",
                    "allgather",
                    "recursive_doubling",
                    "split_allgather",
                    "node_lanes",
                    "dense_mpi",
                )
                for votes in (False, True)
            ],
        ),
        (
            gtopk_iallreduce,
            [
                {"k": k, "algorithm": name}
                for name in ("recursive_doubling", "tree", "exact", "node_leaders")
                for k in (1, LENGTH)
            ],
        ),
        (compressed_iallreduce, [{"compressor": TopK(k=k)} for k in (1, LENGTH)]),
        (sparse_ireduce_scatter, [{}]),
        (sparse_ireduce, [{}]),
        (sparse_ibcast, [{}]),
    ]
    for more in choices
}


def arrays_of(result):
    """Return all arrays in a result with values."""
    if isinstance(result, SparseVector):
        return [result.indices, result.values]
    if isinstance(result, list | tuple):
        return [array for part in result for array in arrays_of(part)]
    return [] if result is None else [result]


@for_each(name=SUMS, holders=ENTRIES)
def test_a_result_shares_no_memory_with_an_argument_or_another_result(
    comm, name, holders
):
    start, more = SUMS[name]
    vector = ENTRIES[holders](comm.rank, comm.size)
    before = vector.to_dense()
    found = arrays_of([start(vector, comm, **more).wait() for _ in range(2)])
    for one, other in combinations([*found, *arrays_of(vector)], 2):
        assert not np.shares_memory(one, other)
    for array in found:
        array += 1
    np.testing.assert_array_equal(vector.to_dense(), before)


@pytest.mark.parametrize("start", [dense_iallreduce, quantised_iallreduce])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sums_of_arrays_are_new_ones(comm, start, dtype):
    array = np.ones(8, dtype)
    found = arrays_of([start(array, comm).wait() for _ in range(2)])
    for one, other in combinations([array, *found], 2):
        assert not np.shares_memory(one, other)


def test_sums_at_a_plan_are_new_arrays(comm):
    plan = SupportPlan.union(ENTRIES["few"](comm.rank, comm.size), comm)
    values = np.ones(plan.indices.size)
    assert not np.shares_memory(plan.allreduce(values), values)
