"""nonfinite="skip": a step in which the gradient of a rank is not finite is skipped on all ranks."""

import re
import warnings
from functools import partial

import numpy as np
import pytest
from cases import RandomK, compressed_sum, is_last, normals, state_of

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    dense_allreduce,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
)
from collectives.faults.errors import NotFiniteError
from mpicomp import (
    ChunkedTopK,
    Compressor,
    Dense,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    SparseVector,
    StepAhead,
    TopK,
)

pytestmark = pytest.mark.small_groups

SHAPES = {"w": (5, 6), "b": (7,), "v": (20,)}  # "b" is sent dense


class First(Compressor):
    """Sends the first value, and looks at no other."""

    def compress(self, corrected, *, gradient=None):
        return SparseVector([0], corrected[:1], corrected.size)


SETTINGS = {
    "default": lambda comm: {},
    "allgather, contributors": lambda comm: {
        "collective": partial(sparse_allreduce, algorithm="allgather"),
        "average": "contributors",
    },
    "gtopk, momentum": lambda comm: {
        "feedback": MomentumCorrection(0.5),
        "collective": gtopk_allreduce,
    },
    "random, compressed sum": lambda comm: {
        "compressor": RandomK(k=3),
        "collective": compressed_sum(TopK(k=2)),
    },
    "step ahead": lambda comm: {"feedback": StepAhead(0.5)},
    "in place": lambda comm: {"feedback": ErrorFeedback(in_place=True)},
    "blocking": lambda comm: {
        "collective": lambda vector, comm: sparse_allreduce(vector, comm)
    },
    "no checks": lambda comm: {"compressor": First()},
    "basis": lambda comm: {
        "compressor": ChunkedTopK(k=2, chunk=16),
        "basis": Hadamard(chunk=16),
        "average": "sign",
    },
    "few bits": lambda comm: {"compressor": None, "bits": 4},
    "dense": lambda comm: {"compressor": Dense(), "collective": dense_allreduce},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)
gradients = partial(normals, SHAPES)


def made(comm, name="default", **more):
    settings = {
        "compressor": TopK(k=3),
        "nonfinite": "skip",
        "small": 10,
        "bucket_nbytes": 1,
    }
    return GradientExchange(comm, **(settings | SETTINGS[name](comm) | more))


def spoilt(given, rank, name, bad=np.nan):
    """Return gradients of which one has a value that is not finite, on the last rank only."""
    copies = {key: array.copy() for key, array in given.items()}
    copies[name].flat[-1] = bad if rank else copies[name].flat[-1]
    return copies


class NotFinite(Compressor):
    """Raises the library's own error on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def compress(self, corrected, *, gradient=None):
        if corrected[0] == self.rank:
            raise NotFiniteError("no number")
        return SparseVector([0], corrected[:1], corrected.size)


def test_without_skips_an_error_of_a_compressor_is_raised_whatever_its_class(comm):
    exchange = made(comm, compressor=NotFinite(comm.size - 1), nonfinite="raise")
    mine = np.full(20, comm.rank, np.float32)
    with pytest.raises((ValueError, CollectiveError), match="no number"):
        exchange(mine)
    assert (exchange.steps, exchange.skipped) == (0, 0)
    assert exchange(mine - comm.size)[0] == np.mean(np.arange(comm.size) - comm.size)


@every_setting
def test_all_ranks_skip_and_go_on_as_if_there_had_been_no_such_step(comm, name):
    exchange, twin = made(comm, name), made(comm, name)
    assert exchange.finite
    for step, place in enumerate(SHAPES):  # the first step among them
        mine = spoilt(
            gradients(comm.rank, 9), is_last(comm), place, (np.nan, np.inf)[step % 2]
        )
        given, before = (
            {key: array.copy() for key, array in mine.items()},
            exchange.state_dict() if step else None,
        )
        means = exchange(mine)
        assert {key: array.shape for key, array in means.items()} == SHAPES
        assert all(
            array.dtype == np.float32 and not array.any() for array in means.values()
        )
        assert not exchange.finite
        np.testing.assert_equal(mine, given)
        if before:
            np.testing.assert_equal(exchange.state_dict(), before)
        kept, same = (
            exchange(gradients(comm.rank, step)),
            twin(gradients(comm.rank, step)),
        )
        assert exchange.finite
        np.testing.assert_equal(kept, same)
    assert (exchange.steps, exchange.skipped) == (3, 3)
    assert exchange.report().startswith(
        f"2 exchanges after the first (3 more skipped) on {comm.size} ranks"
    )


@pytest.mark.exactly(2)
@pytest.mark.exactly(5)
@every_setting
def test_a_step_whose_tensors_are_started_one_by_one_is_skipped_in_finish(comm, name):
    exchange = made(comm, name)
    exchange.register(gradients(0, 0))
    exchange(gradients(comm.rank, 0))
    before = exchange.state_dict()
    for tensor, array in spoilt(gradients(comm.rank, 1), is_last(comm), "w").items():
        exchange.start(tensor, array)
    assert all(not mean.any() for mean in exchange.finish().values())
    np.testing.assert_equal(exchange.state_dict(), before)
    exchange(gradients(comm.rank, 1))
    assert exchange.finite


@pytest.mark.exactly(1)
@pytest.mark.exactly(3)
def test_what_comes_back_of_a_step_that_is_skipped(comm):
    """Output buffers are filled; a sparse mean is empty; an array and a list come back as such."""
    bad = np.full(9, np.nan if is_last(comm) else 1.0)
    exchange, listed = made(comm), made(comm)
    out = np.zeros(9)
    assert exchange(bad, out=out) is out
    assert not out.any()
    vector = exchange(bad, sparse=True)
    assert (vector.nnz, vector.length, vector.dtype, exchange.finite) == (
        0,
        9,
        np.float64,
        False,
    )
    first, second = listed([bad[:4], bad[4:].astype(np.float64)])
    assert not first.any()
    assert second.shape == (5,)
    assert exchange.report() == "no exchange yet (2 more skipped)"


@pytest.mark.exactly(3)
def test_in_the_debug_mode_a_step_is_skipped_too(comm, fresh, monkeypatch):
    monkeypatch.setenv("MPICOMP_CHECK", "1")
    exchange = made(fresh)
    for step in range(2):
        assert not exchange(spoilt(gradients(comm.rank, step), is_last(comm), "v"))[
            "w"
        ].any()
        exchange(gradients(comm.rank, step))


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    "collective", [sparse_allreduce, gtopk_allreduce, sparse_allgather]
)
def test_another_error_in_the_same_message_raises_on_all_ranks(comm, collective):
    """One rank has a NaN, another one an error of its own: no rank takes the step for skipped."""

    class Failing(TopK):
        def select(self, correction, bounds):
            raise MemoryError("none left")

    exchange = made(
        comm,
        compressor=Failing(k=3) if comm.rank == 0 else TopK(k=3),
        collective=collective,
    )
    mine = np.full(9, np.nan if is_last(comm) else 1.0)
    with pytest.raises(
        MemoryError
        if comm.rank == 0
        else ValueError
        if is_last(comm)
        else CollectiveError
    ):
        exchange(mine)
    assert (exchange.steps, exchange.skipped, exchange.finite) == (0, 0, True)


@pytest.mark.parametrize(
    ("name", "more", "dtype"),
    [
        ("default", {}, np.float16),
        ("gtopk, momentum", {}, np.float32),
        ("few bits", {"bits": 8}, np.float16),
        ("few bits", {"bits": 1}, np.float32),
        ("dense", {"basis": Hadamard(chunk=16)}, np.float64),
    ],
)
def test_a_sum_with_the_residual_that_leaves_its_range_is_not_skipped(
    comm, name, more, dtype
):
    """The gradients are finite: to skip the step would hide it in each that follows."""
    exchange = made(comm, name, **more)
    ramp = np.linspace(0.6, 1, 20).astype(dtype) * np.finfo(dtype).max
    large = {"w": ramp if is_last(comm) else np.zeros(20, dtype)}
    exchange({"w": np.zeros(20, dtype)} if exchange.basis else large)
    before = exchange.state_dict()
    with pytest.raises(
        OverflowError if is_last(comm) else CollectiveError,
        match=r"the gradient plus the residual leaves the range of float\d+ \(in w: values\[\d+\] is",
    ):
        exchange(large)
    np.testing.assert_equal(exchange.state_dict(), before)


@pytest.mark.exactly(2)
def test_the_setting_is_the_same_on_all_ranks(comm):
    with pytest.raises(
        CollectiveError, match="'nonfinite' is 'skip' on rank 0, and 'raise' on rank 1"
    ):
        made(comm, nonfinite="raise" if comm.rank else "skip")(np.ones(3))
    with pytest.raises(ValueError, match="nonfinite is True: expected one of"):
        made(comm, nonfinite=True)


@pytest.mark.parametrize("name", ["w", "v"])
def test_a_skipped_message_fills_the_buffers_of_all_its_tensors(comm, name):
    """On every rank, wherever in the message the value is that is not finite."""
    exchange = made(comm, bucket_nbytes=2**20)
    mine = spoilt(gradients(comm.rank, 0), is_last(comm), name)
    exchange(mine, out=mine)
    assert not exchange.finite
    assert all(not array.any() for array in mine.values())


@pytest.mark.exactly(2)
def test_an_error_of_a_later_bucket_counts_before_a_skipped_step(comm):
    """Rank 0 has the NaN in the first bucket, rank 1 a wrong shape in the last one."""
    exchange, mine = made(comm, small=0), gradients(comm.rank, 0)
    exchange(mine)
    bad = dict(mine)
    bad["w" if comm.rank == 0 else "v"] = (
        np.full(SHAPES["w"], np.nan, np.float32) if comm.rank == 0 else mine["b"]
    )
    before = state_of(exchange)
    with pytest.raises(
        ValueError if comm.rank else CollectiveError, match="expected float32 of shape"
    ):
        exchange(bad)
    assert state_of(exchange) == before
    assert (exchange.steps, exchange.skipped) == (1, 0)
    exchange(mine)


@pytest.mark.parametrize("most", [3, 10])
def test_many_skipped_steps_in_a_row_warn_on_all_ranks(comm, most):
    """They name the ranks and the remedy, once; a step that is kept ends the row."""
    more = {} if most == 10 else {"most_skips": most}
    exchange = GradientExchange(comm, TopK(k=3), nonfinite="skip", **more)
    good = np.ones(2000, np.float32)
    bad = good.copy()
    bad[7] = np.nan
    mine = bad if is_last(comm) else good
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(most - 1):
                exchange(mine)
        with pytest.warns(RuntimeWarning) as caught:
            exchange(mine)
        (warning,) = caught
        text = str(warning.message)
        assert f"{most} steps in a row were skipped" in text
        assert re.search(rf"rank {comm.size - 1}: .*values\[7\] is nan", text)
        assert "set them to those of another rank" in text
        assert warning.filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(most):
                exchange(mine)
        exchange(good)
        assert exchange.finite
    with pytest.raises(ValueError, match="most_skips is 0: expected an integer of"):
        GradientExchange(comm, TopK(k=3), nonfinite="skip", most_skips=0)


def test_parameters_that_are_not_finite_are_set_from_the_anchor(comm):
    """The remedy that the error and the warning name; without it no round is ever kept again."""
    parameters = {"w": np.zeros(2000, np.float32)}
    exchange = GradientExchange(comm, bits=4, nonfinite="skip", most_skips=2)
    outer = OuterLoop(exchange, parameters, every=1)
    for step in range(5):
        parameters["w"] += 1
        if step == 2 and is_last(comm):
            parameters["w"][:] = np.nan
        if step == 3:
            with pytest.warns(RuntimeWarning, match=r"outer\.anchor"):
                assert not outer.step()
            if is_last(comm):
                parameters["w"][:] = outer.anchor["w"]
        else:
            assert outer.step() == (step != 2)
    assert outer.rounds == 3
    assert len({*comm.allgather(parameters["w"].tobytes())}) == 1
    assert np.isfinite(parameters["w"]).all()
