"""Ranks out of step are noticed by the agreement of the next step; tensors that are held take no part in it."""

import copy
import os
import pickle
import signal

import numpy as np
import pytest
from cases import is_last

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    gtopk_allreduce,
    sparse_allreduce,
)
from mpicomp import Dense, ErrorFeedback, MomentumCorrection, StepAhead, TopK, WarmUp
from mpicomp.bucket import Bucket
from mpicomp.replica import Replica

pytestmark = pytest.mark.small_groups

SHAPES = {"weight": (40, 50), "bias": (7,), "other": (1500,)}
MAKERS = {
    "top-k": lambda comm: GradientExchange(
        comm, TopK(0.05), collective=gtopk_allreduce
    ),
    "four bits": lambda comm: GradientExchange(comm, bits=4),
    "two bits": lambda comm: GradientExchange(comm, bits=2),
    "momentum": lambda comm: GradientExchange(
        comm, TopK(0.05), MomentumCorrection(0.9), bucket_nbytes=100
    ),
}
every_maker = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


def gradients(comm, step, names=SHAPES):
    draw = np.random.default_rng([step, comm.rank]).standard_normal
    return {
        name: draw(SHAPES[name]).astype(np.float32) for name in SHAPES if name in names
    }


def expect_same(comm, means):
    assert (
        len({*comm.allgather(b"".join(mean.tobytes() for mean in means.values()))}) == 1
    )


def loads_another_step(exchange, states):
    exchange.load_state_dict(states[1])


CHANGES = {
    "load": loads_another_step,
    "reset": lambda exchange, states: exchange.reset(),
    "rescale": lambda exchange, states: exchange.rescale(0.5),
}


@every_maker
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.at_least(2)
def test_a_change_on_one_rank_raises_on_all_and_one_on_all_goes_on(comm, maker, change):
    exchange, states = maker(comm), []
    for step in range(3):
        exchange(gradients(comm, step))
        states.append(exchange.state_dict())
    if is_last(comm):
        change(exchange, states)
    before = exchange.state_dict()
    for _ in range(2):
        with pytest.raises(
            CollectiveError,
            match=r"out of step: .*step 3 of .* on rank.*; step .* on rank",
        ):
            exchange(gradients(comm, 3))
        np.testing.assert_equal(exchange.state_dict(), before)
    exchange.load_state_dict(states[1])
    expect_same(comm, exchange(gradients(comm, 2)))
    assert exchange.steps == 3
    change(exchange, states)
    expect_same(comm, exchange(gradients(comm, 3)))


@pytest.mark.at_least(2)
def test_a_torn_checkpoint_is_refused_by_the_first_step(comm):
    exchange, states = MAKERS["top-k"](comm), []
    for step in range(4):
        exchange(gradients(comm, step))
        states.append(exchange.state_dict())
    resumed = MAKERS["top-k"](comm)
    resumed.register(gradients(comm, 0))
    resumed.load_state_dict(states[1 if is_last(comm) else 3])
    with pytest.raises(
        CollectiveError,
        match=r"step 2 of exchange .*, after load_state_dict on rank",
    ):
        resumed(gradients(comm, 4))
    assert "4 exchanges" not in resumed.report()


@pytest.mark.at_least(2)
@pytest.mark.unchecked("raises at once")
def test_an_interrupt_after_the_agreement_is_noticed_by_the_next_step(
    comm, monkeypatch
):
    exchange = MAKERS["top-k"](comm)
    exchange(gradients(comm, 0))

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if is_last(comm):
            patch.setattr(ErrorFeedback, "_swap", lambda *names: interrupted)
            with pytest.raises(KeyboardInterrupt):
                exchange(gradients(comm, 1))
        else:
            exchange(gradients(comm, 1))
    with pytest.raises(CollectiveError, match="out of step"):
        exchange(gradients(comm, 2))


def test_an_interrupt_within_a_step_is_delivered_after_it(comm, monkeypatch):
    exchange, correct, interrupt = (
        MAKERS["top-k"](comm),
        Bucket.correct,
        [is_last(comm)],
    )
    exchange(gradients(comm, 0))

    def interrupted(self, *given, **settings):
        if interrupt.pop():
            os.kill(os.getpid(), signal.SIGINT)
        interrupt.append(False)
        return correct(self, *given, **settings)

    monkeypatch.setattr(Bucket, "correct", interrupted)
    if is_last(comm):
        with pytest.raises(KeyboardInterrupt):
            exchange(gradients(comm, 1))
    else:
        exchange(gradients(comm, 1))
    assert exchange.steps == 2
    expect_same(comm, exchange(gradients(comm, 2)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPTED = {
    "load": (ErrorFeedback, "take"),
    "reset": (ErrorFeedback, "reset"),
    "rescale": (ErrorFeedback, "rescale"),
    "round": (Replica, "end_round"),
}


@pytest.mark.parametrize("change", INTERRUPTED)
def test_two_interrupts_within_a_call_are_delivered_and_the_first_after_it(
    comm, monkeypatch, change
):
    """As of a terminal, to all ranks: the change is whole, also within another call that defers, as a round's step."""
    delivered, states, (owner, name) = [], [], INTERRUPTED[change]
    outer = OuterLoop(
        MAKERS["top-k"](comm),
        {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()},
        1,
    )
    for _ in range(2):
        outer.exchange(gradients(comm, 0))
        states.append(outer.exchange.state_dict())
    method = getattr(owner, name)

    def interrupted(*args, **settings):
        if not delivered:
            os.kill(os.getpid(), signal.SIGINT)
            assert not delivered
            os.kill(os.getpid(), signal.SIGINT)
            assert len(delivered) == 1
        return method(*args, **settings)

    monkeypatch.setattr(owner, name, interrupted)
    before = signal.signal(signal.SIGINT, lambda *args: delivered.append(args))
    try:
        outer.step() if change == "round" else CHANGES[change](outer.exchange, states)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(delivered) == 2


@every_maker
def test_tensors_that_are_held_do_not_change_and_are_taken_up_again(comm, maker):
    exchange, twin = maker(comm), maker(comm)
    for step in range(2):
        exchange(gradients(comm, step))
        twin(gradients(comm, step))
    for held in (["bias", "weight"], ["weight"]):
        # a name is as good as a list of one
        exchange.hold(held if len(held) > 1 else held[0])
        twin.hold(held)
        before = exchange.state_dict()
        means = exchange(gradients(comm, 2, SHAPES.keys() - {*held}))
        assert means.keys() == SHAPES.keys() - {*held}
        expect_same(comm, means)
        after = exchange.state_dict()
        for key in after:
            if key.partition("/")[0] in held:
                np.testing.assert_array_equal(after[key], before[key])
        with pytest.raises(KeyError if comm.size == 1 else (KeyError, CollectiveError)):
            exchange(gradients(comm, 3))
    exchange.load_state_dict(twin.state_dict())
    exchange.hold([])
    twin.hold([])
    assert np.array_equal(
        exchange(gradients(comm, 3))["weight"], twin(gradients(comm, 3))["weight"]
    )


@every_maker
def test_tensors_that_are_held_from_the_start_are_taken_up_and_a_resumed_run_has_the_same_bits(
    comm, maker
):
    exchange, resumed = maker(comm), maker(comm)
    exchange.register(gradients(comm, 0))
    resumed.register(gradients(comm, 0))
    exchange.hold(["weight"])
    exchange(gradients(comm, 0, ["bias", "other"]))
    exchange.hold([])
    resumed.load_state_dict(exchange.state_dict())
    np.testing.assert_equal(resumed(gradients(comm, 1)), exchange(gradients(comm, 1)))


@pytest.mark.unchecked("raises its own error")
@pytest.mark.at_least(2)
def test_held_tensors_that_differ_raise_on_all(comm):
    exchange = MAKERS["top-k"](comm)
    exchange(gradients(comm, 0))
    with pytest.raises(CollectiveError, match=r"hold\(bias\) "):
        exchange.hold(["bias"] if is_last(comm) else [])
    with pytest.raises(
        KeyError if is_last(comm) else CollectiveError, match="'unknown'"
    ):
        exchange.hold(["unknown"] if is_last(comm) else [])
    with pytest.raises(
        TypeError if is_last(comm) else CollectiveError,
        match="hold got 5: expected names of tensors",
    ):
        exchange.hold(5 if is_last(comm) else [])
    with pytest.raises(ValueError, match="no named tensor is left"):
        exchange.hold(SHAPES)
    expect_same(comm, exchange(gradients(comm, 1)))


@pytest.mark.at_least(2)
@pytest.mark.parametrize("named", [False, True])
def test_a_tensor_that_only_some_ranks_send_whole_has_no_count_of_contributors(
    comm, named
):
    compressor = TopK(0.1) if is_last(comm) else Dense()
    exchange = GradientExchange(
        comm, compressor, collective=sparse_allreduce, average="contributors"
    )
    given = gradients(comm, 0) if named else gradients(comm, 0)["weight"]
    with pytest.raises(
        CollectiveError,
        match=r"same tensors: '.*' is .*, sent whole on rank 0, and .*, in part on rank",
    ):
        exchange(given)


@pytest.mark.at_least(2)
def test_a_rank_without_memory_for_copies_of_its_feedback_raises_on_all(comm):
    class Full(ErrorFeedback):
        is_copy = False  # of the exchange, which the buckets copy

        def __deepcopy__(self, memo):
            if self.is_copy:
                raise MemoryError("no room")
            copy = Full()
            copy.is_copy = True
            return copy

    exchange = GradientExchange(
        comm, TopK(0.1), Full() if is_last(comm) else ErrorFeedback()
    )
    with pytest.raises(
        MemoryError if is_last(comm) else CollectiveError, match="no room"
    ):
        exchange(gradients(comm, 0))


def test_a_chosen_compressor_that_the_collective_cannot_sum_is_refused(comm):
    exchange = GradientExchange(comm, lambda name, shape: TopK(0.1), bits=4)
    with pytest.raises(
        ValueError,
        match=r"compressor for 'weight' is TopK\(density=0.1\), and bits=, or the coll",
    ):
        exchange(gradients(comm, 0))


# What surrounds a step: other exchanges, copies, what is changed between steps.


@pytest.mark.at_least(2)
@pytest.mark.parametrize("form", ["array", "dict"])
def test_exchanges_that_are_stepped_in_another_order_raise_on_all(comm, form):
    """As those of two models of one shape, in the order of a set; then each gets its own mean."""
    actor, critic, third = (
        GradientExchange(comm, TopK(0.5), small=0) for _ in range(3)
    )
    one = np.full(50, 1.0)
    hundred = np.full(50, 100.0)

    def given(array):
        return {"weight": array} if form == "dict" else array

    def value(mean):
        return (mean["weight"] if form == "dict" else mean).max()

    pairs = [(actor, one), (critic, hundred)]
    for exchange, array in pairs:
        exchange(given(array))
    order = reversed(pairs) if is_last(comm) else pairs
    for exchange, array in order:
        with pytest.raises(CollectiveError, match=r"out of step.* of exchange"):
            exchange(given(array))
    assert (actor.steps, critic.steps) == (1, 1)
    assert value(actor(given(one))) <= 2
    assert value(critic(given(hundred))) >= 100
    assert value(third(given(hundred))) == 100


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (
            lambda: [np.ones((100, 5)), np.ones(50)],
            lambda: [np.ones(50), np.ones((100, 5))],
        ),
        (lambda: np.ones((3, 4)), lambda: np.ones((4, 3))),
        (lambda: np.ones(12), lambda: np.ones((3, 4))),
    ],
)
def test_shapes_that_differ_raise_on_all(comm, mine, theirs):
    exchange = GradientExchange(comm, TopK(0.5))
    with pytest.raises(CollectiveError, match="same tensors"):
        exchange(theirs() if is_last(comm) else mine())


@pytest.mark.parametrize("form", ["array", "dict"])
def test_parts_that_are_given_to_two_exchanges_are_not_shared(comm, form):
    feedback = ErrorFeedback()
    compressor = WarmUp(TopK(0.5), [1.0, 0.1], calls=2)

    def given(value):
        array = np.arange(10.0) + value
        return {"weight": array} if form == "dict" else array

    def bits(mean):
        return (mean["weight"] if form == "dict" else mean).tobytes()

    alone = GradientExchange(comm, WarmUp(TopK(0.5), [1.0, 0.1], calls=2), small=0)
    expected = [bits(alone(given(step))) for step in range(3)]
    pair = [GradientExchange(comm, compressor, feedback, small=0) for _ in range(2)]
    for step in range(3):
        for exchange in pair:
            assert bits(exchange(given(step))) == expected[step]
    assert feedback.residual is None
    assert compressor.step == 0


@pytest.mark.exactly(1)
@pytest.mark.parametrize("form", ["array", "dict"])
def test_a_rate_that_is_changed_between_steps_is_that_of_the_next_one(comm, form):
    exchange = GradientExchange(comm, Dense(), StepAhead(rate=0.5), small=0)
    gradient = np.ones(4, np.float32)
    given = {"weight": gradient} if form == "dict" else gradient
    exchange(given)
    exchange.feedback.rate = 0.25
    update = exchange(given)
    assert (update["weight"] if form == "dict" else update).tolist() == [0.25] * 4


@pytest.mark.exactly(1)
def test_settings_cannot_be_assigned(comm):
    exchange = GradientExchange(comm, TopK(0.5))
    for name in ("compressor", "feedback", "average", "basis"):
        with pytest.raises(
            AttributeError, match=f"{name} of GradientExchange is read-only"
        ):
            setattr(exchange, name, None)
    loop = OuterLoop(exchange, {"weight": np.ones(3, np.float32)})
    for name in ("exchange", "every", "momentum", "nesterov", "delay"):
        with pytest.raises(AttributeError, match=f"{name} of OuterLoop is read-only"):
            setattr(loop, name, 1)


@pytest.mark.at_least(2)
def test_an_outer_rate_that_differs_raises_on_all(comm):
    parameters = {"weight": np.ones(2000, np.float32)}
    loop = OuterLoop(GradientExchange(comm, TopK(0.5)), parameters, every=1)
    parameters["weight"] -= 1 + comm.rank
    loop.rate = 0.5 if is_last(comm) else 1.0
    with pytest.raises(CollectiveError, match=r"rate 0\.5"):
        loop.step()
    loop.rate = 1.0
    assert loop.step()


@pytest.mark.at_least(2)
def test_lists_that_differ_in_one_array_name_it(comm):
    exchange = GradientExchange(comm, TopK(k=1))
    with pytest.raises(
        CollectiveError,
        match=r"same tensors: 'item 1 of the list' is float64 of shape \(4,\) on rank 0",
    ):
        exchange([np.ones(3), np.ones(4 + is_last(comm))])


@pytest.mark.at_least(2)
def test_a_mean_without_a_place_raises_on_all(comm):
    """As of a branch of a model that is unused on one rank, whose parameters have no gradient there."""
    exchange = GradientExchange(comm, TopK(0.5), small=0)
    gradients = {"used": np.ones(4), "branch": np.ones(4)}
    exchange(gradients, out=gradients)
    if is_last(comm):
        del gradients["branch"]
    with pytest.raises(
        ValueError if is_last(comm) else CollectiveError,
        match="no gradient of \\['branch'\\]",
    ):
        exchange(gradients, out=gradients)
    assert exchange.steps == 1


@pytest.mark.exactly(1)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_exchange_cannot_be_copied(comm, copied):
    with pytest.raises(TypeError, match=r"has a communicator.*state_dict"):
        copied(GradientExchange(comm, TopK(0.5)))


@pytest.mark.exactly(1)
def test_a_kind_of_array_that_changes_is_refused(comm):
    exchange = GradientExchange(comm, TopK(0.5))
    exchange(np.ones(4, np.float32))
    with pytest.raises((TypeError, ValueError), match="expected float32"):
        exchange(np.ones(4, np.float64))


@pytest.mark.parametrize("segments", ["alike", "apart"])
def test_a_tensor_that_was_held_is_taken_up_with_its_step_of_a_warm_up(comm, segments):
    """It is behind the others, and so is no segment of theirs."""
    shapes = {"a": 3000, "b": 3000, "c": 3000 if segments == "alike" else 2000}
    rng = np.random.default_rng(comm.rank)
    gradients = {
        name: rng.integers(-9, 9, size).astype(np.float32)
        for name, size in shapes.items()
    }
    some = {name: gradients[name] for name in ("a", "c")}
    warm_up = WarmUp(TopK(0.01), [0.5, 0.1, 0.01])
    exchange = GradientExchange(comm, warm_up, small=0)
    exchange(gradients)
    exchange.hold(["b"])
    for _ in range(3):
        exchange(some)
    exchange.hold([])
    exchange(gradients)
    steps = {name: one.step for name, one in exchange.compressors.items()}
    assert steps == {"a": 5, "b": 2, "c": 5}


def test_a_state_that_was_saved_with_a_tensor_held_is_loaded_before_the_same_hold(comm):
    """Tensors that share a compressor in a new exchange were saved at different steps of it."""
    rng = np.random.default_rng(comm.rank)
    gradients = {
        name: rng.integers(-9, 9, 3000).astype(np.float32) for name in ("a", "b", "c")
    }
    some = {name: gradients[name] for name in ("a", "c")}

    def new():
        warm_up = WarmUp(TopK(0.01), [0.5, 0.1, 0.01])
        return GradientExchange(comm, warm_up, small=0)

    def goes_on(exchange):
        means = [exchange(some)]
        exchange.hold([])
        means.append(exchange(gradients))
        return [(name, mean.tobytes()) for step in means for name, mean in step.items()]

    before = new()
    before(gradients)
    before.hold(["b"])
    before(some)
    state = before.state_dict()
    after = new()
    after.register(gradients)
    after.load_state_dict(state)
    after.hold(["b"])
    assert goes_on(after) == goes_on(before)


def test_a_tensor_that_was_held_is_taken_up_at_the_rate_of_a_step_ahead(comm):
    gradients = {name: np.ones(3000, np.float32) for name in ("a", "b")}
    exchange = GradientExchange(comm, TopK(0.01), StepAhead(0.5, 0.5), small=0)
    exchange(gradients)
    exchange.hold(["b"])
    exchange.feedback.rate = 0.25
    exchange({"a": gradients["a"]})
    exchange.hold([])
    exchange(gradients)
    rates = {bucket.feedback.rate for bucket in exchange.buckets}
    assert rates == {0.25}
