"""A checkpoint of some ranks that another number of ranks continues: nothing is lost, bitwise on integers."""

import io

import numpy as np
import pytest
from cases import compressed_sum
from mpi4py import MPI

from collectives import GradientExchange, OuterLoop, sparse_allreduce
from mpicomp import (
    AggregationAware,
    ChunkedTopK,
    CollectiveError,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    NoFeedback,
    RandomK,
    StepAhead,
    TopK,
)

SAVED = 4  # ranks
SHAPES = {"weight": (20, 60), "bias": (7,)}  # the second one is sent dense
FEEDBACKS = {
    "error feedback": lambda: ErrorFeedback(),
    "decay": lambda: ErrorFeedback(decay=0.5),
    "momentum": lambda: MomentumCorrection(0.5),
    "step ahead": lambda: StepAhead(0.5, 0.5),
    "none": lambda: NoFeedback(),
}


def exchange_of(comm, feedback, **settings):
    exchange = GradientExchange(comm, RandomK(k=9, seed=3), feedback, sparse_allreduce, **settings)
    exchange.register({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    return exchange


def gradients(rank, step):
    """Return multiples of 64, which a few halvings leave integers."""
    rng = np.random.default_rng([rank, step])
    return {name: np.float32(64 * rng.integers(-9, 10, shape)) for name, shape in SHAPES.items()}


def to_file(state):
    file = io.BytesIO()
    np.savez(file, **state)
    return file.getvalue()


def loader(files):
    return lambda rank: np.load(io.BytesIO(files[rank]))


def cut(comm, size):
    """Return a communicator of the first ranks; COMM_NULL on the others."""
    return comm.Split(0 if comm.rank < size else MPI.UNDEFINED, comm.rank)


def saved_by(comm, feedback, steps=3, **settings):
    """Let the first ranks take a few steps; return what they saved as files, and the sum of their results."""
    group, file, total = cut(comm, SAVED), None, None
    if group != MPI.COMM_NULL:
        exchange = exchange_of(group, FEEDBACKS[feedback](), **settings)
        total = sum(exchange(gradients(group.rank, step))["weight"] for step in range(steps))
        file = to_file(exchange.state_dict())
        group.Free()
    return comm.allgather(file)[:SAVED], comm.bcast(total)


def sums(states):
    """Return the sums over the ranks of the arrays that differ by rank."""
    names = "residual", "velocity"
    keys = [key for key in states[0] if key.endswith(names) and "/feedback." in key]
    return {key: sum(np.float64(state[key]) for state in states) for key in keys}


@pytest.mark.exactly(6)
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_all_that_4_ranks_kept_is_kept_on_2_3_and_6(comm, feedback):
    files, _ = saved_by(comm, feedback)
    states = [dict(loader(files)(rank)) for rank in range(SAVED)]
    before = sums(states)
    assert all(array.any() for key, array in before.items() if key.startswith("weight"))
    for size, conserve in (2, "sum"), (3, "sum"), (3, "mean"), (6, "sum"):
        group = cut(comm, size)
        if group == MPI.COMM_NULL:
            continue
        exchange = exchange_of(group, FEEDBACKS[feedback]())
        exchange.load_state_dicts(SAVED, loader(files), conserve=conserve)
        state = exchange.state_dict()
        after = sums(group.allgather(state))
        factor = size / SAVED if conserve == "mean" else 1
        for key, array in before.items():
            np.testing.assert_array_equal(after[key], factor * array)
        assert state["weight/compressor.0.step"] == 3, "the same random positions on all ranks"
        exchange(gradients(group.rank, 3))
        group.Free()


@pytest.mark.exactly(6)
@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_run_on_other_numbers_of_ranks_returns_and_keeps_all_that_was_put_in(comm, size):
    files, returned = saved_by(comm, "error feedback", average=False)
    given = sum(gradients(rank, step)["weight"] for step in range(3) for rank in range(SAVED))
    group = cut(comm, size)
    if group == MPI.COMM_NULL:
        return
    exchange = exchange_of(group, ErrorFeedback(), average=False)
    exchange.load_state_dicts(SAVED, loader(files))
    for step in range(3, 6):
        returned += exchange(gradients(group.rank, step))["weight"]
        given += sum(gradients(rank, step)["weight"] for rank in range(size))
    kept = sums(group.allgather(exchange.state_dict()))["weight/feedback.residual"]
    np.testing.assert_array_equal(returned.reshape(-1) + kept, given.reshape(-1))
    assert kept.any()
    group.Free()


EVERY_STEP = {
    "basis": lambda comm: GradientExchange(comm, ChunkedTopK(k=2, chunk=16), basis=Hadamard(chunk=16), average=False),
    "few bits": lambda comm: GradientExchange(comm, bits=4, average=False),
}


@pytest.mark.exactly(6)
@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("method", EVERY_STEP)
def test_coefficients_and_rounding_errors_are_kept_on_another_number_of_ranks(comm, method, size):
    applied, given, file = np.zeros((20, 60)), np.zeros((20, 60)), None

    def train(group, exchange, steps):
        for step in steps:
            applied[...] += exchange({"weight": gradients(group.rank, step)["weight"]})["weight"]
            given[...] += sum(gradients(rank, step)["weight"] for rank in range(group.size))

    group = cut(comm, SAVED)
    if group != MPI.COMM_NULL:
        exchange = EVERY_STEP[method](group)
        train(group, exchange, range(3))
        file = to_file(exchange.state_dict())
        group.Free()
    files = comm.allgather(file)[:SAVED]
    applied, given = comm.bcast((applied, given))
    group = cut(comm, size)
    if group == MPI.COMM_NULL:
        return
    exchange = EVERY_STEP[method](group)
    exchange.register({"weight": np.zeros((20, 60), np.float32)})
    exchange.load_state_dicts(SAVED, loader(files))
    train(group, exchange, range(3, 5))
    (bucket,) = exchange.buckets
    residual = bucket.feedback.residual.copy()
    kept = group.allreduce((bucket.inverse(residual) if method == "basis" else residual).astype(np.float64))
    assert kept.any()
    np.testing.assert_allclose(applied.reshape(-1) + kept, given.reshape(-1), atol=0.1)
    group.Free()


def two_way_of(group):
    """Return an exchange of three buckets whose sums are compressed."""
    parts = AggregationAware(k=9), ErrorFeedback()
    exchange = GradientExchange(
        group,
        *parts,
        average=False,
        small=0,
        bucket_nbytes=1,
        collective=compressed_sum(TopK(k=5)),
    )
    exchange.register({name: np.zeros((20, 60), np.float32) for name in "abc"})
    return exchange


def step_of(exchange, number):
    """Take a step; return by name what came back, and what all ranks put in."""
    given = [gradients(rank, number)["weight"] for rank in range(exchange.comm.size)]
    return {
        name: (mean, sum(given)) for name, mean in exchange(dict.fromkeys("abc", given[exchange.comm.rank])).items()
    }


def kept_by(group, exchange, name):
    """Return the sum over the ranks of what they keep of a tensor."""
    residual = exchange.state_dict().get(f"{name}/feedback.residual", np.zeros(1200))
    return sum(group.allgather(residual)).reshape(20, 60)


@pytest.mark.exactly(3)
@pytest.mark.parametrize(("saved", "size"), [(2, 1), (2, 3), (3, 2)])
def test_what_the_owners_of_shares_keep_is_kept(comm, saved, size):
    """On ranks that saved nothing too, and what a compressor knows of the sums; other ranks own the shares then."""
    group, file, account = cut(comm, saved), None, None
    if group != MPI.COMM_NULL:
        exchange = two_way_of(group)
        steps = [step_of(exchange, number) for number in range(2)]
        account = {name: sum(given - mean for mean, given in (step[name] for step in steps)) for name in "abc"}
        file = to_file(exchange.state_dict())
        group.Free()
    files, account = comm.allgather(file)[:saved], comm.bcast(account)
    group = cut(comm, size)
    if group == MPI.COMM_NULL:
        return
    exchange = two_way_of(group)
    exchange.load_state_dicts(saved, loader(files))
    states, again = group.allgather(exchange.state_dict()), loader(files)(0)
    for name in "abc":
        np.testing.assert_array_equal(kept_by(group, exchange, name), account[name])
        for state in states:
            np.testing.assert_array_equal(state[f"{name}/compressor.0._bonus"], again[f"{name}/compressor.0._bonus"])
    for name, (mean, given) in step_of(exchange, 2).items():
        np.testing.assert_array_equal(kept_by(group, exchange, name), account[name] + given - mean)
    group.Free()


@pytest.mark.exactly(2)
def test_ranks_may_have_compressors_of_their_own(comm):
    exchange = GradientExchange(comm, RandomK(k=9, seed=comm.rank), ErrorFeedback())
    exchange(gradients(comm.rank, 0)["weight"])
    states = comm.allgather(exchange.state_dict())
    alone = GradientExchange(MPI.COMM_SELF, RandomK(k=9, seed=0), ErrorFeedback())
    alone.load_state_dicts(2, lambda rank: states[rank])
    np.testing.assert_array_equal(alone.feedback.residual, sum(state["gradient/feedback.residual"] for state in states))


@pytest.mark.exactly(2)
def test_as_many_ranks_continue_bit_for_bit(comm):
    whole = exchange_of(comm, MomentumCorrection(0.9))
    whole(gradients(comm.rank, 0))
    files = comm.allgather(to_file(whole.state_dict()))
    for conserve in "sum", "mean":
        again = exchange_of(comm, MomentumCorrection(0.9))
        again.load_state_dicts(2, loader(files), conserve=conserve)
        np.testing.assert_equal(again.state_dict(), whole.state_dict())


@pytest.mark.exactly(1)
def test_states_that_do_not_belong_together_change_nothing(comm):
    """Of different steps, of other ranks, of other settings, and with sums out of range."""

    def state(rank, ranks=2, value=1.0, **more):
        exchange = GradientExchange(comm, TopK(k=1))
        exchange(np.zeros(3, np.float16))
        arrays = {"gradient/feedback.residual": np.full(3, value, np.float16)}
        table = np.array(
            [["rank", str(rank)], ["ranks", str(ranks)], ["average", "True"], ["small", "1024"], ["basis", "None"]]
        )
        return exchange.state_dict() | arrays | {"settings": table} | more

    exchange = GradientExchange(comm, TopK(k=1))
    exchange(np.ones(3, np.float16))
    before = exchange.state_dict()
    fresh = GradientExchange(comm, TopK(k=1)).state_dict()
    wrong = [
        (3, state, r"load\(0\): the state was saved with ranks 2: expected 3"),
        (2, lambda rank: state(0), r"load\(1\): the state was saved with rank 0: expected 1"),
        (2, lambda rank: fresh | {"settings": state(1)["settings"]} if rank else state(0), "arrays"),
        (2, lambda rank: state(rank, value=np.nan), "leaves the range of float16"),
        (2, lambda rank: state(rank, value=4e4), "leaves the range of float16"),
        (2, lambda rank: state(rank, **{"gradient/feedback.rate": np.array(rank)}), r"rate differs between .* 0 and 1"),
        (2, lambda rank: {}, "the state of rank 0 has no 'settings'"),
        (0, state, "ranks is 0"),
    ]
    for ranks, load, said in wrong:
        with pytest.raises((ValueError, OverflowError), match=said):
            exchange.load_state_dicts(ranks, load)
    with pytest.raises(ValueError, match=r"conserve is 'all': expected one of"):
        exchange.load_state_dicts(2, state, conserve="all")
    with pytest.raises(ValueError, match=r"saved with feedback ErrorFeedback.*: expected MomentumCorrection"):
        GradientExchange(comm, TopK(k=1), MomentumCorrection()).load_state_dicts(2, state)
    np.testing.assert_equal(exchange.state_dict(), before)
    exchange.load_state_dicts(2, state)
    assert exchange.feedback.residual.tolist() == [2, 2, 2]


def loop_of(comm, model, *, bits=None, **settings):
    compressor = TopK(k=9) if bits is None else None
    exchange = GradientExchange(comm, compressor, ErrorFeedback(), bits=bits, average=False, small=0)
    return OuterLoop(exchange, model, every=2, **settings)


@pytest.mark.exactly(6)
@pytest.mark.parametrize(("size", "bits"), [(2, None), (3, None), (6, None), (2, 4), (6, 4)])
def test_local_steps_continue_on_another_number_of_ranks(comm, size, bits):
    """The anchor moves by what arrives of the progress of all ranks; the rest is in their residuals."""

    def advance(model, rank, step):
        model["weight"] -= gradients(rank, step)["weight"]

    group, file = cut(comm, SAVED), None
    if group != MPI.COMM_NULL:
        model = {"weight": np.zeros(SHAPES["weight"], np.float32)}
        outer = loop_of(group, model, bits=bits)
        for step in range(4):
            advance(model, group.rank, step)
            outer.step()
        file = to_file(outer.state_dict())
        group.Free()
    files = comm.allgather(file)[:SAVED]
    group = cut(comm, size)
    if group == MPI.COMM_NULL:
        return
    model = {"weight": np.zeros(SHAPES["weight"], np.float32)}
    outer = loop_of(group, model, bits=bits)
    outer.load_state_dicts(SAVED, loader(files))
    model["weight"][...] = outer.anchor["weight"]
    for step in range(4, 6):
        advance(model, group.rank, step)
        outer.step()
    assert (outer.count, outer.rounds) == (6, 3)
    given = sum(gradients(rank, step)["weight"] for step in range(6) for rank in range(SAVED if step < 4 else size))
    residuals = sum(group.allgather(outer.exchange.state_dict()["weight/feedback.residual"]))
    np.testing.assert_allclose(residuals.reshape(given.shape) - model["weight"], given, 0, 0.1 if bits else 0)
    assert residuals.any()
    group.Free()


@pytest.mark.exactly(3)
@pytest.mark.parametrize(("steps", "delay"), [(1, 0), (2, 1)])
def test_local_steps_within_a_round_or_in_flight_do_not_continue_on_another_number_of_ranks(comm, steps, delay):
    model = {"weight": np.zeros(SHAPES["weight"], np.float32)}
    outer = loop_of(comm, model, delay=delay)
    for _ in range(steps):
        outer.step()
    state, fresh = outer.state_dict(), loop_of(comm, model, delay=delay)
    before = fresh.state_dict()
    with pytest.raises(ValueError, match=f"the state is of step {steps}, within a round of 2 steps or with an"):
        fresh.load_state_dicts(2, lambda rank: state)
    np.testing.assert_equal(fresh.state_dict(), before)
    ranks = 0 if comm.rank == 1 else 3
    with pytest.raises(ValueError if comm.rank == 1 else CollectiveError, match="ranks is 0"):
        fresh.load_state_dicts(ranks, lambda rank: state)
    outer.step()  # ends what is in flight
