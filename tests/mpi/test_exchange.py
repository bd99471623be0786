"""GradientExchange over the real collectives: conservation to the last bit, and the same bits on every rank."""

import gc
import sys
import weakref
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from collectives import (
    CollectiveError,
    GradientExchange,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_iallreduce,
    sparse_ireduce_scatter,
    sparse_reduce,
    sparse_reduce_scatter,
    traffic,
)
from mpicomp import ErrorFeedback, Quantised, TopK

pytestmark = pytest.mark.small_groups

COLLECTIVES = [gtopk_allreduce, sparse_allgather, sparse_allreduce]
LENGTH = 301
DTYPES = np.float16, np.float32, np.float64


def gradients(rank, step, dtype=np.float32):
    """Integers; rank 0 contributes nothing in step 1, and all ranks the same in step 2."""
    rng = np.random.default_rng([step, 0 if step == 2 else rank])
    return (
        rng.integers(-9, 10, LENGTH) * (0 if step == 1 and rank == 0 else 1)
    ).astype(dtype)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        *((dtype, None) for dtype in DTYPES),
        *((np.float64, form) for form in ("float16", "bfloat16", "sign", "two_bit")),
    ],
)
def test_mass_is_conserved_over_steps(comm, collective, dtype, form):
    """Bitwise, as integers; quantised sevenths up to the rounding of float64: the magnitudes of the signs are means."""
    compressor, divisor = (Quantised(TopK(0.05), form), 7) if form else (TopK(0.05), 1)
    send = partial(collective, codec="smallest") if form else collective
    exchange = GradientExchange(comm, compressor, ErrorFeedback(), send, average=False)
    applied, given = np.zeros(LENGTH), np.zeros(LENGTH)
    for step in range(5):
        total = exchange(gradients(comm.rank, step, dtype) / dtype(divisor))
        assert total.dtype == dtype
        assert len(set(comm.allgather(total.tobytes()))) == 1
        applied += total
        given += sum(
            gradients(rank, step, np.float64) / divisor for rank in range(comm.size)
        )
        owed = sum(comm.allgather(exchange.feedback.residual.astype(np.float64)))
        np.testing.assert_allclose(
            applied + owed, given, rtol=0, atol=1e-13 * comm.size if form else 0
        )


@pytest.mark.parametrize(
    "call", [sparse_reduce_scatter, sparse_ireduce_scatter, sparse_reduce, sparse_bcast]
)
def test_a_collective_that_does_not_give_all_ranks_the_sum_is_refused(comm, call):
    for each in call, partial(partial(call, codec="plain"), algorithm="auto"):
        with pytest.raises(
            TypeError,
            match=f"collective is {call.__name__}, which does not give every rank the sum",
        ):
            GradientExchange(comm, TopK(density=0.1), ErrorFeedback(), each)


@pytest.mark.exactly(2)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_that_overflows_raises_on_all_ranks_and_nothing_changes(
    comm, in_place
):
    """gTop-k hands an entry back to a rank that has a large one there: 40000 and 45000 leave the range."""
    feedback = ErrorFeedback(in_place=in_place)
    exchange = GradientExchange(
        comm, TopK(k=2), feedback, partial(gtopk_allreduce, k=1)
    )
    mine = np.array([[40_000, 50_000, 0], [45_000, 0, 0]][comm.rank], np.float16)
    given = mine.copy()
    with pytest.raises(
        (OverflowError, CollectiveError),
        match="the residual leaves the range of float16",
    ):
        exchange(mine)
    np.testing.assert_array_equal(mine, given)
    assert feedback.residual is None
    assert exchange(np.ones(3, np.float16)).max() == 1


@pytest.mark.parametrize("named", [None, "allgather"])
def test_a_step_and_a_request_say_which_algorithm_ran(comm, named):
    options = {"algorithm": named} if named else {}
    collective = partial(sparse_allreduce, **options)
    exchange = GradientExchange(comm, TopK(k=30), collective=collective)
    arrays = {"large": np.ones(5000, np.float32), "small": np.ones(3, np.float32)}
    exchange(arrays)
    ran = exchange.statistics.algorithms
    assert comm.allgather(ran) == comm.size * [ran]
    assert ran.startswith("sparse_allreduce (")
    assert ran.endswith("), dense_allreduce (mpi)")
    assert f", by {ran}\n" in exchange.report()
    assert "(auto)" not in ran
    assert named is None or f"({named})" in ran
    vector = TopK(k=30).compress(arrays["large"])
    request = sparse_iallreduce(vector, comm, **options)
    request.wait()
    assert f"sparse_allreduce ({request.algorithm})" in ran


def test_a_null_communicator_is_told(comm):
    with pytest.raises(
        ValueError,
        match=r"comm is MPI\.COMM_NULL: expected a communicator that this rank belongs to",
    ):
        GradientExchange(MPI.COMM_NULL, TopK(density=0.1))


@pytest.mark.unchecked("sends more")
def test_a_list_of_arrays_is_sent_as_one_message_a_round(comm):
    """In the steps behind the first one, beside the round in which the ranks agree."""
    whole, parts = (
        GradientExchange(comm, TopK(k=40), ErrorFeedback(), gtopk_allreduce)
        for _ in range(2)
    )
    for step in range(2):
        flat = gradients(comm.rank, step)
        mean, before = whole(flat), traffic(comm).messages
        pieces = parts([flat[:100].reshape(4, 25), flat[100], flat[101:]])
        assert [piece.shape for piece in pieces] == [(4, 25), (), (200,)]
        np.testing.assert_array_equal(
            np.concatenate([piece.reshape(-1) for piece in pieces]), mean
        )
    rounds = comm.size.bit_length() + 1 + (comm.size - 1).bit_length()
    assert traffic(comm).messages - before <= rounds


def test_a_failed_call_holds_neither_the_gradient_nor_the_vector(comm):
    class Gradient(np.ndarray):
        pass

    exchange = GradientExchange(comm, TopK(k=1), ErrorFeedback(), gtopk_allreduce)
    gradient = np.array([np.nan if comm.rank == 0 else 2.0, 1.0]).view(Gradient)
    alive = weakref.ref(gradient)
    gc.disable()
    try:
        with pytest.raises(
            ValueError if comm.rank == 0 else CollectiveError, match="nan"
        ):
            exchange(gradient)
        del gradient
        # there frames of the traceback form a cycle, until it is collected
        if sys.version_info >= (3, 12):
            gc.collect()
        assert alive() is None
    finally:
        gc.enable()


class Foreign:
    """An array of another library, as far as the array interface goes."""

    def __init__(self, array):
        self.dtype = array.dtype
        self.__array_interface__ = array.__array_interface__
        self.array = array


@pytest.mark.parametrize("kinds", [(Foreign, np.asarray), (np.asarray, Foreign)])
def test_another_kind_of_array_on_one_rank_is_refused_on_all(comm, kinds):
    first, other = kinds
    exchange = GradientExchange(comm, TopK(k=5))
    exchange(first(gradients(comm.rank, 0)))
    for turn in range(comm.size):
        kind = other if comm.rank == turn else first
        error = ValueError if comm.rank == turn else CollectiveError
        with pytest.raises(error, match=r"gradient is float32 of \w+: expected"):
            exchange(kind(gradients(comm.rank, 1)))
    exchange(first(gradients(comm.rank, 1)))
    assert exchange.steps == 2
