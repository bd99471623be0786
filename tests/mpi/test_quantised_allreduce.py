"""Dense sums in few bits against dense NumPy in float64; what they conserve, and what they refuse."""

import numpy as np
import pytest
from cases import for_each
from few_bits_cases import ORACLES, quantised
from mpi4py import MPI

from collectives import CollectiveError, quantised_allreduce
from collectives.runtime import link

BITS = [8, 4, 2, 1]
LENGTHS = [0, 1, 33, 1000]
EVERY = pytest.mark.parametrize("algorithm", ORACLES)
DTYPES = pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])


def reals(rank, length, dtype):
    return np.random.default_rng([rank, length]).laplace(size=length).astype(dtype)


def integers(rank, length, dtype=np.float32):
    values = np.random.default_rng([rank, length, 1]).integers(-9, 10, length)
    values[length // 3 : length // 2] = 0
    return values.astype(dtype)


def of_all(make, comm, *args):
    return [make(rank, *args).astype(np.float64) for rank in range(comm.size)]


def check_same_bits(comm, array):
    assert len(set(comm.allgather(array.tobytes()))) == 1, (
        "the ranks hold different bits"
    )


def assert_close(found, expected, room, most=0):
    """Fail unless arrays are the same within `room`, but for at most so many values."""
    assert np.count_nonzero(~np.isclose(found, expected, rtol=0, atol=room)) <= most


@pytest.mark.every_size
@EVERY
@DTYPES
@for_each(bits=BITS, length=LENGTHS)
def test_the_result_is_that_of_the_oracle(comm, algorithm, dtype, bits, length):
    """Real numbers between two levels, where rounding decides, are rare; of float16 there are some in any data.

    The mean of a block may be between two magnitudes of 8 significant bits.
    """
    total, rejected = quantised_allreduce(
        reals(comm.rank, length, dtype), comm, bits, block=32, algorithm=algorithm
    )
    arrays = of_all(reals, comm, length, dtype)
    expected, errors = ORACLES[algorithm](
        arrays, lambda part: quantised(part, bits, 32, dtype), 32
    )
    room = (
        4
        * comm.size
        * np.finfo(dtype).eps
        * max((np.abs(each).max() for each in arrays if length), default=0)
    )
    assert total.dtype == rejected.dtype == dtype
    most = (
        length // 40
        if dtype == np.float16
        else 32
        if dtype == np.float32 and bits < 4
        else 0
    )
    assert_close(total, expected, room, most)
    assert_close(rejected, errors[comm.rank], room, most)


@EVERY
# float16 has too few bits for some errors
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@for_each(bits=BITS, length=LENGTHS, subnormal=[False, True])
def test_integers_are_conserved_bitwise(
    comm, algorithm, dtype, bits, length, subnormal
):
    unit = np.finfo(dtype).smallest_subnormal if subnormal else dtype(1)
    mine = unit * integers(comm.rank, length, dtype)
    total, rejected = quantised_allreduce(mine, comm, bits, 64, algorithm=algorithm)
    check_same_bits(comm, total)
    kept = comm.allgather(rejected.astype(np.float64))
    np.testing.assert_array_equal(
        total + sum(kept), np.float64(unit) * sum(of_all(integers, comm, length, dtype))
    )


@EVERY
@pytest.mark.parametrize("shape", [(), (0,), (7, 11, 3)], ids=str)
def test_shapes_and_orders(comm, algorithm, shape):
    mine = np.array(integers(comm.rank, int(np.prod(shape))).reshape(shape), order="F")
    before = mine.copy()
    total, rejected = quantised_allreduce(mine, comm, algorithm=algorithm)
    assert total.shape == rejected.shape == shape
    arrays = of_all(integers, comm, mine.size)
    np.testing.assert_array_equal(
        total + sum(comm.allgather(rejected)), sum(arrays).reshape(shape)
    )
    np.testing.assert_array_equal(mine, before)


@EVERY
@DTYPES
def test_results_are_written_to_given_arrays(comm, algorithm, dtype):
    mine = integers(comm.rank, 1000, dtype)
    expected = quantised_allreduce(mine, comm, algorithm=algorithm)
    out = np.full_like(mine, 7), np.full_like(mine, 7)
    assert quantised_allreduce(mine, comm, algorithm=algorithm, out=out) is out
    in_place = np.full_like(mine, 7), mine.copy()
    quantised_allreduce(in_place[1], comm, algorithm=algorithm, out=in_place)
    for found in (out, in_place):
        assert [each.tobytes() for each in found] == [
            each.tobytes() for each in expected
        ]


@EVERY
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_raises_on_all_ranks(comm, algorithm, bad):
    last = comm.rank == comm.size - 1
    for place in (0, 500, 999):
        for in_place in (False, True):
            mine = integers(comm.rank, 1000)
            mine[place] = bad if last else 0
            out = (np.empty_like(mine), mine) if in_place else None
            with pytest.raises(
                ValueError if last else CollectiveError,
                match=rf"values\[{place}\] is" if last else "ValueError",
            ):
                quantised_allreduce(mine, comm, block=64, algorithm=algorithm, out=out)
    comm.Barrier()
    assert not link.link_if_any(comm).comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    comm.Barrier()


@EVERY
@DTYPES
@for_each(bits=BITS)
def test_the_largest_numbers_stay_in_range(comm, algorithm, dtype, bits):
    """Of one rank, as a sum of them would not be; with zeros, from which the scales of 2 bits differ."""
    largest = np.finfo(dtype).max
    mine = (largest if comm.rank == comm.size - 1 else dtype(0)) * np.resize(
        [-1, 1, 1, 0, 0.5], 300
    ).astype(dtype)
    total, rejected = quantised_allreduce(mine, comm, bits, algorithm=algorithm)
    assert np.isfinite(total).all()
    if comm.size == 1:
        kept = total.astype(np.longdouble) + rejected
        np.testing.assert_allclose(
            kept / largest,
            mine.astype(np.longdouble) / largest,
            rtol=0,
            atol=np.finfo(dtype).eps,
        )
    check_same_bits(comm, total)


@EVERY
@pytest.mark.at_least(2)
@DTYPES
@for_each(bits=BITS)
@pytest.mark.unchecked("refuses sums that are not finite")
def test_a_sum_out_of_range_is_not_finite_on_any_rank(comm, algorithm, dtype, bits):
    mine = np.full(300, np.finfo(dtype).max)
    for out in None, (np.empty_like(mine), mine):
        with np.errstate(over="ignore", invalid="ignore"):
            total, _ = quantised_allreduce(
                mine, comm, bits, algorithm=algorithm, out=out
            )
        assert not np.isfinite(total).any()
        check_same_bits(comm, total)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"bits": 3}, ValueError, r"bits is 3: expected one of \[8, 4, 2, 1\]"),
        ({"bits": True}, ValueError, "bits is True: expected one of"),
        ({"bits": 4.0}, ValueError, "bits is 4.0: expected one of"),
        ({"block": 100}, ValueError, r"block is 100: expected one of \[32, 64, 128"),
        ({"block": 16}, ValueError, "block is 16: expected"),
        ({"block": 1 << 17}, ValueError, "block is 131072: expected"),
        (
            {"array": np.arange(9)},
            TypeError,
            "values are int64: expected float16, float32 or float64",
        ),
        (
            {"out": np.ones(9)},
            TypeError,
            "out is ndarray: expected a tuple of two arrays",
        ),
        (
            {"out": (np.ones(9), np.ones(8))},
            ValueError,
            "out has 8 values of float64: expected 9 of float64",
        ),
        ({"algorithm": "tree"}, ValueError, "algorithm is 'tree': expected one of"),
    ],
    ids=str,
)
def test_bad_arguments_raise_on_all_ranks(comm, wrong, error, message):
    bad = comm.rank == comm.size - 1
    arguments = {"array": np.ones(9)} | (wrong if bad else {})
    with pytest.raises(
        error if bad else CollectiveError, match=message if bad else error.__name__
    ):
        quantised_allreduce(arguments.pop("array"), comm, **arguments)


def test_out_shares_no_memory(comm):
    twice = integers(comm.rank, 18)
    array, before = twice[:9], twice.copy()
    apart = np.ones(9, array.dtype)
    for out in [
        (twice[:9], twice[5:14]),
        (array, apart),
        (twice[1:10], apart),
        # it may be the array itself, and no other part of its memory
        (apart, twice[1:10]),
    ]:
        with pytest.raises(ValueError, match="share memory"):
            quantised_allreduce(array, comm, out=out)
        np.testing.assert_array_equal(twice, before)


@pytest.mark.at_least(2)
@for_each(
    mine=[
        {"bits": 8},
        {"block": 512},
        {"array": np.ones(8)},
        {"array": np.ones(9, "f4")},
        {"algorithm": "node_lanes"},
    ]
)
def test_a_mismatch_raises_on_all_ranks(comm, mine):
    for other in ({}, {"algorithm": "direct"}):
        for odd in {0, comm.size - 1}:
            arguments = {"array": np.ones(9)} | (mine if comm.rank == odd else other)
            with pytest.raises(CollectiveError, match="must be the same on all ranks"):
                quantised_allreduce(arguments.pop("array"), comm, **arguments)


@EVERY
def test_threads_and_groups_of_blocks_change_no_bit(comm, algorithm, monkeypatch):
    mine = reals(comm.rank, 3001, np.float32)
    expected = quantised_allreduce(mine, comm, block=32, algorithm=algorithm)
    monkeypatch.setattr("mpicomp.threads._LEAST", 64)
    monkeypatch.setattr("mpicomp.kernels.host.few_bits._ROOM", 64)
    monkeypatch.setenv("MPICOMP_THREADS", "3")
    found = quantised_allreduce(mine, comm, block=32, algorithm=algorithm)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
