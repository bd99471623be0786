import numpy as np
from cases import contribution

from collectives import sparse_allgather
from mpicomp import SparseVector


def test_the_parts_do_not_share_memory_with_the_input(comm):
    vector = contribution("random", comm.rank, comm.size)
    part = sparse_allgather(vector, comm)[comm.rank]
    assert not np.shares_memory(part.values, vector.values)


def test_a_part_of_several_megabytes(comm):
    entries = 10**6 if comm.rank == comm.size - 1 else 10
    vector = SparseVector(
        np.arange(entries), np.arange(entries, dtype=np.float32), 10**6
    )
    parts = sparse_allgather(vector, comm)
    assert [part.nnz for part in parts] == [10] * (comm.size - 1) + [10**6]
    assert all((part.indices == part.values).all() for part in parts)
