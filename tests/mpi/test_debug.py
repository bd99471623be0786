"""The debug mode, MPICOMP_CHECK=1: what is sound passes, and a broken promise is found on every rank."""

from functools import partial

import numpy as np
import pytest
from cases import FEEDBACKS, bits, contribution, contributions, window
from disorder import Damaging, over

from collectives import (
    CheckError,
    DamagedMessageError,
    GradientExchange,
    SupportPlan,
    allreduce,
    compressed_allreduce,
    dense_allreduce,
    dense_iallreduce,
    gtopk_allreduce,
    quantised_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_iallreduce,
    sparse_reduce,
    sparse_reduce_scatter,
    traffic,
)
from mpicomp import (
    AdaComp,
    ErrorFeedback,
    Quantised,
    SparseVector,
    TopK,
)

pytestmark = pytest.mark.small_groups


@pytest.fixture
def watched(comm, fresh, monkeypatch):
    """Return a communicator of its own, which the library sees first with the debug mode on."""
    if comm:
        # that communicator is asked now, and does without
        sparse_allgather(SparseVector.empty(1), comm)
    monkeypatch.setenv("MPICOMP_CHECK", "1")
    return fresh


@pytest.mark.parametrize("pattern", ["random", "unequal"])
def test_what_is_sound_passes_and_is_the_same(comm, watched, pattern):
    vector, total = (
        contribution(pattern, comm.rank, comm.size),
        sum(map(window, contributions(pattern, comm.size))),
    )
    for name in ("auto", *allreduce.ALGORITHMS):
        checked = sparse_allreduce(vector, watched, algorithm=name)
        assert bits(checked) == bits(sparse_allreduce(vector, comm, algorithm=name))
        np.testing.assert_array_equal(window(checked), total)
    for name in gtopk_allreduce.algorithms:
        assert bits(gtopk_allreduce(vector, watched, 7, algorithm=name)[0]) == bits(
            gtopk_allreduce(vector, comm, 7, algorithm=name)[0]
        )
    parts = (compressed_allreduce(vector, each, TopK(k=3)) for each in (watched, comm))
    assert [bits(part) for part in next(parts)] == [bits(part) for part in next(parts)]
    assert sparse_allreduce(vector, watched, votes=True)[1].max(initial=0) <= comm.size
    assert len(sparse_allgather(vector, watched)) == comm.size
    sparse_reduce_scatter(vector, watched)
    root = comm.size - 1
    assert (sparse_reduce(vector, watched, root) is not None) == (comm.rank == root)
    assert bits(
        sparse_bcast(vector if comm.rank == root else None, watched, root)
    ) == bits(contribution(pattern, root, root + 1))
    np.testing.assert_array_equal(dense_allreduce(window(vector), watched), total)
    for name in quantised_allreduce.algorithms:
        checked, own = (
            quantised_allreduce(window(vector), each, 2, algorithm=name)
            for each in (watched, comm)
        )
        assert [part.tobytes() for part in checked] == [part.tobytes() for part in own]
    plan = SupportPlan.union(vector, watched)
    np.testing.assert_array_equal(
        plan.allreduce(window(vector)[plan.indices]), total[plan.indices]
    )


@pytest.mark.at_least(2)
def test_ranks_that_call_different_operations_are_told_who_called_what_from_where(
    comm, watched
):
    """Whether their schedules begin alike or not; at 4 ranks these two do not. And the next call works."""
    vector = contribution("random", comm.rank, comm.size)
    sparse_allgather(vector, watched)
    with pytest.raises(
        CheckError,
        match=r"MPICOMP_CHECK: call 1 on this communicator, must be the same operation on all ranks, got "
        r"sparse_allgather at test_debug.py:\d+ on rank 0; sparse_allreduce at test_debug.py:\d+ on rank",
    ):
        (sparse_allgather if comm.rank == 0 else sparse_allreduce)(vector, watched)
    with pytest.raises(
        CheckError, match=r"call 2 .* got gtopk_allreduce .*; dense_allreduce"
    ):
        gtopk_allreduce(vector, watched) if comm.rank == 0 else dense_allreduce(
            np.ones(3), watched
        )
    assert len(sparse_allgather(vector, watched)) == comm.size


def test_several_in_flight_keep_the_order_in_which_mpi_is_called(comm, watched):
    """The rounds of the debug mode end in any order; MPI's own sums have to start in one."""
    requests = [dense_iallreduce(np.full(3, float(turn)), watched) for turn in range(6)]
    sums = [sparse_iallreduce(contribution("random", comm.rank, comm.size), watched)]
    order = [(place * 5 + comm.rank) % 6 for place in range(6)]
    for place in order:
        assert requests[place].wait().tolist() == [place * comm.size] * 3
    assert sums[0].wait().nnz


def _lossy(vector, group, metadata):
    total = yield from _sound(vector, group, metadata)
    return SparseVector(total.indices[1:], total.values[1:], total.length)


def _astray(vector, group, metadata):
    total = yield from _sound(vector, group, metadata)
    return SparseVector(total.indices + 1, total.values, total.length)


def _apart(vector, group, metadata):
    total = yield from _sound(vector, group, metadata)
    return SparseVector(
        total.indices, total.values * (1 + (group.rank == 1)), total.length
    )


def _disordered(vector, group, metadata):
    total = yield from _sound(vector, group, metadata)
    return SparseVector(total.indices[[0, 2, 1, 3]], total.values[:4], total.length)


_sound = allreduce.allgather


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_lossy, "sparse_allreduce: mass is not conserved: the ranks contributed"),
        (_astray, "mass is not conserved"),
        (_apart, "the ranks hold different bits: "),
        (_disordered, r"rank 0: its result: indices\[2\] is \d+ and follows \d+"),
    ],
)
@pytest.mark.unchecked("is on")
def test_an_algorithm_that_breaks_its_promise_is_found_on_every_rank(
    comm, watched, monkeypatch, broken, said
):
    monkeypatch.setitem(allreduce.ALGORITHMS, "split_allgather", broken)
    vector = SparseVector([2, 4, 6, 8, 9], [1.0, -1.0, 5.0, 2.0, 3.0], 12)
    with pytest.raises(CheckError, match=said):
        sparse_allreduce(vector, watched, algorithm="split_allgather")
    assert sparse_allreduce(vector, watched).nnz == 5
    sparse_allreduce(vector, comm, algorithm="split_allgather")  # off, nobody looks


@pytest.mark.at_least(2)
def test_a_sum_that_overflows_is_found(comm, watched):
    with pytest.raises(CheckError, match=r"rank 0: its result: values\[0\] is inf"):
        sparse_allreduce(SparseVector([1], np.array([3e38], np.float32), 4), watched)
    with pytest.raises(
        CheckError,
        match=r"rank 1: its contribution: values\[2\] is nan",
    ):
        dense_allreduce(
            np.array([1.0, 2.0, np.nan if comm.rank == 1 else 3.0]), watched
        )


def test_where_a_mass_leaves_the_range_of_float64_nothing_is_claimed(comm, watched):
    values = np.array([1e308, 1.5e308, -1e308]) / comm.size
    exchange = GradientExchange(watched, TopK(k=3), ErrorFeedback(), sparse_allreduce)
    np.testing.assert_allclose(exchange(values), values)


# a dtype, and what is sent of it
SENT = (np.float16, TopK(k=6)), (np.float32, Quantised(TopK(k=6), "bfloat16"))


@pytest.mark.parametrize("method", FEEDBACKS)
def test_the_accounts_of_every_feedback_are_balanced(comm, watched, method):
    def gradient(step, size=60):
        return (
            np.random.default_rng([step, comm.rank]).standard_normal(size).astype(dtype)
        )

    for turn, collective in enumerate(
        (gtopk_allreduce, sparse_allgather, sparse_iallreduce),
        list(FEEDBACKS).index(method),
    ):
        dtype, compressor = SENT[turn % 2]
        one = GradientExchange(watched, compressor, FEEDBACKS[method](), collective)
        named = GradientExchange(
            watched, compressor, FEEDBACKS[method](), collective, small=50
        )
        for step in range(3):
            sparse = step % 2 == 1
            one(gradient(step), sparse=sparse)
            named({"weight": gradient(step), "bias": gradient(step, 7)}, sparse=sparse)
        assert one.steps == named.steps == 3


ROUNDED = {
    "bins": ({"compressor": AdaComp(50)}, np.eye(1, 2000, 9, dtype=np.float32)[0]),
    "one bit": (
        {"bits": 1},
        {
            "weight": np.eye(1, 2000, 9, dtype=np.float16)[0],
            "bias": np.ones(1, np.float16),
        },
    ),
    "subnormal": (
        {"compressor": TopK(0.05)},
        (np.arange(2000.0) % 19 - 9) * 2.0**-1074,
    ),
}


@pytest.mark.at_least(2)
@pytest.mark.parametrize("case", ROUNDED)
def test_what_rounding_takes_from_a_residual_that_is_much_larger_than_what_was_sent_is_no_lost_mass(
    watched, case
):
    settings, gradient = ROUNDED[case]
    exchange = GradientExchange(watched, **settings)
    for _ in range(3):
        exchange(gradient)
    assert exchange.steps == 3


@pytest.mark.at_least(2)
def test_the_variable_on_some_ranks_only_is_refused_on_all(comm, fresh, monkeypatch):
    monkeypatch.setenv("MPICOMP_CHECK", str(int(comm.rank == 1)))
    with pytest.raises(
        ValueError,
        match=r"MPICOMP_CHECK must be the same on all ranks, got .*1 on rank 1",
    ):
        sparse_allgather(SparseVector.empty(3), fresh)
    monkeypatch.setenv("MPICOMP_CHECK", "0")
    assert len(sparse_allgather(SparseVector.empty(3), fresh)) == comm.size


def _flip(place, buffer):
    buffer[place % buffer.size] ^= 4
    return buffer


@pytest.mark.exactly(3)
@pytest.mark.parametrize(
    "name",
    [
        "sparse_allreduce",
        pytest.param("split_allgather", marks=pytest.mark.slow),
        pytest.param("gtopk_allreduce", marks=pytest.mark.slow),
    ],
)
def test_a_message_that_is_damaged_on_its_way_is_found(comm, watched, name):
    """Any bit of any message. On all ranks, but for the last ones of a call: nobody can tell the others of these."""
    run = {
        "sparse_allreduce": sparse_allreduce,
        "split_allgather": partial(sparse_allreduce, algorithm="split_allgather"),
        "gtopk_allreduce": gtopk_allreduce,
    }[name]
    vector, last = (
        contribution("random", comm.rank, comm.size),
        int(np.ceil(np.log2(comm.size))),
    )
    with over(Damaging, comm) as own:
        run(vector, own)
        sent = comm.bcast(traffic(own).messages, root=comm.size - 1)
    # each field of the envelope, the codec's header, and behind
    places = iter((3, 9, 17, 24, 29, 40, 66, 90) * sent)
    for which in range(sent):
        spoil = staticmethod(partial(_flip, next(places)))
        with over(
            Damaging, comm, culprit=comm.size - 1, which=which, change=spoil
        ) as own:
            try:
                run(vector, own)
            except DamagedMessageError as error:
                heard = "received a damaged message" in str(error)
            else:
                heard = False
            found = comm.allgather(heard)
            assert any(found)
            assert all(found) or which >= sent - last, (which, sent)


@pytest.mark.unchecked("is on")
def test_off_it_sends_nothing_more(comm, watched):
    vector = contribution("random", comm.rank, comm.size)
    before = traffic(comm).messages
    sparse_allgather(vector, comm)
    plain = traffic(comm).messages - before
    sparse_allgather(vector, watched)
    assert traffic(watched).messages == 3 * plain, (
        "the order of calls, the operation, and the account"
    )


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    ("fault", "message"),
    [(0, "the ranks hold different bits"), (1, "mass is not conserved")],
)
def test_a_dense_sum_in_few_bits_that_differs_or_loses_something_is_found(
    comm, watched, monkeypatch, fault, message
):
    direct = quantised_allreduce.algorithms["direct"]

    def broken(*given, **arguments):
        total, errors = yield from direct(*given, **arguments)
        changed = errors if fault else total.shares[-1].scales
        changed[0] += comm.rank == 0
        return total, errors

    monkeypatch.setitem(quantised_allreduce.algorithms, "direct", broken)
    with pytest.raises(CheckError, match=message):
        quantised_allreduce(np.arange(100.0), watched, algorithm="direct")


@pytest.mark.parametrize("bits", [1, 4])
def test_a_sum_that_is_written_over_its_input_is_sound(comm, watched, bits):
    """Also in an exchange, where the residual takes the place of the corrected gradient."""
    exchange = GradientExchange(watched, bits=bits)
    for step in range(3):
        exchange(
            np.random.default_rng([step, comm.rank])
            .standard_normal(5000)
            .astype(np.float32)
        )
    array = np.random.default_rng(comm.rank).standard_normal(300)
    out = quantised_allreduce(array, watched, bits=bits, out=(np.empty(300), array))
    assert np.shares_memory(out[1], array)
