"""Means in the caller's own arrays, `out`, and sparse ones: the same bits as in new dense ones, and all or nothing."""

from functools import partial

import numpy as np
import pytest
from cases import compressed_sum, normals

from collectives import (
    CollectiveError,
    GradientExchange,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_iallreduce,
)
from mpicomp import (
    Dense,
    ErrorFeedback,
    MomentumCorrection,
    NoFeedback,
    StepAhead,
    TopK,
)

pytestmark = pytest.mark.small_groups

SHAPES = {"w": (30, 40), "v": (25, 8), "bias": (40,), "scale": ()}
FEEDBACKS = [ErrorFeedback, NoFeedback, MomentumCorrection]
gradients = partial(normals, SHAPES)


def pair(comm, feedback, collective, compressor=None, **settings):
    """Return two exchanges that are alike."""
    return [
        GradientExchange(
            comm, compressor or TopK(0.1), feedback(), collective, **settings
        )
        for _ in range(2)
    ]


def same(arrays, others):
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(arrays, others, strict=True)
    )


@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("place", ["the gradient", "another array"])
def test_an_array(comm, feedback, dtype, place):
    usual, exchange = pair(comm, feedback, gtopk_allreduce)
    for step in range(3):
        gradient = gradients(comm.rank, step, dtype)["w"]
        expected = usual(gradient)
        out = gradient if place == "the gradient" else np.full_like(gradient, np.nan)
        assert exchange(gradient, out=out) is out
        assert same([out], [expected])
    assert same(usual.state_dict().values(), exchange.state_dict().values())


@pytest.mark.parametrize("average", [True, False])
def test_all_that_a_gradient_has_written_over_itself(comm, average):
    usual, exchange = pair(comm, NoFeedback, sparse_allreduce, Dense(), average=average)
    gradient = gradients(comm.rank, 0)["w"]
    expected = usual(gradient.copy())
    assert same([exchange(gradient, out=gradient)], [expected])


@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("some_new", [True, False])
def test_a_list(comm, feedback, some_new):
    usual, exchange = pair(comm, feedback, gtopk_allreduce)
    for step in range(3):
        members = list(gradients(comm.rank, step).values())
        if step == 2:
            usual.reset(), exchange.reset()
        expected = usual(members)
        outs = [
            members[0],
            None if some_new else members[1],
            np.full_like(members[2], np.nan),
            members[3],
        ]
        means = exchange(members, out=outs)
        assert all(
            mean is out
            for mean, out in zip(means, outs, strict=True)
            if out is not None
        )
        assert same(means, expected)


@pytest.mark.parametrize("small", [0, 100])
def test_named_tensors_alone_and_several_in_a_vector(comm, small):
    usual, exchange = pair(
        comm, ErrorFeedback, sparse_iallreduce, small=small, bucket_nbytes=3000
    )
    for step in range(3):
        mine = gradients(comm.rank, step)
        expected = usual(mine)
        outs = {
            "w": mine["w"],
            "bias": np.empty(40, np.float32),
            "scale": mine["scale"],
        }
        if step == 1:
            for name, array in mine.items():
                exchange.start(name, array, out=outs.get(name))
            means = exchange.finish()
        else:
            means = exchange(mine, out=outs)
        assert all(means[name] is out for name, out in outs.items())
        assert same(
            [means[name] for name in SHAPES], [expected[name] for name in SHAPES]
        )
    means = exchange(gradients(comm.rank, 3))
    assert not any(np.shares_memory(means[name], out) for name, out in outs.items()), (
        "out is for one step only"
    )


def bad_outs():
    """Return what may be wrong with an output buffer for 30 times 40 numbers, and what the error says."""
    fixed = np.empty((30, 40), np.float32)
    fixed.flags.writeable = False
    return {
        "shape": (np.empty(1200, np.float32), r"is float32 of shape \(1200,\)"),
        "dtype": (np.empty((30, 40)), "is float64 of shape"),
        "read-only": (fixed, "is read-only for NumPy"),
        "order": (np.empty((40, 30), np.float32).T, "not C-contiguous"),
        "kind": ("room", "str"),
        "number": (np.float32(7), "the number .*cannot be written to"),
    }


@pytest.mark.parametrize("fault", bad_outs())
@pytest.mark.parametrize("named", [True, False])
def test_a_bad_output_buffer_on_one_rank_raises_everywhere_and_nothing_changes(
    comm, fault, named
):
    exchange = GradientExchange(comm, TopK(0.1), ErrorFeedback(), sparse_iallreduce)
    shape = () if fault == "number" else (30, 40)

    def step(number, out):
        gradient = np.resize(gradients(comm.rank, number)["w"], shape)
        return (
            exchange({"w": gradient}, out={"w": out})["w"]
            if named
            else exchange(gradient, out=out)
        )

    step(0, None)
    before, (out, said) = exchange.state_dict(), bad_outs()[fault]
    culprit, good = comm.rank == comm.size - 1, np.full(shape, 7, np.float32)
    with pytest.raises(
        (TypeError, ValueError) if culprit else CollectiveError, match=said
    ):
        step(1, out if culprit else good)
    assert (good == 7).all()
    assert same(before.values(), exchange.state_dict().values())
    assert len(set(comm.allgather(step(1, good).tobytes()))) == 1


@pytest.mark.parametrize(
    ("gradient", "out", "said"),
    [
        (
            [np.ones(3), np.ones(2)],
            [np.ones(3)],
            "out is 1 arrays: expected a list of 2",
        ),
        (
            [np.ones(3)],
            np.ones(3),
            "out is ndarray: expected a list of arrays, as the gradients are",
        ),
        ({"a": np.ones(3)}, {"b": np.ones(3)}, "out has 'b'"),
        (
            {"a": np.ones(3)},
            [np.ones(3)],
            "out is list: expected arrays by name, as the gradients are",
        ),
        (
            np.ones(3),
            {"a": np.ones(3)},
            "out is dict: expected one array, as the gradients are",
        ),
    ],
)
def test_output_buffers_of_another_form_are_named(comm, gradient, out, said):
    exchange = GradientExchange(comm, TopK(0.5), ErrorFeedback(), gtopk_allreduce)
    with pytest.raises((TypeError, ValueError), match=said):
        exchange(gradient, out=out)
    assert exchange(np.ones(3)).tolist() == [1, 1, 0]


def dense_of(mean, like):
    """Return a sparse mean as a dense array; it is sound, and of the length of the tensor."""
    mean.validate()
    assert mean.length == np.size(like)
    return mean.to_dense().reshape(np.shape(like))


@pytest.mark.parametrize(
    ("feedback", "collective"),
    [
        (ErrorFeedback, gtopk_allreduce),
        (NoFeedback, sparse_allgather),
        (MomentumCorrection, sparse_iallreduce),
        (partial(StepAhead, 0.1), gtopk_allreduce),
    ],
)
def test_a_sparse_mean_is_the_dense_one(comm, collective, feedback):
    both_ways = compressed_sum(TopK(0.05))
    for average, total in ((True, collective), (False, both_ways)):
        settings = {"average": average, "small": 100, "bucket_nbytes": 3000}
        for form in ("array", "list", "dict"):
            usual, exchange = (
                GradientExchange(comm, TopK(0.1), feedback(), total, **settings)
                for _ in range(2)
            )
            for step in range(2):
                mine = gradients(comm.rank, step)
                given = {"array": mine["w"], "list": list(mine.values()), "dict": mine}[
                    form
                ]
                expected, means = usual(given), exchange(given, sparse=True)
                if form == "dict":
                    assert list(means) == list(mine)
                    given, means, expected = (
                        list(each.values()) for each in (given, means, expected)
                    )
                if form == "array":
                    given, means, expected = [given], [means], [expected]
                assert same(map(dense_of, means, given), expected)
        assert same(usual.state_dict().values(), exchange.state_dict().values())


def test_a_sparse_mean_of_started_tensors_is_subtracted_from_a_model(comm):
    usual, exchange = pair(comm, ErrorFeedback, sparse_iallreduce, small=100)
    mine = gradients(comm.rank, 0)
    for name, array in mine.items():
        exchange.start(name, array)
    means, expected = exchange.finish(sparse=True), usual(mine)
    for name, mean in means.items():
        model = np.ones(np.shape(mine[name]), np.float32)
        mean.add_to(model, -0.5)
        np.testing.assert_array_equal(model, 1 - np.float32(0.5) * expected[name])


@pytest.mark.parametrize("odd_only", [False, True])
def test_a_sparse_mean_in_an_output_buffer_is_refused_on_all_ranks_and_nothing_changes(
    comm, odd_only
):
    exchange = GradientExchange(comm, TopK(0.1))
    exchange(gradients(comm.rank, 0)["w"])
    before, odd = exchange.state_dict(), comm.rank == comm.size - 1 or not odd_only
    out = np.full((30, 40), 7, np.float32)
    with pytest.raises(
        ValueError if odd else CollectiveError, match="got out= and sparse=True"
    ):
        exchange(gradients(comm.rank, 1)["w"], out=out, sparse=odd)
    assert same(before.values(), exchange.state_dict().values())
    assert (out == 7).all()
    exchange(gradients(comm.rank, 1)["w"])


@pytest.mark.exactly(2)
@pytest.mark.parametrize("form", ["dict", "list"])
def test_a_gradient_that_one_rank_lacks_has_no_place_for_its_mean(comm, form):
    """The mean would be written on one rank only."""
    exchange = GradientExchange(comm, TopK(k=1), small=0)

    def given(unused=None):
        arrays = {"a": np.ones(3), "b": np.ones(4) if unused is None else unused[0]}
        return arrays if form == "dict" else [*arrays.values()]

    exchange(given())
    mine = given((None,) if comm.rank else None)
    with pytest.raises(
        ValueError if comm.rank else CollectiveError,
        match=r"got out= and no gradient of .*pass zeros.*exchange.hold",
    ):
        exchange(mine, out=mine)
    exchange(given(), out=given())


def test_a_gradient_that_is_none_in_the_first_step_is_named(comm):
    with pytest.raises(
        TypeError,
        match="b is None in the first step: pass zeros, or register the tensors before",
    ):
        GradientExchange(comm, TopK(k=1))({"a": np.ones(3), "b": None})
