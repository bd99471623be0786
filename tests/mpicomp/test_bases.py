"""Bases against dense matrices in float64: any length, chunk and dtype, on the host and on a device."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from devices import cupy_for_tests
from scipy.linalg import hadamard
from strategies import DTYPES

from mpicomp import Basis, Hadamard, SparseVector
from mpicomp.bases import coefficients_of
from mpicomp.kernels import Summands, host
from mpicomp.kernels.host import fused, selection

LENGTHS = 0, 1, 2, 3, 7, 31, 64, 97, 256, 257, 1009


@cache
def matrix_of(size):
    return hadamard(size) / np.sqrt(size)


def lengths_of_parts(basis, length):
    """Return the lengths of the parts of a vector that are transformed each by itself."""
    whole, rest = divmod(length, basis.chunk)
    return [basis.chunk] * whole + [
        1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1
    ]


def expected(basis, vector):
    """Return the coefficients of a vector, in float64."""
    lengths = lengths_of_parts(basis, vector.size)
    parts = np.split(vector.astype(float), np.cumsum(lengths)) if lengths else []
    return np.concatenate(
        [
            vector[:0],
            *(
                matrix_of(size) @ part
                for size, part in zip(lengths, parts, strict=False)
            ),
        ]
    )


BASES = [Hadamard(chunk) for chunk in (1, 2, 8, 64, 128, 256)]


def draw(length, dtype):
    return np.random.default_rng(length).standard_normal(length).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("basis", BASES, ids=repr)
def test_a_transform_is_the_product_with_its_matrix_and_the_inverse_undoes_it(
    basis, dtype
):
    tolerance = 20 * np.finfo(dtype).eps
    for length in LENGTHS:
        vector = draw(length, dtype)
        coefficients, back = np.empty_like(vector), np.empty_like(vector)
        basis.forward(vector, coefficients)
        np.testing.assert_allclose(
            coefficients, expected(basis, vector), atol=tolerance, rtol=tolerance
        )
        basis.inverse(coefficients, back)
        np.testing.assert_allclose(back, vector, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("basis", BASES, ids=repr)
def test_in_place_has_the_same_bits(basis):
    for dtype in DTYPES:
        vector = draw(1009, dtype)
        for transform in basis.forward, basis.inverse:
            out = np.empty_like(vector)
            transform(vector, out)
            transform(vector, vector)
            assert vector.tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64, 256, 1024, 4096])
def test_integers_are_exact_in_chunks_of_powers_of_four(chunk, dtype):
    basis, rng = Hadamard(chunk), np.random.default_rng(chunk)
    # 21 = 16 + 4 + 1
    vector = rng.integers(-500, 500, 3 * chunk + 21 % chunk).astype(dtype)
    coefficients, back = np.empty_like(vector), np.empty_like(vector)
    basis.forward(vector, coefficients)
    np.testing.assert_array_equal(coefficients, expected(basis, vector))
    basis.inverse(coefficients, back)
    assert back.tobytes() == vector.tobytes()


def test_halves_are_computed_in_single_precision():
    basis, vector = Hadamard(256), draw(1000, np.float16)
    wide, out = vector.astype(np.float32), np.empty_like(vector)
    basis.forward(wide, wide)
    basis.forward(vector, out)
    np.testing.assert_array_equal(out, wide.astype(np.float16))
    high = np.full(256, 6e4, np.float16)
    basis.forward(high, high)
    assert np.isinf(high[0])


def test_arrays_of_any_shape_are_taken_in_c_order():
    basis, array = Hadamard(8), draw(60, np.float32).reshape(4, 15)
    expected, out = np.empty(60, np.float32), np.empty((6, 10), np.float32)
    basis.forward(array.reshape(-1), expected)
    array.flags.writeable = False
    basis.forward(array, out)
    np.testing.assert_array_equal(out.reshape(-1), expected)
    basis.forward(np.asfortranarray(array), out)
    np.testing.assert_array_equal(out.reshape(-1), expected)


@pytest.mark.parametrize("chunk", [0, -4, 8192, 2.5, True])
def test_a_chunk_that_cannot_be_is_an_error(chunk):
    with pytest.raises(
        (TypeError, ValueError), match=r"chunk is .*: expected an integer"
    ):
        Hadamard(chunk)


def test_a_hadamard_basis_has_powers_of_two():
    with pytest.raises(ValueError, match="chunk is 100: expected a power of two"):
        Hadamard(100)


@pytest.mark.parametrize("transform", [Hadamard(8).forward, Hadamard(8).inverse])
def test_arrays_that_do_not_fit_are_errors(transform):
    vector = np.zeros(20, np.float32)
    with pytest.raises(
        ValueError, match="out has 19 values of float32: expected 20 of float32"
    ):
        transform(vector, np.zeros(19, np.float32))
    with pytest.raises(
        ValueError, match="out has 20 values of float64: expected 20 of float32"
    ):
        transform(vector, np.zeros(20))
    with pytest.raises(ValueError, match="out overlaps the vector"):
        transform(vector[:-1], vector[1:])
    with pytest.raises(TypeError, match="int64: expected float16, float32 or float64"):
        transform(np.arange(20), vector)
    with pytest.raises(ValueError, match="not C-contiguous"):
        transform(vector, np.zeros(40, np.float32)[::2])
    with pytest.raises(ValueError, match="on different devices"):
        transform(vector, cupy_for_tests().zeros(20, np.float32))


def test_a_basis_of_ones_own_has_both_methods():
    class Nothing(Basis):
        pass

    for transform in Nothing(4).forward, Nothing(4).inverse:
        with pytest.raises(NotImplementedError, match="Nothing has no"):
            transform(np.zeros(3), np.zeros(3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chunk", [1, 4, 64, 256, 4096])
@pytest.mark.parametrize("length", [0, 1, 100, 5000, 9000])
@pytest.mark.parametrize("long", [0, 1 << 30])
def test_entries_are_transformed_as_a_dense_vector_is(dtype, chunk, length, long):
    """Also where the array does not begin at a cache line; nothing around it changes."""
    rng = np.random.default_rng(length)
    # words of zeros, which are skipped, and a negative zero, which is not
    indices = np.flatnonzero(rng.random(length) < 0.02).astype(np.int32)
    values = rng.standard_normal(indices.size).astype(dtype)
    values[::9] = -0.0
    dense = np.zeros(length, dtype)
    dense[indices] = values
    expected = np.empty_like(dense)
    host.hadamard(dense, expected, chunk)
    signs = expected.copy()
    host.signs(signs)
    for start in (0, 3):
        around = np.full(length + 8, 7, dtype)
        out = around[start : start + length]
        host.hadamard_writer(indices, values, out, chunk, long=long, threads=2)()
        assert out.tobytes() == expected.tobytes()
        assert (around[:start] == 7).all()
        assert (around[start + length :] == 7).all()
        settings = {"is_sign": True, "long": long, "threads": 2}
        host.hadamard_writer(indices, values, out, chunk, **settings)()
        assert out.tobytes() == signs.tobytes()
        assert (around[:start] == 7).all()
        assert (around[start + length :] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chunk", [1, 4, 64, 256, 4096])
@pytest.mark.parametrize("length", [0, 1, 100, 5000, 9000])
@pytest.mark.parametrize("long", [0, 1 << 30])
def test_a_transform_is_added_as_one_that_was_written(dtype, chunk, length, long):
    """Also where the array does not begin at a cache line; nothing around it changes."""
    rng = np.random.default_rng(length)
    dense, base = rng.standard_normal((2, length)).astype(dtype)
    expected = np.empty_like(dense)
    host.hadamard(dense, expected, chunk)
    host.add_parts(base, 0.3, [expected], expected)
    for start in (0, 3):
        around = np.full(length + 8, 7, dtype)
        out = around[start : start + length]
        host.hadamard(dense, out, chunk, onto=(base, 0.3), long=long, threads=2)
        assert out.tobytes() == expected.tobytes()
        assert (around[:start] == 7).all()
        assert (around[start + length :] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chunk", [4, 64, 256])
@pytest.mark.parametrize("foreseen", [None, (1, 10), (1 << 30, 100)])
def test_the_largest_of_a_sum_with_a_transform_are_those_of_the_sum(
    monkeypatch, dtype, chunk, foreseen
):
    """Also where the sample misleads: more values than expected reach the threshold, or fewer."""
    monkeypatch.setattr(selection, "_SAMPLE", 64)
    if foreseen:
        monkeypatch.setattr(fused, "foresee", lambda *_: foreseen)
    rng = np.random.default_rng(chunk)
    vector, base = rng.standard_normal((2, 9001)).astype(dtype)
    expected = np.empty_like(vector)
    host.hadamard(vector, expected, chunk, onto=(base, 0.3), long=1 << 30)
    for start in (0, 3):
        around = np.full(vector.size + 8, 7, dtype)
        out = around[start : start + vector.size]
        given = {"scale": 0.3, "chunk": chunk, "long": 0}
        places, values = host.add_largest(base, vector, out, 91, **given)
        assert out.tobytes() == expected.tobytes()
        assert (around[:start] == 7).all()
        assert (around[start + vector.size :] == 7).all()
        largest = host.largest(expected, 91)
        assert places.tolist() == largest[0].tolist()
        assert values.tobytes() == largest[1].tobytes()


@pytest.mark.parametrize("longest", [100, 1 << 20])
def test_segments_are_transformed_each_by_itself(longest):
    rng = np.random.default_rng(longest)
    bounds = [0, 37, 37 + longest, 90 + longest]
    vector, base = rng.standard_normal((2, bounds[-1])).astype(np.float32)
    parts = [vector[first:end] for first, end in pairwise(bounds)]
    coefficients = coefficients_of(parts, Hadamard(16))
    sizes = np.diff(bounds).tolist()
    rows = bounds, [5, 9, 7], sizes, [5, 9, 7]
    outs = np.zeros((2, vector.size), np.float32)
    expected = host.largest_in_segments(
        outs[0], *rows, summands=Summands(base, 0.3, coefficients)
    )
    found = host.largest_in_segments(
        outs[1], *rows, summands=Summands(base, 0.3, parts, 16)
    )
    assert outs[1].tobytes() == outs[0].tobytes()
    assert found.indices.tolist() == expected.indices.tolist()
    assert found.values.tobytes() == expected.values.tobytes()


def test_coefficients_whose_sums_may_be_out_of_range_are_transformed_before_they_are_written():
    basis = Hadamard(chunk=4)
    out = np.zeros(4, np.float32)
    large = np.full(4, np.finfo(np.float32).max / 3, np.float32)
    with pytest.raises(OverflowError, match="out of the basis"):
        basis.writer(SparseVector.from_dense(large), out)
    large[1:] = 0
    basis.writer(SparseVector.from_dense(large), out)()
    assert (out == large[0] / 2).all()
