"""Patches of weights sent to all ranks: applied on all or on none."""

import numpy as np
import pytest
from cases import contribution

from collectives import CollectiveError, sparse_bcast, sparse_ibcast
from mpicomp import Patch, changes, patches

SIZES = [0, 300, 400_000]  # values: none, one piece, and many


def versions(size):
    """Return weights, and those that a patch makes of them; the same on all ranks."""
    rng = np.random.default_rng(size)
    before = {
        "matrix": rng.standard_normal((size, 2)).astype(np.float32),
        "bias": rng.standard_normal(13).astype(np.float16),
    }
    after = {name: array.copy() for name, array in before.items()}
    for array in after.values():
        array *= 1 + np.where(rng.random(array.shape) < 0.3, array.dtype.type(1e-3), 0)
    after["bias"][3] = np.nan
    return before, after


def copies(arrays):
    return {name: array.copy() for name, array in arrays.items()}


def assert_same(ours, expected):
    assert {name: array.tobytes() for name, array in ours.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


@pytest.mark.every_size
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["first", "last"])
def test_all_ranks_get_the_patch_and_apply_it(comm, size, place):
    root = 0 if place == "first" else comm.size - 1
    before, after = versions(size)
    mine = copies(before)
    patch = changes(before, after)
    sent = patch if comm.rank == root else None
    received = sparse_bcast(sent, comm, root=root, out=mine)
    assert bytes(received) == bytes(patch)
    assert_same(mine, after)


@pytest.mark.parametrize("size", SIZES)
def test_a_patch_beside_other_operations_and_without_out(comm, size):
    before, after = versions(size)
    patch = changes(before, after)
    vector = contribution("random", comm.rank, comm.size)
    requests = [
        sparse_ibcast(patch if comm.rank == 0 else None, comm),
        sparse_ibcast(vector, comm),
        sparse_ibcast(patch if comm.rank == 0 else vector, comm),
    ]
    first, second, third = [request.wait() for request in reversed(requests)][::-1]
    assert bytes(first) == bytes(third) == bytes(patch)
    assert second.nnz == contribution("random", 0, comm.size).nnz
    first.apply(before)
    assert_same(before, after)


@pytest.mark.parametrize("size", SIZES)
def test_weights_of_another_version_on_one_rank_change_on_none(comm, size):
    before, after = versions(size)
    patch = changes(before, after)
    culprit = comm.size - 1
    mine = copies(before)
    if comm.rank == culprit:
        mine["bias"][0] += 1
    was = copies(mine)
    for rank_alone in (culprit, 0):
        with pytest.raises(
            ValueError if comm.rank == culprit else CollectiveError,
            match=r"'bias' is [0-9a-f]{16} float16 \(13,\): expected [0-9a-f]{16} float16",
        ):
            sparse_bcast(
                patch if comm.rank == rank_alone else None, comm, rank_alone, out=mine
            )
        assert_same(mine, was)
    mine = copies(before)
    sparse_bcast(patch if comm.rank == 0 else None, comm, out=mine)
    assert_same(mine, after)


@pytest.mark.parametrize("size", SIZES)
def test_out_of_memory_on_one_rank_changes_none(comm, monkeypatch, size):
    before, after = versions(size)
    mine = copies(before)
    patch = changes(before, after)
    culprit = comm.size - 1

    def on_host(array):
        raise MemoryError("no room")

    with monkeypatch.context() as context:
        if comm.rank == culprit:
            context.setattr(patches, "_on_host", on_host)
        with pytest.raises(
            MemoryError if comm.rank == culprit else CollectiveError, match="no room"
        ):
            sparse_bcast(patch if comm.rank == 0 else None, comm, out=mine)
    assert_same(mine, before)


@pytest.mark.at_least(2)
def test_a_damaged_patch_is_an_error_on_all_ranks(comm):
    before, after = versions(300)
    message = changes(before, after).message.copy()
    message[-9] ^= 1
    patch = Patch(message)
    mine = copies(before)
    with pytest.raises((ValueError, CollectiveError), match="got changed bytes"):
        sparse_bcast(patch if comm.rank == 0 else None, comm, out=mine)
    assert_same(mine, before)


def test_a_rank_that_failed_before_and_a_vector_with_out(comm):
    before, after = versions(300)
    patch = changes(before, after)
    mine = copies(before)
    culprit = comm.size - 1
    with pytest.raises(
        OverflowError if comm.rank == culprit else CollectiveError, match="overflow"
    ):
        sparse_bcast(
            OverflowError("overflow") if comm.rank == culprit else patch, comm, out=mine
        )
    vector = contribution("random", comm.rank, comm.size)
    out = mine if comm.rank == culprit else None
    with pytest.raises(
        (ValueError, CollectiveError), match="out is for a patch, got a SparseVector"
    ):
        sparse_bcast(vector, comm, out=out)
    assert_same(mine, before)
