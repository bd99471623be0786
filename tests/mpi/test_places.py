"""Ranks out of step are noticed by the agreement of the next step; tensors that are held take no part in it."""

import os
import signal

import numpy as np
import pytest
from cases import is_last

from collectives import GradientExchange, OuterLoop, gtopk_allreduce, sparse_allreduce
from mpicomp import CollectiveError, Dense, ErrorFeedback, MomentumCorrection, TopK
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
            match=r"out of step: rank .* is at step .*the others are at step 3",
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
        match="is at step 2, after load_state_dict, and the others are at step 4",
    ):
        resumed(gradients(comm, 4))
    assert "4 exchanges" not in resumed.report()
    mixed = {key: states["other" in key][key] for key in states[0]}
    with pytest.raises(ValueError, match="different steps"):
        resumed.load_state_dict(mixed)


@pytest.mark.at_least(2)
def test_an_interrupt_after_the_agreement_is_noticed_by_the_next_step(
    comm, monkeypatch
):
    exchange = MAKERS["top-k"](comm)
    exchange(gradients(comm, 0))

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if is_last(comm):
            patch.setattr(
                type(exchange._layout.alone([]).feedback), "commit", interrupted
            )
            with pytest.raises(KeyboardInterrupt):
                exchange(gradients(comm, 1))
        else:
            exchange(gradients(comm, 1))
    with pytest.raises(CollectiveError, match="out of step"):
        exchange(gradients(comm, 2))


def test_an_interrupt_within_a_step_is_delivered_after_it(comm, monkeypatch):
    exchange, gradient, interrupt = (
        MAKERS["top-k"](comm),
        Bucket.gradient,
        [is_last(comm)],
    )
    exchange(gradients(comm, 0))

    def interrupted(self, arrays):
        if interrupt.pop():
            os.kill(os.getpid(), signal.SIGINT)
        interrupt.append(False)
        return gradient(self, arrays)

    monkeypatch.setattr(Bucket, "gradient", interrupted)
    if is_last(comm):
        with pytest.raises(KeyboardInterrupt):
            exchange(gradients(comm, 1))
    else:
        exchange(gradients(comm, 1))
    assert exchange.steps == 2
    expect_same(comm, exchange(gradients(comm, 2)))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPTED = {
    "load": (ErrorFeedback, "load_state_dict"),
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
            if key.partition("/")[0] in held and not key.endswith("settings"):
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


@pytest.mark.at_least(2)
def test_held_tensors_that_differ_raise_on_all(comm):
    exchange = MAKERS["top-k"](comm)
    exchange(gradients(comm, 0))
    with pytest.raises(CollectiveError, match=r"hold\(bias\) on rank"):
        exchange.hold(["bias"] if is_last(comm) else [])
    with pytest.raises(
        KeyError if is_last(comm) else CollectiveError, match="'unknown'"
    ):
        exchange.hold(["unknown"] if is_last(comm) else [])
    with pytest.raises(
        TypeError if is_last(comm) else CollectiveError, match="not iterable"
    ):
        exchange.hold(None if is_last(comm) else [])
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
        match=r"same tensors that are sent whole: '.*' is True on rank 0, and False",
    ):
        exchange(given)


@pytest.mark.at_least(2)
def test_a_rank_without_memory_for_copies_of_its_feedback_raises_on_all(comm):
    class Full(ErrorFeedback):
        def __deepcopy__(self, memo):
            raise MemoryError("no room")

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
        match=r"compressor for 'weight' is TopK\(density=0.1\), and the collective sums",
    ):
        exchange(gradients(comm, 0))
