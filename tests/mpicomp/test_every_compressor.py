"""What every compressor promises, in one table of them."""

import re
from functools import partial

import cases
import numpy as np
import pytest
from cases import noisy_gradients, take_step

from mpicomp import (
    AdaComp,
    AggregationAware,
    ErrorFeedback,
    SparseVector,
    TopK,
    WarmUp,
    quantise,
)
from mpicomp.codec import CODECS, encode

EVERY = {
    **cases.compressors(chunk=64),
    "WarmUp": lambda density: WarmUp(TopK(density), [1.0, density]),
    "AggregationAware quota": partial(AggregationAware, metric="quota"),
}
# those whose values are not those of the vector
ROUNDED = "AdaComp", "Quantised-bfloat16", "Quantised-two_bit"
compressors = pytest.mark.parametrize("name", EVERY)


def compress(compressor, dense):
    return compressor.compress(dense, gradient=dense)


@compressors
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_is_sent_is_sound(name, dtype):
    dense = np.random.default_rng(0).standard_normal(1000).astype(dtype)
    vector = compress(EVERY[name](0.05), dense)
    vector.validate()
    assert (vector.dtype, vector.length) == (dtype, 1000)
    assert vector.nnz >= 1
    if name not in ROUNDED:
        assert (vector.values == dense[vector.indices]).all()
    assert vector.values.all(), "an exact zero was sent"


@compressors
def test_what_the_caller_has_changed_is_validated_anew(name):
    dense = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    vector = compress(EVERY[name](0.05), dense)
    vector.values[-1] = np.nan
    with pytest.raises(ValueError, match="nan"):
        vector.validate()


@compressors
@pytest.mark.parametrize("length", [0, 1, 7, 1000])
def test_nothing_is_sent_of_zeros(name, length):
    assert compress(EVERY[name](0.05), np.zeros(length, np.float32)).nnz == 0


@compressors
@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_single_value_that_is_not_zero_is_sent(name, place):
    dense = np.zeros(1000, np.float32)
    dense[place] = -3
    vector = compress(EVERY[name](0.01), dense)
    sent = -3 / 20 if name == "AdaComp" else -3  # the mean over the bins
    assert (vector.indices.tolist(), vector.values.tolist()) == (
        [place],
        [pytest.approx(sent)],
    )


@compressors
@pytest.mark.parametrize("length", [1, 2, 3, 1000])
@pytest.mark.parametrize("value", [2.0, -1e-30, 1e30])
def test_equal_values(name, length, value):
    vector = compress(EVERY[name](0.1), np.full(length, value, np.float32))
    vector.validate()
    assert vector.nnz >= 1
    if name not in ("Dense", "AdaComp", "WarmUp"):
        assert vector.nnz <= max(1, round(0.1 * length)) * 1.3


@compressors
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_its_place(name, bad):
    dense = np.random.default_rng(1).standard_normal(300)
    dense[123] = bad
    compressor = EVERY[name](0.1)
    with pytest.raises(
        ValueError, match=re.escape(f"values[123] is {bad}: expected finite values")
    ):
        compress(compressor, dense)
    fresh, sound = EVERY[name](0.1), np.random.default_rng(2).standard_normal(300)
    after, expected = compress(compressor, sound), compress(fresh, sound)
    assert after.indices.tolist() == expected.indices.tolist(), (
        "the failed call left a trace"
    )


@compressors
def test_a_density_of_one_sends_everything(name):
    dense = np.random.default_rng(1).standard_normal(99) + 3
    if name != "AdaComp":
        assert compress(EVERY[name](1.0), dense).nnz == 99


@compressors
def test_views_that_are_not_contiguous(name):
    whole = np.random.default_rng(1).standard_normal((40, 50)).astype(np.float32)
    view = compress(EVERY[name](0.1), whole[::2, ::-1])
    copy = compress(EVERY[name](0.1), whole[::2, ::-1].copy())
    assert view.indices.tolist() == copy.indices.tolist()
    assert view.values.tobytes() == copy.values.tobytes()
    assert view.length == 1000


@compressors
def test_a_run_is_reproducible_and_leaves_the_global_random_state_alone(name):
    dense = np.random.default_rng(1).standard_normal(500)
    np.random.seed(5)
    before = np.random.get_state()[1].tobytes()
    first, second = EVERY[name](0.1), EVERY[name](0.1)
    for _ in range(3):
        one, other = compress(first, dense), compress(second, dense)
        assert one.indices.tolist() == other.indices.tolist()
    assert np.random.get_state()[1].tobytes() == before


@pytest.mark.parametrize(
    ("quota", "k"), [(0.75, 1), (0.75, 2), (0.0, 1), (0.75, 4), (0.99, 3)]
)
def test_below_a_quota_of_one_nothing_starves(quota, k):
    compressor, feedback = (
        AggregationAware(k=k, metric="quota", quota=quota),
        ErrorFeedback(),
    )
    rng, sent = np.random.default_rng(1), set()
    for _ in range(300):
        vector = take_step(feedback, compressor, 1 + rng.random(20))
        compressor.observe(vector)
        sent |= set(vector.indices.tolist())
    assert sent == set(range(20))


@pytest.mark.parametrize("metric", ["support", "quota"])
def test_a_sum_that_was_filled_up_with_zeros_says_the_same_as_a_sparse_one(metric):
    sums = SparseVector([2, 7], [4.0, -3.0], 10), SparseVector([1, 7], [2.0, 1.0], 10)
    gradient, sent = np.arange(10, 0, -1.0), []
    for filled in False, True:
        compressor = AggregationAware(k=3, metric=metric, weight=9.0)
        for each in sums:
            compressor.observe(
                SparseVector(range(10), each.to_dense(), 10) if filled else each
            )
        sent.append(compressor.compress(gradient).indices.tolist())
    assert sent[0] == sent[1]
    assert 7 in sent[0]


def test_adacomp_sends_an_entry_where_the_new_gradient_undoes_the_largest():
    assert AdaComp(50).compress(
        np.array([1.0, 0, 0]), gradient=np.array([-1.0, 0, 0])
    ).indices.tolist() == [0]
    assert AdaComp(50).compress(np.zeros(3), gradient=np.ones(3)).nnz == 0


def test_adacomp_sends_no_exact_zero_though_the_new_gradient_is_large_there():
    vector = AdaComp(50).compress(np.array([5.0, 0.0]), gradient=np.array([0.0, 7.0]))
    assert vector.to_dense().tolist() == [5, 0]
    assert vector.indices.tolist() == [0]


def test_adacomp_takes_the_largest_numbers():
    gradient = np.full(200, 1e308)
    vector = AdaComp(50).compress(gradient, gradient=gradient)
    assert vector.nnz == 200
    np.testing.assert_allclose(vector.values, gradient)


def test_what_float16_has_of_bfloat16_ends_at_65280():
    for value in (65280.0, 65408.0, 65504.0):
        quantised = quantise(
            SparseVector([0], np.array([value], np.float16), 1), "bfloat16"
        )
        assert quantised.values[0] == 65280


def test_one_magnitude_is_not_above_the_largest():
    largest = np.full(3, np.finfo(float).max)
    assert (
        quantise(SparseVector(range(3), largest, 3), "sign").values.tolist()
        == largest.tolist()
    )
    assert (
        AdaComp(1).compress(largest, gradient=largest).values.tolist()
        == largest.tolist()
    )


def test_signs_of_the_largest_numbers_have_a_finite_magnitude():
    quantised = quantise(
        SparseVector(range(4), [1.5e308, -1.5e308, 1.5e308, 1.5e308], 4), "sign"
    )
    np.testing.assert_allclose(quantised.values, [1.5e308, -1.5e308, 1.5e308, 1.5e308])


@pytest.mark.parametrize(
    ("bin_size", "entries", "rate"), [(50, 5.0, 40), (500, 6.4, 128)]
)
def test_adacomp_in_the_steady_state(bin_size, entries, rate):
    """Independent Gaussian steps 40 to 60: entries a bin, and at least the rate that the paper's wire format gets.

    That format takes 8 bits for an entry in a bin of 50, 16 in one of 500: an offset
    and a sign. Ours counts headers. Bins of 500 take longer to settle: 7.8 entries, the
    128 times of the reference, are passed around step 25.
    """
    compressor, feedback, rng = (
        AdaComp(bin_size),
        ErrorFeedback(),
        np.random.default_rng(0),
    )
    counts, rates, length = [], [], 100_000
    for step in range(60):
        gradient = rng.standard_normal(length).astype(np.float32)
        vector = take_step(feedback, compressor, gradient)
        message = encode(vector, coding=CODECS["smallest"](vector))
        assert np.unique(np.abs(vector.values)).size == 1
        if step >= 40:
            counts.append(vector.nnz / (length / bin_size))
            rates.append(gradient.nbytes / message.nbytes)
    assert np.mean(counts) == pytest.approx(entries, abs=0.1)
    assert min(rates) > rate


def test_adacomp_sends_nothing_of_bins_of_zeros_which_count_in_the_mean():
    gradient = np.zeros(500)
    gradient[120] = 2
    vector = AdaComp(50).compress(gradient, gradient=gradient)
    assert (vector.indices.tolist(), vector.values.tolist()) == ([120], [2 / 10])
    least = np.finfo(np.float32).smallest_subnormal
    few = np.where(np.arange(500) == 120, least, np.float32(0))
    assert AdaComp(50).compress(few, gradient=few).values.tolist() == [least]
    with pytest.raises(ValueError, match="AdaComp needs the new gradient too"):
        AdaComp(50).compress(gradient)


def union_of_16_ranks(make):
    """Return the union over k, the mean of rounds 31 to 40: 20,000 values, k = 200."""
    size, length, k, unions = 16, 20_000, 200, []
    ranks = [
        (make(k), ErrorFeedback(), noisy_gradients(rank, length))
        for rank in range(size)
    ]
    for _ in range(40):
        total = np.zeros(length)
        is_sent = np.zeros(length, bool)
        for compressor, feedback, gradients in ranks:
            vector = take_step(feedback, compressor, next(gradients))
            total[vector.indices] += vector.values
            is_sent[vector.indices] = True
        aggregate = SparseVector(np.flatnonzero(is_sent), total[is_sent], length)
        for compressor, _, _ in ranks:
            if isinstance(compressor, AggregationAware):
                compressor.observe(aggregate)
        unions.append(aggregate.nnz / k)
    return np.mean(unions[30:])


def test_the_union_shrinks_when_ranks_look_at_the_last_aggregate():
    """About 12 k for top-k, under 6 k with a bonus."""
    assert 11 < union_of_16_ranks(lambda k: TopK(k=k)) < 13
    assert union_of_16_ranks(lambda k: AggregationAware(k=k)) < 6


def test_a_bonus_prefers_what_was_in_the_last_aggregate():
    compressor = AggregationAware(k=1)
    assert compressor.compress(np.array([3.0, 2.0, 0.0])).indices.tolist() == [0]
    compressor.observe(SparseVector([1, 2], [-2.0, 9.0], 3))
    # an exact zero is never sent
    assert compressor.compress(np.array([3.0, 2.0, 0.0])).indices.tolist() == [1]
    with pytest.raises(ValueError, match="corrected has 4 values: expected 3"):
        compressor.compress(np.ones(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaComp(0), "bin_size is 0: expected an integer from 1 to 16384"),
        (
            lambda: AggregationAware(0.1, metric="age"),
            "metric is 'age': expected one of",
        ),
        (
            lambda: AggregationAware(0.1, quota=2),
            "quota is 2: expected 0 <= quota <= 1",
        ),
        (
            lambda: TopK(k=2**63),
            "k is 9223372036854775808: expected an integer of at least 1, below 2^63",
        ),
        (
            lambda: WarmUp(TopK(k=3)),
            "expected at least one density, and a compressor made with density=",
        ),
        (lambda: WarmUp(TopK(0.1), []), "expected at least one density"),
        (lambda: WarmUp(TopK(0.1), [5.0]), "density is 5.0: expected 0 < density <= 1"),
        (lambda: WarmUp(TopK(0.1), calls=0), "calls is 0"),
        (lambda: TopK(), "got density=None and k=None: expected exactly one of them"),
    ],
)
def test_bad_settings_raise(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()
