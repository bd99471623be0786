"""The table of wrong arguments: what each raises, where. Nobody hangs, and the next collective works."""

import gc
import re
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import scipy.sparse
from cases import assert_same_bits, compressed_sum, contribution
from mpi4py import MPI

from collectives import (
    CollectiveError,
    DamagedMessageError,
    GradientExchange,
    SupportPlan,
    allreduce,
    average_residuals,
    dense_allreduce,
    gtopk_allreduce,
    quantised_allreduce,
    shrink,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_reduce,
    sparse_reduce_scatter,
    traffic,
)
from mpicomp import ErrorFeedback, SparseVector, TopK

pytestmark = pytest.mark.small_groups

LENGTH = 100


def sparse(indices, values=None, length=LENGTH, dtype=np.float32):
    values = np.ones(len(indices)) if values is None else np.asarray(values)
    return SparseVector(np.asarray(indices, np.int32), values.astype(dtype), length)


SOUND = sparse([3, 5, 8])

# (what one rank contributes, the error that it raises itself); the others raise
# CollectiveError naming that rank.
BAD_VECTORS = {
    "unsorted": (
        sparse([3, 8, 5, 9]),
        ValueError,
        "indices[2] is 5 and follows 8: expected strictly increasing",
    ),
    "repeated": (
        sparse([3, 5, 5, 9]),
        ValueError,
        "indices[2] is 5 and repeats 5: expected strictly increasing",
    ),
    "above the range": (
        sparse([3, 100, 9]),
        ValueError,
        "indices[1] is 100: expected 0 <= index < length = 100",
    ),
    "below the range": (
        sparse([3, -1, 9]),
        ValueError,
        "indices[1] is -1: expected 0 <= index < length = 100",
    ),
    "nan": (
        sparse([3, 5], [1, np.nan]),
        ValueError,
        "values[1] is nan: expected finite values",
    ),
    "infinite": (
        sparse([3, 5], [-np.inf, 1]),
        ValueError,
        "values[0] is -inf: expected finite values",
    ),
    "dense array": (
        np.ones(LENGTH),
        TypeError,
        "vector is ndarray: expected a SparseVector, not a dense array: SparseVector.from_dense(array) has",
    ),
    "SciPy's sparse matrix": (
        scipy.sparse.csr_array(np.eye(1, 9)),
        TypeError,
        "use SparseVector.from_entries",
    ),
    "nothing": (
        None,
        TypeError,
        "vector is NoneType: expected a SparseVector (see SparseVector.from_entries)",
    ),
    "failed before": (
        OverflowError("the loss scaler overflowed"),
        OverflowError,
        "the loss scaler overflowed",
    ),
}
# keyword arguments of one rank that are bad in themselves
BAD_KEYWORDS = {
    "k below 0": (
        {"k": -1},
        ValueError,
        "k is -1: expected an integer of at least 1, below 2^63",
    ),
    "k of 0": (
        {"k": 0},
        ValueError,
        "k is 0: expected an integer of at least 1, below 2^63; from a density take",
    ),
    "k no integer": ({"k": 2.5}, TypeError, "k is 2.5: expected an integer"),
    "codec": (
        {"codec": "zip"},
        ValueError,
        "codec is 'zip': expected one of ['auto', 'plain', 'quick', 'smallest']",
    ),
    "algorithm": (
        {"algorithm": "tree-ish"},
        ValueError,
        "algorithm is 'tree-ish': expected one of ['auto', 'recursive_doubling'",
    ),
    "unknown": (
        {"densty": 0.1},
        TypeError,
        "gtopk_allreduce has no argument 'densty': expected algorithm or codec or comm or k or",
    ),
    "misspelt": (
        {"algoritm": "exact"},
        TypeError,
        "gtopk_allreduce has no argument 'algoritm': expected algorithm",
    ),
    "operation of MPI": (
        {"op": MPI.MAX},
        TypeError,
        "gtopk_allreduce has no argument 'op': expected algorithm or codec or comm",
    ),
    "given twice": (
        {"vector": SOUND},
        TypeError,
        "got multiple values for argument 'vector'",
    ),
}
# what rank 1 contributes instead of SOUND and k=5: sound in itself, but not what the
# others contribute
MISMATCHES = {
    "length": (
        sparse([3], length=99),
        5,
        "length must be the same on all ranks, got 100 on {others}; 99 on rank 1",
    ),
    "dtype": (
        sparse([3], dtype=np.float64),
        5,
        "dtype must be the same on all ranks, got float32 on {others}",
    ),
    "k": (SOUND, 6, "k must be the same on all ranks, got 5 on {others}; 6 on rank 1"),
    "k left open": (
        SOUND,
        None,
        "k must be the same on all ranks, got 5 on {others}; None on rank 1",
    ),
}


def expect(comm, culprit, error, message, call):
    """Check that `call` raises `error` on the culprit and CollectiveError, with the same words, on the others."""
    mine = error if comm.rank == culprit else CollectiveError
    with pytest.raises(mine, match=re.escape(message)) as caught:
        call()
    if comm.rank != culprit:
        assert f"rank {culprit}: {error.__name__}: " in str(caught.value)
    # nothing is left over of it
    result, _ = gtopk_allreduce(contribution("random", comm.rank, comm.size), comm)
    assert_same_bits(comm, result)


@pytest.mark.parametrize(
    "collective", [gtopk_allreduce, sparse_allgather, sparse_allreduce]
)
@pytest.mark.parametrize("row", BAD_VECTORS)
def test_a_bad_vector_on_one_rank(comm, row, collective):
    bad, error, message = BAD_VECTORS[row]
    culprit = comm.size // 2
    expect(
        comm,
        culprit,
        error,
        message,
        lambda: collective(bad if comm.rank == culprit else SOUND, comm),
    )


EVERY = {
    **{
        f"allreduce {name}": partial(sparse_allreduce, algorithm=name)
        for name in ("auto", *allreduce.ALGORITHMS)
    },
    **{
        f"gtopk {name}": partial(gtopk_allreduce, algorithm=name)
        for name in gtopk_allreduce.algorithms
    },
    "allgather": sparse_allgather,
    "compressed": compressed_sum(TopK(k=2)),
    "reduce": sparse_reduce,
    "reduce_scatter": sparse_reduce_scatter,
}


@pytest.mark.parametrize("culprit", ["first", "last"])
@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_raises_on_all_ranks_or_on_none(comm, name, culprit):
    culprit = 0 if culprit == "first" else comm.size - 1
    bad, error, message = BAD_VECTORS["nan"]
    expect(
        comm,
        culprit,
        error,
        message,
        lambda: EVERY[name](bad if comm.rank == culprit else SOUND, comm),
    )
    if comm.size > 1:
        longer = sparse([3], length=101)
        with pytest.raises(
            CollectiveError, match="length must be the same on all ranks"
        ):
            EVERY[name](longer if comm.rank == culprit else SOUND, comm)
        with pytest.raises(
            CollectiveError, match="dtype must be the same on all ranks"
        ):
            EVERY[name](
                sparse([3], dtype=np.float64) if comm.rank == culprit else SOUND, comm
            )


@pytest.mark.parametrize("row", BAD_KEYWORDS)
def test_a_bad_keyword_on_one_rank(comm, row):
    keywords, error, message = BAD_KEYWORDS[row]
    culprit = comm.size - 1
    mine = keywords if comm.rank == culprit else {}
    expect(comm, culprit, error, message, lambda: gtopk_allreduce(SOUND, comm, **mine))


def test_a_missing_argument_on_one_rank(comm):
    call = (
        sparse_reduce.nonblocking
        if comm.rank == 0
        else partial(sparse_reduce.nonblocking, SOUND)
    )
    expect(
        comm,
        0,
        TypeError,
        "missing 1 required positional argument: 'vector'",
        lambda: call(comm=comm).wait(),
    )


@pytest.mark.at_least(2)
@pytest.mark.parametrize("row", MISMATCHES)
def test_arguments_that_differ_between_ranks(comm, row):
    vector, k, message = MISMATCHES[row]
    others = {2: "rank 0", 3: "ranks 0, 2"}.get(
        comm.size, f"ranks 0, 2-{comm.size - 1}" if comm.size > 4 else "ranks 0, 2, 3"
    )
    with pytest.raises(
        CollectiveError, match=re.escape(message.format(others=others))
    ) as caught:
        gtopk_allreduce(*((vector, comm, k) if comm.rank == 1 else (SOUND, comm, 5)))
    assert len(set(comm.allgather(str(caught.value)))) == 1
    if row in ("length", "dtype"):
        with pytest.raises(CollectiveError, match=row):
            sparse_allgather(vector if comm.rank == 1 else SOUND, comm)
    assert len(sparse_allgather(SOUND, comm)) == comm.size


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    "other", [np.ones(5), np.ones(4, np.float32)], ids=["size", "dtype"]
)
def test_dense_arrays_that_differ_between_ranks(comm, other):
    with pytest.raises(CollectiveError, match="must be the same on all ranks"):
        dense_allreduce(other if comm.rank == comm.size - 1 else np.ones(4), comm)
    np.testing.assert_array_equal(
        dense_allreduce(np.ones(4), comm), np.full(4, comm.size)
    )


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    "collective",
    [sparse_allgather, sparse_allreduce, sparse_reduce_scatter, sparse_reduce],
)
@pytest.mark.parametrize("other", [4, None])
def test_widths_of_rows_that_differ_raise_everywhere(comm, collective, other):
    """Rows of another width on one rank, and plain values."""
    width = other if comm.rank == 1 else 3
    vector = SparseVector(
        [1, 5], np.ones((2, width) if width else 2, np.float32), LENGTH
    )
    with pytest.raises(
        CollectiveError,
        match=rf"width must be the same on all ranks, got 3 on rank.*; {other} on",
    ):
        collective(vector, comm)


@pytest.mark.parametrize("algorithm", gtopk_allreduce.algorithms)
def test_gtopk_does_not_take_rows(comm, algorithm):
    rows, culprit = (
        SparseVector([3, 5], np.ones((2, 3), np.float32), LENGTH),
        comm.size - 1,
    )
    call = partial(
        gtopk_allreduce,
        rows if comm.rank == culprit else SOUND,
        comm,
        5,
        algorithm=algorithm,
    )
    expect(comm, culprit, ValueError, "vector has rows of 3 values", call)


@pytest.mark.parametrize(
    "collective", [gtopk_allreduce, sparse_allgather, dense_allreduce]
)
def test_what_is_no_intracommunicator_raises_at_once(comm, collective):
    with pytest.raises(
        TypeError, match="comm is int: expected an mpi4py intracommunicator"
    ):
        collective(SOUND, 3)
    with pytest.raises(ValueError, match="COMM_NULL"):
        collective(SOUND, MPI.Intracomm(MPI.COMM_NULL))


@pytest.mark.parametrize("known", [False, True])
def test_a_communicator_that_was_freed_is_refused_in_the_words_of_the_library(
    comm, known
):
    freed, array = comm.Dup(), np.ones(4)
    exchange = GradientExchange(freed, TopK(k=2))
    if known:
        exchange(array)
        plan = SupportPlan.union(SOUND, freed)
    freed.Free()
    calls = [
        lambda: dense_allreduce(array, freed),
        lambda: sparse_allreduce(SOUND, freed),
        lambda: exchange(array),
        lambda: traffic(freed),
        lambda: plan.allreduce(np.ones(3)) if known else traffic(freed),
        lambda: average_residuals(exchange),
        lambda: shrink(freed),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"comm is MPI\.COMM_NULL.*is not freed"):
            call()
    assert exchange.report().startswith(
        "the first exchange" if known else "no exchange"
    )


@pytest.mark.parametrize("value", [4e4, 6e-8])
@pytest.mark.unchecked("refuses sums that are not finite")
def test_error_settings_of_numpy_on_one_rank_raise_on_none(comm, value):
    """float16 sums that leave their range are infinite on all ranks."""
    array = np.full(300, value, np.float16)
    vector = SparseVector.from_dense(array)
    calls = [
        lambda: dense_allreduce(array, comm),
        lambda: quantised_allreduce(array, comm, 8)[0],
        lambda: quantised_allreduce(
            array, comm, out=(np.empty_like(array), np.empty_like(array))
        )[0],
        lambda: SupportPlan.union(vector, comm).allreduce(array),
        *[
            partial(sparse_allreduce, vector, comm, algorithm=name)
            for name in allreduce.ALGORITHMS
        ],
        lambda: gtopk_allreduce(vector, comm, 7)[0],
        lambda: sparse_allreduce(vector, comm, votes=True)[0],
    ]
    with np.errstate(all="raise" if comm.rank == 0 else "ignore"):
        for call in calls:
            total = call()
            values = total.values if isinstance(total, SparseVector) else total
            assert len(set(comm.allgather(values.tobytes()))) == 1


@pytest.mark.at_least(2)
@pytest.mark.unchecked("raises its own error")
def test_ranks_that_call_different_collectives_of_one_schedule_all_raise(comm):
    with pytest.raises(
        CollectiveError, match="operation must be the same on all ranks, got"
    ):
        sparse_allgather(SOUND, comm) if comm.rank == 0 else dense_allreduce(
            SOUND.to_dense(), comm
        )
    with pytest.raises(
        CollectiveError, match="operation must be the same on all ranks, got"
    ) as caught:
        sparse_reduce(SOUND, comm) if comm.rank == 0 else sparse_bcast(SOUND, comm)
    assert "width" not in str(caught.value)


@pytest.mark.parametrize("algorithm", gtopk_allreduce.algorithms)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.unchecked("refuses sums that are not finite")
def test_a_sum_that_overflows_on_the_way_is_infinite_on_every_rank_and_nobody_hangs(
    comm, algorithm, dtype
):
    large = np.finfo(dtype).max * 0.9
    vector = sparse([0, 1 + comm.rank], [large, 1], dtype=dtype)
    result, _ = gtopk_allreduce(vector, comm, 2, algorithm=algorithm)
    assert_same_bits(comm, result)
    assert np.isinf(result.values[0]) == (comm.size > 1)


@pytest.mark.exactly(4)
@pytest.mark.parametrize("algorithm", allreduce.ALGORITHMS)
def test_a_sum_that_leaves_its_range_on_the_way_has_the_same_bits_on_all_ranks(
    comm, algorithm
):
    """NaN, infinity or 0, as the order of the additions has it."""
    large = float(np.finfo(np.float32).max) * (1 if comm.rank < 2 else -1)
    total = sparse_allreduce(sparse([0, 2], [large, 1]), comm, algorithm=algorithm)
    assert_same_bits(comm, total)
    values = dict(zip(total.indices.tolist(), total.values.tolist(), strict=True))
    assert values[2] == comm.size
    assert values.get(0, 0.0) == 0 or not np.isfinite(values[0])


@pytest.mark.unchecked("refuses sums that are not finite")
def test_an_exchange_whose_sum_overflows_raises_on_every_rank_and_keeps_the_residual(
    comm,
):
    exchange = GradientExchange(comm, TopK(k=1), ErrorFeedback(), gtopk_allreduce)
    exchange(np.array([3.0, 1.0], np.float32))
    with (
        pytest.raises(OverflowError, match="leaves the range of float32")
        if comm.size > 1
        else nullcontext()
    ):
        exchange(np.array([3e38, 1.0], np.float32))
    assert exchange.feedback.residual.tolist() == ([0, 1] if comm.size > 1 else [0, 2])


class Unreadable:
    """An array whose library raises what NumPy does not expect."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        raise OSError("the file is gone")


class FalseError(Exception):
    def __bool__(self):
        return False


class UnprintableError(RuntimeError):
    def __str__(self):
        raise ValueError("no words")


STRANGE = {
    "algorithm list": (sparse_allreduce, SOUND, {"algorithm": ["dense"]}, ValueError),
    "algorithm array": (
        gtopk_allreduce,
        SOUND,
        {"algorithm": np.arange(3)},
        ValueError,
    ),
    "algorithm dict": (sparse_reduce, SOUND, {"algorithm": {}}, ValueError),
    "codec set": (sparse_allgather, SOUND, {"codec": {"plain"}}, ValueError),
    "root array": (sparse_bcast, SOUND, {"root": np.array([0, 1])}, TypeError),
    "root none": (sparse_bcast, SOUND, {"root": None}, TypeError),
    "root time": (sparse_reduce, SOUND, {"root": np.timedelta64(0)}, TypeError),
    "k time": (gtopk_allreduce, SOUND, {"k": np.timedelta64(1)}, TypeError),
    "unprintable": (sparse_allreduce, UnprintableError(), {}, UnprintableError),
    "stop iteration": (
        gtopk_allreduce,
        StopIteration("the loader is empty"),
        {},
        StopIteration,
    ),
    "false": (sparse_allreduce, FalseError("no"), {}, FalseError),
    "damage elsewhere": (
        sparse_allreduce,
        DamagedMessageError("elsewhere"),
        {},
        DamagedMessageError,
    ),
    "dense error": (dense_allreduce, OSError("the disk is full"), {}, OSError),
    "unreadable": (dense_allreduce, Unreadable(), {}, OSError),
    "integers": (dense_allreduce, np.ones(4, np.int32), {}, TypeError),
    "list": (dense_allreduce, [1.0, 2.0], {}, TypeError),
    "no room": (
        dense_allreduce,
        np.broadcast_to(np.float32(1), (2**45,)),
        {},
        MemoryError,
    ),
    "spoilt": ("union", None, {}, ValueError),
}


@pytest.mark.parametrize("row", STRANGE)
def test_whatever_one_rank_gives_the_others_hear_of_it(comm, row):
    collective, vector, options, error = STRANGE[row]
    sound = np.ones(3, np.float32) if collective is dense_allreduce else SOUND
    if collective == "union":
        indices = np.array([3, 5, 8], np.int32)
        collective, vector = (
            SupportPlan.union,
            SparseVector(indices, np.ones(3), LENGTH),
        )
        indices[-1] = 1000  # after it was made
    culprit = comm.rank == comm.size - 1
    with pytest.raises(error if culprit else CollectiveError):
        collective(vector if culprit else sound, comm, **(options if culprit else {}))
    result, _ = gtopk_allreduce(contribution("random", comm.rank, comm.size), comm)
    assert_same_bits(comm, result)


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int16])
def test_a_root_may_be_any_integer_type(comm, kind):
    """The distance to an unsigned root wraps round where it is not made Python's integer first."""
    root = kind(comm.size - 1)
    total = sparse_reduce(SOUND, comm, root)
    assert (total is not None) == (comm.rank == comm.size - 1)
    handed = sparse_bcast(total, comm, root)
    assert handed.values.tolist() == [comm.size] * 3


@pytest.mark.parametrize("vector", ["bad", "good"])
def test_an_error_leaves_no_cycle_that_holds_the_vector(comm, vector):
    def fail():
        values = np.ones(3) * (np.nan if vector == "bad" else 1)
        alive = weakref.ref(values)
        with pytest.raises((ValueError, CollectiveError)):
            sparse_allreduce(
                SparseVector([1, 2, 3], values, 9),
                comm,
                algorithm="auto" if vector == "bad" else "x",
            )
        return alive

    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
