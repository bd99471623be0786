"""Thousands of small named tensors, as experts and adapters have: the work grows in proportion to their number."""

import cProfile

import numpy as np
import pytest

from collectives import GradientExchange
from mpicomp import TopK

pytestmark = pytest.mark.exactly(1)

FEW, MANY = 50, 400


def gradients(count):
    return {f"layer.{number}": np.ones(4, np.float32) for number in range(count)}


def calls(function):
    """Return the number of functions that a call calls, and its result."""
    profile = cProfile.Profile()
    result = profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats()), result


@pytest.mark.parametrize("settings", [{"compressor": TopK(k=1)}, {"bits": 4}])
def test_calls_grow_in_proportion_to_the_tensors(comm, settings):
    counts = []
    for count in FEW, MANY:
        exchange = GradientExchange(comm, small=0, **settings)
        resumed = GradientExchange(comm, small=0, **settings)
        mine = gradients(count)
        exchange(mine)
        resumed.register(mine)
        of_step, _ = calls(lambda each=exchange, given=mine: each(given))
        of_save, state = calls(exchange.state_dict)
        of_load, _ = calls(
            lambda each=resumed, given=state: each.load_state_dict(given)
        )
        of_hold, _ = calls(lambda each=resumed: each.hold(["layer.1"]))
        counts.append((of_step, of_save, of_load, of_hold))
        resumed.hold([])
        means = resumed(mine)
        expected = exchange(mine)
        assert all(np.array_equal(means[name], expected[name]) for name in mine)
    for of_few, of_many in zip(*counts, strict=True):
        assert of_many < 1.1 * of_few * MANY / FEW
    _, _, _, of_hold = counts[-1]
    assert of_hold < 400 * MANY  # whoever looks at each tensor's signature takes 600
