"""Parts of a model that are exchanged one after the other, each by a loop of its own, also with a delay.

The trajectories are those of torchft's regression test of DiLoCo
(torchft/diloco_regression_test.py and its fixtures): two layers of one weight, of which
every local step subtracts 2; rounds of 6 steps, a layer every 3; outer rate 2; all
replicas alike. alpha: the share of the local parameters in what a round leaves.
"""

import numpy as np
import pytest

from collectives import CollectiveError, GradientExchange, OuterLoop
from mpicomp import Dense, NoFeedback

pytestmark = pytest.mark.small_groups

EVERY = 6
# by delay and alpha: the layers after 3, 6, 9, 12 and 15 steps
TRAJECTORIES = {
    (0, 0.0): ([-11, -17, -35, -41, -59], [-5, -23, -29, -47, -53]),
    (0, 0.5): ([-8, -14, -24.5, -30.5, -40.25], [-5, -17, -23, -32, -38]),
    (0, 1.0): ([-5, -11, -17, -23, -29], [-5, -11, -17, -23, -29]),
    (1, 0.0): ([-7, -13, -27, -33, -47], [-5, -19, -25, -39, -45]),
    (1, 0.5): ([-6, -12, -21.5, -27.5, -35.75], [-5, -15, -21, -29, -35]),
    (1, 1.0): ([-5, -11, -17, -23, -29], [-5, -11, -17, -23, -29]),
}
# their anchors after as many
ANCHORS = {
    (0, 0.0): ([-11, -11, -35, -35, -59], [1, -23, -23, -47, -47]),
    (0, 0.5): ([-11, -11, -29, -29, -44], [1, -23, -23, -35, -35]),
    (0, 1.0): ([-11, -11, -23, -23, -35], [1, -23, -23, -23, -23]),
    (1, 0.0): ([-7, -7, -27, -27, -47], [1, -19, -19, -39, -39]),
    (1, 0.5): ([-7, -7, -25, -25, -38], [1, -19, -19, -31, -31]),
    (1, 1.0): ([-7, -7, -23, -23, -31], [1, -19, -19, -23, -23]),
}


# where an anchor meets the parameters
@pytest.mark.filterwarnings("ignore:no rank has changed a parameter")
@pytest.mark.parametrize(("delay", "alpha"), TRAJECTORIES)
def test_fragments_have_the_trajectories_of_torchft(comm, delay, alpha):
    layers, loops = [], []
    for number in range(2):
        layers.append({"weight": np.ones((1, 1), np.float32)})
        exchange = GradientExchange(comm, Dense(), NoFeedback())
        loop = OuterLoop(
            exchange,
            layers[-1],
            EVERY,
            rate=2,
            delay=delay,
            first=EVERY // 2 * (1 + number) - delay,
            check_every=int(alpha < 1),  # else each round is undone
        )
        loops.append(loop)
    found, anchors = ([], []), ([], [])
    for step in range(1, 16):
        for layer, loop, trajectory, of_anchor in zip(
            layers, loops, found, anchors, strict=True
        ):
            parameters = layer["weight"]
            parameters -= 2
            local = parameters.copy()
            if loop.step():
                anchor = loop.anchor["weight"]
                parameters[...] = (1 - alpha) * anchor + alpha * local
            if step % 3 == 0:
                trajectory.append(parameters.item())
                of_anchor.append(loop.anchor["weight"].item())
    assert found == TRAJECTORIES[delay, alpha]
    assert anchors == ANCHORS[delay, alpha]


@pytest.mark.parametrize("delay", [0, 2])
def test_a_first_round_may_be_shorter(comm, delay):
    parameters = {"weight": np.zeros(3, np.float32)}
    exchange = GradientExchange(comm, Dense(), NoFeedback())
    loop = OuterLoop(exchange, parameters, every=5, delay=delay, first=2)
    loop.restart()
    ended = []
    for step in range(1, 14):
        parameters["weight"] -= 1
        if loop.step():
            ended.append(step)
    assert ended == [2 + delay, 7 + delay, *([12] if delay == 0 else [])]


@pytest.mark.parametrize(
    ("first", "error"), [(0, ValueError), (6, ValueError), (1.5, TypeError)]
)
def test_a_first_round_has_steps_of_a_round(comm, first, error):
    exchange = GradientExchange(comm, Dense(), NoFeedback())
    with pytest.raises(error, match="first is"):
        OuterLoop(exchange, np.zeros(3), every=5, first=first)


@pytest.mark.at_least(2)
def test_first_rounds_of_other_lengths_raise(comm):
    exchange = GradientExchange(comm, Dense(), NoFeedback())
    with pytest.raises(
        CollectiveError, match="'first' is 1 on rank 0, and 2 on rank 1"
    ):
        OuterLoop(exchange, np.zeros(3), every=5, first=1 + min(comm.rank, 1))


def test_a_run_of_fragments_continues_from_its_state(comm):
    def made(first):
        parameters = {"weight": np.zeros(3, np.float32)}
        exchange = GradientExchange(comm, Dense(), NoFeedback())
        return parameters, OuterLoop(
            exchange, parameters, every=5, delay=1, first=first
        )

    def train(parameters, loop, steps):
        for step in steps:
            parameters["weight"] -= step * (comm.rank + 1)
            loop.step()

    parameters, loop = made(2)
    train(parameters, loop, range(1, 4))
    state, saved = loop.state_dict(), parameters["weight"].copy()
    train(parameters, loop, range(4, 15))
    resumed, other = made(2)
    other.load_state_dict(state)
    resumed["weight"][...] = saved
    train(resumed, other, range(4, 15))
    assert resumed["weight"].tobytes() == parameters["weight"].tobytes()
    assert other.rounds == loop.rounds == 3
