import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import sparse_vectors

from mpicomp import ErrorFeedback, Quantised, SparseVector, TopK, quantise
from mpicomp.codec import HEADER_NBYTES, encoded_nbytes, smallest
from mpicomp.compressors.selection import Selection
from mpicomp.correction import Correction
from mpicomp.vector import concatenate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got density=None and k=None: expected exactly one of them"),
        (
            {"density": 0.1, "k": 3},
            "got density=0.1 and k=3: expected exactly one of them",
        ),
        ({"density": 0}, "density is 0: expected 0 < density <= 1"),
        ({"density": 1.5}, "density is 1.5: expected 0 < density <= 1"),
        ({"density": "0.1"}, "density is '0.1': expected a number"),
        (
            {"density": 1},
            "density is 1 of type int: expected a float, 0 < density <= 1; write density=1.0 to",
        ),
        (
            {"density": True},
            "density is True of type bool: expected a float, .* or k=1 to send one",
        ),
        ({"density": np.bool_(True)}, "of type bool_?: expected a float"),
        ({"density": np.int64(1)}, "of type int64: expected a float"),
        ({"density": 100}, "density is 100: expected 0 < density <= 1 .*; or give k="),
        ({"k": 0}, "k is 0: expected an integer of at least 1"),
        ({"k": 2.5}, "k is 2.5: expected an integer"),
        ({"k": True}, "k is True: expected an integer"),
    ],
)
def test_bad_settings_raise(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TopK(**arguments)


@pytest.mark.parametrize(
    ("density", "length", "count"),
    [(0.01, 1000, 10), (0.001, 10, 1), (1.0, 7, 7), (0.5, 5, 2)],
)
def test_density_gives_k(density, length, count):
    assert TopK(density).counts([length]) == [count]
    assert TopK(density).compress(np.ones(length)).nnz == count


@pytest.mark.parametrize(
    "settings",
    [
        [{"k": 1}, {"k": 2}, {"k": 9}],
        [{"density": 0.25}, {"density": 0.5}, {"density": 1.0}],
    ],
)
def test_segments_with_other_settings_are_selected_from_as_alone(settings):
    vectors = [np.array([5.0, 1, 4, 3]), np.arange(4.0) + 1, np.array([1.0, -2, 3])]
    alone = [
        TopK(**own).compress(vector)
        for own, vector in zip(settings, vectors, strict=True)
    ]
    bounds = [0, 4, 8, 11]
    selection = Selection("abc", bounds, [TopK(**own) for own in settings])
    together = np.concatenate(vectors)
    selected = selection.select(Correction([together], together))
    assert len(selection.runs) == 1
    together = concatenate(alone)
    assert selected.indices.tolist() == together.indices.tolist()
    assert selected.values.tolist() == together.values.tolist()


def test_the_largest_magnitudes_travel_and_ties_go_to_the_lowest_index():
    vector = TopK(k=3).compress(np.array([[1, -5, 2], [2, 0, -2]], np.float32))
    assert (vector.indices.tolist(), vector.values.tolist(), vector.length) == (
        [1, 2, 3],
        [-5, 2, 2],
        6,
    )
    assert vector.indices.dtype == np.int32


def test_zeros_never_travel():
    assert TopK(k=3).compress(np.zeros(5)).nnz == 0
    assert TopK(k=3).compress(np.array([0, 0, 7, 0.0])).indices.tolist() == [2]


def test_an_array_that_is_not_contiguous():
    array = np.arange(24, dtype=np.float64).reshape(4, 6)
    for view in (array[:, ::2], array.T):
        assert (
            TopK(k=5).compress(view).to_dense().tolist()
            == np.where(view < np.sort(view, None)[-5], 0, view).ravel().tolist()
        )


def test_what_is_selected_is_a_copy():
    gradient = np.ones(4)
    vector = TopK(density=1.0).compress(gradient)
    gradient[:] = 9
    assert vector.values.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_value_that_is_not_finite_is_named(bad):
    values = np.arange(100, dtype=np.float32)
    values[[42, 77]] = bad
    with pytest.raises(
        ValueError, match=rf"values\[42\] is {bad}: expected finite values"
    ):
        TopK(k=1).compress(values)


@pytest.mark.parametrize(
    ("bad", "error"),
    [([1.0, np.nan], ValueError), ([1, 2], TypeError), ([1j, 2], TypeError)],
)
def test_bad_gradients_raise(bad, error):
    with pytest.raises(error):
        TopK(k=1).compress(np.array(bad))


@given(
    st.one_of(sparse_vectors(), sparse_vectors(width=2)),
    st.sampled_from(["float16", "bfloat16", "sign", "two_bit"]),
)
def test_quantised_values_keep_indices_signs_and_dtype(vector, form):
    quantised = quantise(vector, form)
    assert quantised.dtype == vector.dtype
    assert quantised.indices.tobytes() == vector.indices.tobytes()
    again = quantise(quantised, form)
    # the mean of equal magnitudes need not be one of them, to the bit
    if form not in ("sign", "two_bit"):
        assert again.values.tobytes() == quantised.values.tobytes()
    assert (np.signbit(quantised.values) == np.signbit(vector.values)).all()


@pytest.mark.parametrize(
    ("form", "magnitudes"), [("sign", [4, 4]), ("two_bit", [2, 6])]
)
def test_the_magnitudes_of_rows_are_those_of_all_their_values(form, magnitudes):
    vector = SparseVector(
        np.array([1, 4, 6]), np.array([[1.0, 5.0], [2.0, -6.0], [3.0, 7.0]]), 9
    )
    assert np.abs(quantise(vector, form).values).tolist() == [magnitudes] * 3


@pytest.mark.parametrize(
    ("form", "nbytes"),
    [("float16", 2000), ("bfloat16", 2000), ("sign", 128 + 24), ("two_bit", 256 + 32)],
)
def test_quantised_values_travel_in_a_shorter_format(form, nbytes):
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    quantised = quantise(SparseVector(np.arange(1000), values, 1000), form)
    error = values - quantised.values
    assert encoded_nbytes(quantised, smallest(quantised)) == HEADER_NBYTES + 8 + nbytes
    # value and quantised value are close: the error is exact
    if form not in ("sign", "two_bit"):
        assert ((quantised.values + error) == values).all()
        assert np.abs(error / values).max() <= (2**-11 if form == "float16" else 2**-8)


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even():
    values = np.array(
        [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), 3.4e38, -3.4e38, 0.0, -0.0],
        np.float32,
    )
    quantised = quantise(SparseVector(np.arange(7), values, 7), "bfloat16")
    largest = 2.0**127 * (2 - 2**-7)
    assert quantised.values.tolist() == [
        1,
        1 + 2**-6,
        -(1 + 2**-7),
        largest,
        -largest,
        0,
        0,
    ]
    assert np.signbit(quantised.values).tolist() == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def test_feedback_keeps_what_quantisation_loses():
    compressor, feedback = Quantised(TopK(k=3), "sign"), ErrorFeedback()
    gradient = np.array([1.0, -2, 4, 0.5, -6])
    correction = feedback.correct(gradient)
    sent = compressor.compress(correction.add())
    assert sent.values.tolist() == [-4, 4, -4]
    feedback.prepare_residual(correction, sent)()
    np.testing.assert_array_equal(feedback.residual + sent.to_dense(), gradient)
    assert repr(compressor) == "Quantised(compressor=TopK(k=3), form='sign')"
    with pytest.raises(ValueError, match="form is 'int8': expected one of"):
        Quantised(TopK(k=3), "int8")
