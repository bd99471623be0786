"""What outlives a step: saved and taken up again, averaged, compressed by the server, evaluated ahead."""

from itertools import count

import numpy as np
import pytest
from cases import (
    RandomK,
    compressed_sum,
    for_each,
    state_of,
    through_a_file,
    with_header,
)

from collectives import (
    GradientExchange,
    gtopk_allreduce,
    sparse_allreduce,
)
from mpicomp import (
    AggregationAware,
    ErrorFeedback,
    MomentumCorrection,
    Quantised,
    SIDCo,
    StepAhead,
    TopK,
    WarmUp,
)

pytestmark = pytest.mark.small_groups

MAKERS = {
    "error feedback": lambda comm: GradientExchange(
        comm, TopK(density=0.1), ErrorFeedback(), gtopk_allreduce
    ),
    "momentum": lambda comm: GradientExchange(
        comm,
        WarmUp(RandomK(0.1, seed=1), [0.5, 0.1], calls=2),
        MomentumCorrection(0.9),
        sparse_allreduce,
    ),
    "step ahead": lambda comm: GradientExchange(
        comm,
        Quantised(TopK(density=0.1), "float16"),
        StepAhead(0.1, 0.9),
        gtopk_allreduce,
    ),
    "random": lambda comm: GradientExchange(
        comm, RandomK(0.1, seed=2), ErrorFeedback(), sparse_allreduce
    ),
    "two-way": lambda comm: GradientExchange(
        comm,
        AggregationAware(0.1),
        ErrorFeedback(),
        collective=compressed_sum(TopK(0.2)),
    ),
    "SIDCo": lambda comm: GradientExchange(
        comm, SIDCo(0.05), ErrorFeedback(), gtopk_allreduce
    ),
    "SIDCo as published": lambda comm: GradientExchange(
        comm, SIDCo(0.05, adaptation="published"), ErrorFeedback(), gtopk_allreduce
    ),
}
SHAPES = {"weight": (40, 50), "bias": (7,), "scale": (3, 1)}


def gradient(rank, step, name="weight"):
    return (
        np.random.default_rng([step, rank, len(name)])
        .standard_normal(SHAPES[name])
        .astype(np.float32)
    )


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("named", [False, True])
def test_a_run_that_is_taken_up_again_continues_bit_for_bit(comm, maker, named):
    def bits(exchange, step):
        if not named:
            return exchange(gradient(comm.rank, step)).tobytes()
        means = exchange({name: gradient(comm.rank, step, name) for name in SHAPES})
        return [means[name].tobytes() for name in SHAPES]

    whole, first, second = (MAKERS[maker](comm) for _ in range(3))
    for step in range(4):
        assert bits(whole, step) == bits(first, step)
    state = through_a_file(first.state_dict())
    if named:
        with pytest.raises(
            ValueError,
            match=r"without \['gradient'\]: expected the 1 of the exchange; register",
        ):
            second.load_state_dict(state)
        second.register({name: gradient(0, 0, name) for name in SHAPES})
    second.load_state_dict(state)
    for step in range(4, 8):
        assert bits(whole, step) == bits(second, step)


def test_a_state_that_does_not_fit_changes_nothing(comm):
    exchange = MAKERS["momentum"](comm)
    exchange(gradient(comm.rank, 0))
    before, bits = exchange.state_dict(), state_of(exchange)
    for bad in (
        {"gradient/compressor/0.pace": np.array(1)},
        {"gradient/feedback/residual": before["gradient/feedback/residual"]},
        {"gradient/feedback/other": np.ones(3)},
        {**before, "gradient/feedback/velocity": np.ones(3, np.float32)},
        {
            **before,
            "gradient/compressor/0.step": np.array(9),
            "gradient/feedback/more": np.ones(3),
        },
    ):
        with pytest.raises(ValueError, match=r"the state (has|is of|of)|shape"):
            exchange.load_state_dict(bad)
        assert state_of(exchange) == bits


def test_a_compressors_state_is_whole(comm):
    """The state of an exchange whose compressor remembers nothing is not that of one whose compressor does."""
    plain = MAKERS["error feedback"](comm)
    plain(gradient(comm.rank, 0))
    random = GradientExchange(comm, RandomK(0.1), ErrorFeedback(), gtopk_allreduce)
    random(gradient(comm.rank, 0))
    before = state_of(random)
    with pytest.raises(
        ValueError,
        match=r"the state of 'gradient' has nothing as 0.step: expected an integer from 0 to",
    ):
        random.load_state_dict(plain.state_dict(), same_settings=False)
    for step in np.ones(3, int), np.array(-1), np.array(0.5):
        with pytest.raises(
            ValueError,
            match=r"the state of 'gradient' has .* as 0.step: expected an integer from 0 to",
        ):
            random.load_state_dict(
                random.state_dict() | {"gradient/compressor/0.step": step}
            )
    assert state_of(random) == before
    assert random(gradient(comm.rank, 0)).shape == SHAPES["weight"]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_state_of_which_something_is_missing_changes_nothing(comm, maker):
    exchange = MAKERS[maker](comm)
    exchange({name: gradient(comm.rank, 0, name) for name in SHAPES})
    before, bits = exchange.state_dict(), state_of(exchange)
    for name in before:
        with pytest.raises(ValueError, match=r"the state .*has no"):
            exchange.load_state_dict(
                {key: before[key] for key in before if key != name}
            )
    for vector in ("weight/", "bias/", ""):
        with pytest.raises(
            ValueError, match=r"the state has no .*: expected all that state_dict"
        ):
            exchange.load_state_dict(
                {key: before[key] for key in before if not key.startswith(vector)}
            )
    for no_state in (None, [1], ["weight"], {1: before[next(iter(before))]}, "weight"):
        with pytest.raises(
            TypeError, match=r"the state is .*: expected arrays by name"
        ):
            exchange.load_state_dict(no_state)
    assert state_of(exchange) == bits


def test_the_state_of_an_exchange_that_has_kept_nothing_is_one_too(comm):
    fresh, used = (MAKERS["error feedback"](comm) for _ in range(2))
    used(gradient(comm.rank, 0))
    used.load_state_dict(through_a_file(fresh.state_dict()))
    assert used.residual_norm == 0
    assert (
        used(gradient(comm.rank, 1)).tobytes()
        == fresh(gradient(comm.rank, 1)).tobytes()
    )


@pytest.mark.parametrize("maker", ["random", "two-way"])
def test_the_length_of_every_state_is_looked_at(comm, maker):
    first, second = (MAKERS[maker](comm) for _ in range(2))
    first({"weight": gradient(comm.rank, 0)[:39]})
    second.register({"weight": gradient(0, 0)})
    with pytest.raises(
        ValueError, match=r"the state of 'weight' has 1950 values: expected 2000"
    ):
        second.load_state_dict(first.state_dict())


def test_a_rescaling_that_fails_changes_nothing(comm):
    exchange = GradientExchange(
        comm, TopK(k=1), MomentumCorrection(0.5), sparse_allreduce, small=0
    )
    own = np.zeros((comm.size, 2), np.float16)
    own[comm.rank] = 3e4
    exchange({"a": np.ones(5, np.float16), "b": own})
    before = state_of(exchange)
    with pytest.raises(
        OverflowError, match=r"the residual times 3(\.0)? leaves the range of float16"
    ):
        exchange.rescale(3)
    assert state_of(exchange) == before


def test_after_a_reset_an_exchange_is_as_new_for_the_same_shapes(comm):
    used, fresh = (MAKERS["error feedback"](comm) for _ in range(2))
    for step in range(2):
        used(gradient(comm.rank, step))
    used.reset()
    with pytest.raises(
        ValueError,
        match=r"gradient is float32 of shape \(7, 50\): expected float32 of shape \(40, 50\)",
    ):
        used(gradient(comm.rank, 2)[:7])
    assert (
        used(gradient(comm.rank, 3)).tobytes()
        == fresh(gradient(comm.rank, 3)).tobytes()
    )


def test_the_norm_of_halves_does_not_overflow(comm):
    exchange = GradientExchange(comm, TopK(k=1), ErrorFeedback(), gtopk_allreduce)
    exchange(np.full(1001, 10, np.float16))
    assert exchange.residual_norm == pytest.approx(np.sqrt(1e5), rel=0.01)


def test_reset_and_rescale_reach_every_vector(comm):
    exchange = GradientExchange(
        comm, TopK(k=1), ErrorFeedback(), collective=compressed_sum(TopK(k=1))
    )
    exchange({name: gradient(comm.rank, 0, name) for name in SHAPES})
    before = exchange.state_dict()
    exchange.rescale(2.0)
    after = exchange.state_dict()
    residuals = [name for name in before if name.endswith("residual")]
    assert len(residuals) == len(SHAPES)
    for name in residuals:
        np.testing.assert_array_equal(after[name], 2 * before[name])
    exchange.reset()
    assert exchange.residual_norm == 0


def test_the_point_ahead(comm):
    """As an array, as a list and by name; other methods stay where they are."""
    x, zero = np.ones(2000, np.float32), np.zeros((40, 50), np.float32)
    exchange = GradientExchange(comm, TopK(k=1), StepAhead(0.5), sparse_allreduce)
    np.testing.assert_array_equal(exchange.ahead(x), x)
    exchange(gradient(comm.rank, 0).reshape(-1))
    np.testing.assert_array_equal(exchange.ahead(x), x - exchange.feedback.residual)
    listed = GradientExchange(comm, TopK(k=1), StepAhead(0.5), sparse_allreduce)
    listed(np.split(gradient(comm.rank, 0).reshape(-1), 2))
    halves = listed.ahead([x[:1000].reshape(10, 100), x[1000:]])
    assert halves[0].shape == (10, 100)
    np.testing.assert_array_equal(
        np.concatenate([half.reshape(-1) for half in halves]), exchange.ahead(x)
    )

    named = GradientExchange(comm, TopK(k=1), StepAhead(0.5), sparse_allreduce)
    model = {
        "weight": zero,
        "bias": np.zeros(7, np.float32),
        "scale": np.zeros((3, 1), np.float32),
    }
    assert named.ahead(model)["weight"] is zero
    named({name: gradient(comm.rank, 0, name) for name in SHAPES})
    points = named.ahead(model | {"frozen": zero})
    assert points["frozen"] is zero  # it is not exchanged
    with pytest.raises(KeyError, match=r"no parameter for \['bias', 'scale'\]"):
        named.ahead({"weight": zero})
    with pytest.raises(KeyError, match="in the form of the gradients"):
        exchange.ahead([x])
    state = named.state_dict()
    np.testing.assert_array_equal(
        points["weight"].reshape(-1), -state["weight/feedback/residual"]
    )
    small = np.concatenate([points["bias"], points["scale"].reshape(-1)])
    kept = np.concatenate(
        [state["bias/feedback/residual"], state["scale/feedback/residual"]]
    )
    np.testing.assert_array_equal(small, -kept)

    plain = GradientExchange(comm, TopK(k=1), ErrorFeedback(), sparse_allreduce)
    plain(gradient(comm.rank, 0))
    np.testing.assert_array_equal(plain.ahead(zero), zero)


@pytest.mark.parametrize("maker", MAKERS)
def test_within_a_step_the_state_is_that_before_it(comm, maker):
    """Also where a compressor has remembered the step already; and the step goes on as if nobody had looked."""
    exchange, twin = (MAKERS[maker](comm) for _ in range(2))
    for step in range(2):
        exchange({name: gradient(comm.rank, step, name) for name in SHAPES})
        twin({name: gradient(comm.rank, step, name) for name in SHAPES})
    before = exchange.state_dict()
    for name in SHAPES:
        exchange.start(name, gradient(comm.rank, 2, name))
        np.testing.assert_equal(exchange.state_dict(), before)
    mean, expected = (
        exchange.finish(),
        twin({name: gradient(comm.rank, 2, name) for name in SHAPES}),
    )
    assert all(mean[name].tobytes() == expected[name].tobytes() for name in SHAPES)
    np.testing.assert_equal(exchange.state_dict(), twin.state_dict())


def test_a_state_of_another_rank_or_number_of_ranks_is_refused(comm):
    exchange = MAKERS["error feedback"](comm)
    exchange(gradient(comm.rank, 0))
    before = exchange.state_dict()
    states = comm.allgather(before)
    other = (comm.rank + 1) % comm.size
    if other != comm.rank:
        said = (
            f"the state was saved with rank {other}: expected {comm.rank}; "
            "each rank loads what it saved"
        )
        with pytest.raises(ValueError, match=said):
            exchange.load_state_dict(states[other], same_settings=False)
    with pytest.raises(
        ValueError,
        match=f"the state was saved with ranks 77: expected {comm.size}; each rank",
    ):
        exchange.load_state_dict(with_header(before, ranks=77), same_settings=False)
    np.testing.assert_equal(exchange.state_dict(), before)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b"5", b"null", b'"x"', b'{"format": 1}', b'{"tensors": {}}'],
)
def test_a_damaged_header_is_said_to_be_one(comm, text):
    exchange = MAKERS["error feedback"](comm)
    exchange(gradient(comm.rank, 0))
    before = exchange.state_dict()
    damaged = {"header/json": np.frombuffer(text, np.uint8)}
    with pytest.raises(ValueError, match="the state is damaged"):
        exchange.load_state_dict(before | damaged)
    np.testing.assert_equal(exchange.state_dict(), before)
    other = with_header(before, format=2)
    with pytest.raises(ValueError, match="or was saved by another version"):
        exchange.load_state_dict(other)
    np.testing.assert_equal(exchange.state_dict(), before)


OTHERS = {
    "density": (
        {"compressor": TopK(0.2)},
        r"of 'gradient' was saved with compressor TopK\(density=0.2\): expected TopK",
    ),
    "decay": (
        {"feedback": ErrorFeedback(decay=0.5)},
        r"saved with feedback ErrorFeedback\(.*decay=0.5\): expected Error",
    ),
    "average": (
        {"average": "contributors"},
        "was saved with average 'contributors': expected True; make the exchange",
    ),
    "small": ({"small": 5}, "the state was saved with small 5: expected 1024"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_of_other_settings_is_refused_unless_that_is_asked_for(comm, what):
    usual = {"compressor": TopK(0.1), "feedback": ErrorFeedback()}
    changed, said = OTHERS[what]
    one = GradientExchange(comm, **(usual | changed))
    other = GradientExchange(comm, **(usual | {"feedback": ErrorFeedback()}))
    one(gradient(comm.rank, 0))
    other(gradient(comm.rank, 1))
    before = other.state_dict()
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(one.state_dict())
    np.testing.assert_equal(other.state_dict(), before)
    other.load_state_dict(through_a_file(one.state_dict()), same_settings=False)
    np.testing.assert_array_equal(other.feedback.residual, one.feedback.residual)


def test_what_changes_between_steps_is_no_other_setting(comm):
    """A learning rate, which is part of the state; a density that is warmed up; residuals that are rescaled."""
    for name in ("step ahead", "momentum"):
        exchange = MAKERS[name](comm)
        exchange(gradient(comm.rank, 0))
        if name == "step ahead":
            exchange.feedback.rate = 0.01
        exchange.rescale(2.0)
        exchange(gradient(comm.rank, 1))
        fresh = MAKERS[name](comm)
        fresh.load_state_dict(through_a_file(exchange.state_dict()))
        assert (
            exchange(gradient(comm.rank, 2)).tobytes()
            == fresh(gradient(comm.rank, 2)).tobytes()
        )


@pytest.mark.exactly(2)
@for_each(
    prefix=["", "module.", "_orig_mod.module.", "module._orig_mod."],
    inside=["", "_checkpoint_wrapped_module."],
    name=["weight", "header", "header/json", "loop", "feedback/residual", "a/b"],
)
def test_a_tensor_may_have_any_name_and_in_a_wrapped_model_has_the_state_of_the_model(
    comm, prefix, inside, name
):
    names = {f"{prefix}{inside}{name}": name, "same": "same"}
    one, two = (GradientExchange(comm, TopK(k=1), small=0) for _ in range(2))
    one({given: gradient(comm.rank, place) for place, given in enumerate(names)})
    two.register({known: gradient(comm.rank, 0) for known in names.values()})
    two.load_state_dict(through_a_file(one.state_dict()))
    np.testing.assert_equal(two.state_dict(), one.state_dict())


def test_names_of_which_two_are_the_same_without_wrappers_stay_as_they_are(comm):
    one, two = (GradientExchange(comm, TopK(k=1), small=0) for _ in range(2))
    for exchange in one, two:
        exchange({"module.a": gradient(comm.rank, 0), "a": gradient(comm.rank, 1)})
    two.load_state_dict(through_a_file(one.state_dict()))
    np.testing.assert_equal(two.state_dict(), one.state_dict())
    fresh = GradientExchange(comm, TopK(k=1), small=0)
    fresh.register({"a": gradient(comm.rank, 0)})
    with pytest.raises(ValueError, match="the state is of 2 tensors"):
        fresh.load_state_dict(one.state_dict())


def test_a_state_is_loaded_into_the_compressors_in_use(comm):
    """A function that chooses them is not asked again, and what was set in them stays."""
    seeds = count()
    exchange = GradientExchange(
        comm, lambda name, shape: RandomK(0.5, seed=next(seeds)), small=0
    )
    arrays = {name: np.ones(10, np.float32) for name in "ab"}
    exchange(arrays)
    before = exchange.compressors
    exchange.load_state_dict(exchange.state_dict())
    assert exchange.compressors == before
    assert next(seeds) == 2
