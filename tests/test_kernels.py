"""Every kernel against NumPy, compiled and as the Python function that it was compiled from."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, finite_values

from mpicomp.kernels import host

KERNELS = [name for name in vars(host) if hasattr(getattr(host, name), "py_func")]


@contextlib.contextmanager
def interpreted(monkeypatch):
    with monkeypatch.context() as patch, np.errstate(over="ignore"):  # products modulo 2^64 are meant
        for name in KERNELS:
            patch.setattr(host, name, getattr(host, name).py_func)
        yield


@pytest.fixture(params=["compiled", "interpreted"])
def mode(request, monkeypatch):
    with interpreted(monkeypatch) if request.param == "interpreted" else contextlib.nullcontext():
        yield request.param


def expected_top_k(values, k):
    magnitudes = np.abs(values)
    order = np.lexsort((np.arange(values.size), -magnitudes.astype(np.float64)))[:k]
    return np.sort(order[magnitudes[order] > 0])


def families(dtype, n=3000):
    rng = np.random.default_rng(7)
    tiny = np.finfo(dtype).smallest_subnormal
    normal = rng.standard_normal(n)
    return {
        "normal": normal,
        "cauchy": np.clip(rng.standard_cauchy(n), -1e4, 1e4),
        "zeros": np.zeros(n),
        "all equal": np.full(n, -3.0),
        "sorted": np.arange(n),
        "reversed": np.arange(n)[::-1],
        "quantised": np.round(normal * 2),
        "one non-zero": np.where(np.arange(n) == 17, 1.0, 0.0),
        "neighbours": 1 + np.finfo(dtype).eps * rng.integers(0, 9, n),
        "denormal": tiny * rng.integers(-9, 10, n),
        "negative zeros": np.where(rng.random(n) < 0.9, -0.0, normal),
        "largest": np.finfo(dtype).max * rng.choice([-1, 1], n),
    }


def test_there_are_kernels_to_interpret():
    assert len(KERNELS) >= 6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", families(np.float32))
@pytest.mark.parametrize("k", [1, 2, 37, 1500, 2999, 3000, 10**6])
def test_top_k_is_exact_with_ties_to_the_lowest_position(mode, dtype, family, k):
    if mode == "interpreted" and k not in (37, 2999):
        k = 37
    values = families(dtype)[family].astype(dtype)
    np.testing.assert_array_equal(host.top_k(values, k), expected_top_k(values, k))


@settings(max_examples=200)
@given(st.data())
def test_top_k_on_any_values(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    values = data.draw(finite_values(dtype, st.integers(0, 60)))
    k = data.draw(st.integers(1, 70))
    np.testing.assert_array_equal(host.top_k(values, k), expected_top_k(values, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_count_as_the_largest(mode, dtype, bad):
    values = np.arange(100).astype(dtype)
    values[[42, 77]] = bad
    assert host.top_k(values, 1).tolist() == [42]
    assert host.top_k(values, 3).tolist() == [42, 77, 99]
    with pytest.raises(ValueError, match=rf"values\[42\] is {bad}: expected finite values"):
        host.raise_not_finite(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("size_a", "size_b"), [(0, 0), (5, 0), (0, 5), (40, 60), (100, 100)])
def test_merge_adds_where_both_have_an_entry(mode, dtype, index_dtype, size_a, size_b):
    rng = np.random.default_rng([size_a, size_b])
    pair = [np.sort(rng.choice(120, size, replace=False)).astype(index_dtype) for size in (size_a, size_b)]
    values = [rng.standard_normal(size).astype(dtype) for size in (size_a, size_b)]
    indices, total = host.merge(pair[0], values[0], pair[1], values[1])
    dense = np.zeros(120, dtype)
    for where, what in zip(pair, values, strict=True):
        dense[where] += what
    assert (indices.dtype, total.dtype) == (index_dtype, dtype)
    np.testing.assert_array_equal(indices, np.union1d(*pair))
    np.testing.assert_array_equal(total, dense[indices])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_add_is_numpys_on_unique_indices(mode, dtype):
    rng = np.random.default_rng(1)
    indices = np.sort(rng.choice(500, 80, replace=False)).astype(np.int32)
    values, dense = rng.standard_normal(80).astype(dtype), rng.standard_normal(500).astype(dtype)
    expected = dense.copy()
    expected[indices] += values
    host.scatter_add(dense, indices, values)
    np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize(
    ("indices", "position"),
    [([], -1), ([0, 4, 9], -1), ([-1, 4], 0), ([0, 10], 1), ([0, 3, 3], 2), ([5, 4], 1), ([0, 2**31 - 1, 1], 1)],
)
def test_first_disorder(mode, indices, position):
    for dtype in (np.int32, np.int64):
        assert host.first_disorder(np.array(indices, dtype), 10) == position


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("span", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("share", [0, 0.05, 0.9, 1])
def test_a_bitmap_gives_its_indices_back(mode, index_dtype, span, share):
    places = np.flatnonzero(np.random.default_rng(span).random(span) < share)
    words = np.zeros(-(-span // 64), np.uint64)
    host.to_bitmap((places + 77).astype(index_dtype), 77, words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=span)
    np.testing.assert_array_equal(np.flatnonzero(bits), places)
    back = np.empty(places.size, index_dtype)
    assert host.from_bitmap(words, 77, back) == places.size
    np.testing.assert_array_equal(back, places + 77)
    few = np.empty(places.size // 2, index_dtype)
    assert host.from_bitmap(words, 77, few) == places.size
    np.testing.assert_array_equal(few, back[: few.size])
