import numpy as np
import pytest

from mpicomp import TopK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got density=None and k=None: expected exactly one of them"),
        ({"density": 0.1, "k": 3}, "got density=0.1 and k=3: expected exactly one of them"),
        ({"density": 0}, "density is 0: expected 0 < density <= 1"),
        ({"density": 1.5}, "density is 1.5: expected 0 < density <= 1"),
        ({"density": "0.1"}, "density is '0.1': expected 0 < density <= 1"),
        ({"density": 100}, "density is 100: expected 0 < density <= 1 .*; or give k="),
        ({"k": 0}, "k is 0: expected an integer of at least 1"),
        ({"k": 2.5}, "k is 2.5: expected an integer of at least 1"),
        ({"k": True}, "k is True: expected an integer of at least 1"),
    ],
)
def test_bad_settings_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        TopK(**arguments)


@pytest.mark.parametrize(("density", "length", "count"), [(0.01, 1000, 10), (0.001, 10, 1), (1, 7, 7), (0.5, 5, 2)])
def test_density_gives_k(density, length, count):
    assert TopK(density).count(length) == count
    assert TopK(density).compress(np.ones(length)).nnz == count


def test_the_largest_magnitudes_travel_and_ties_go_to_the_lowest_index():
    vector = TopK(k=3).compress(np.array([[1, -5, 2], [2, 0, -2]], np.float32))
    assert (vector.indices.tolist(), vector.values.tolist(), vector.length) == ([1, 2, 3], [-5, 2, 2], 6)
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
    with pytest.raises(ValueError, match=rf"values\[42\] is {bad}: expected finite values"):
        TopK(k=1).compress(values)


@pytest.mark.parametrize(("bad", "error"), [([1.0, np.nan], ValueError), ([1, 2], TypeError), ([1j, 2], TypeError)])
def test_bad_gradients_raise(bad, error):
    with pytest.raises(error):
        TopK(k=1).compress(np.array(bad))
