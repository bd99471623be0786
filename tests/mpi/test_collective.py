"""A collective is declared once: a new algorithm is one function, and is tested against one oracle."""

import numpy as np
import pytest
from cases import contributions, declare_gathering, select, window

from collectives import gtopk_allreduce, gtopk_iallreduce


@pytest.mark.parametrize("pattern", ["random", "unequal", "disjoint", "empty"])
def test_a_new_algorithm_is_one_function(comm, monkeypatch, pattern):
    declare_gathering(monkeypatch)
    total = sum(window(vector) for vector in contributions(pattern, comm.size))
    vector = contributions(pattern, comm.size)[comm.rank]
    for outcome in (
        gtopk_allreduce(vector, comm, 3, algorithm="gathering"),
        gtopk_iallreduce(vector, comm, 3, algorithm="gathering").wait(),
    ):
        np.testing.assert_array_equal(window(outcome[0]), select(total, 3))
