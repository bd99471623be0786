import numpy as np
import pytest
from cases import LENGTH, PATTERNS, bits, contribution, contributions

from collectives import sparse_allgather
from mpicomp import SparseVector


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_rank_gets_every_part_in_rank_order(comm, pattern):
    parts = sparse_allgather(contribution(pattern, comm.rank, comm.size), comm)
    assert [bits(part) for part in parts] == [bits(vector) for vector in contributions(pattern, comm.size)]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(("length", "offset"), [(LENGTH, 0), (2**40, 2**39)], ids=["int32", "int64"])
def test_every_dtype(comm, dtype, length, offset):
    case = {"dtype": dtype, "length": length, "offset": offset}
    parts = sparse_allgather(contribution("unequal", comm.rank, comm.size, **case), comm)
    assert [bits(part) for part in parts] == [bits(vector) for vector in contributions("unequal", comm.size, **case)]


def test_the_parts_do_not_share_memory_with_the_input(comm):
    vector = contribution("random", comm.rank, comm.size)
    part = sparse_allgather(vector, comm)[comm.rank]
    assert not np.shares_memory(part.values, vector.values)


def test_a_part_of_several_megabytes(comm):
    entries = 10**6 if comm.rank == comm.size - 1 else 10
    vector = SparseVector(np.arange(entries), np.arange(entries, dtype=np.float32), 10**6)
    parts = sparse_allgather(vector, comm)
    assert [part.nnz for part in parts] == [10] * (comm.size - 1) + [10**6]
    assert all((part.indices == part.values).all() for part in parts)
