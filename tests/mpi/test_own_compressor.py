"""A compressor of one's own that draws random numbers, by the pattern of docs/contributing/own_compressor.md."""

from zlib import crc32

import numpy as np
import pytest

from collectives import CollectiveError, GradientExchange, sparse_allreduce
from mpicomp import (
    Compressor,
    Dense,
    Feedback,
    MomentumCorrection,
    TopK,
    WarmUp,
    Wrapper,
)
from mpicomp.compressors.common import at_positions, finite_vector

pytestmark = pytest.mark.small_groups

SHAPES = {"weight": (30, 4), "bias": (40,)}


class Sampled(Compressor):
    """Select `count` positions at random, others in each step."""

    state = {"step": (0, 2**62)}

    def __init__(self, count, seed):
        self.count = count
        self.seed = seed
        self.step = 0

    def compress(self, corrected, *, gradient=None):
        dense = finite_vector(corrected)
        generator = np.random.default_rng([*self.seed, self.step])
        positions = np.sort(generator.choice(dense.size, self.count, replace=False))
        self.step += 1
        return at_positions(dense, positions)


def made(comm, seed=1):
    def choose(name, shape):
        return Sampled(10, (seed, comm.rank, crc32(name.encode())))

    return GradientExchange(comm, choose, small=0)


def gradients(comm, step):
    generator = np.random.default_rng([step, comm.rank])
    return {
        name: generator.integers(1, 9, shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def test_draws_are_repeated_after_a_step_that_failed_and_in_a_resumed_run(comm):
    exchange, twin, resumed = made(comm), made(comm), made(comm)
    for step in range(3):
        twin(gradients(comm, step))
    for step in range(3):
        if step == 2:
            bad = gradients(comm, step)
            bad["bias"][0] = np.nan if comm.rank == comm.size - 1 else 1
            with pytest.raises((ValueError, CollectiveError), match="nan"):
                exchange(bad)
            resumed.register(gradients(comm, 0))
            resumed.load_state_dict(exchange.state_dict())
        mean = exchange(gradients(comm, step))
    np.testing.assert_equal(resumed(gradients(comm, 2)), mean)
    for each in (exchange, resumed):
        np.testing.assert_equal(each.state_dict(), twin.state_dict())


def test_tensors_ranks_and_steps_have_draws_of_their_own(comm):
    exchange = made(comm)
    drawn = []
    for _ in range(2):
        exchange({name: np.ones(40, np.float32) for name in SHAPES})
        drawn += [np.flatnonzero(exchange.buckets[0].feedback.residual == 0).tolist()]
    everywhere = comm.allgather(drawn)
    assert len({str(each) for rank in everywhere for each in rank}) == 2 * comm.size


def test_a_state_of_another_seed_is_refused(comm):
    exchange, other = made(comm), made(comm, seed=2)
    for each in (exchange, other):
        each(gradients(comm, 0))
    with pytest.raises(ValueError, match=r"seed=\[1, .*seed=\[2, "):
        other.load_state_dict(exchange.state_dict())


class Forgetful(Sampled):
    def __init__(self, count, random_seed):
        super().__init__(count, (random_seed,))


class Stateful(Sampled):
    def __init__(self, count, seed):
        super().__init__(count, seed)
        self.draws = np.random.default_rng(seed)


class Kept(MomentumCorrection):
    def __init__(self, rule):
        super().__init__(0.9)
        self.rule = rule


@pytest.mark.exactly(1)
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((Forgetful(1, 2),), "Forgetful has no attribute 'random_seed': store every"),
        ((Stateful(1, (2,)),), "draws of Stateful is a generator of random numbers"),
        ((Sampled(1, lambda: 1),), "seed of Sampled is <function .*cannot compare"),
        ((Sampled(1, (1,)), Kept(lambda: 1)), "rule of Kept is <function"),
    ],
)
def test_what_states_cannot_compare_or_restore_is_refused(comm, arguments, match):
    with pytest.raises(TypeError, match=match):
        GradientExchange(comm, *arguments)
    if len(arguments) == 1:
        exchange = GradientExchange(comm, lambda name, shape: arguments[0], small=0)
        with pytest.raises(TypeError, match=match):
            exchange(gradients(comm, 0))


class Writing(Compressor):
    """Write to one of its arguments."""

    def __init__(self, argument):
        self.argument = argument

    def compress(self, corrected, *, gradient=None):
        array = gradient if self.argument == "gradient" else corrected
        array[0] = 0
        return at_positions(corrected, np.arange(2))


@pytest.mark.parametrize("argument", ["corrected", "gradient"])
def test_a_compressor_cannot_write_to_what_it_is_passed(comm, argument):
    exchange = GradientExchange(comm, Writing(argument))
    gradient = np.ones(5, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        exchange(gradient)
    assert gradient.tolist() == [1] * 5


class Returning(Feedback):
    """Correct a gradient, and return an array that `kind` names in place of the spare residual."""

    def __init__(self, kind="spare"):
        super().__init__()
        self.kind = kind

    def correct(self, *gradient, basis=None):
        parts = self._stage(gradient, basis)
        spare = self._spare("residual")
        np.add(self._arrays["residual"], self._joined(parts), out=spare)
        arrays = {
            "spare": spare,
            "new": spare.copy(),
            "view": spare[:],
            "gradient": gradient[0],
            "kept": self._arrays["residual"],
        }
        return self._corrected(arrays[self.kind])


@pytest.mark.parametrize("kind", ["new", "view", "gradient", "kept"])
@pytest.mark.parametrize(
    "settings", [{"compressor": TopK(k=2)}, {"bits": 4}, {"compressor": Dense()}]
)
def test_a_feedback_that_returns_another_array_is_refused_on_all_ranks(
    comm, kind, settings
):
    """What is not sent would be lost. Also where one rank alone does, and in a later step."""
    gradient = np.arange(1, 9, dtype=np.float32)
    exchange = GradientExchange(comm, feedback=Returning(), **settings)
    exchange(gradient)
    before = exchange.state_dict()
    for who in {0, comm.size - 1}:
        mine = comm.rank == who
        exchange.feedback.kind = kind if mine else "spare"
        with pytest.raises(
            TypeError if mine else CollectiveError,
            match="returned an array that is not kept",
        ):
            exchange(gradient)
        exchange.feedback.kind = "spare"
        for name, array in exchange.state_dict().items():
            np.testing.assert_array_equal(array, before[name])
    exchange(gradient)
    assert exchange.steps == 2


def reversed_on(comm, vector):
    """Reverse the indices of a vector in place, on the last rank."""
    if comm.rank == comm.size - 1:
        vector.indices[:] = vector.indices[::-1].copy()
    return vector


class Reversed(TopK):
    """TopK of which a subclass spoils what it has selected."""

    comm: object = None

    def select(self, *given):
        return reversed_on(self.comm, super().select(*given))


@pytest.mark.parametrize("place", ["the collective", "the compressor"])
def test_what_code_of_the_user_has_changed_is_looked_at_again(comm, monkeypatch, place):
    monkeypatch.setattr(Reversed, "comm", comm)
    if place == "the collective":
        exchange = GradientExchange(
            comm,
            TopK(k=2),
            collective=lambda v, comm: sparse_allreduce(reversed_on(comm, v), comm),
        )
    else:
        exchange = GradientExchange(comm, Reversed(k=2))
    gradient = np.arange(1, 9, dtype=np.float32)
    is_culprit = comm.rank == comm.size - 1
    expected = ValueError if is_culprit else CollectiveError
    with pytest.raises(expected, match="strictly increasing"):
        exchange(gradient)
    assert GradientExchange(comm, TopK(k=2))(gradient).sum() == 15


def test_a_sum_that_is_the_own_vector_is_validated_by_its_owner_again(comm):
    exchange = GradientExchange(comm, TopK(k=2), collective=lambda vector, comm: vector)
    mean = exchange(np.arange(1, 9, dtype=np.float32), sparse=True)
    mean.values[0] = np.nan
    with pytest.raises(ValueError, match="nan"):
        mean.validate()


class Refusing(TopK):
    """TopK that refuses a first value of 7."""

    def select(self, correction, bounds):
        if correction.add()[0] == 7:
            raise ValueError("got a seven")
        return super().select(correction, bounds)


@pytest.mark.parametrize("others", [TopK, Refusing])
def test_the_error_of_a_compressor_is_its_own_after_a_step_that_failed(comm, others):
    """What that step has left in the buffers of other tensors is no value of this one; tensors may share an object."""

    def choose(name, shape):
        return Refusing(k=1) if name == "a" else others(k=1)

    exchange = GradientExchange(comm, choose, small=0)
    good = {name: np.ones(9, np.float32) for name in "ab"}
    exchange(good)
    with pytest.raises(ValueError, match="nan"):
        exchange({**good, "b": np.full(9, np.nan, np.float32)})
    with pytest.raises(ValueError, match="got a seven"):
        exchange({**good, "a": np.full(9, 7, np.float32) - exchange_residual(exchange)})


def exchange_residual(exchange):
    """Return the residual of the first tensor."""
    return exchange.state_dict()["a/feedback/residual"]


class Changing(Wrapper):
    """A wrapper that takes another inner compressor in its second call."""

    def __init__(self, compressor):
        super().__init__(compressor)
        self.calls = 0

    def compress(self, corrected, *, gradient=None):
        vector = self.compressor.compress(corrected, gradient=gradient)
        self.calls += 1
        if self.calls == 2:
            self.compressor = WarmUp(TopK(0.25), [1.0, 0.5, 0.25])
        return vector


def test_an_inner_compressor_that_came_later_is_restored_after_a_step_that_failed(comm):
    exchange = GradientExchange(comm, Changing(TopK(0.5)))
    gradient = np.arange(1, 9, dtype=np.float32)
    for _ in range(3):
        exchange(gradient)
    bad = gradient.copy()
    bad[0] = np.nan if comm.rank == comm.size - 1 else 1
    with pytest.raises((ValueError, CollectiveError)):
        exchange(bad)
    assert (exchange.compressor.calls, exchange.compressor.compressor.step) == (3, 1)
