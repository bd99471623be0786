"""GradientExchange and OuterLoop with every value in few bits, both ways: the residual is what was rounded away."""

from functools import partial
from itertools import product
from operator import eq

import numpy as np
import pytest
from cases import FEEDBACKS, normals

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    quantised_allreduce,
)
from mpicomp import (
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    StepAhead,
    TopK,
)
from mpicomp.vector import from_all_values
from mpicomp_bench.bench.quantised import sum_in_16_bits

SHAPES = {"w": (30, 40), "b": (40,), "v": (25, 8), "s": ()}
gradients = partial(normals, SHAPES)


def flat(arrays):
    return np.concatenate(
        [np.ravel(arrays[name]).astype(np.float64) for name in SHAPES]
    )


def residual(exchange):
    parts = [bucket.feedback.residual for bucket in exchange.buckets]
    return np.concatenate(parts).astype(np.float64)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("bucket_nbytes", [1, 2**25])
def test_applied_and_residuals_are_what_was_given(comm, bits, bucket_nbytes):
    """Within the rounding of an addition a rank; small tensors are sent with the others; the same bits on all ranks."""
    exchange = GradientExchange(
        comm, bits=bits, average=False, bucket_nbytes=bucket_nbytes
    )
    applied, given = np.zeros(1441), np.zeros(1441)
    for step in range(4):
        totals = exchange(gradients(comm.rank, step))
        assert len(set(comm.allgather(flat(totals).tobytes()))) == 1
        applied += flat(totals)
        given += sum(flat(gradients(rank, step)) for rank in range(comm.size))
        everyone = comm.allreduce(residual(exchange))
        np.testing.assert_allclose(
            applied + everyone, given, atol=2e-5 * (step + 1) * comm.size
        )
    assert len(exchange.buckets) == (1 if bucket_nbytes > 1 else len(SHAPES))
    length = sum(bucket.length for bucket in exchange.buckets)
    assert 1441 <= length <= 1441 + 255 * len(SHAPES)
    assert (exchange.statistics.sent, exchange.statistics.rejected) == (length, length)


@pytest.mark.parametrize(
    "feedback", [NoFeedback, MomentumCorrection, partial(StepAhead, 0.1)]
)
def test_feedback_methods_get_the_sum_of_the_collective_and_what_it_rejects(
    comm, feedback
):
    """As if each step were called by hand, in which the whole vector is sent."""
    exchange = GradientExchange(
        comm, None, feedback(), partial(quantised_allreduce, bits=4)
    )
    method = feedback()
    for step in range(3):
        mine = flat(gradients(comm.rank, step))
        before, corrected = mine.copy(), method.correct(mine).add().copy()
        total, rejected = quantised_allreduce(corrected, comm, bits=4)
        sent, back = from_all_values(corrected.copy()), from_all_values(rejected.copy())
        correction = method.correct(mine)
        correction.add()
        method.prepare_residual(correction, sent, back)()
        np.testing.assert_allclose(exchange(mine), total / comm.size, atol=1e-12)
        np.testing.assert_array_equal(mine, before, "the gradient is not written to")


def test_the_gradients_own_arrays_may_hold_the_residual(comm):
    inside, beside = (
        GradientExchange(comm, None, ErrorFeedback(in_place=here), bits=4)
        for here in (True, False)
    )
    home = np.zeros(3000)
    for step in range(3):
        mine = np.random.default_rng([step, comm.rank]).standard_normal(3000)
        home += mine
        np.testing.assert_allclose(inside(home), beside(mine), atol=1e-12)
        np.testing.assert_allclose(home, residual(beside), atol=1e-12)


def test_means_over_the_gradients_and_a_state_that_continues_in_other_buckets(comm):
    first, second = (
        GradientExchange(comm, Dense(), bits=4, bucket_nbytes=nbytes)
        for nbytes in (1, 2**25)
    )
    for exchange in first, second:
        exchange.register(gradients(0, 0))
    mine = gradients(comm.rank, 0)
    means = first(mine, out=mine)
    assert all(means[name] is mine[name] for name in SHAPES)
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(residual(second), residual(first))
    one, other = first(gradients(comm.rank, 1)), second(gradients(comm.rank, 1))
    assert one["w"].tobytes() != gradients(comm.rank, 1)["w"].tobytes()
    # blocks begin elsewhere
    assert all(np.abs(one[name] - other[name]).max() < 1 for name in SHAPES)


@pytest.mark.parametrize("name", ["w", "s"])
def test_a_step_that_fails_on_one_rank_changes_nothing(comm, name):
    exchange = GradientExchange(comm, bits=4)
    exchange(gradients(comm.rank, 0))
    before, bad = residual(exchange), gradients(comm.rank, 1)
    if comm.rank == comm.size - 1:
        bad[name][...] = np.inf
    error = ValueError if comm.rank == comm.size - 1 else CollectiveError
    with pytest.raises(error, match=rf"in {name}: values\[0\] is inf"):
        exchange(bad)
    np.testing.assert_array_equal(residual(exchange), before)
    assert (
        len(set(comm.allgather(flat(exchange(gradients(comm.rank, 1))).tobytes()))) == 1
    )


def test_settings_that_do_not_go_together_are_refused(comm):
    with pytest.raises(
        ValueError, match="got bits and collective: expected one of them"
    ):
        GradientExchange(comm, bits=4, collective=quantised_allreduce)
    with pytest.raises(
        ValueError,
        match=r"compressor is TopK\(density=0.1\), and bits=, or the collective, sends every value",
    ):
        GradientExchange(comm, TopK(0.1), bits=4)
    with pytest.raises(
        ValueError,
        match=r"compressor is TopK\(density=0.1\), and bits=, or the collective, sends every value",
    ):
        GradientExchange(comm, TopK(0.1), collective=quantised_allreduce)
    with pytest.raises(
        ValueError,
        match="and the mean of dense arrays has all values: expected sparse=False",
    ):
        GradientExchange(comm, bits=4)(np.ones(9), sparse=True)
    with pytest.raises(ValueError, match="bits is 3: expected one of"):
        GradientExchange(comm, bits=3)


def test_the_dense_sum_in_16_bits_of_the_benchmark_is_the_sum(comm):
    for length in (0, 1, 7, 1000):
        mine, total = (
            np.arange(length, dtype=np.float32) * (comm.rank + 1),
            np.empty(length, np.float32),
        )
        sum_in_16_bits(mine, comm, total)
        ranks = comm.size * (comm.size + 1) // 2
        np.testing.assert_allclose(total, np.arange(length) * ranks, rtol=1e-3)


@pytest.mark.parametrize("delay", [0, 1])
def test_local_steps_in_few_bits_continue_bitwise_within_a_round(comm, delay):
    def made():
        parameters = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        return parameters, OuterLoop(
            GradientExchange(comm, bits=4),
            parameters,
            every=2,
            momentum=0.5,
            delay=delay,
        )

    def train(parameters, loop, steps):
        for step in steps:
            for name, array in gradients(comm.rank, step, np.float64).items():
                parameters[name] += array
            loop.step()

    parameters, loop = made()
    train(parameters, loop, range(3))
    state, then = (
        loop.state_dict(),
        {name: array.copy() for name, array in parameters.items()},
    )
    train(parameters, loop, range(3, 7))
    second, other = made()
    other.load_state_dict(state)
    for name, array in second.items():
        array[...] = then[name]
    train(second, other, range(3, 7))
    assert flat(second).tobytes() == flat(parameters).tobytes()
    assert residual(other.exchange).tobytes() == residual(loop.exchange).tobytes()
    assert residual(loop.exchange).any()


# Tensors of other sizes beside each other: no block has values of two of them.


SCALES = {"weight": 1.0, "bias": 1e-3, "gain": 1e-6, "other": 300.0}
SIZES = {"weight": (40, 25), "bias": (64,), "gain": (3,), "other": (513,)}


def scaled(comm, step, names=SIZES):
    draws = {}
    for name in names:
        rng = np.random.default_rng([step, comm.rank, len(name)])
        values = SCALES[name] * rng.standard_normal(SIZES[name])
        draws[name] = values.astype(np.float32)
    return draws


def slow_unless_alone(case):
    """Return a case as a parameter, slow unless two of its choices are the usual ones."""
    usual = sum(map(eq, case, (4, "dict", "error feedback")))
    return pytest.param(*case, marks=() if usual >= 2 else pytest.mark.slow)


@pytest.mark.small_groups
@pytest.mark.parametrize(
    ("bits", "form", "feedback"),
    map(slow_unless_alone, product([8, 4, 2, 1], ["dict", "list"], FEEDBACKS)),
)
def test_a_mean_does_not_depend_on_the_tensors_beside_it(comm, bits, form, feedback):
    together, *others = (
        GradientExchange(comm, bits=bits, feedback=FEEDBACKS[feedback]())
        for _ in (None, *SIZES)
    )
    alone = dict(zip(SIZES, others, strict=True))
    for step in range(3):
        gradients = scaled(comm, step)
        apart = {name: array.copy() for name, array in gradients.items()}
        if form == "dict":
            means = together(gradients)
        else:
            means = dict(zip(SIZES, together([*gradients.values()]), strict=True))
        for name, exchange in alone.items():
            expected = exchange({name: apart[name]})[name]
            assert np.abs(means[name] - expected).max() <= np.abs(expected).max() * (
                0.5 if bits > 2 else 2.5
            )
            if comm.size == 1:
                np.testing.assert_array_equal(means[name], expected)


@pytest.mark.small_groups
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_small_values_beside_large_ones_keep_their_size(comm, bits):
    """The mean over many steps is that of the gradients, of each tensor by its own scale."""
    exchange = GradientExchange(comm, bits=bits)
    gradients = scaled(comm, 0)
    expected = {
        name: np.mean(comm.allgather(array), axis=0)
        for name, array in gradients.items()
    }
    steps = 32
    totals = {name: np.zeros(SIZES[name]) for name in SIZES}
    for _ in range(steps):
        for name, mean in exchange(gradients).items():
            assert np.abs(mean).max() <= 30 * SCALES[name]
            totals[name] += mean
    for name, total in totals.items():
        error = np.abs(total / steps - expected[name]).max()
        assert error <= SCALES[name] * (0.1 if bits > 2 else 2), name


@pytest.mark.small_groups
@pytest.mark.parametrize("bits", [4, 2])
def test_local_steps_move_small_parameters_beside_large_ones(comm, bits):
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SIZES.items()}
    outer = OuterLoop(GradientExchange(comm, bits=bits), parameters, every=1)
    target = {name: np.full(shape, SCALES[name]) for name, shape in SIZES.items()}
    for _ in range(30):
        for name, array in parameters.items():
            array += 0.5 * (target[name] - array).astype(np.float32)
        assert outer.step()
    for name, array in parameters.items():
        np.testing.assert_allclose(array, target[name], rtol=0.05)


def test_states_of_few_bits_are_by_tensor(comm):
    """They fit an exchange of other buckets."""
    exchange = GradientExchange(comm, bits=4)
    other = GradientExchange(comm, bits=4, bucket_nbytes=100)
    for step in range(3):
        exchange(scaled(comm, step))
    other.register(scaled(comm, 0))
    state = exchange.state_dict()
    assert state["bias/feedback/residual"].shape == (64,)
    other.load_state_dict(state)
    loaded = other.state_dict()
    for key in state:
        np.testing.assert_array_equal(loaded[key], state[key])
