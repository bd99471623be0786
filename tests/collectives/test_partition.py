import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import sparse_vectors

from collectives.planning.partition import (
    balanced_bounds,
    cut,
    equal_bounds,
    given_bounds,
    likely,
    sample,
)
from mpicomp import SparseVector
from mpicomp.vector import join


@given(st.integers(0, 2**63 - 1), st.integers(1, 2000))
def test_equal_ranges_cover_everything_and_differ_by_one_at_most(length, size):
    bounds = equal_bounds(length, size)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, length, size + 1)
    lengths = [end - start for start, end in pairwise(bounds)]
    assert min(lengths) >= 0
    assert max(lengths) - min(lengths) <= 1


@given(st.one_of(sparse_vectors(), sparse_vectors(width=2)), st.integers(1, 12))
def test_cut_gives_every_entry_to_its_owner_and_join_undoes_it(vector, size):
    bounds = equal_bounds(vector.length, size)
    parts = cut(vector, bounds)
    assert len(parts) == size
    for rank, part in enumerate(parts):
        part.validate()
        assert all(bounds[rank] <= index < bounds[rank + 1] for index in part.indices)
    whole = join(parts)
    assert whole.indices.tolist() == vector.indices.tolist()
    assert whole.values.tobytes() == vector.values.tobytes()


@pytest.mark.parametrize("length", [2**31 - 1, 2**53 + 1, 2**63 - 1])
@pytest.mark.parametrize("size", [3, 8])
def test_bounds_are_right_at_the_largest_lengths(length, size):
    """Published code takes the average of P boundaries in 32 bits."""
    last = SparseVector([length - 1], [1.0], length)
    assert [part.nnz for part in cut(last, equal_bounds(length, size))] == [0] * (
        size - 1
    ) + [1]
    everywhere = np.linspace(length / 2, length - 10_000, 4096).astype(np.int64)
    shares = [sample(everywhere, rank, size) for rank in range(size)]
    bounds = balanced_bounds(shares, [4096] * size, length, size)
    assert all(start < end for start, end in pairwise(bounds))
    places = np.searchsorted(everywhere, np.array(bounds))
    assert np.diff(places).max() <= 1.1 * 4096 / size


def hot(rank, length, entries):
    """Return the support of a gradient whose mass sits in 5 % of its length: 9 in 10 entries stand there."""
    rng = np.random.default_rng(rank)
    inside = rng.choice(length // 20, entries * 9 // 10, replace=False) + length // 3
    return np.union1d(inside, rng.choice(length, entries // 10, replace=False))


def largest_share(partition, supports, length):
    """Return the entries that the busiest owner gets, over the mean."""
    vectors = [
        SparseVector(support, np.ones(support.size), length) for support in supports
    ]
    received = np.sum(
        [[part.nnz for part in cut(vector, partition)] for vector in vectors], axis=0
    )
    return received.max() / received.mean()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16, 64])
def test_quantiles_balance_a_gradient_that_is_hot_in_a_twentieth_of_its_length(size):
    length = 1_000_000
    supports = [hot(rank, length, 20_000) for rank in range(size)]
    counts = [support.size for support in supports]
    samples = [sample(support, rank, size) for rank, support in enumerate(supports)]
    assert largest_share(equal_bounds(length, size), supports, length) > min(
        15, 0.6 * size
    )
    assert (
        largest_share(balanced_bounds(samples, counts, length, size), supports, length)
        <= 1.1
    )


def test_one_rank_with_everything_and_one_support_on_all_ranks_are_balanced_too():
    length, size = 1_000_000, 8
    support = hot(0, length, 20_000)
    for supports in (
        [support] * size,
        [support] + [support[:0]] * (size - 1),
        [support[:3]] + [support] * (size - 1),
    ):
        counts = [each.size for each in supports]
        samples = [sample(each, rank, size) for rank, each in enumerate(supports)]
        assert (
            largest_share(
                balanced_bounds(samples, counts, length, size), supports, length
            )
            <= 1.1
        )


def test_where_all_ranks_have_one_support_each_samples_other_places_of_it():
    length, size = 1_000_000, 8
    supports = [hot(0, length, 20_000)] * size
    samples = [sample(each, rank, size) for rank, each in enumerate(supports)]
    assert np.unique(np.concatenate(samples)).size == size * samples[0].size
    balanced = balanced_bounds(samples, [each.size for each in supports], length, size)
    assert largest_share(balanced, supports, length) <= 1.01


def test_even_supports_keep_equal_ranges_and_so_do_small_ones():
    rng = np.random.default_rng(0)
    even = [np.sort(rng.choice(100_000, 5000, replace=False)) for _ in range(4)]
    samples = [sample(support, rank, 4) for rank, support in enumerate(even)]
    assert balanced_bounds(samples, [5000] * 4, 100_000, 4) == equal_bounds(100_000, 4)
    few = [sample(np.arange(15), rank, 4) for rank in range(4)]
    assert balanced_bounds(few, [15] * 4, 100_000, 4) == equal_bounds(100_000, 4)
    assert balanced_bounds(few, [15] * 4, 100_000, 4) == equal_bounds(100_000, 4)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            [0, 10],
            "partition has 2 bounds from 0 to 10: expected 4 from 0 to the length 10",
        ),
        ([0, 3, 5, 9], "expected 4"),
        ([1, 3, 5, 10], "expected 4"),
        ([0, 5, 3, 10], "partition has bounds that decrease"),
        ([], "expected 4"),
    ],
)
def test_bounds_that_do_not_cover_the_indices_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        given_bounds(bounds, 10, 3)


def test_the_callers_own_bounds():
    assert given_bounds(np.array([0, 0, 7, 10]), 10, 3) == (0, 0, 7, 10)
    with pytest.raises(TypeError):
        given_bounds([0, 2.5, 10], 10, 2)


@pytest.mark.parametrize("size", [2, 8, 64, 1024])
@pytest.mark.parametrize("mean", [0.1, 1, 4, 100, 1875])
def test_what_a_share_is_likely_to_hold_is_rarely_too_little_and_little_too_much(
    size, mean
):
    """Entries that are spread at random are about Poisson distributed over the shares."""
    most = likely(mean, size)
    within = sum(
        math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        for count in range(most + 1)
    )
    assert size * (1 - within) < 0.02
    assert most <= mean + 5 * math.sqrt(mean) + 7
    assert likely(0, size) == 0
