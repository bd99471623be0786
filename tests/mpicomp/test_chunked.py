"""Top-k in chunks and values of two magnitudes: what is selected, what is captured, what is lost, and the bytes."""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from kernel_cases import expected_in_chunks

from mpicomp import ChunkedTopK, SparseVector, TopK, quantise
from mpicomp.codec import decode, encode, smallest
from mpicomp.vector import split

LENGTH = 4096 * 256
DRAWS = {
    "normal": lambda rng: rng.standard_normal(LENGTH),
    "laplace": lambda rng: rng.laplace(size=LENGTH),
    "t3": lambda rng: rng.standard_t(3, LENGTH),
}


@cache
def selected(family):
    """Return a gradient, and 64 of each of its chunks of 4096."""
    gradient = DRAWS[family](np.random.default_rng(0)).astype(np.float32)
    return gradient, ChunkedTopK(k=64, chunk=4096).compress(gradient)


def energy(values):
    return float(np.square(values, dtype=np.float64).sum())


@pytest.mark.parametrize(
    ("k", "chunk"), [(1, 1), (1, 7), (3, 50), (50, 50), (64, 4096), (2, 70_000)]
)
@pytest.mark.parametrize("length", [0, 1, 2, 49, 50, 4099, 8191, 140_009])
def test_each_chunk_keeps_its_largest_and_the_last_one_the_same_share(k, chunk, length):
    """Prime lengths among them: chunks do not depend on divisors."""
    # ties, and no zeros
    gradient = np.round(9 * np.random.default_rng(length).standard_normal(length)) + 0.5
    last = max(1, round(Fraction(k * (length % chunk), chunk)))
    compressor = ChunkedTopK(k, chunk)
    vector = compressor.compress(gradient)
    assert (
        vector.indices.tolist() == expected_in_chunks(gradient, k, chunk, last).tolist()
    )
    assert vector.values.tobytes() == gradient[vector.indices].tobytes()
    count = length // chunk * k + (last if length % chunk else 0)
    assert vector.nnz == count
    if length <= chunk:
        assert (
            vector.indices.tolist()
            == TopK(k=count or 1).compress(gradient).indices.tolist()
        )


def test_a_layer_of_small_gradients_is_not_left_out():
    gradient = np.ones(8192, np.float32)
    gradient[4096:] = 1e-6
    assert [
        part.size for part in np.split(ChunkedTopK().compress(gradient).indices, [64])
    ] == [64, 64]
    assert TopK(k=128).compress(gradient).indices.max() < 4096


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 9), "k is 0: expected an integer of at least 1"),
        ((3.5, 9), "k is 3.5: expected an integer"),
        ((3, 0), "chunk is 0: expected an integer of at least 1"),
        (
            (10, 9),
            "k is 10 and chunk is 9: expected k <= chunk; k=chunk sends every entry",
        ),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ChunkedTopK(*arguments)


def published(values):
    """Return values in the four bins of the published rule, each as the mean of its bin, and the codes."""
    scale = 6 * values.std(ddof=1) / 4
    codes = np.clip(np.round((values - values.mean()) / scale + 2), 0, 3).astype(int)
    means = np.array(
        [
            values[codes == code].mean() if (codes == code).any() else 0
            for code in range(4)
        ]
    )
    return means[codes], codes


def error(values, quantised):
    return energy(values.astype(np.float64) - quantised) / energy(values)


def two_magnitudes(values):
    """Return what Lloyd's rounds give, in plain NumPy."""
    magnitudes = np.abs(values.astype(np.float64))
    threshold = magnitudes.mean()
    for _ in range(20):
        low, high = (
            magnitudes[magnitudes <= threshold].mean(),
            magnitudes[magnitudes > threshold].mean(),
        )
        before, threshold = threshold, (low + high) / 2
        if threshold == before:
            break
    return np.copysign(np.where(magnitudes <= threshold, low, high), values), low, high


def test_the_golden_vector_of_both_rules():
    values = np.array([-4, -3, -2.5, -2, 2, 2.5, 3, 6])
    theirs, codes = published(values)
    assert codes.tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert values.std(ddof=1) == pytest.approx(3.585685828)
    np.testing.assert_allclose(theirs, [-19 / 6] * 3 + [5 / 6] * 3 + [4.5] * 2)
    assert error(values, theirs) == pytest.approx(0.19705, abs=5e-6)
    quantised = quantise(SparseVector(range(8), values, 8), "two_bit")
    assert quantised.values.tolist() == [-5, -2.5, -2.5, -2.5, 2.5, 2.5, 2.5, 5]
    assert error(values, quantised.values) == pytest.approx(0.03315, abs=5e-6)


@pytest.mark.parametrize(
    ("family", "four_bins", "sign", "two_bit", "within"),
    [
        ("normal", 0.0125, 0.0125, 0.0043, 0.02),
        ("laplace", 0.0379, 0.0379, 0.0138, 0.06),
        ("t3", 0.394, 0.282, 0.148, 0.2),
    ],
)
def test_two_magnitudes_lose_at_most_half_of_what_one_loses(
    family, four_bins, sign, two_bit, within
):
    _, vector = selected(family)
    errors = {
        form: error(vector.values, quantise(vector, form).values)
        for form in ("sign", "two_bit")
    }
    assert errors["sign"] == pytest.approx(sign, rel=within)
    assert errors["two_bit"] == pytest.approx(two_bit, rel=within)
    assert errors["two_bit"] < errors["sign"] / 2
    assert error(
        vector.values, published(vector.values.astype(np.float64))[0]
    ) == pytest.approx(four_bins, rel=within)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_two_magnitudes_are_lloyds(dtype):
    values = selected("laplace")[1].values.astype(dtype)
    vector = SparseVector(np.arange(values.size), values, values.size)
    quantised = quantise(vector, "two_bit")
    expected, low, high = two_magnitudes(values)
    np.testing.assert_allclose(
        np.unique(np.abs(quantised.values)), [low, high], rtol=np.finfo(dtype).eps
    )
    np.testing.assert_allclose(quantised.values, expected, rtol=np.finfo(dtype).eps)


@pytest.mark.parametrize("form", ["sign", "two_bit"])
def test_each_segment_has_magnitudes_of_its_own(form):
    """Bitwise those of each segment alone; also where the sums of one leave the range."""
    rng, bounds = np.random.default_rng(0), [0, 500, 500, 800, 1000]
    values = rng.standard_normal(1000).astype(np.float32) * np.repeat(
        np.float32([1, 1, 1e-3, 1e30]), np.diff(bounds)
    )
    for given in (values, values.astype(np.float64) * 1e270):
        vector = SparseVector(np.arange(1000), given, 1000)
        quantised = quantise(vector, form, bounds)
        each = [quantise(part, form).values for part in split(vector, bounds)]
        assert quantised.values.tobytes() == np.concatenate(each).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "values",
    [[], [3, -3, 3], [1, 2], [0, 0], [0, -5], ["least", 1], ["most", 1], ["most"] * 3],
)
def test_two_magnitudes_of_few_values_are_exact(dtype, values):
    named = {"least": np.finfo(dtype).smallest_subnormal, "most": np.finfo(dtype).max}
    values = np.array([named.get(each, each) for each in values], dtype)
    quantised = quantise(
        SparseVector(range(values.size), values, values.size), "two_bit"
    )
    assert quantised.values.tobytes() == values.tobytes()


def test_two_magnitudes_of_the_largest_numbers_are_finite():
    values = 1.79e308 * np.random.default_rng(0).uniform(-1, 1, 1000)
    quantised = quantise(SparseVector(range(1000), values, 1000), "two_bit")
    expected, _, _ = two_magnitudes(values / 2**20)
    np.testing.assert_allclose(quantised.values, expected * 2**20, rtol=1e-12)


@pytest.mark.parametrize(("form", "bits"), [("two_bit", 10.6), ("sign", 9.6)])
def test_an_entry_takes_eight_bits_and_those_of_its_value(form, bits):
    vector = quantise(selected("normal")[1], form)
    message = encode(vector, coding=smallest(vector))
    assert vector.nnz == 64 * 256
    assert 8 * message.size / vector.nnz <= bits
    assert decode(message).values.tobytes() == vector.values.tobytes()
