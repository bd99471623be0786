import numpy as np
import pytest

from mpicomp import ErrorFeedback, GradientExchange, NoFeedback, SparseVector, TopK


class World:
    size = 1


def alone(vector, comm):
    """A collective of one rank that rejects every second entry."""
    if isinstance(vector, Exception):
        raise vector
    return vector.every(2), vector.every(2, 1)


def test_the_residual_is_what_was_not_applied():
    exchange = GradientExchange(World, TopK(k=6), ErrorFeedback(), alone)
    rng = np.random.default_rng(0)
    given, applied = np.zeros(40), np.zeros(40)
    for _ in range(6):
        gradient = rng.integers(-9, 10, 40).astype(np.float64)
        given += gradient
        applied += exchange(gradient)
        np.testing.assert_array_equal(applied + exchange.feedback.residual, given)


def test_correct_changes_neither_the_gradient_nor_the_residual():
    feedback = ErrorFeedback()
    sent = SparseVector([1], [2.0], 3)
    feedback.keep(feedback.correct(np.array([1.0, 2.0, 3.0])), sent, None)
    gradient = np.ones(3)
    for _ in range(2):
        assert feedback.correct(gradient).tolist() == [2, 1, 4]
    assert feedback.residual.tolist() == [1, 0, 3]
    assert gradient.tolist() == [1, 1, 1]


def test_values_that_travel_rounded_leave_their_error_behind():
    feedback = ErrorFeedback()
    feedback.keep(feedback.correct(np.array([1.25, 5.0])), SparseVector([0], [1.0], 2), SparseVector([1], [3.0], 2))
    assert feedback.residual.tolist() == [0.25, 8.0]


def test_another_size_or_dtype_is_refused():
    feedback = ErrorFeedback()
    feedback.keep(feedback.correct(np.ones(3)), SparseVector.empty(3, np.float64), None)
    for other in (np.ones(4), np.ones(3, np.float32)):
        with pytest.raises(ValueError, match="use one ErrorFeedback for each tensor"):
            feedback.correct(other)
    feedback.reset()
    assert feedback.residual is None
    assert feedback.correct(np.ones(4)).tolist() == [1, 1, 1, 1]


def test_no_feedback_keeps_nothing():
    exchange = GradientExchange(World, TopK(k=1), NoFeedback(), alone)
    gradient = np.array([1.0, 3.0, 2.0])
    for _ in range(2):
        assert exchange(gradient).tolist() == [0, 3, 0]
    assert gradient.tolist() == [1, 3, 2]


def test_a_failed_call_leaves_the_residual_and_reports_the_error_to_the_collective():
    reported = []

    def collective(vector, comm):
        reported.append(vector)
        return alone(vector, comm)

    exchange = GradientExchange(World, TopK(k=1), ErrorFeedback(), collective)
    exchange(np.array([4.0, 1.0]))
    with pytest.raises(ValueError, match=r"values\[1\] is nan"):
        exchange(np.array([4.0, np.nan]))
    assert isinstance(reported[1], ValueError)
    assert exchange.feedback.residual.tolist() == [0, 1]
    with pytest.raises(ValueError, match="got an empty list"):
        exchange([])
    with pytest.raises(TypeError, match="expected one dtype in a list"):
        exchange([np.ones(1), np.ones(1, np.float32)])
