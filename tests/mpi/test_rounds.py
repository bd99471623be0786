"""What a loop knows of its rounds: whether there is progress, whether the model is at its anchor, what is trained."""

import warnings

import numpy as np
import pytest
from cases import is_last, through_a_file

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    redistribute_state,
)
from mpicomp import Dense, NoFeedback, TopK

pytestmark = pytest.mark.small_groups

EXCHANGES = {
    "dense": {"compressor": Dense(), "feedback": NoFeedback()},
    "4 bits": {"bits": 4},
    "top-k": {"compressor": TopK(0.1)},
}
LOOPS = {"plain": {}, "momentum": {"momentum": 0.5}, "delay": {"delay": 1}}
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES)
every_loop = pytest.mark.parametrize("settings", LOOPS)


def made(comm, parameters=None, exchange="dense", every=3, nonfinite="raise", **more):
    if parameters is None:
        parameters = {"w": np.zeros(2000, np.float32)}
    made = GradientExchange(comm, nonfinite=nonfinite, **EXCHANGES[exchange])
    return parameters, OuterLoop(made, parameters, every=every, **more)


def train(comm, parameters, loop, steps):
    for _ in range(steps):
        for array in parameters.values():
            array += comm.rank + 1 + np.arange(array.size) % 5
        loop.step()


def are_replicas(comm, loop, parameters):
    """Return whether all ranks hold the same parameters, which are their anchor."""
    mine = [array.tobytes() for array in parameters.values()]
    anchor = [array.tobytes() for array in loop.anchor.values()]
    return len({*map(tuple, comm.allgather(mine + anchor))}) == 1 and mine == anchor


@every_exchange
@every_loop
@pytest.mark.parametrize("fault", ["skipped", "raised"])
def test_the_progress_of_a_round_that_failed_is_synchronised(
    comm, exchange, settings, fault
):
    """At once, and also by a second call of synchronise() where the first one fails too."""
    nonfinite = "skip" if fault == "skipped" else "raise"
    more = LOOPS[settings]
    parameters, loop = made(comm, exchange=exchange, nonfinite=nonfinite, **more)
    delay = more.get("delay", 0)
    train(comm, parameters, loop, 3 + delay)
    assert loop.rounds == 1

    def fails(call):
        """Call it with a NaN on the last rank."""
        whole = parameters["w"][5]
        if is_last(comm):
            parameters["w"][5] = np.nan
        if fault == "skipped":
            assert call() is False
        else:
            with pytest.raises((ValueError, CollectiveError), match="is nan"):
                call()
        if is_last(comm):
            parameters["w"][5] = whole

    if delay:
        train(comm, parameters, loop, 1)
        whole = parameters["w"][5]
        if is_last(comm):
            parameters["w"][5] = np.nan
        assert loop.step() is False
        if is_last(comm):
            parameters["w"][5] = whole
        if fault == "raised":
            with pytest.raises((ValueError, CollectiveError), match="is nan"):
                loop.step()
        else:
            assert loop.step() is False
    else:
        train(comm, parameters, loop, 2)
        fails(loop.step)
    assert loop.rounds == 1
    fails(loop.synchronise)
    fails(loop.synchronise)
    states = comm.allgather(loop.state_dict())
    with pytest.raises(ValueError, match=r"within a round .* after synchronise"):
        redistribute_state(states.__getitem__, comm.size, comm.rank, comm.size)
    assert loop.synchronise() is True
    assert are_replicas(comm, loop, parameters)
    assert loop.synchronise() is False
    rounds = loop.rounds
    train(comm, parameters, loop, 3 + delay)
    assert loop.rounds == rounds + 1


@every_exchange
@pytest.mark.parametrize(("saved", "every"), [(6, 4), (6, 5), (6, 7), (6, 3), (3, 10)])
@pytest.mark.parametrize("redistributes", [False, True])
def test_a_state_of_a_round_that_ended_loads_with_any_every(
    comm, exchange, saved, every, redistributes
):
    parameters, loop = made(comm, exchange=exchange, every=saved)
    train(comm, parameters, loop, 2 * saved)
    states = comm.allgather(through_a_file(loop.state_dict()))
    fresh, other = made(comm, exchange=exchange, every=every)
    state = states[comm.rank]
    if redistributes:
        state = redistribute_state(states.__getitem__, comm.size, comm.rank, comm.size)
    other.load_state_dict(state, same_settings=False)
    assert fresh["w"].tobytes() == parameters["w"].tobytes()
    train(comm, fresh, other, every)
    assert other.rounds == loop.rounds + 1
    assert are_replicas(comm, other, fresh)


@pytest.mark.parametrize("every", [2, 4, 9])
def test_a_state_from_within_a_round_continues_with_another_every(comm, every):
    """Its steps count: the round ends after as many as the new loop has, at once if there were more."""
    parameters, loop = made(comm, every=6)
    train(comm, parameters, loop, 9)
    fresh, other = made(comm, every=every)
    other.load_state_dict(loop.state_dict(), same_settings=False)
    assert not fresh["w"].any(), "the parameters within a round belong to the rank"
    fresh["w"][:] = parameters["w"]
    left = max(every - 3, 1)
    train(comm, fresh, other, left)
    assert other.rounds == 2
    assert are_replicas(comm, other, fresh)
    train(comm, parameters, loop, left)
    loop.synchronise()
    assert fresh["w"].tobytes() == parameters["w"].tobytes()


class Trained(np.ndarray):
    """An array that requires a gradient, as PyTorch's parameters do."""

    requires_grad = True


@pytest.mark.parametrize("follows", ["synchronise", "load", "redistribute"])
def test_a_frozen_parameter_that_moves_first_is_in_the_round_that_ends(comm, follows):
    """On one rank alone; so all ranks hold the anchor behind the round."""

    def started():
        arrays = {name: np.zeros(2000, np.float32).view(Trained) for name in "vw"}
        return made(comm, arrays, every=2)

    parameters, loop = started()
    moving = {"v": parameters["v"]}
    train(comm, parameters, loop, 2)
    parameters["w"].requires_grad = False
    train(comm, moving, loop, 4)
    before = loop.anchor["w"].copy()
    if is_last(comm):
        parameters["w"] += comm.size
    train(comm, moving, loop, 2)
    assert are_replicas(comm, loop, parameters)
    np.testing.assert_array_equal(parameters["w"], before + 1)
    assert loop.synchronise() is False
    if follows == "synchronise":
        return
    state = loop.state_dict()
    if follows == "redistribute":
        states = comm.allgather(state)
        state = redistribute_state(states.__getitem__, comm.size, comm.rank, comm.size)
    fresh, other = started()
    other.load_state_dict(state)
    assert are_replicas(comm, other, fresh)
    assert fresh["w"].tobytes() == parameters["w"].tobytes()


# What the program trains


def test_a_round_without_progress_on_any_rank_warns(comm):
    """As w = w - rate * g makes an array that the loop does not know."""
    own, loop = made(comm, every=1)
    w = own["w"]
    w = w - 0.1
    with pytest.warns(
        RuntimeWarning, match=r"no rank has changed .* w\[\.\.\.\] = "
    ) as caught:
        loop.step()
    assert caught[0].filename == __file__
    assert not own["w"].any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # one rank alone has a batch
            own["w"] += is_last(comm)
            loop.step()


@pytest.mark.parametrize(
    "copies",
    [
        lambda array: array.copy(),
        lambda array: array.astype(np.float64),
        lambda array: array.tolist() and np.array(array),
    ],
)
def test_a_function_that_returns_copies_is_refused(comm, copies):
    model = {"w": np.zeros(2000, np.float32), "bias": np.zeros(3, np.float32)}
    with pytest.raises(
        (ValueError, CollectiveError), match=r"returns w in other memory .*no copies"
    ):
        made(comm, lambda: {name: copies(array) for name, array in model.items()})
    made(comm, lambda: {name: array.view() for name, array in model.items()})


def test_an_array_that_is_read_only_names_what_works(comm):
    array = np.zeros(2000, np.float32)
    array.flags.writeable = False
    with pytest.raises(
        (ValueError, CollectiveError), match=r"read-only .* copy\[\.\.\.\] = new"
    ):
        made(comm, {"w": array})


class Masters:
    """An optimiser that trains copies of its own, and writes them to the parameters."""

    def __init__(self, parameters, rank):
        self.parameters, self.rank = parameters, rank
        self.copies = {
            name: array.astype(np.float64) for name, array in parameters.items()
        }

    def step(self):
        for name, array in self.copies.items():
            array -= (self.rank + 1) * 0.01 * (np.arange(array.size) % 3)
            self.parameters[name][...] = array


@every_exchange
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.at_least(2)
def test_an_optimiser_that_trains_copies_is_noticed_in_the_first_round(
    comm, exchange, dtype
):
    parameters, loop = made(
        comm, {"w": np.zeros(2000, dtype)}, exchange=exchange, every=10
    )
    optimiser = Masters(parameters, comm.rank)
    for _ in range(10):
        optimiser.step()
        loop.step()
    optimiser.step()
    with pytest.raises(CollectiveError, match=r"before round 1 .* float32 masters"):
        loop.step()
    parameters, loop = made(comm, {"w": np.zeros(2000)}, exchange=exchange, every=10)
    optimiser = Masters(parameters, comm.rank)
    optimiser.copies = parameters
    for _ in range(30):
        optimiser.step()
        loop.step()
    assert loop.rounds == 3


@every_exchange
@pytest.mark.parametrize(
    "rate",
    [0.1, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.5, 0.7)), 1.0],
)
@pytest.mark.parametrize("every", [1, 2, 4, 10])
def test_steps_towards_an_optimum_of_each_rank_are_no_copies(
    comm, exchange, rate, every
):
    """Also fast ones, as by LBFGS, where only some ranks have batches, and where all ranks have the same optimum."""
    for optimum in (1.0, float(comm.rank), float(comm.rank == 0)):
        parameters, loop = made(comm, exchange=exchange, every=every)
        for _ in range(4 * every):
            parameters["w"] -= np.float32(rate) * (parameters["w"] - optimum)
            loop.step()
        assert loop.rounds == 4


@pytest.mark.at_least(2)
def test_two_loops_in_another_order_by_rank_are_named(comm):
    ends = [made(comm, every=1)[1] for _ in range(2)]
    if is_last(comm):
        ends.reverse()
    with pytest.raises(CollectiveError, match=r"of exchange \d.* in the same order"):
        ends[0].step()


def test_parameters_that_overlap_after_the_loop_was_made_are_refused(comm):
    """In PyTorch: `p.data` made a view of another parameter's memory."""
    model = {"w": np.zeros(2000, np.float32), "bias": np.zeros(3, np.float32)}
    _, outer = made(comm, lambda: model)
    if comm.rank == comm.size - 1:
        model["bias"] = model["w"][5:8]
    model["w"] += 1
    for _ in range(outer.every - 1):
        outer.step()
    with pytest.raises(
        (ValueError, CollectiveError), match="two parameters share a part"
    ):
        outer.step()
