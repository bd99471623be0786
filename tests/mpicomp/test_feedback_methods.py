"""Each feedback method against its rule in dense NumPy, and what all promise: a failed step changes nothing, a restart
has the same bits. The values are integers and halves, so that sums are exact.
"""

from functools import partial

import numpy as np
import pytest
from cases import FEEDBACKS

from mpicomp import (
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    SparseVector,
    StepAhead,
    TopK,
)

LENGTH = 40
METHODS = {
    **FEEDBACKS,
    "whole momentum": partial(MomentumCorrection, 1.0),
    "unmasked": partial(MomentumCorrection, 0.5, masking=False),
    "step ahead without momentum": partial(StepAhead, 0.5),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
STATEFUL = {
    name: method for name, method in METHODS.items() if name not in ("none", "in place")
}
every_keeping_method = pytest.mark.parametrize(
    "method", STATEFUL.values(), ids=STATEFUL
)


def integers(step, rank=0, dtype=np.float64):
    return np.random.default_rng([step, rank]).integers(-9, 10, LENGTH).astype(dtype)


def normal(step, rank=0, dtype=np.float64):
    return np.random.default_rng([step, rank, 7]).standard_normal(LENGTH).astype(dtype)


def dense(vector):
    return vector.to_dense().astype(np.float64)


def one_step(feedback, gradient, compressor, reject=0):
    """Return what was corrected, sent and rejected (the first `reject` entries) as dense vectors, and the result."""
    correction = feedback.correct(gradient)
    corrected = correction.add()
    assert corrected.dtype == gradient.dtype
    before = corrected.astype(np.float64)
    sent = compressor.compress(corrected, gradient=gradient)
    rejected, arrived = sent.divide(np.arange(min(reject, sent.nnz)))
    keep(feedback, correction, sent, rejected if reject else None)
    return before, dense(sent), dense(rejected), dense(arrived)


def keep(feedback, correction, sent, rejected=None):
    """End a step."""
    correction.add()
    feedback.prepare_residual(correction, sent, rejected)()


def state_of(feedback):
    return {
        name: (array.dtype, array.shape, array.tobytes())
        for name, array in feedback.state_dict().items()
    }


# What holds for every method.


@every_method
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_second_correct_gives_the_same_and_changes_nothing(method, dtype):
    feedback = method()
    for step in range(3):
        before = state_of(feedback)
        gradient = normal(step, dtype=dtype)
        kept = gradient.copy()
        feedback.correct(normal(9, dtype=dtype))  # a step that fails
        first = feedback.correct(gradient).add().copy()
        correction = feedback.correct(gradient)
        corrected = correction.add()
        assert first.tobytes() == corrected.tobytes()
        assert state_of(feedback) == before
        np.testing.assert_array_equal(gradient, kept)
        keep(feedback, correction, TopK(k=5).compress(corrected))


@every_method
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_restart_continues_with_the_same_bits(method, dtype, tmp_path):
    one, compressor = method(), TopK(k=5)
    for step in range(4):
        one_step(one, normal(step, dtype=dtype), compressor, reject=step % 3)
    np.savez(tmp_path / "state.npz", **one.state_dict())
    other = method()
    with np.load(tmp_path / "state.npz") as stored:
        other.load_state_dict(stored)
    assert state_of(one) == state_of(other)
    for step in range(4, 8):
        ours, theirs = (
            one_step(each, normal(step, dtype=dtype), compressor, reject=step % 3)
            for each in (one, other)
        )
        assert [array.tobytes() for array in ours] == [
            array.tobytes() for array in theirs
        ]
    assert state_of(one) == state_of(other)


@every_keeping_method
def test_the_state_is_a_copy_both_ways(method):
    feedback = method()
    one_step(feedback, normal(0), TopK(k=5))
    saved = feedback.state_dict()
    before = state_of(feedback)
    for array in saved.values():
        array.fill(3)
    assert state_of(feedback) == before
    feedback.load_state_dict(saved)
    loaded = state_of(feedback)
    for array in saved.values():
        array.fill(5)
    assert state_of(feedback) == loaded


def without_one(state, name):
    return {key: array for key, array in state.items() if key != name}


def of_all(change):
    """Return the change of every array of a state, numbers left alone."""
    return lambda state, name: {
        key: change(array) if array.ndim else array for key, array in state.items()
    }


@every_keeping_method
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state, name: {**state, "more": np.ones(LENGTH)},
            r"the state has \[.*'more'.*\]: expected \[",
        ),
        (
            lambda state, name: {**without_one(state, name), "other": np.ones(LENGTH)},
            r"has \[.*'other'.*: expected",
        ),
        (
            lambda state, name: {**state, name: state[name].astype(complex)},
            r"complex128 of shape \(40,\).*expected a finite vector",
        ),
        (
            of_all(lambda array: array[:, None]),
            r"of shape \(40, 1\).*: expected a finite vector",
        ),
        (of_all(lambda array: array * np.inf), "expected a finite vector"),
        (
            of_all(lambda array: array[:9]),
            r"of shape \(9,\).*: expected .* of shape \(40,\) .*reset\(\) first",
        ),
        (
            of_all(np.float64),
            r"float64 of shape \(40,\).*: expected .*float32 of shape \(40,\).*reset\(\) first",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")  # 0 * inf, on purpose
def test_a_wrong_state_is_refused_and_changes_nothing(method, change, message):
    feedback = method()
    one_step(feedback, normal(0, dtype=np.float32), TopK(k=5))
    state, before = feedback.state_dict(), state_of(feedback)
    name = next(name for name, array in state.items() if array.ndim)
    with pytest.raises(ValueError, match=message):
        feedback.load_state_dict(change(state, name))
    assert state_of(feedback) == before


def test_the_arrays_of_a_state_have_one_shape_also_in_a_fresh_object():
    state = {"residual": np.ones(3), "velocity": np.ones(4)}
    with pytest.raises(
        ValueError, match=r"of shape \(3,\), velocity .*: expected .*, of one shape"
    ):
        MomentumCorrection().load_state_dict(state)


@pytest.mark.parametrize("state", [None, [3], {3: np.ones(3)}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TypeError, match="expected arrays by name, what state_dict"):
        StepAhead(0.5).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "rate",
            np.ones(1),
            r"the state has array\(\[1\.\]\) as rate: expected a number",
        ),
        ("rate", np.array("1"), "as rate: expected a number"),
        ("rate", np.array(-1.0), "as rate: expected a number from 0"),
        ("rate", np.array(0.0), "rate is 0.0: expected 0 < rate"),
    ],
)
def test_a_wrong_number_in_a_state_is_refused(name, value, message):
    feedback = StepAhead(0.5, 0.5)
    one_step(feedback, normal(0), TopK(k=5))
    before = state_of(feedback)
    with pytest.raises(ValueError, match=message):
        feedback.load_state_dict({**feedback.state_dict(), name: value})
    assert state_of(feedback) == before


@every_method
@pytest.mark.parametrize("way", ["a reset", "the state of a fresh one"])
def test_afterwards_it_is_as_new(method, way):
    feedback, fresh = method(), method()
    one_step(feedback, normal(0), TopK(k=5))
    feedback.reset() if way == "a reset" else feedback.load_state_dict(
        fresh.state_dict()
    )
    assert state_of(feedback) == state_of(fresh)
    assert feedback.residual is None
    ours, theirs = (
        one_step(each, normal(1, dtype=np.float32), TopK(k=5))
        for each in (feedback, fresh)
    )
    assert [array.tobytes() for array in ours] == [array.tobytes() for array in theirs]


@every_keeping_method
def test_misuse_is_named(method):
    feedback, nothing = method(), SparseVector.empty(LENGTH, np.float64)
    corrected = feedback.correct(normal(0))
    with pytest.raises(ValueError, match="got a vector of length 3: expected 40"):
        feedback.prepare_residual(corrected, SparseVector.empty(3, np.float64))
    keep(feedback, corrected, nothing)
    with pytest.raises(RuntimeError, match="prepare_residual without correct"):
        feedback.prepare_residual(corrected, nothing)
    for change in (
        lambda: feedback.load_state_dict(feedback.state_dict()),
        lambda: feedback.rescale(2),
    ):
        corrected = feedback.correct(normal(1))
        change()
        with pytest.raises(RuntimeError, match="prepare_residual without correct"):
            feedback.prepare_residual(corrected, nothing)
    for other in (np.ones(4), np.ones(LENGTH, np.float32)):
        message = rf"the gradient is .*: expected float64 of shape \(40,\).*use one {type(feedback).__name__} for each"
        with pytest.raises(ValueError, match=message):
            feedback.correct(other)
    with pytest.raises(
        ValueError,
        match=r"the gradient is float64 of shape \(2, 2\): expected float16 or float32 or",
    ):
        method().correct(np.ones((2, 2)))


@every_keeping_method
@pytest.mark.parametrize(
    "other", [np.ones(3, np.float32), np.ones(LENGTH, np.float16), np.ones(LENGTH)]
)
def test_before_the_first_commit_a_gradient_may_be_of_another_kind(method, other):
    feedback, gradient = method(), integers(0, dtype=np.float32)
    feedback.correct(other)
    corrected = feedback.correct(gradient).add()
    assert (corrected.dtype, corrected.shape) == (gradient.dtype, gradient.shape)
    np.testing.assert_array_equal(corrected, method().correct(gradient).add())


@pytest.mark.parametrize(
    "method", [NoFeedback, *STATEFUL.values()], ids=["none", *STATEFUL]
)
def test_rescale_scales_residuals_in_gradient_units_and_nothing_else(method):
    feedback = method()
    feedback.rescale(2.0)
    one_step(feedback, integers(0), TopK(k=5))
    before = feedback.state_dict()
    feedback.rescale(0.5)
    scaled = not isinstance(feedback, StepAhead)
    for name, array in feedback.state_dict().items():
        np.testing.assert_array_equal(
            array, before[name] * (0.5 if scaled and name == "residual" else 1)
        )
    for factor in (0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="the old learning rate over the new one"):
            feedback.rescale(factor)


def test_rescale_refuses_what_leaves_the_range():
    feedback = ErrorFeedback()
    one_step(feedback, np.full(LENGTH, 3e4, np.float16), TopK(k=5))
    before = state_of(feedback)
    with pytest.raises(
        OverflowError, match=r"the residual times 3\.0 leaves the range of float16"
    ):
        feedback.rescale(3)
    assert state_of(feedback) == before


@every_keeping_method
def test_a_step_allocates_no_vector(method):
    """After the second step the same buffers take turns."""
    feedback, seen = method(), []
    for step in range(8):
        correction = feedback.correct(normal(step))
        corrected = correction.add()
        seen.append(corrected.ctypes.data)
        keep(feedback, correction, TopK(k=5).compress(corrected))
    assert len(set(seen)) <= 2


@pytest.mark.parametrize("name", [name for name in METHODS if name != "none"])
def test_what_comes_back_out_of_range_is_told_before_anything_changes(name):
    """An entry of another rank comes back to one that has a large one there."""
    feedback, gradient = METHODS[name](), np.full(LENGTH, 40_000, np.float16)
    gradient[3:] = 1
    before, nothing = state_of(feedback), SparseVector.empty(LENGTH, np.float16)
    back = SparseVector([1], np.array([60_000], np.float16), LENGTH)
    message = "leaves the range of float16: scale the gradients down, or use float32"
    correction = feedback.correct(gradient)
    correction.add()
    with np.errstate(over="ignore"), pytest.raises(OverflowError, match=message):
        feedback.prepare_residual(correction, nothing, back)
    assert state_of(feedback) == before
    assert np.isfinite(gradient).all()
    one_step(feedback, np.ones(LENGTH, np.float16), TopK(k=5))


def test_in_place_the_gradient_changes_at_the_commit_and_nothing_is_kept():
    """Also where an entry was sent and another one came back."""
    feedback, gradient = ErrorFeedback(in_place=True), np.array([4.0, 1.0, -6.0, 2.0])
    correction = feedback.correct(gradient)
    assert np.shares_memory(correction.add(), gradient)
    sent, rejected = (
        SparseVector([0, 2], [4.0, -5.0], 4),
        SparseVector([0, 3], [4.0, 7.0], 4),
    )
    write = feedback.prepare_residual(correction, sent, rejected)
    assert gradient.tolist() == [4, 1, -6, 2]
    write()
    assert gradient.tolist() == [4, 1, -1, 9]
    assert feedback.residual is None
    assert feedback.state_dict() == {}
    with pytest.raises(
        RuntimeError, match="the residual is in the gradient's own array"
    ):
        feedback.rescale(2.0)


# Momentum correction.


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_momentum_correction_follows_its_rule(masking, dtype):
    feedback = MomentumCorrection(0.5, masking=masking)
    u, v = np.zeros(LENGTH), np.zeros(LENGTH)
    for step in range(6):
        g = integers(step, dtype=dtype)
        u = 0.5 * u + g
        p, sent, rejected, _ = one_step(feedback, g, TopK(k=9), reject=4 * (step % 2))
        np.testing.assert_array_equal(p, v + u)
        v = p - sent + rejected
        if masking:
            u = np.where((sent != 0) & (rejected == 0), 0, u)
        np.testing.assert_array_equal(feedback.residual, v)
        np.testing.assert_array_equal(feedback.velocity, u)


@pytest.mark.parametrize("sparse_gradient", [False, True])
def test_with_dense_momentum_correction_is_plain_momentum_sgd(sparse_gradient):
    """Also where entries are zero, which are never sent."""
    feedback, u = MomentumCorrection(0.5), np.zeros(LENGTH)
    for step in range(5):
        g = integers(step) * (np.arange(LENGTH) % 4 == 0 if sparse_gradient else 1)
        u = 0.5 * u + g
        result = one_step(feedback, g, Dense())[-1]
        np.testing.assert_array_equal(result, u)
        np.testing.assert_array_equal(feedback.velocity, u)
        assert not feedback.residual.any()


def test_what_is_sent_rounded_is_masked_and_leaves_its_error():
    feedback = MomentumCorrection(0.5)
    corrected = feedback.correct(np.array([1.25, 5.0]))
    keep(feedback, corrected, SparseVector([0], [1.0], 2))
    assert feedback.residual.tolist() == [0.25, 5]
    assert feedback.velocity.tolist() == [0, 5]


def test_with_dense_the_momentum_of_what_came_back_stays():
    feedback, g = MomentumCorrection(0.5), np.arange(1.0, LENGTH + 1)
    one_step(feedback, g, Dense(), reject=3)
    np.testing.assert_array_equal(feedback.velocity, np.where(g <= 3, g, 0))


def test_what_a_long_vector_keeps_at_its_end_has_the_rest_masked():
    feedback, g = MomentumCorrection(0.5), np.zeros(200_000)
    g[[0, -1]] = 4, 3
    keep(feedback, feedback.correct(g), SparseVector([0], [4.0], g.size))
    assert (feedback.velocity[0], feedback.velocity[-1], feedback.residual[-1]) == (
        0,
        3,
        3,
    )


def test_what_others_hand_back_to_this_rank_leaves_its_momentum_alone():
    feedback = MomentumCorrection(0.5)
    corrected, sent = (
        feedback.correct(np.array([4.0, 1.0, 6.0])),
        SparseVector([0, 2], [4.0, 6.0], 3),
    )
    keep(feedback, corrected, sent, SparseVector([1, 2], [7.0, 6.0], 3))
    assert feedback.residual.tolist() == [0, 8, 6]
    assert feedback.velocity.tolist() == [0, 1, 6]


def test_a_velocity_for_float16_gradients_is_kept_in_float32():
    """In float16, as in `half`, it would stop 2 to 5 % below its limit g / (1 - m)."""
    feedback, half = MomentumCorrection(0.99), np.float16(0)
    for _ in range(2000):
        one_step(feedback, np.full(LENGTH, 0.3, np.float16), Dense())
        half = np.float16(0.99 * float(half)) + np.float16(0.3)
    limit = float(np.float16(0.3)) / (1 - 0.99)
    assert feedback.velocity.dtype == np.float32
    assert abs(feedback.velocity[0] / limit - 1) < 1e-4
    assert half / limit < 0.98


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MomentumCorrection(1.5),
            "momentum is 1.5: expected 0 <= momentum <= 1",
        ),
        (lambda: StepAhead(0.0), "rate is 0.0: expected 0 < rate"),
        (lambda: StepAhead(1.0, -0.1), "momentum is -0.1"),
    ],
)
def test_a_setting_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Step-ahead.


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_step_ahead_follows_its_rule_also_when_the_rate_changes(momentum, dtype):
    feedback = StepAhead(0.5, momentum)
    m, e, x = (
        np.zeros(LENGTH),
        np.zeros(LENGTH),
        integers(99, dtype=dtype).reshape(8, 5),
    )
    for step in range(6):
        feedback.rate = rate = 2.0 ** -(step % 3)
        g = integers(step, dtype=dtype)
        ahead = feedback.ahead(x)
        assert (ahead.shape, ahead.dtype) == (x.shape, x.dtype)
        assert not np.shares_memory(ahead, x)
        np.testing.assert_array_equal(ahead.reshape(-1), x.reshape(-1) - e)
        m = momentum * m + g
        p, sent, rejected, _ = one_step(feedback, g, TopK(k=9), reject=4 * (step % 2))
        np.testing.assert_array_equal(p, rate * m + e)
        e = p - sent + rejected
        np.testing.assert_array_equal(feedback.residual, e)


def test_the_model_and_the_learning_rate_may_be_of_another_precision_than_the_gradient():
    feedback = StepAhead(np.float32(0.5))
    assert feedback.state_dict()["rate"].dtype == np.float64
    assert feedback.correct(normal(0, dtype=np.float32)).out.dtype == np.float32
    one_step(feedback, normal(0, dtype=np.float32), TopK(k=5))
    for dtype in (np.float16, np.float32, np.float64):
        assert feedback.ahead(np.zeros(LENGTH, dtype)).dtype == dtype
    with pytest.raises(ValueError, match="x has 3 values: expected 40"):
        feedback.ahead(np.zeros(3))
