"""What is sound passes the checks of compressors and feedback, and a broken promise is said."""

import ctypes

import numpy as np
import pytest
from cases import FEEDBACKS, RandomK, compressors, feedbacks_but

from mpicomp import (
    Compressor,
    Dense,
    ErrorFeedback,
    SparseVector,
    TopK,
    WarmUp,
    verify_compressor,
    verify_feedback,
)
from mpicomp.compressors.common import finite_vector

COMPRESSORS = {
    **{name: lambda make=make: make(0.1) for name, make in compressors(50).items()},
    "dense": Dense,
    "random": lambda: RandomK(0.1, seed=1),
    "warm-up": lambda: WarmUp(TopK(0.1), [0.5, 0.1], calls=2),
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_compressors_of_the_library_pass(name):
    verify_compressor(COMPRESSORS[name])


@pytest.mark.parametrize("name", feedbacks_but("none", "in place"))
def test_the_feedbacks_of_the_library_pass(name):
    verify_feedback(FEEDBACKS[name])


class Broken(Compressor):
    def __init__(self, fault):
        self.fault, self.step = fault, 0

    def compress(self, corrected, *, gradient=None):
        self.step += 1
        if self.fault == "writes":
            # The view is read-only, and the memory behind it is not.
            ctypes.c_uint8.from_address(corrected.ctypes.data).value ^= 1
        if self.fault == "counts":
            finite_vector(corrected)
        sent = TopK(k=5).compress(np.nan_to_num(corrected))
        if self.fault == "no vector":
            return sent.values
        if self.fault == "length":
            return SparseVector(sent.indices, sent.values, corrected.size + 1)
        return sent


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("writes", AssertionError, "compress changed its input"),
        ("takes NaN", AssertionError, "a NaN that is not sent would stay"),
        ("counts", AssertionError, "attributes changed in a step that fails"),
        ("no vector", TypeError, "returned ndarray: expected a SparseVector"),
        ("length", ValueError, "of length 300"),
    ],
)
def test_a_compressor_that_breaks_a_promise_is_told(fault, error, said):
    with pytest.raises(error, match=said):
        verify_compressor(lambda: Broken(fault))


class Stateless(Compressor):
    """Selects by a count that it does not save."""

    def __init__(self):
        self.step = 0

    def compress(self, corrected, *, gradient=None):
        sent = TopK(k=self.step % 7 + 1).compress(corrected)
        self.step += 1
        return sent


def test_a_compressor_without_its_state_is_told():
    with pytest.raises(AssertionError, match="from the state other entries"):
        verify_compressor(Stateless)


class Forgetting(ErrorFeedback):
    """Loses what was rejected."""

    def prepare_residual(self, correction, sent, rejected=None):
        return super().prepare_residual(correction, sent)


class Adding(ErrorFeedback):
    """Changes what it keeps before the step is kept."""

    def correct(self, *gradient, basis=None):
        correction = super().correct(*gradient, basis=basis)
        if correction.residual is not None:
            correction.residual[0] += 1
        return correction


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Forgetting, "the residual is not what was kept"),
        (Adding, "a second correct returns another vector"),
    ],
)
def test_a_feedback_that_breaks_a_promise_is_told(kind, said):
    with pytest.raises(AssertionError, match=said):
        verify_feedback(kind)
