"""The union of supports, from the entries in a few windows of the index space."""

import numpy as np
import pytest

from collectives.planning.choice import Case
from collectives.planning.overlap import (
    LEAST_ENTRIES,
    SHOWN,
    WINDOWS,
    inside,
    likely_union,
    outside,
    windows,
)

SIZES = 2, 4, 8, 16


def supports(common, size, length, entries):
    """Return indices of each rank, of which so many are those of all ranks."""
    rng = np.random.default_rng([size, common])
    shared = rng.choice(length, common, replace=False)
    drawn = []
    for _ in range(size):
        own = np.setdiff1d(rng.choice(length, entries, replace=False), shared)
        own = rng.permutation(own)[: entries - common]
        drawn.append(np.sort(np.concatenate([shared, own])))
    return drawn


@pytest.mark.parametrize("length", [LEAST_ENTRIES, 10**6 + 7, 2**40, 2**63 - 1])
@pytest.mark.parametrize("entries", [LEAST_ENTRIES, 5001, 10**6, 10**9])
def test_windows_are_in_order_and_those_of_more_entries_are_parts_of_the_others(
    length, entries
):
    edges = windows(length, entries)
    assert edges.size == 2 * WINDOWS
    assert (np.diff(edges) >= 0).all()
    assert edges[0] >= 0
    assert edges[-1] <= length
    fewer = windows(length, LEAST_ENTRIES)
    assert (fewer[::2] == edges[::2]).all()
    assert (fewer[1::2] >= edges[1::2]).all()


def test_an_index_is_in_the_windows_or_it_is_not():
    rng = np.random.default_rng(0)
    for dtype, length in (np.int32, 10**6), (np.int64, 2**40):
        indices = np.unique(rng.integers(0, length, 20_000)).astype(dtype)
        edges = windows(length, indices.size)
        parts = inside(indices, edges), outside(indices, edges)
        assert parts[0].dtype == dtype
        assert SHOWN / 4 < parts[0].size < 2 * SHOWN
        np.testing.assert_array_equal(np.union1d(*parts), indices)
        assert sum(part.size for part in parts) == indices.size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.9, 1])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_the_union_is_known_within_some_per_cent(size, share, density):
    entries = 20_000
    drawn = supports(round(share * entries), size, round(entries / density), entries)
    found = likely_union(round(entries / density), [entries] * size, drawn)
    true = np.unique(np.concatenate(drawn)).size
    assert found == pytest.approx(true, rel=0.25)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [0.01, pytest.param(0.3, marks=pytest.mark.slow)])
def test_independent_supports_are_taken_for_independent(size, density):
    """Sums of a step that are alike take one algorithm, which decides what they send first in the next step."""
    entries = 10_000
    length = round(entries / density)
    case = Case(size, length, entries)
    cases = set()
    for seed in range(20):
        rng = np.random.default_rng([size, seed])
        drawn = [np.sort(rng.permutation(length)[:entries]) for _ in range(size)]
        union = likely_union(length, [entries] * size, drawn)
        cases.add(case.with_union(union))
    assert cases == {case}


def test_ranks_with_other_numbers_of_entries_show_the_same_windows():
    length = 10**7
    many = supports(0, 1, length, 100_000)[0]
    few = many[::20]
    counts = [many.size, few.size, many.size]
    shown = [inside(each, windows(length, each.size)) for each in (many, few, many)]
    assert likely_union(length, counts, shown) == pytest.approx(100_000, rel=0.15)


def test_nothing_is_said_of_a_support_that_the_windows_miss():
    length = 10**6
    edges = windows(length, 5000)
    hidden = outside(np.arange(0, length, 200), edges)
    assert likely_union(length, [5000, 5000], [hidden, np.arange(5000)]) is None


@pytest.mark.parametrize("size", SIZES)
def test_a_case_with_a_union_has_it(size):
    case = Case(size, 10**6, 10_000)
    independent = case.union(size)
    assert case.with_union(independent) == case
    for union in 10_000, 12_000, 0.9 * independent:
        found = case.with_union(union)
        assert found.union(1) == case.union(1)
        assert found.union(size) == pytest.approx(union, rel=0.1)
    disjoint = Case(size, 10**6, 10**6 / size).with_union(10**6)
    assert disjoint.union(size) == pytest.approx(10**6, rel=0.01)
    assert Case(1, 10, 5).with_union(5).fresh == 1
    for entries in 0, 10:
        assert Case(4, 10, entries).with_union(entries).fresh == 1


def test_shares_of_nodes_have_the_same_union():
    for fresh in 0, 0.3, 1, 1.5:
        case = Case(16, 10**6, 1000, per_node=4, fresh=fresh)
        between = case.of_nodes()
        assert 4 * between.union(4) == pytest.approx(case.union(16), rel=0.01)
