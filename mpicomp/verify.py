"""Checks of a compressor or a feedback of one's own, on one rank: what an exchange relies on, on integers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpicomp.arrays import Array, Dtype
from mpicomp.arrays.memory import read_only
from mpicomp.arrays.values import VALUE_DTYPES
from mpicomp.compressors import Compressor, TopK
from mpicomp.compressors.base import check_selected
from mpicomp.feedback import ErrorFeedback, Feedback
from mpicomp.vector import SparseVector

_LENGTH = 300


def verify_compressor(make: Callable[[], Compressor], steps: int = 10) -> None:
    """Check that a compressor loses nothing, leaves its input alone, refuses NaN, and continues from its state.

    Args:
        make: returns a new compressor.
        steps: the number of steps, with float16, float32 and float64 each.

    Raises:
        AssertionError: it says what differs.
        TypeError: the compressor returned no SparseVector.
        ValueError: the vector has another length or dtype, or is not in order.

    >>> verify_compressor(lambda: TopK(k=2))
    """
    for dtype in VALUE_DTYPES:
        compressor = make()
        feedback = ErrorFeedback()
        put_in = np.zeros(_LENGTH)
        for step in range(steps):
            gradient = _gradient(step, dtype)
            correction = feedback.correct(gradient)
            corrected = correction.add()
            before = corrected.copy()
            sent = compressor.compress(
                read_only(corrected), gradient=read_only(gradient)
            )
            check_selected(sent, corrected, compressor)
            sent.validate()
            _check_equal(corrected, before, "compress changed its input")
            feedback.prepare_residual(correction, sent)()
            put_in += gradient - sent.to_dense().astype(np.float64)
        # Values may be rounded; the feedback keeps the error, rounded to its dtype.
        most = 100 * steps * float(np.finfo(gradient.dtype).eps)
        kept: Any = feedback.residual
        np.testing.assert_allclose(kept, put_in, 0, most, err_msg="values are lost")
        _check_refuses_nan(compressor, before)
        other = make()
        other.load_state_dict(compressor.state_dict())
        one, same = [
            part.compress(before, gradient=gradient).to_dense()
            for part in (compressor, other)
        ]
        _check_equal(one, same, "from the state other entries are selected")


def verify_feedback(make: Callable[[], Feedback], steps: int = 10) -> None:
    """Check that a feedback keeps what is not sent and what is rejected, changes nothing before, and has a state.

    Args:
        make: returns a new feedback, with a residual of its own.
        steps: the number of steps, with float16, float32 and float64 each.

    Raises:
        AssertionError: it says what differs.

    >>> verify_feedback(lambda: ErrorFeedback(decay=0.5))
    """
    for dtype in VALUE_DTYPES:
        feedback = make()
        for step in range(steps):
            gradient = _gradient(step, dtype)
            first = feedback.correct(gradient).add().copy()
            correction = feedback.correct(gradient)
            corrected = correction.add()
            _check_equal(corrected, first, "a second correct returns another vector")
            sent = TopK(k=30).compress(corrected)
            rejected = SparseVector(sent.indices[:9], sent.values[:9], _LENGTH)
            kept = first - sent.to_dense() + rejected.to_dense()
            feedback.prepare_residual(correction, sent, rejected)()
            _check_equal(feedback.residual, kept, "the residual is not what was kept")
        other = make()
        other.load_state_dict(feedback.state_dict())
        one, same = [part.correct(gradient).add() for part in (feedback, other)]
        _check_equal(one, same, "from the state another vector is returned")


def _gradient(step: int, dtype: Dtype) -> Array:
    return np.random.default_rng(step).integers(-8, 9, _LENGTH).astype(dtype)


def _check_equal(one: Any, other: Array, message: str) -> None:
    np.testing.assert_array_equal(one, other, err_msg=message)


def _check_refuses_nan(compressor: Compressor, values: Array) -> None:
    before = dict(vars(compressor))
    bad = values.copy()
    bad[np.abs(bad).argmin()] = np.nan
    try:
        compressor.compress(bad, gradient=bad)
    except ValueError:
        assert vars(compressor) == before, "attributes changed in a step that fails"
        return
    raise AssertionError("a NaN that is not sent would stay in the residual: raise")
