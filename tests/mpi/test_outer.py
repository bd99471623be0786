"""OuterLoop against a simulation of all ranks in float64; restarts, faults, and the pitfalls of published code."""

from asyncio import CancelledError
from contextlib import contextmanager

import numpy as np
import pytest
from cases import RandomK, is_last, through_a_file, with_header
from devices import cupy_for_tests

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    dense_allreduce,
    redistribute_state,
    sparse_allreduce,
    traffic,
)
from mpicomp import Dense, ErrorFeedback, NoFeedback, TopK, WarmUp

pytestmark = pytest.mark.small_groups

SHAPES = {"weight": (20, 30), "bias": (7,)}  # the second is sent dense
START = {
    name: np.random.default_rng(len(name)).standard_normal(shape)
    for name, shape in SHAPES.items()
}
SMALL, DENSITY = 10, 0.1


def target(rank, step, name):
    return np.random.default_rng([rank, step, len(name)]).standard_normal(SHAPES[name])


def learn(parameters, rank, step):
    """Take one step of an inner optimiser, in place."""
    for name, array in parameters.items():
        array -= 0.1 * (array - target(rank, step, name))


def largest(vector, density):
    """Return the entries that are sent of a tensor: all of a small one."""
    k = vector.size if vector.size < SMALL else round(density * vector.size)
    kept = np.zeros_like(vector)
    places = np.argsort(-np.abs(vector), axis=None, kind="stable")[:k]
    kept.flat[places] = vector.flat[places]
    return kept


def simulate(
    size,
    steps,
    every,
    rate=1.0,
    momentum=0.0,
    nesterov=False,
    delay=0,
    decay=1.0,
    contributors=False,
    skipped=(),
):
    """Return the anchor and every rank's parameters of one run, tensor by tensor."""
    anchors, everyone = {}, [{} for _ in range(size)]
    for name, start in START.items():
        anchor, velocity, began = start, 0.0, None
        theta, residual = (
            [start.copy() for _ in range(size)],
            [np.zeros_like(start) for _ in range(size)],
        )
        for step in range(1, steps + 1):
            for rank in range(size):
                theta[rank] = theta[rank] - 0.1 * (
                    theta[rank] - target(rank, step, name)
                )
            if step % every == 0 and step not in skipped:
                began = [each.copy() for each in theta]
            if began is None or step % every != delay:
                continue
            corrected = [
                decay * e + anchor - each
                for e, each in zip(residual, began, strict=True)
            ]
            sent = [largest(each, DENSITY) for each in corrected]
            residual = [one - other for one, other in zip(corrected, sent, strict=True)]
            dense = sent[0].size < SMALL or not contributors
            mean = sum(sent) / (
                size if dense else np.maximum(sum(each != 0 for each in sent), 1)
            )
            velocity = momentum * velocity + mean
            anchor = anchor - rate * (
                mean + momentum * velocity if nesterov else velocity
            )
            theta = [
                anchor + (each - then) for each, then in zip(theta, began, strict=True)
            ]
            began = None
        anchors[name] = anchor
        for rank in range(size):
            everyone[rank][name] = theta[rank]
    return anchors, everyone


def made(
    comm,
    *,
    parameters=None,
    compressor=None,
    decay=None,
    average=True,
    options=None,
    **settings,
):
    """Return the parameters of this rank and their loop."""
    parameters = (
        {name: array.copy() for name, array in START.items()}
        if parameters is None
        else parameters
    )
    feedback = ErrorFeedback() if decay is None else ErrorFeedback(decay=decay)
    exchange = GradientExchange(
        comm,
        compressor or TopK(DENSITY),
        feedback,
        small=SMALL,
        average=average,
        **options or {},
    )
    return parameters, OuterLoop(exchange, parameters, **settings)


def train(comm, parameters, loop, first, end):
    """Take the steps first, ..., end - 1."""
    for step in range(first, end):
        learn(parameters, comm.rank, step)
        loop.step()


def same_everywhere(comm, arrays):
    return (
        len(
            set(
                comm.allgather(
                    b"".join(np.asarray(array).tobytes() for array in arrays.values())
                )
            )
        )
        == 1
    )


def bits(arrays):
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


CASES = {
    "plain": {},
    "a rate": {"rate": 0.65},
    "momentum": {"momentum": 0.9, "rate": 0.7},
    "Nesterov": {"momentum": 0.9, "nesterov": True, "rate": 0.7},
    "delay": {"delay": 1},
    "delay, Nesterov": {"delay": 3, "momentum": 0.5, "nesterov": True, "rate": 0.5},
    "every step": {"every": 1},
    "decay": {"decay": 0.95, "rate": 0.65},
    "contributors": {"contributors": True},
    "decay, contributors, delay": {"decay": 0.5, "contributors": True, "delay": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_a_simulation_of_all_ranks(comm, case):
    settings = {"every": 4} | CASES[case]
    anchors, everyone = simulate(comm.size, 15, **settings)
    average = "contributors" if settings.pop("contributors", False) else True
    parameters, loop = made(comm, average=average, **settings)
    train(comm, parameters, loop, 1, 16)
    assert (loop.count, loop.rounds) == (15, 15 // loop.every)
    for name in SHAPES:
        np.testing.assert_allclose(loop.anchor[name], anchors[name], rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            parameters[name], everyone[comm.rank][name], rtol=0, atol=1e-12
        )
    assert same_everywhere(comm, loop.anchor)


@pytest.mark.parametrize(("inner", "outer"), [(0.25, 1.0), (1.0, 0.25)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_step_and_dense_it_is_dense_sgd_bit_for_bit(comm, inner, outer, dtype):
    """Where anchor - theta is exact, as of quarters; else it rounds once more than dense SGD, to the parameters' dtype.

    The gradients are multiples of the number of ranks, so that their mean is exact too.
    """

    def gradient(theta, step):
        return (
            comm.size * ((np.floor(4 * theta) * 3 + 5 * comm.rank + step) % 11 - 5)
        ).astype(dtype)

    start = np.arange(-150, 150).astype(dtype)
    dense, local = start.copy(), start.copy()
    _, loop = made(comm, parameters=local, compressor=Dense(), every=1, rate=outer)
    for step in range(9):
        dense -= dtype(0.25) * (
            dense_allreduce(gradient(dense, step), comm) / dtype(comm.size)
        )
        local -= dtype(inner) * gradient(local, step)
        loop.step()
        assert local.tobytes() == dense.tobytes()
    assert local.tobytes() != start.tobytes()


def test_interleaved_dtypes_are_exchanged_in_a_bucket_each(comm):
    shapes = {"w": ((16, 9), "f2"), "norm": ((9,), "f4")}
    interleaved = [f"{number}.{kind}" for number in range(64) for kind in shapes]
    grouped = sorted(interleaved, key=lambda name: name[-1])
    messages, anchors = [], []
    for names in interleaved, grouped:
        parameters = {name: np.zeros(*shapes[name.split(".")[1]]) for name in names}
        exchange = GradientExchange(comm, bits=4)
        loop = OuterLoop(exchange, parameters, every=1)
        assert len(exchange.buckets) == 2
        loop.step()
        before = traffic(comm).messages
        for array in parameters.values():
            array -= 1 + comm.rank
        loop.step()
        messages.append(traffic(comm).messages - before)
        anchors.append(bits({name: parameters[name] for name in interleaved}))
    assert messages[0] == messages[1]
    assert anchors[0] == anchors[1]


# Pitfalls of published code


def test_a_round_of_rate_0_discards_its_progress_and_the_residual(comm):
    """So that nothing of a warm-up is applied later."""
    parameters, loop = made(comm, every=2, rate=0)
    train(comm, parameters, loop, 1, 5)
    assert bits(parameters) == bits(START)
    assert loop.exchange.residual_norm == 0
    loop.rate = 1.0
    fresh, other = made(comm, every=2)
    train(comm, parameters, loop, 1, 5)
    train(comm, fresh, other, 1, 5)
    assert bits(parameters) == bits(fresh)
    assert loop.exchange.residual_norm > 0


def test_ranks_with_different_numbers_of_batches_lose_nothing(comm):
    parameters = {"weight": np.zeros(600)}
    _, loop = made(comm, parameters=parameters, every=2, average=False)
    total = np.zeros(600)
    for step in range(8):
        for rank in range(comm.size):
            learnt = np.random.default_rng([rank, step]).integers(-9, 10, 600)
            if step < 3 + rank:  # then this rank has no batch left
                total += learnt
                if rank == comm.rank:
                    parameters["weight"] += learnt
        loop.step()
    residual = np.array(loop.exchange.state_dict()["weight/feedback/residual"])
    comm.Allreduce(residual.copy(), residual)
    np.testing.assert_array_equal(parameters["weight"] - residual, total)
    assert residual.any() or comm.size == 1


@pytest.mark.at_least(2)
def test_models_that_did_not_start_alike_are_named(comm):
    odd = comm.size - 1
    parameters = {name: array.copy() for name, array in START.items()}
    parameters["bias"][3] += comm.rank == odd
    with pytest.raises(
        CollectiveError,
        match=rf"the parameters of rank {odd} differ .* in 1 of 2 tensors; the first is 'bias'.* broadcast rank 0's",
    ):
        made(comm, parameters=parameters)


@pytest.mark.at_least(2)
def test_the_debug_mode_compares_the_anchors_each_round(comm, fresh, monkeypatch):
    monkeypatch.setenv("MPICOMP_CHECK", "1")
    parameters, loop = made(fresh, every=2)
    train(fresh, parameters, loop, 1, 5)
    train(fresh, parameters, loop, 5, 8)
    if comm.rank == comm.size - 1:
        loop._replicas[0].anchor[0] += 1
    learn(parameters, comm.rank, 8)
    with pytest.raises(
        CollectiveError,
        match=rf"the parameters of rank {comm.size - 1} differ .* the first is 'weight'",
    ):
        loop.step()


# Settings


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"every": 0}, "every is 0: expected an integer of at least 1"),
        (
            {"every": 2, "delay": 2},
            "delay is 2 and every 2: expected 0 <= delay < every",
        ),
        ({"rate": -1.0}, "rate is -1.0: expected 0 <= rate < infinity"),
        ({"momentum": 1.0}, "momentum is 1.0: expected 0 <= momentum < 1"),
        ({"nesterov": True}, "nesterov is set and momentum is 0"),
        ({"parameters": {}}, "it is empty: expected at least one array"),
        (
            {"parameters": np.arange(9)},
            "values are int64: expected float16, float32 or float64",
        ),
        (
            {"parameters": np.zeros((4, 4)).T[::2]},
            "not contiguous in any order of its axes",
        ),
    ],
)
def test_a_bad_argument_of_one_rank_raises_on_all(comm, bad, match):
    last = comm.rank == comm.size - 1
    own = (ValueError, TypeError)
    with pytest.raises(own if last else CollectiveError, match=match):
        made(comm, **(bad if last else {}))


@pytest.mark.at_least(2)
def test_settings_and_tensors_that_differ_are_named(comm):
    with pytest.raises(
        CollectiveError,
        match=r"same settings of OuterLoop: 'every' is 2 on rank 0, and 3 on rank 1",
    ):
        made(comm, every=2 + (comm.rank > 0))
    with pytest.raises(
        CollectiveError,
        match=r"the same tensors: 'w' is float64 of shape \(9,\) on rank 0, and float",
    ):
        made(
            comm, parameters={"w": np.zeros(9, np.float32 if comm.rank else np.float64)}
        )


def test_a_feedback_that_keeps_its_residual_in_the_gradient_is_refused(comm):
    exchange = GradientExchange(comm, TopK(k=3), ErrorFeedback(in_place=True))
    with pytest.raises(
        ValueError,
        match=r"feedback of the exchange is InPlaceErrorFeedback\(in_place=True.*: expected one",
    ):
        OuterLoop(exchange, np.zeros(2000))
    # the type: the values of a model take pages
    with pytest.raises(TypeError, match="exchange is dict: expected a Gradient"):
        OuterLoop({"w": np.zeros(2000)}, exchange)


def test_tied_parameters_count_once_and_a_list_and_an_array_are_taken(comm):
    shared = np.zeros((20, 30))
    parameters = {"embedding": shared, "head": shared.reshape(600)}
    _, loop = made(comm, parameters=parameters, compressor=Dense(), every=1)
    shared += 2
    loop.step()
    np.testing.assert_array_equal(shared, 2)
    assert list(loop.anchor) == ["embedding", "head"]
    assert [name for name in loop.state_dict() if name.endswith("/anchor")] == [
        "embedding/loop/anchor"
    ]
    assert loop.exchange.residual_norm == 0
    first, second = np.zeros(5), np.zeros((30, 40), np.float32)
    _, loop = made(comm, parameters=[first, second], compressor=Dense(), every=1)
    second += 1
    loop.step()
    assert [each.sum() for each in loop.anchor] == [0, 1200]


class Trained(np.ndarray):
    """An array that requires a gradient, as PyTorch's parameters do."""

    requires_grad = True


@pytest.mark.parametrize("settings", [{}, {"delay": 1, "momentum": 0.5}])
def test_a_frozen_parameter_does_not_change_and_can_be_trained_again(comm, settings):
    """What it learnt in the round in which it was frozen is exchanged, also where only one rank had changed it."""
    parameters = {name: array.copy().view(Trained) for name, array in START.items()}
    _, loop = made(comm, parameters=parameters, every=2, **settings)
    weight, rest = parameters["weight"], {"bias": parameters["bias"]}
    train(comm, parameters, loop, 1, 5)
    weight -= comm.rank == 0
    weight.requires_grad = False
    train(comm, rest, loop, 5, 8)
    before = {
        key: array.tobytes()
        for key, array in loop.state_dict().items()
        if key.startswith("weight/")
    }
    anchor, theta = loop.anchor["weight"].tobytes(), weight.tobytes()
    assert len(set(comm.allgather((anchor, theta)))) == 1
    assert not np.array_equal(weight, START["weight"])
    train(comm, rest, loop, 8, 14)
    assert weight.tobytes() == theta
    assert all(
        loop.state_dict()[key].tobytes() == array for key, array in before.items()
    )
    weight.requires_grad = True
    train(comm, parameters, loop, 14, 18)
    assert weight.tobytes() != theta
    assert same_everywhere(comm, loop.anchor)
    assert loop.rounds == 8


def test_a_loop_that_was_saved_with_a_frozen_parameter_is_resumed_with_a_warm_up(comm):
    """The compressors of its tensors were saved at different steps of the warm-up."""

    def new():
        start = np.random.default_rng(3).standard_normal((2, 600)).astype(np.float32)
        parameters = {
            name: row.copy().view(Trained)
            for name, row in zip("ab", start, strict=True)
        }
        compressor = WarmUp(TopK(0.01), [0.5, 0.25, 0.1, 0.01])
        return made(comm, parameters=parameters, compressor=compressor, every=1)

    def goes_on(parameters, loop):
        for step in range(3, 8):
            parameters["a"].requires_grad = step > 4
            progress(comm, parameters, "ab" if step > 4 else "b", step)
            loop.step()
        return {name: array.tobytes() for name, array in loop.anchor.items()}

    parameters, loop = new()
    for step in range(3):
        parameters["a"].requires_grad = not step
        progress(comm, parameters, "b" if step else "ab", step)
        loop.step()
    resumed, again = new()
    again.load_state_dict(loop.state_dict())
    assert goes_on(resumed, again) == goes_on(parameters, loop)


def test_a_loop_holds_what_it_held_when_it_was_saved_whatever_the_names(comm):
    """One name is the other with what a wrapper adds; the frozen one is held while an exchange is in flight."""

    def new():
        parameters = {
            name: np.ones(600, np.float32).view(Trained) for name in ("a", "module.a")
        }
        return made(comm, parameters=parameters, every=2, delay=1)

    def goes_on(parameters, loop):
        parameters["module.a"].requires_grad = False
        for step in range(5, 8):
            progress(comm, parameters, ["a"], step)
            loop.step()
        return {name: array.tobytes() for name, array in loop.anchor.items()}

    parameters, loop = new()
    parameters["module.a"].requires_grad = False
    for step in range(4):
        progress(comm, parameters, ["a"], step)
        loop.step()
    assert loop.in_flight
    resumed, again = new()
    again.load_state_dict(loop.state_dict())
    for name, array in parameters.items():
        resumed[name][...] = array
    assert goes_on(resumed, again) == goes_on(parameters, loop)


def progress(comm, parameters, names, step):
    """Another step on each rank, of the named parameters."""
    for name in names:
        parameters[name] -= np.float32(0.5 * (comm.rank + 1) + step)


@pytest.mark.parametrize("synchronises", [False, True])
@pytest.mark.parametrize("settings", [{}, {"delay": 1, "momentum": 0.5}])
def test_a_parameter_that_is_frozen_whenever_a_round_starts_is_exchanged(
    comm, settings, synchronises
):
    """As the discriminator of a GAN, after a round without training; it moves on the last rank alone."""
    parameters = {name: array.copy().view(Trained) for name, array in START.items()}
    _, loop = made(comm, parameters=parameters, compressor=Dense(), every=2, **settings)
    weight = parameters["weight"]
    for step in range(1, 11):
        weight.requires_grad = False
        trained = ["bias"]
        if step > 4 and step % 2:  # within a round
            trained += ["weight"] * (comm.rank == comm.size - 1)
        progress(comm, parameters, trained, step)
        loop.step()
    if synchronises:
        progress(comm, parameters, trained, 11)
        loop.step()
        loop.synchronise()
        assert same_everywhere(comm, parameters)
    assert same_everywhere(comm, loop.anchor)
    moved = loop.anchor["weight"] - START["weight"]
    if not settings:
        mean = sum(0.5 * comm.size + step for step in (5, 7, 9)) / comm.size
        np.testing.assert_allclose(-moved, mean, rtol=1e-5)
    assert moved.any()


@pytest.mark.at_least(2)
@pytest.mark.parametrize("thaws", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("compressor", [TopK(0.5), Dense()])
def test_a_parameter_frozen_or_thawed_on_one_rank_is_named_on_all(
    comm, compressor, delay, thaws
):
    parameters = {name: array.copy().view(Trained) for name, array in START.items()}
    _, loop = made(
        comm, parameters=parameters, compressor=compressor, every=2, delay=delay
    )
    weight = parameters["weight"]
    weight.requires_grad = not thaws
    names = ["bias"] if thaws else START
    for step in range(4 + delay):
        progress(comm, parameters, names, step)
        loop.step()
    before = {name: array.tobytes() for name, array in loop.anchor.items()}
    if comm.rank == 0:
        weight.requires_grad = thaws
    raised = []
    for step in range(2):  # with a delay the others raise in the second one
        progress(comm, parameters, ["bias"], step)
        try:
            loop.step()
        except CollectiveError as error:
            raised.append(str(error))
    assert len(raised) == 1
    assert "hold(weight)" in raised[0]
    assert {name: array.tobytes() for name, array in loop.anchor.items()} == before
    weight.requires_grad = False
    loop.step()
    loop.synchronise()
    assert same_everywhere(comm, loop.anchor)


@pytest.mark.at_least(2)
@pytest.mark.parametrize("freezes", [False, True])
def test_a_round_that_one_rank_alone_ends_early_raises_on_all(comm, freezes):
    """Also where a layer is frozen in it, so that all ranks hold the same one in a call that is not of the round."""
    parameters = {name: array.copy().view(Trained) for name, array in START.items()}
    _, loop = made(comm, parameters=parameters, compressor=Dense(), every=4)
    for step in range(5):
        progress(comm, parameters, START, step)
        loop.step()
    before = {name: array.tobytes() for name, array in loop.anchor.items()}
    parameters["weight"].requires_grad = not freezes
    loop.step()
    if comm.rank:
        loop.step()
    with pytest.raises(CollectiveError, match=r"synchronised|hold\("):
        (loop.step if comm.rank else loop.synchronise)()
    assert {name: array.tobytes() for name, array in loop.anchor.items()} == before
    for _ in range(4):
        loop.step()
    assert same_everywhere(comm, loop.anchor)


@pytest.mark.at_least(2)
def test_a_parameter_frozen_on_one_rank_at_the_start_is_named(comm):
    parameters = {name: array.copy().view(Trained) for name, array in START.items()}
    if comm.rank == 0:
        parameters["weight"].requires_grad = False
    with pytest.raises(CollectiveError, match="'parameter weight' is"):
        made(comm, parameters=parameters)


@pytest.mark.parametrize("settings", [{}, {"delay": 1, "momentum": 0.5}])
@pytest.mark.parametrize("saved_at", range(5, 10))
def test_a_run_with_a_frozen_parameter_continues_bit_for_bit(comm, settings, saved_at):
    """Also with an exchange in flight, of which the frozen one is no part, and one that moves while it is left out."""

    def steps(parameters, loop, first, end):
        for step in range(first, end):
            parameters["weight"].requires_grad = step < 2
            # trained once within the round of steps 6 and 7
            names = [*START] if step in (1, 6) else ["bias", "scale"]
            progress(comm, parameters, {*names} & {*START}, step)
            loop.step()

    runs = []
    for _ in range(2):
        parameters = {name: array.copy().view(Trained) for name, array in START.items()}
        runs.append(
            (parameters, made(comm, parameters=parameters, every=2, **settings)[1])
        )
    (parameters, loop), (resumed, other) = runs
    steps(parameters, loop, 1, saved_at)
    other.load_state_dict(loop.state_dict())
    for name, array in parameters.items():
        resumed[name][...] = array
    steps(parameters, loop, saved_at, 14)
    steps(resumed, other, saved_at, 14)
    for name, array in parameters.items():
        assert resumed[name].tobytes() == array.tobytes(), name
    np.testing.assert_equal(other.state_dict(), loop.state_dict())


def test_a_function_returns_the_parameters_of_each_round(comm):
    """As PyTorch's load_state_dict(assign=True) makes new ones."""
    parameters = {"w": np.zeros(2000)}
    _, loop = made(
        comm, parameters=lambda: dict(parameters), compressor=Dense(), every=1
    )
    parameters["w"] = np.full(2000, 3.0)
    loop.step()
    assert (parameters["w"] == 3).all()
    parameters["w"] = np.zeros(2001)
    with pytest.raises(
        ValueError,
        match=r"w is float64 of shape \(2001,\): expected float64 of shape \(2000,\)",
    ):
        loop.step()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_parameters_that_are_added_or_removed_on_one_rank_are_named_on_all(
    comm, change, delay
):
    parameters = {"w": np.zeros(2000), "v": np.zeros(30)}
    exchange = GradientExchange(comm, Dense(), NoFeedback())
    loop = OuterLoop(exchange, parameters, every=2, delay=delay)
    loop.step()
    if delay:
        loop.step()
    if is_last(comm):
        if change != "added":
            del parameters["v"]
        if change != "removed":
            parameters["u"] = np.zeros(30)
    with pytest.raises(
        ValueError if is_last(comm) else CollectiveError,
        match=r"are parameters now and were none at the start, or the reverse: expected",
    ):
        loop.step()
    assert loop.rounds == 0


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, CancelledError])
def test_what_a_function_of_the_parameters_raises_on_one_rank_undoes_the_round(
    comm, error, delay
):
    parameters = {"w": np.zeros(2000)}
    fails = False

    def current():
        if fails:
            raise error("mine")
        return parameters

    exchange = GradientExchange(comm, Dense(), NoFeedback())
    loop = OuterLoop(exchange, current, every=2, delay=delay)
    loop.step()
    if delay:  # it fails when the exchange ends, in the next step
        loop.step()
    parameters["w"] += 1 + comm.rank
    fails = is_last(comm)
    with pytest.raises(error if fails else CollectiveError, match="mine"):
        loop.step()
    fails = False
    assert loop.rounds == 0
    for _ in range(2):
        loop.step()
    assert loop.rounds == 1
    assert (loop.anchor["w"] == 1 + np.mean(range(comm.size))).all()


# Saved and taken up again


RESTARTS = {
    "plain": {"compressor": TopK(DENSITY)},
    "delay": {"compressor": RandomK(DENSITY, seed=3), "delay": 2, "momentum": 0.5},
}


@pytest.mark.parametrize("case", RESTARTS)
def test_a_run_that_is_taken_up_at_any_step_continues_bit_for_bit(comm, case):
    settings = RESTARTS[case]
    parameters, loop = made(comm, every=3, **settings)
    saved = []
    for step in range(1, 9):
        saved.append(
            (
                loop.state_dict(),
                {name: array.copy() for name, array in parameters.items()},
            )
        )
        train(comm, parameters, loop, step, step + 1)
    assert len([state for state, _ in saved if "weight/loop/delta" in state]) == (
        4 if "delay" in settings else 0
    )
    for step, (state, then) in enumerate(saved, 1):
        second, other = made(comm, every=3, **settings)
        other.load_state_dict(through_a_file(state))
        for name, array in second.items():
            array[...] = then[name]
        assert bits(other.state_dict()) == bits(state)
        train(comm, second, other, step, 9)
        assert (other.count, other.rounds) == (loop.count, loop.rounds)
        assert bits(second) == bits(parameters)
        assert bits(other.state_dict()) == bits(loop.state_dict())


def test_a_state_that_does_not_fit_one_rank_changes_nothing(comm):
    last = comm.rank == comm.size - 1
    parameters, loop = made(comm, every=2, delay=1)
    train(comm, parameters, loop, 1, 4)
    good = loop.state_dict()
    _, other = made(comm, every=2, delay=1)
    plain = GradientExchange(comm, TopK(DENSITY), small=SMALL)
    plain.register(START)
    before = bits(other.state_dict())
    anchor, residual = "weight/loop/anchor", "weight/feedback/residual"
    for bad, match in (
        (good | {anchor: np.zeros(5)}, "the state of 'weight' has 5 values: expected 600"),
        (good | {anchor: np.zeros(600, np.float32)}, "has float32 as anchor: expected float64; make the"),
        (good | {anchor: np.full(600, np.nan)}, "expected a finite vector"),
        (good | {residual: np.zeros(3)}, "600"),
        (good | {"weight/loop/velocity": np.zeros(600)}, r"the state has \['weight/loop/velocity'\] too"),
        (good | {"header/json": np.zeros(3, np.uint8)}, "no 'header/json' of format 1: .* damaged"),
        (with_header(good, loop={"in_flight": True, "steps_into_round": 1}), "the delay with which it was saved"),
        (plain.state_dict(), "the state is of a GradientExchange: expected one of an OuterLoop"),
    ):  # fmt: skip
        with pytest.raises(ValueError if last else CollectiveError, match=match):
            other.load_state_dict(bad if last else good)
        assert bits(other.state_dict()) == before
    for state in None, [3], good | {3: np.array(3)}:
        with pytest.raises(
            TypeError if last else CollectiveError,
            match="expected arrays by name, what state_dict",
        ):
            other.load_state_dict(state if last else good)
    if comm.size > 1:
        with pytest.raises(
            CollectiveError,
            match="the same saved state: 'count' is 3 on rank 0, and 5 on rank",
        ):
            other.load_state_dict(
                with_header(good, loop={"count": 5}) if last else good
            )
    assert bits(other.state_dict()) == before
    learn(parameters, comm.rank, 4)
    loop.step()
    with pytest.raises(
        RuntimeError,
        match="an exchange is in flight: load the state into a new OuterLoop",
    ):
        loop.load_state_dict(good)
    learn(parameters, comm.rank, 5)
    loop.step()


def test_a_state_names_its_settings_and_no_wrapper(comm):
    parameters = {
        f"module._orig_mod.{name}": array.copy() for name, array in START.items()
    }
    _, loop = made(comm, parameters=parameters, every=2, momentum=0.5)
    state = loop.state_dict()
    _, other = made(comm, every=2, momentum=0.5)
    other.load_state_dict(state)
    loop.load_state_dict(other.state_dict())
    assert bits(other.state_dict()) == bits(state)
    for name, value in {
        "every": 3,
        "momentum": 0.25,
        "rate": 0.5,
        "nesterov": True,
        "delay": 1,
    }.items():
        _, other = made(comm, **{"every": 2, "momentum": 0.5} | {name: value})
        with pytest.raises(
            ValueError,
            match=rf"saved with {name} .*: expected {value}; make the loop with the settings",
        ):
            other.load_state_dict(state)
        other.load_state_dict(state, same_settings=False)


# Faults


@contextmanager
def all_raise(comm, match):
    with pytest.raises(
        ValueError if comm.rank == comm.size - 1 else CollectiveError, match=match
    ):
        yield


@pytest.mark.parametrize("settings", [{}, {"delay": 1, "momentum": 0.5}])
def test_a_round_that_fails_leaves_all_as_it_was_and_training_goes_on(comm, settings):
    """To the end of a run that skips this round: its progress is in the next one."""
    last, delay = comm.rank == comm.size - 1, settings.get("delay", 0)
    parameters, loop = made(comm, every=3, **settings)
    train(comm, parameters, loop, 1, 6)
    learn(parameters, comm.rank, 6)
    whole, before = parameters["weight"][2, 3], loop.state_dict()
    if last:
        parameters["weight"][2, 3] = np.nan
    if delay:
        loop.step()
        if last:
            parameters["weight"][2, 3] = whole
        learn(parameters, comm.rank, 7)
    local = bits(parameters)
    with all_raise(comm, r"\[63\] is nan"):
        loop.step()
    assert bits(parameters) == local
    facts = {"count": 6 + delay, "steps_into_round": delay, "has_progress": True}
    assert bits(loop.state_dict()) == bits(with_header(before, loop=facts))
    if last and not delay:
        parameters["weight"][2, 3] = whole
    train(comm, parameters, loop, 7 + delay, 14)
    anchors, everyone = simulate(comm.size, 13, 3, **settings, skipped=[6])
    for name in SHAPES:
        np.testing.assert_allclose(loop.anchor[name], anchors[name], rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            parameters[name], everyone[comm.rank][name], rtol=0, atol=1e-12
        )
    assert same_everywhere(comm, loop.anchor)
    assert loop.rounds == 3


@pytest.mark.parametrize("settings", [{}, {"delay": 1}])
def test_a_step_that_the_exchange_skips_is_no_round(comm, settings):
    parameters, loop = made(comm, every=3, options={"nonfinite": "skip"}, **settings)
    train(comm, parameters, loop, 1, 6)
    learn(parameters, comm.rank, 6)
    whole, before = parameters["weight"][2, 3], bits(loop.anchor)
    if comm.rank == comm.size - 1:
        parameters["weight"][2, 3] = np.nan
    local = bits(parameters)
    assert loop.step() is False
    assert bits(parameters) == local
    parameters["weight"][2, 3] = whole
    learn(parameters, comm.rank, 7)
    local = bits(parameters)
    assert loop.step() is False
    assert (loop.rounds, bits(loop.anchor), bits(parameters)) == (1, before, local)
    train(comm, parameters, loop, 8, 14)
    anchors, _ = simulate(comm.size, 13, 3, **settings, skipped=[6])
    for name in SHAPES:
        np.testing.assert_allclose(loop.anchor[name], anchors[name], rtol=0, atol=1e-12)
    assert same_everywhere(comm, loop.anchor)


def test_parameters_that_cannot_be_written_to_any_more_on_one_rank(comm):
    """With a delay the others learn of it when they finish; all try again in the next round."""
    parameters, loop = made(comm, every=3, delay=1)
    train(comm, parameters, loop, 1, 6)
    before, array = bits(loop.anchor), parameters["bias"]
    learn(parameters, comm.rank, 6)
    loop.step()
    learn(parameters, comm.rank, 7)
    array.flags.writeable = comm.rank != comm.size - 1
    with all_raise(comm, r"bias: .* is read-only"):
        loop.step()
    array.flags.writeable = True
    assert bits(loop.anchor) == before
    train(comm, parameters, loop, 8, 11)
    anchors, _ = simulate(comm.size, 10, 3, delay=1, skipped=[6])
    for name in SHAPES:
        np.testing.assert_allclose(loop.anchor[name], anchors[name], rtol=0, atol=1e-12)


@pytest.mark.unchecked("refuses sums that are not finite")
def test_a_sum_that_overflows_on_all_ranks_is_no_round(comm):
    mine = np.zeros(2000, np.float32)
    exchange = GradientExchange(
        comm, TopK(k=20), collective=sparse_allreduce, average=False
    )
    loop = OuterLoop(exchange, mine, every=1)
    mine[:3] = 3e38
    if comm.size == 1:
        loop.step()
        return
    with (
        np.errstate(all="raise"),
        pytest.raises(OverflowError, match="the sum over the ranks leaves the range"),
    ):
        loop.step()
    assert (mine[:3] == np.float32(3e38)).all()
    assert not loop.anchor.any()
    assert loop.rounds == 0


# Devices


@pytest.mark.exactly(1)
@pytest.mark.exactly(3)
@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9, "nesterov": True}, {"delay": 1}]
)
def test_the_bits_on_a_device_are_those_of_the_host(comm, settings):
    cupy = cupy_for_tests()
    here, loop = made(comm, every=2, **settings)
    there = {name: cupy.asarray(array) for name, array in START.items()}
    there, other = made(comm, parameters=there, every=2, **settings)
    for step in range(1, 8):
        learn(here, comm.rank, step)
        loop.step()
        for name, array in there.items():
            array -= 0.1 * (array - cupy.asarray(target(comm.rank, step, name)))
        other.step()
        assert {name: array.get().tobytes() for name, array in there.items()} == bits(
            here
        )
        assert bits(other.state_dict()) == bits(loop.state_dict())
    assert isinstance(other.anchor["bias"], cupy.ndarray)
    _, third = made(
        comm,
        parameters={name: cupy.asarray(array) for name, array in START.items()},
        every=2,
        **settings,
    )
    third.load_state_dict(loop.state_dict())
    assert bits(third.state_dict()) == bits(loop.state_dict())


@pytest.mark.parametrize("kind", ["own state", "states of all ranks"])
def test_a_state_from_the_end_of_a_round_writes_the_parameters(comm, kind):
    """Else the next round would discard what was trained: the model is a new one."""
    parameters = {"weight": np.ones(3000, np.float32)}
    loop = OuterLoop(GradientExchange(comm, Dense(), NoFeedback()), parameters, every=2)

    def train(parameters, loop, rounds):
        for step in range(2 * rounds):
            parameters["weight"] -= 1 + comm.rank + step
            loop.step()

    train(parameters, loop, 2)
    states = comm.allgather(loop.state_dict())
    new = {"weight": np.zeros(3000, np.float32)}
    other = OuterLoop(GradientExchange(comm, Dense(), NoFeedback()), new, every=2)
    if kind == "own state":
        other.load_state_dict(states[comm.rank])
    else:
        other.load_state_dict(
            redistribute_state(states.__getitem__, comm.size, comm.rank, comm.size)
        )
    np.testing.assert_array_equal(new["weight"], parameters["weight"])
    train(new, other, 1)
    train(parameters, loop, 1)
    np.testing.assert_array_equal(new["weight"], parameters["weight"])


def test_a_state_from_within_a_round_leaves_the_parameters(comm):
    """They belong to the rank, which saves them itself."""
    parameters = {"weight": np.ones(3000, np.float32)}
    loop = OuterLoop(GradientExchange(comm, Dense(), NoFeedback()), parameters, every=2)
    loop.step()
    parameters["weight"][:] = 5
    loop.load_state_dict(loop.state_dict())
    assert parameters["weight"][0] == 5


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("steps", [0, 3, 4, 5, 7])
def test_a_round_ends_early_on_all_ranks(comm, steps, delay):
    """All hold the mean of what they did then; the next round has as many steps as any."""
    parameters = {"weight": np.zeros(3000)}
    exchange = GradientExchange(comm, Dense(), NoFeedback())
    loop = OuterLoop(exchange, parameters, every=4, delay=delay)
    for _ in range(steps):
        parameters["weight"] += 2 * comm.rank
        loop.step()
    exchanged = steps % 4 > 0 or (delay > 0 and steps > 0)
    assert loop.synchronise() == exchanged
    mean = steps * (comm.size - 1)
    assert set(parameters["weight"]) == set(loop.anchor["weight"]) == {mean}
    assert loop.synchronise() is False
    rounds = loop.rounds
    for step in range(4 + delay):
        parameters["weight"] += 2 * comm.rank
        assert loop.step() == (step == 3 + delay)
    assert loop.rounds == rounds + 1
    assert loop.count == steps + 4 + delay


def test_parameters_that_were_loaded_are_the_anchor_after_restart(comm):
    """Else the first round would send their change."""
    parameters = {"weight": np.zeros(3000)}
    exchange = GradientExchange(comm, bits=4)
    loop = OuterLoop(exchange, parameters, every=2)
    parameters["weight"][:] = np.linspace(-1, 1, 3000)
    loop.restart()
    for _ in range(2):
        loop.step()
    np.testing.assert_array_equal(parameters["weight"], np.linspace(-1, 1, 3000))
    with pytest.raises(
        RuntimeError, match=r"after round 1, .*: expected it before the first"
    ):
        loop.restart()


def test_a_restart_that_raises_changes_no_anchor(comm):
    parameters = {"a": np.zeros(3000, np.float32), "b": np.zeros(3000)}
    loop = OuterLoop(GradientExchange(comm, bits=4), parameters, every=2)
    parameters["a"][:] = 7
    parameters["b"] = np.ones(2999)
    with pytest.raises(ValueError, match="b is float64 of shape"):
        loop.restart()
    assert not loop.anchor["a"].any()
    parameters["b"] = np.ones(3000)
    loop.restart()
    assert (loop.anchor["a"] == 7).all()
    assert (loop.anchor["b"] == 1).all()


@pytest.mark.at_least(2)
def test_ranks_that_restart_with_other_parameters_raise_and_restart_again(comm):
    """As where one rank alone has loaded a checkpoint: the error names the remedy, which works after it."""
    parameters = {"weight": np.zeros(3000)}
    loop = OuterLoop(GradientExchange(comm, bits=4), parameters, every=2)
    parameters["weight"][0] = comm.rank == comm.size - 1
    loop.restart()
    loop.step()
    with pytest.raises(
        CollectiveError, match=r"the parameters of rank .* differ .* restart\(\)"
    ):
        loop.step()
    parameters["weight"][0] = 5
    loop.restart()
    loop.step()
    assert loop.step()
    assert parameters["weight"][0] == 5
