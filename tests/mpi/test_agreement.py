"""Agreement of all ranks on whether a block succeeded."""

import gc
import weakref

import numpy as np
import pytest

from collectives import CollectiveError, sparse_allreduce, traffic
from collectives.calls.all_or_none import all_or_none
from collectives.faults.errors import NotFiniteError, StepSkippedError
from mpicomp import SparseVector

pytestmark = pytest.mark.small_groups


def run(comm, kind=None, alive=()):
    """Run a block, which fails on a rank with a kind of error."""
    with all_or_none(comm, "a block"):
        gradient = np.ones(3)
        alive += (weakref.ref(gradient),)
        if kind is not None:
            raise kind("mine")


@pytest.mark.unchecked("sends more")
def test_a_block_that_succeeds_takes_one_message(comm):
    before = traffic(comm).messages
    each = 0 if comm.size == 1 else 1
    for number in (1, 2):
        run(comm)
        assert traffic(comm).messages == before + number * each


@pytest.mark.parametrize("culprit", [0, None])
@pytest.mark.parametrize("kind", [KeyError, StopIteration, MemoryError])
def test_an_error_in_a_block_raises_on_all_ranks(comm, kind, culprit):
    own = culprit in (None, comm.rank)
    with pytest.raises(kind if own else CollectiveError) as caught:
        run(comm, kind if own else None)
    if own:
        assert caught.traceback[-1].name == "run"
    else:
        assert "a block raised on all" in str(caught.value)
    total = sparse_allreduce(SparseVector([1], np.ones(1), 3), comm)
    assert total.values.tolist() == [comm.size]


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(comm):
    with pytest.raises(StepSkippedError):
        run(comm, None if comm.rank else NotFiniteError)


def test_an_error_in_a_block_leaves_no_cycle(comm):
    alive = []

    def step():
        with pytest.raises((KeyError, CollectiveError)):
            run(comm, None if comm.rank else KeyError, alive)

    gc.collect()
    gc.disable()
    try:
        step()
        assert all(array() is None for array in alive)
    finally:
        gc.enable()
