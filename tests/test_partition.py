from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import sparse_vectors

from collectives.partition import cut, equal_ranges
from collectives.tuning import choose_allreduce, expected_union


@given(st.integers(0, 2**63 - 1), st.integers(1, 2000))
def test_equal_ranges_cover_everything_and_differ_by_one_at_most(length, size):
    bounds = equal_ranges(length, size)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, length, size + 1)
    lengths = [end - start for start, end in pairwise(bounds)]
    assert min(lengths) >= 0
    assert max(lengths) - min(lengths) <= 1


@given(sparse_vectors(), st.integers(1, 12))
def test_cut_gives_every_entry_to_its_owner(vector, size):
    bounds = equal_ranges(vector.length, size)
    parts = cut(vector, bounds)
    assert np.concatenate([part.indices for part in parts]).tolist() == vector.indices.tolist()
    for rank, part in enumerate(parts):
        assert all(bounds[rank] <= index < bounds[rank + 1] for index in part.indices)


def test_the_expected_union_of_independent_supports():
    assert expected_union(1000, [10] * 4) == pytest.approx(1000 * (1 - 0.99**4))
    assert expected_union(10, [10, 3]) == 10
    assert expected_union(0, [0, 0]) == 0


@pytest.mark.parametrize(
    ("length", "counts", "algorithm"),
    [
        (10**6, [1000], "recursive_doubling"),
        (10**6, [1000] * 2, "recursive_doubling"),
        (10**6, [511] * 8, "allgather"),
        (10**6, [512] * 8, "split_allgather"),
        (100, [100] * 3, "allgather"),
        (10**6, [0] * 8, "allgather"),
        (10**6, [60_000] * 8, "split_allgather"),
        (10**6, [10_000] * 65, "recursive_halving"),
        (10**6, [300_000] * 4, "dense"),
        (10**6, [10**6, 0, 0], "dense"),
    ],
)
def test_the_rule_of_auto(length, counts, algorithm):
    assert choose_allreduce(length, counts) == algorithm


@pytest.mark.parametrize(("value_nbytes", "algorithm"), [(2, "dense"), (4, "split_allgather"), (256, "split_allgather")])
def test_auto_goes_dense_where_that_is_smaller(value_nbytes, algorithm):
    assert choose_allreduce(10**6, [130_000] * 4, value_nbytes) == algorithm
