"""Means written to the caller's own arrays, `out`: the same bits as in new ones, and all or nothing."""

import numpy as np
import pytest

from collectives import dense_iallreduce, gtopk_allreduce, sparse_allreduce, sparse_iallreduce
from mpicomp import EF21, CollectiveError, Dense, ErrorFeedback, GradientExchange, MomentumCorrection, NoFeedback, TopK

SHAPES = {"w": (30, 40), "v": (25, 8), "bias": (40,), "scale": ()}
FEEDBACKS = [ErrorFeedback, NoFeedback, EF21, MomentumCorrection]


def gradients(rank, step, dtype=np.float32):
    rng = np.random.default_rng([step, rank])
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def pair(comm, feedback, collective, compressor=None, **settings):
    """Return two exchanges that are alike."""
    return [GradientExchange(comm, compressor or TopK(0.1), feedback(), collective, **settings) for _ in range(2)]


def same(arrays, others):
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(arrays, others, strict=True))


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


def test_a_feedback_that_knows_nothing_of_it_has_its_result_copied(comm):
    class Doubled(ErrorFeedback):
        def result(self, mean):
            return 2 * super().result(mean)

    usual, exchange = pair(comm, Doubled, gtopk_allreduce)
    gradient = gradients(comm.rank, 0)["w"]
    expected = usual(gradient)
    assert exchange(gradient, out=gradient) is gradient
    assert same([gradient], [expected])


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
    for step in range(4):
        members = [
            array.astype(np.float64 if step == 3 else np.float32) for array in gradients(comm.rank, step).values()
        ]
        if step == 3:  # of another dtype: a new start
            usual.reset(), exchange.reset()
        expected = usual(members)
        outs = [members[0], None if some_new else members[1], np.full_like(members[2], np.nan), members[3]]
        means = exchange(members, out=outs)
        assert all(mean is out for mean, out in zip(means, outs, strict=True) if out is not None)
        assert same(means, expected)


@pytest.mark.parametrize("dense", [None, dense_iallreduce])
def test_named_tensors_alone_and_several_in_a_vector(comm, dense):
    usual, exchange = pair(comm, ErrorFeedback, sparse_iallreduce, dense=dense, small=100, bucket_nbytes=3000)
    for step in range(3):
        mine = gradients(comm.rank, step)
        expected = usual(mine)
        outs = {"w": mine["w"], "bias": np.empty(40, np.float32), "scale": mine["scale"]}
        if step == 1:
            for name, array in mine.items():
                exchange.start(name, array, out=outs.get(name))
            means = exchange.finish()
        else:
            means = exchange(mine, out=outs)
        assert all(means[name] is out for name, out in outs.items())
        assert same([means[name] for name in SHAPES], [expected[name] for name in SHAPES])
    means = exchange(gradients(comm.rank, 3))
    assert not any(np.shares_memory(means[name], out) for name, out in outs.items()), "each step says where it goes"


def bad_outs():
    """Return what may be wrong with the place for a mean of 30 times 40 numbers, and what is said of it."""
    fixed = np.empty((30, 40), np.float32)
    fixed.flags.writeable = False
    return {
        "shape": (np.empty(1200, np.float32), r"is float32 of shape \(1200,\)"),
        "dtype": (np.empty((30, 40)), "is float64 of shape"),
        "read-only": (fixed, "may not write"),
        "order": (np.empty((40, 30), np.float32).T, "C order"),
        "kind": ("room", "str"),
    }


@pytest.mark.parametrize("fault", bad_outs())
@pytest.mark.parametrize("named", [True, False])
def test_a_bad_place_on_one_rank_raises_everywhere_and_nothing_changes(comm, fault, named):
    exchange = GradientExchange(comm, TopK(0.1), ErrorFeedback(), sparse_iallreduce)

    def step(number, out):
        gradient = gradients(comm.rank, number)["w"]
        return exchange({"w": gradient}, out={"w": out})["w"] if named else exchange(gradient, out=out)

    step(0, None)
    before, (out, said) = exchange.state_dict(), bad_outs()[fault]
    culprit, good = comm.rank == comm.size - 1, np.full((30, 40), 7, np.float32)
    with pytest.raises((TypeError, ValueError) if culprit else CollectiveError, match=said):
        step(1, out if culprit else good)
    assert (good == 7).all()
    assert same(before.values(), exchange.state_dict().values())
    assert len(set(comm.allgather(step(1, good).tobytes()))) == 1


@pytest.mark.parametrize(
    ("gradient", "out", "said"),
    [
        ([np.ones(3), np.ones(2)], [np.ones(3)], "out is 1 arrays: expected a list of 2"),
        ([np.ones(3)], np.ones(3), "out is ndarray: expected a list of 1"),
        ({"a": np.ones(3)}, {"b": np.ones(3)}, "out has 'b'"),
        ({"a": np.ones(3)}, [np.ones(3)], "out is list: expected a dict"),
        (np.ones(3), {"a": np.ones(3)}, "out for gradient: got builtins.dict"),
    ],
)
def test_a_place_of_another_form_is_told(comm, gradient, out, said):
    exchange = GradientExchange(comm, TopK(0.5), ErrorFeedback(), gtopk_allreduce)
    with pytest.raises((TypeError, ValueError), match=said):
        exchange(gradient, out=out)
    assert exchange(np.ones(3)).tolist() == [1, 1, 0]
