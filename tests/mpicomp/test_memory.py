"""Memory that an exchange needs beside the gradient, as NumPy reports its allocations to tracemalloc."""

import gc
import tracemalloc

import numpy as np
import pytest
from cases import FEEDBACKS
from mpi4py import MPI

from collectives import GradientExchange
from collectives.exchange.step import Step
from mpicomp import (
    ErrorFeedback,
    TopK,
)

LENGTH = 10_000_000


def peak_values(feedback, sparse):
    """Return the peak of a step behind the first ones, over what was there before the exchange, in gradients."""
    fresh = np.random.default_rng(0).standard_normal(LENGTH, dtype=np.float32)
    gradient = fresh.copy()
    # what is imported and compiled is not counted
    GradientExchange(MPI.COMM_SELF, TopK(0.001))(fresh, sparse=sparse)
    tracemalloc.start()
    try:
        exchange = GradientExchange(MPI.COMM_SELF, TopK(0.001), feedback)
        for _ in range(3):
            exchange(gradient, sparse=sparse)
            if getattr(feedback, "in_place", False):
                gradient += fresh
        tracemalloc.reset_peak()
        mean = exchange(gradient, sparse=sparse)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (mean.nnz if sparse else np.count_nonzero(mean)) == LENGTH // 1000
    return peak / gradient.nbytes


@pytest.mark.parametrize(
    ("in_place", "sparse", "most"),
    [(True, True, 0.1), (False, True, 2.1), (True, False, 1.1), (False, False, 3.1)],
)
def test_a_step_needs_no_more_memory_than_promised(in_place, sparse, most):
    """In gradients: the residual and its spare unless it is in place, the mean unless it is sparse, and a tenth."""
    assert 0.001 < peak_values(ErrorFeedback(in_place=in_place), sparse) <= most


@pytest.mark.parametrize("is_skipped", [False, True])
@pytest.mark.parametrize("form", ["list", "dict"])
@pytest.mark.parametrize("method", FEEDBACKS)
def test_what_follows_the_agreement_allocates_no_array(
    method, form, is_skipped, monkeypatch
):
    """Nor for a step that is skipped; Python's frames take some bytes."""
    rng = np.random.default_rng(0)
    gradient = [rng.standard_normal(200_000, np.float32) for _ in range(4)]
    if form == "dict":
        gradient = {f"w{i}": array for i, array in enumerate(gradient)}
    exchange = GradientExchange(
        MPI.COMM_SELF, TopK(0.01), FEEDBACKS[method](), nonfinite="skip"
    )
    exchange(gradient)
    if is_skipped:
        gradient["w1" if form == "dict" else 1][7] = np.nan
    commit = Step._commit
    peaks = []

    def measured(*args):
        gc.collect()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        commit(*args)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)

    monkeypatch.setattr(Step, "_commit", measured)
    tracemalloc.start()
    try:
        exchange(gradient)
    finally:
        tracemalloc.stop()
    assert exchange.finite is not is_skipped
    assert len(peaks) == 1
    assert peaks[0] < 4000
