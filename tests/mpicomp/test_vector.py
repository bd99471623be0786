import re
import tracemalloc

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from strategies import sparse_vectors

from mpicomp import SparseVector
from mpicomp.vector import (
    add_up,
    concatenate,
    index_dtype,
    intersection,
    join,
    merge,
    partition,
    top_k,
    without_zeros,
)


def test_arrays_of_the_right_dtype_are_not_copied():
    indices, values = np.array([1, 4], np.int32), np.array([2.0, 3.0])
    vector = SparseVector(indices, values, 8)
    assert np.shares_memory(vector.indices, indices)
    assert np.shares_memory(vector.values, values)
    with pytest.raises(AttributeError):
        vector.length = 9


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(2**31 - 1, np.int32), (2**31, np.int64), (2**63 - 1, np.int64)],
)
def test_indices_are_64_bit_beyond_2_to_the_31(length, dtype):
    assert index_dtype(length) == dtype
    assert SparseVector([length - 1], [1.0], length).indices.dtype == dtype


ONE = np.ones(1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ([0], ONE, -1),
            ValueError,
            "length is -1: expected an integer of at least 0, below 2^63",
        ),
        (
            ([0], ONE, 2**63),
            ValueError,
            "expected an integer of at least 0, below 2^63",
        ),
        (([0], ONE, 2.0), TypeError, "length is 2.0: expected an integer"),
        (([0], ONE, True), TypeError, "length is True: expected an integer"),
        (([0, 1], ONE, 4), ValueError, "got 2 indices and 1 values"),
        (
            ([[0]], ONE, 4),
            ValueError,
            "indices have shape (1, 1): expected one dimension",
        ),
        (
            ([0], [[ONE]], 4),
            ValueError,
            "values have shape (1, 1, 1): expected (entries,), or (entries, width)",
        ),
        (
            ([0.0], ONE, 4),
            TypeError,
            "indices are float64: expected integers (floats are wrong above 2^24",
        ),
        (
            (["the"], ONE, 4),
            TypeError,
            "indices are <U3: expected integers (floats are wrong above 2^24; words need a",
        ),
        (
            ([0], [1], 4),
            TypeError,
            "values are int64: expected float16, float32 or float64; astype(np.float64) keeps",
        ),
        (
            ([0], [1j], 4),
            TypeError,
            "complex128: expected float16, float32 or float64; pass array.real and array.imag",
        ),
        (
            ([4], ONE, 4),
            ValueError,
            "index 4 is out of range: expected 0 <= index < length = 4",
        ),
        (([-1], ONE, 4), ValueError, "index -1 is out of range"),
        # would wrap to 1
        (
            ([0, 2**32 + 1, 3], np.ones(3), 4),
            ValueError,
            "index 4294967297 is out of range",
        ),
        (
            (np.array([2**63], np.uint64), ONE, 2**62),
            ValueError,
            "index 9223372036854775808 is out of range",
        ),
        (
            ([3, 1], [1.0, 2.0], 4),
            ValueError,
            "got 2 indices, the first 3 and the last 1: expected strictly",
        ),
        (
            ([2, 2], [1.0, 2.0], 4),
            ValueError,
            "SparseVector.from_entries sorts entries and adds repeated ones",
        ),
        (
            ([1, 2, 2, 3], np.ones(4), 9),
            ValueError,
            "got 4 indices, the first 1 and the last 3: expected strictly",
        ),
    ],
)
def test_the_constructor_says_what_it_got(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        SparseVector(*arguments)


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        (
            [1, 3, 2, 4],
            None,
            r"indices\[2\] is 2 and follows 3: expected strictly .* SparseVector.from_entries sorts",
        ),
        (
            [1, 3, 3, 4],
            None,
            r"indices\[2\] is 3 and repeats 3: expected strictly .* and adds repeated ones",
        ),
        ([1, 99, 3], None, r"indices\[1\] is 99: expected 0 <= index < length = 9"),
        ([1, -5, 3], None, r"indices\[1\] is -5: expected 0 <= index"),
        ([1, 2], [1, np.nan], r"values\[1\] is nan: expected finite values"),
        ([1, 2], [-np.inf, 1], r"values\[0\] is -inf: expected finite values"),
    ],
)
def test_validate_names_the_first_bad_entry(indices, values, message):
    values = np.ones(len(indices)) if values is None else np.array(values)
    vector = SparseVector(np.array(indices, np.int32), values, 9)
    with pytest.raises(ValueError, match=message):
        vector.validate()


@given(sparse_vectors())
def test_dense_and_back(vector):
    vector.validate()
    dense = vector.to_dense()
    back = SparseVector.from_dense(dense)
    assert back.nnz == np.count_nonzero(vector.values)
    np.testing.assert_array_equal(back.to_dense(), dense)


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
@pytest.mark.parametrize(
    ("place", "said"),
    [(10**9, "indices.1. is 1000000000"), (2, "indices.1. is 2 and repeats 2")],
)
def test_to_dense_refuses_indices_that_are_no_vectors(shape, place, said):
    vector = SparseVector(
        np.array([2, place, 5], np.int32), np.ones(shape, np.float32), 10
    )
    with pytest.raises(ValueError, match=said):
        vector.to_dense()
    out = np.full((10, *shape[1:]), 7, np.float32)
    with pytest.raises(ValueError, match=said):
        vector.to_dense(out)
    assert (out == 7).all()


@pytest.mark.parametrize("step", [1, 2])
def test_to_dense_writes_into_out(step):
    vector = SparseVector([1], [5.0], 3)
    out = np.full(3 * step, 7.0)[::step]
    assert vector.to_dense(out) is out
    np.testing.assert_array_equal(out, [0, 5, 0])
    with pytest.raises(
        ValueError,
        match=r"out is float32 of shape \(3,\): expected float64 of shape \(3,\)",
    ):
        vector.to_dense(np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="out is <class 'list'>: expected <class"):
        vector.to_dense([0.0, 0.0, 0.0])


@pytest.mark.parametrize("width", [None, 2])
def test_to_dense_is_not_written_into_the_vector_itself(width):
    values = np.ones(3 if width is None else (3, width))
    vector = SparseVector(np.arange(3), values, 3)
    with pytest.raises(ValueError, match="share memory"):
        vector.to_dense(out=vector.values)
    np.testing.assert_array_equal(vector.values, values)


def test_to_dense_is_right_where_an_array_with_gaps_shares_the_memory():
    memory = np.array([1.0, 2.0, 3.0, 4.0])
    vector = SparseVector([0, 1], memory[:2], 2)
    np.testing.assert_array_equal(vector.to_dense(out=memory[::2]), [1, 2])


@given(st.data(), st.sampled_from([None, 0, 1, 3]))
def test_merge_is_the_dense_sum_and_commutative_to_the_bit(data, width):
    a = data.draw(sparse_vectors(width=width))
    b = data.draw(sparse_vectors(length=a.length, dtype=a.dtype, width=width))
    one, other = merge(a, b), merge(b, a)
    one.validate()
    assert (one.width, one.dtype) == (width, a.dtype)
    assert one.values.tobytes() == other.values.tobytes()
    np.testing.assert_array_equal(one.indices, other.indices)
    np.testing.assert_array_equal(one.indices, np.union1d(a.indices, b.indices))
    np.testing.assert_array_equal(one.to_dense(), a.to_dense() + b.to_dense())


def test_rows():
    dense = np.zeros((5, 3), np.float32)
    dense[[1, 4]] = [[1, 0, 2], [0, 3, 0]]
    rows = SparseVector([1, 4], dense[[1, 4]], 5)
    assert (rows.nnz, rows.length, rows.width, rows.nbytes) == (2, 5, 3, 32)
    assert "{7: [1. 1. ... 1. 1.]}, nnz=1, length=9, width=64, float64" in repr(
        SparseVector([7], np.ones((1, 64)), 9)
    )
    np.testing.assert_array_equal(rows.to_dense(), dense)
    assert SparseVector.empty(5, width=3).to_dense().shape == (5, 3)
    support = rows.support()
    assert (support.width, support.nbytes, support.indices.tolist()) == (0, 8, [1, 4])
    with pytest.raises(ValueError, match=r"values\[1, 2\] is nan: expected finite"):
        SparseVector([0, 3], [[1, 2, 3], [4, 5, np.nan]], 9).validate()


def test_entries_in_any_order_are_sorted_and_added_up():
    tokens, gradients = (
        [7, 3, 7, 0],
        np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32),
    )
    rows = SparseVector.from_entries(tokens, gradients, 10)
    rows.validate()
    assert rows.indices.tolist() == [0, 3, 7]
    assert rows.values.tolist() == [[7, 8], [3, 4], [6, 8]]
    assert SparseVector.from_entries([], np.empty(0, np.float16), 3).nnz == 0
    assert SparseVector.from_entries(
        [1, 1, 1], np.array([2048, 1, 1], np.float16), 3
    ).values.tolist() == [2050]
    with pytest.raises(ValueError, match=r"got indices of shape \(2,\) and 1 values"):
        SparseVector.from_entries([1, 2], [1.0], 3)
    with pytest.raises(ValueError, match="index 3 is out of range"):
        SparseVector.from_entries([3, 1], [1.0, 2.0], 3)


@given(sparse_vectors(), st.integers(0, 60))
def test_top_k_splits_a_vector(vector, k):
    kept, dropped = top_k(vector, k)
    assert kept.nnz <= k
    np.testing.assert_array_equal(
        np.sort(np.r_[kept.indices, dropped.indices]), vector.indices
    )
    np.testing.assert_array_equal(
        kept.to_dense() + dropped.to_dense(), vector.to_dense()
    )
    if kept.nnz and dropped.nnz:
        assert np.abs(kept.values).min() >= np.abs(dropped.values).max()


@given(sparse_vectors(), st.integers(1, 9))
def test_every_makes_disjoint_shares(vector, step):
    shares = [vector.every(step, start) for start in range(step)]
    np.testing.assert_array_equal(
        sum(share.to_dense() for share in shares), vector.to_dense()
    )
    assert sum(share.nnz for share in shares) == vector.nnz


@given(st.data())
def test_add_up_is_the_dense_sum_and_join_undoes_a_cut(data):
    first = data.draw(sparse_vectors())
    vectors = [
        first,
        *(
            data.draw(sparse_vectors(length=first.length, dtype=first.dtype))
            for _ in range(4)
        ),
    ]
    # exact sums
    vectors = [
        SparseVector(each.indices, np.round(each.values % 9), each.length)
        for each in vectors
    ]
    for count in range(1, 6):
        total = add_up(vectors[:count])
        total.validate()
        np.testing.assert_array_equal(
            total.to_dense(), sum(each.to_dense() for each in vectors[:count])
        )
    half = first.nnz // 2
    parts = [
        SparseVector(first.indices[a:b], first.values[a:b], first.length)
        for a, b in ((0, half), (half, None))
    ]
    assert join(parts).indices.tolist() == first.indices.tolist()
    assert join(parts).values.tobytes() == first.values.tobytes()


def test_add_up_adds_in_the_order_of_the_vectors_whatever_they_have_elsewhere():
    big, one = np.array([1e8], np.float32), np.array([1], np.float32)
    vectors = [
        SparseVector([5], big, 10),
        SparseVector.empty(10),
        SparseVector([5], one, 10),
        SparseVector([5], -big, 10),
    ]
    assert add_up(vectors).values.tolist() == [0]  # (1e8 + 1) - 1e8: the one is lost
    assert add_up([vectors[0], vectors[3], vectors[2]]).values.tolist() == [1]
    more = [
        SparseVector([3, 5, 7], np.r_[one, each.values, one], 10)
        for each in vectors
        if each.nnz
    ]
    assert add_up(more).values.tolist() == [3, 0, 3]
    assert add_up([SparseVector.empty(10)] * 3).nnz == 0


def test_add_up_rounds_float16_once():
    parts = [
        SparseVector([0], np.array([value], np.float16), 1) for value in (2048, 1, 1)
    ]
    assert add_up(parts).values.tolist() == [2050]  # 2048 + 1 is 2048 in float16


@given(
    st.one_of(sparse_vectors(), sparse_vectors(width=2), sparse_vectors(width=0)),
    st.data(),
)
def test_divide_parts_the_entries(vector, data):
    positions = np.flatnonzero(
        data.draw(st.lists(st.booleans(), min_size=vector.nnz, max_size=vector.nnz))
    )
    chosen, rest = vector.divide(positions)
    assert chosen.indices.tolist() == vector.indices[positions].tolist()
    assert chosen.values.tobytes() == vector.values[positions].tobytes()
    assert rest.indices.tolist() == np.delete(vector.indices, positions).tolist()
    assert (
        rest.values.tobytes() == np.delete(vector.values, positions, axis=0).tobytes()
    )
    assert (chosen.width, rest.dtype, chosen.length) == (
        vector.width,
        vector.dtype,
        vector.length,
    )


@pytest.mark.parametrize("sizes", [(40, 30), (0, 30), (40, 0), (1, 90), (90, 1)])
def test_within_keeps_the_entries_where_another_vector_has_one(sizes):
    rng = np.random.default_rng(1)
    supports = [np.sort(rng.choice(90, size, replace=False)) for size in sizes]
    vector, other = (
        SparseVector(support, np.arange(support.size) + 1.0, 90) for support in supports
    )
    found, expected = intersection(vector, other), np.isin(supports[0], supports[1])
    assert found.indices.tolist() == supports[0][expected].tolist()
    assert found.values.tolist() == vector.values[expected].tolist()


@given(
    st.one_of(sparse_vectors(), sparse_vectors(width=3)),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
@pytest.mark.parametrize("scale", [1.0, -0.5, np.float32(3)])
def test_add_to_adds_in_place_and_rounds_once(scale, vector, dtype):
    values = np.round(vector.values.astype(np.float64) % 64)
    vector = SparseVector(vector.indices, values.astype(vector.dtype), vector.length)
    shape = (vector.length, *vector.values.shape[1:])
    array = np.random.default_rng(0).integers(-64, 65, shape).astype(dtype)
    expected = (
        array + np.float64(scale) * vector.to_dense().astype(np.float64)
    ).astype(dtype)
    assert vector.add_to(array, scale=scale) is None
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, expected)


def test_add_to_takes_any_shape_and_updates_parameters():
    parameters = np.ones((2, 3), np.float32)
    SparseVector([1, 5], [2.0, 4.0], 6).add_to(parameters, scale=-0.25)
    assert parameters.tolist() == [[1, 0.5, 1], [1, 1, 0]]
    SparseVector.empty(6).add_to(parameters)
    SparseVector.empty(0).add_to(np.empty((0, 3)))
    half = np.full(1, 2048, np.float16)
    # 1.5 in float16 first, or the sum in float16, would round twice
    SparseVector([0], [1.5], 1).add_to(half)
    assert half.tolist() == [2050]


def read_only_array():
    array = np.zeros(6)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "scale", "error", "message"),
    [
        (
            np.zeros(5),
            1.0,
            ValueError,
            r"the array has shape \(5,\): expected \(6,\)",
        ),
        (np.zeros(12)[::2], 1.0, ValueError, "not C-contiguous"),
        (np.zeros((3, 2)).T, 1.0, ValueError, "not C-contiguous"),
        (read_only_array(), 1.0, ValueError, "read-only for NumPy"),
        (
            np.zeros(6, int),
            1.0,
            TypeError,
            "values are int64: expected float16, float32 or float64",
        ),
        ([0.0] * 6, 1.0, TypeError, "expected an array"),
        (
            np.zeros(6),
            np.nan,
            ValueError,
            r"scale is .*: expected -infinity < scale < infinity",
        ),
        (np.zeros(6), "2", TypeError, r"scale is .*: expected a number"),
    ],
)
def test_add_to_refuses_what_it_cannot_add(array, scale, error, message):
    with pytest.raises(error, match=message):
        SparseVector([1, 5], [2.0, 4.0], 6).add_to(array, scale)
    assert not np.any(array)


def test_add_to_wants_an_array_of_rows_and_indices_in_order():
    with pytest.raises(
        ValueError, match=r"the array has shape \(6,\): expected \(3, 2\)"
    ):
        SparseVector([1], [[1.0, 2.0]], 3).add_to(np.zeros(6))
    array = np.zeros(9)
    with pytest.raises(ValueError, match=r"indices\[2\] is 2 and follows 3"):
        SparseVector(np.array([1, 3, 2, 4], np.int32), np.ones(4), 9).add_to(array)
    assert not array.any()


def test_sparse_matrices_are_refused_with_the_remedy():
    matrix = scipy.sparse.csr_array(np.array([[0, 2.0, 0, 3.0]]))
    calls = (
        SparseVector.from_dense,
        lambda m: SparseVector([1], m, 4),
        lambda m: SparseVector.from_entries(m, [1.0], 4),
    )
    for call in calls:
        with pytest.raises(
            TypeError,
            match=r"expected a dense array; .*use SparseVector.from_entries\(m.indices",
        ):
            call(matrix)


def test_results_of_operations_share_no_memory_with_their_arguments():
    vector, empty = SparseVector([1, 4], np.ones(2), 6), SparseVector.empty(6, float)
    results = [
        vector.copy(),
        vector.every(1),
        merge(vector, empty),
        merge(empty, vector),
        add_up([vector]),
        add_up([empty, vector, empty]),
        *top_k(vector, 2),
        *top_k(vector, 0),
        concatenate([vector]),
        join([vector]),
        without_zeros(vector),
        *partition(vector, empty),
        intersection(vector, vector),
    ]
    for result in results:
        assert not np.shares_memory(result.indices, vector.indices)
        assert not np.shares_memory(result.values, vector.values)
        result.values[...] = 7
    assert vector.values.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "value", "repeats", "total"),
    [
        (np.float32, 1.0, 2**24 + 4, 2**24 + 4),
        (np.float32, 2.0**-149, 2**10, 2.0**-139),
        (np.float16, 1.0, 2**11 + 2, 2**11 + 2),
        (np.float16, 0.5, 2**16, 2**15),
    ],
)
def test_repeated_entries_are_added_in_float64_and_rounded_once(
    dtype, value, repeats, total
):
    places = np.zeros(repeats, np.int32)
    vector = SparseVector.from_entries(places, np.full(repeats, value, dtype), 1)
    assert vector.dtype == dtype
    assert vector.values.tolist() == [total]


def test_rows_that_repeat_are_added_in_float64():
    rows = np.float32([[2.0**24, 1], [1, 1], [1, 1]])
    vector = SparseVector.from_entries([2, 2, 2], rows, 4)
    assert vector.values.tolist() == [[2.0**24 + 2, 3]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("width", [(), (0,), (1,), (7,), (300,)])
def test_entries_in_any_order_against_addition_at_each_index(dtype, width):
    """From all of one index to each its own; more than are added at a time, too."""
    rng = np.random.default_rng(0)
    for entries, length in (1, 1), (500, 1), (500, 30), (2000, 900), (400, 10**12):
        places = rng.integers(0, length, entries)
        values = rng.integers(-8, 9, (entries, *width)).astype(dtype)
        vector = SparseVector.from_entries(places, values, length)
        vector.validate()
        union, where = np.unique(places, return_inverse=True)
        sums = np.zeros((union.size, *width))
        np.add.at(sums, where, values)
        np.testing.assert_array_equal(vector.indices, union)
        np.testing.assert_array_equal(vector.values, sums.astype(dtype))


def test_rows_in_any_order_take_no_memory_but_that_of_their_sums():
    """In float64 all of them would take twice as much."""
    rows = np.ones((4096, 256), np.float32)
    tokens = np.random.default_rng(0).permutation(2 * len(rows))[: len(rows)]
    tracemalloc.start()
    SparseVector.from_entries(tokens, rows, 2 * len(rows))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.5 * rows.nbytes
