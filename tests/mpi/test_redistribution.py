"""A checkpoint of some ranks that another number of ranks continues: nothing is lost, bitwise on integers."""

import io

import numpy as np
import pytest
from cases import RandomK, compressed_sum, feedbacks_but, with_header
from mpi4py import MPI

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    redistribute_state,
    sparse_allreduce,
)
from mpicomp import (
    AggregationAware,
    ChunkedTopK,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    TopK,
)

SAVED = 4  # ranks
SHAPES = {"weight": (20, 60), "bias": (7,)}  # the second one is sent dense


def exchange_of(comm, feedback):
    exchange = GradientExchange(comm, RandomK(k=9, seed=3), feedback, sparse_allreduce)
    exchange.register(
        {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    )
    return exchange


def gradients(rank, step):
    """Return multiples of 64, which a few halvings leave integers."""
    rng = np.random.default_rng([rank, step])
    return {
        name: np.float32(64 * rng.integers(-9, 10, shape))
        for name, shape in SHAPES.items()
    }


def to_file(state):
    file = io.BytesIO()
    np.savez(file, **state)
    return file.getvalue()


def loader(files):
    return lambda rank: np.load(io.BytesIO(files[rank]))


def resume(one, saved, load, **more):
    """Load what ranks saved into an exchange or a loop of another number of ranks."""
    comm = getattr(one, "exchange", one).comm
    state = redistribute_state(load, saved, comm.rank, comm.size, **more)
    one.load_state_dict(state)


def cut(comm, size):
    """Return a communicator of the first ranks; COMM_NULL on the others."""
    return comm.Split(0 if comm.rank < size else MPI.UNDEFINED, comm.rank)


def saved_by(comm, made, train):
    """Let the first ranks train what they make; return what they saved, as files, and what the training returned."""
    group, file, returned = cut(comm, SAVED), None, None
    if group != MPI.COMM_NULL:
        one = made(group)
        returned = train(one, group)
        file = to_file(one.state_dict())
        group.Free()
    return comm.allgather(file)[:SAVED], comm.bcast(returned)


def sums(states):
    """Return the sums over the ranks of the arrays that differ by rank."""
    names = "residual", "velocity"
    keys = [key for key in states[0] if key.endswith(names) and "/feedback/" in key]
    return {key: sum(np.float64(state[key]) for state in states) for key in keys}


@pytest.mark.exactly(6)
@pytest.mark.parametrize("feedback", feedbacks_but("in place"))
def test_all_that_4_ranks_kept_is_kept_on_2_3_and_6(comm, feedback):
    def train(exchange, group):
        for step in range(3):
            exchange(gradients(group.rank, step))

    files, _ = saved_by(
        comm, lambda group: exchange_of(group, feedbacks_but()[feedback]()), train
    )
    states = [dict(loader(files)(rank)) for rank in range(SAVED)]
    before = sums(states)
    assert all(array.any() for key, array in before.items() if key.startswith("weight"))
    for size, conserve in (2, "sum"), (3, "sum"), (3, "mean"), (6, "sum"):
        group = cut(comm, size)
        if group == MPI.COMM_NULL:
            continue
        exchange = exchange_of(group, feedbacks_but()[feedback]())
        resume(exchange, SAVED, loader(files), conserve=conserve)
        state = exchange.state_dict()
        after = sums(group.allgather(state))
        factor = size / SAVED if conserve == "mean" else 1
        for key, array in before.items():
            np.testing.assert_array_equal(after[key], factor * array)
        assert state["weight/compressor/0.step"] == 3, (
            "the same random positions on all ranks"
        )
        exchange(gradients(group.rank, 3))
        group.Free()


BASIS = Hadamard(chunk=16)


RUNS = {  # the compressor, and more settings
    "error feedback": lambda: (RandomK(k=9, seed=3), {}),
    "shares of the owners": lambda: (
        AggregationAware(k=9),
        {"collective": compressed_sum(TopK(k=5))},
    ),
    "basis": lambda: (ChunkedTopK(k=2, chunk=16), {"basis": BASIS}),
    "few bits": lambda: (None, {"bits": 4}),
}


def account(exchange, steps):
    """Take some steps; return what came back minus what all ranks put in, by name."""
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in steps:
        for name, mean in exchange(gradients(exchange.comm.rank, step)).items():
            total[name] += mean - sum(
                gradients(rank, step)[name] for rank in range(exchange.comm.size)
            )
    return total


@pytest.mark.exactly(6)
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_on_another_number_of_ranks_returns_and_keeps_all_that_was_put_in(
    comm, size, run
):
    """Also what a compressor knows of the sums, on ranks that saved nothing too."""

    def made(group):
        compressor, more = RUNS[run]()
        exchange = GradientExchange(
            group, compressor, average=False, small=0, bucket_nbytes=1, **more
        )
        exchange.register(gradients(0, 0))
        return exchange

    files, before = saved_by(
        comm, made, lambda exchange, group: account(exchange, range(3))
    )
    group = cut(comm, size)
    if group == MPI.COMM_NULL:
        return
    exchange, saved = made(group), loader(files)(0)
    resume(exchange, SAVED, loader(files))
    for key, array in exchange.state_dict().items():
        if "/compressor" in key:
            np.testing.assert_array_equal(array, saved[key])
    after = account(exchange, range(3, 5))
    for name, shape in SHAPES.items():
        kept = exchange.state_dict()[f"{name}/feedback/residual"]
        if run == "basis":
            BASIS.inverse(kept.copy(), kept)
        kept = sum(group.allgather(kept.astype(np.float64))).reshape(shape)
        assert kept.any() or name == "bias"
        np.testing.assert_allclose(
            before[name] + after[name],
            -kept,
            0,
            0.1 if run in ("basis", "few bits") else 0,
        )
    group.Free()


@pytest.mark.exactly(2)
def test_ranks_may_have_compressors_of_their_own(comm):
    exchange = GradientExchange(comm, RandomK(k=9, seed=comm.rank), ErrorFeedback())
    exchange(gradients(comm.rank, 0)["weight"])
    states = comm.allgather(exchange.state_dict())
    alone = GradientExchange(MPI.COMM_SELF, RandomK(k=9, seed=0), ErrorFeedback())
    resume(alone, 2, lambda rank: states[rank])
    np.testing.assert_array_equal(
        alone.feedback.residual,
        sum(state["gradient/feedback/residual"] for state in states),
    )


@pytest.mark.exactly(2)
def test_as_many_ranks_continue_bit_for_bit(comm):
    whole = exchange_of(comm, MomentumCorrection(0.9))
    whole(gradients(comm.rank, 0))
    files = comm.allgather(to_file(whole.state_dict()))
    for conserve in "sum", "mean":
        again = exchange_of(comm, MomentumCorrection(0.9))
        resume(again, 2, loader(files), conserve=conserve)
        np.testing.assert_equal(again.state_dict(), whole.state_dict())


@pytest.mark.exactly(1)
def test_states_that_do_not_belong_together_change_nothing(comm):
    """Of different steps, of other ranks, of other settings, and with sums out of range."""

    def state(rank, ranks=2, value=1.0, changed=(), **more):
        exchange = GradientExchange(comm, TopK(k=1))
        exchange(np.zeros(3, np.float16))
        arrays = {"gradient/feedback/residual": np.full(3, value, np.float16)}
        saved = exchange.state_dict()
        place = {"rank": rank, "ranks": ranks} | dict(changed)
        return with_header(saved, **place) | arrays | more

    exchange = GradientExchange(comm, TopK(k=1))
    exchange(np.ones(3, np.float16))
    before = exchange.state_dict()
    fresh = GradientExchange(comm, TopK(k=1)).state_dict()
    wrong = [
        (3, state, r"load\(0\): the state was saved with ranks 2: expected 3"),
        (
            2,
            lambda rank: state(0),
            r"load\(1\): the state was saved with rank 0: expected 1",
        ),
        (
            2,
            lambda rank: (
                with_header(fresh, rank=1, ranks=2, steps=1) if rank else state(0)
            ),
            "have different arrays",
        ),
        (
            2,
            lambda rank: state(rank, changed={"steps": rank}),
            "rank 1 was saved with steps 1: expected 0",
        ),
        (2, lambda rank: state(rank, value=np.nan), "leaves the range of float16"),
        (2, lambda rank: state(rank, value=4e4), "leaves the range of float16"),
        (
            2,
            lambda rank: state(rank, **{"gradient/feedback/rate": np.array(rank)}),
            r"load\(0\): the state has \['gradient/feedback/rate'\] too",
        ),
        (2, lambda rank: {}, "returned no state of 2 ranks"),
        (0, state, "saved is 0"),
    ]
    for ranks, load, said in wrong:
        with pytest.raises((ValueError, OverflowError), match=said):
            resume(exchange, ranks, load)
    with pytest.raises(ValueError, match=r"conserve is 'all': expected one of"):
        resume(exchange, 2, state, conserve="all")
    for rank, ranks, said in (0, 0, "ranks is 0"), (3, 3, "rank is 3: .* from 0 to 2"):
        with pytest.raises(ValueError, match=said):
            redistribute_state(state, 2, rank, ranks)
    with pytest.raises(
        ValueError,
        match=r"saved with feedback ErrorFeedback.*: expected MomentumCorrection",
    ):
        resume(GradientExchange(comm, TopK(k=1), MomentumCorrection()), 2, state)
    np.testing.assert_equal(exchange.state_dict(), before)
    resume(exchange, 2, state)
    assert exchange.feedback.residual.tolist() == [2, 2, 2]


def loop_of(comm, model, *, bits=None, **settings):
    compressor = TopK(k=9) if bits is None else None
    exchange = GradientExchange(
        comm, compressor, ErrorFeedback(), bits=bits, average=False, small=0
    )
    return OuterLoop(exchange, model, every=2, **settings)


@pytest.mark.exactly(1)
@pytest.mark.parametrize("name", ["feedback.weight", "layer/feedback.weight"])
def test_a_parameter_of_any_name_keeps_its_value(comm, name):
    """Keys of an exchange's feedback are added over the ranks; those of a loop's parameters are not."""
    outer = loop_of(comm, {name: np.full(9, 3, np.float32)})
    saved = outer.state_dict()

    def load(rank):
        return with_header(saved, rank=rank, ranks=2)

    state = redistribute_state(load, 2, 0, 1)
    assert state[f"{name}/loop/anchor"].tolist() == [3] * 9


@pytest.mark.exactly(6)
@pytest.mark.parametrize(
    ("size", "bits"), [(2, None), (3, None), (6, None), (2, 4), (6, 4)]
)
def test_local_steps_continue_on_another_number_of_ranks(comm, size, bits):
    """The anchor moves by what arrives of the progress of all ranks; the rest is in their residuals."""
    model = {"weight": np.zeros(SHAPES["weight"], np.float32)}

    def train(outer, group, steps=range(4)):
        for step in steps:
            model["weight"] -= gradients(group.rank, step)["weight"]
            outer.step()

    files, _ = saved_by(comm, lambda group: loop_of(group, model, bits=bits), train)
    group = cut(comm, size)
    if group == MPI.COMM_NULL:
        return
    model["weight"][...] = 0
    outer = loop_of(group, model, bits=bits)
    resume(outer, SAVED, loader(files))
    model["weight"][...] = outer.anchor["weight"]
    train(outer, group, range(4, 6))
    assert (outer.count, outer.rounds) == (6, 3)
    given = sum(
        gradients(rank, step)["weight"]
        for step in range(6)
        for rank in range(SAVED if step < 4 else size)
    )
    residuals = sum(
        group.allgather(outer.exchange.state_dict()["weight/feedback/residual"])
    )
    np.testing.assert_allclose(
        residuals.reshape(given.shape) - model["weight"], given, 0, 0.1 if bits else 0
    )
    assert residuals.any()
    group.Free()


@pytest.mark.exactly(3)
@pytest.mark.parametrize(("steps", "delay"), [(1, 0), (2, 1)])
def test_local_steps_within_a_round_or_in_flight_do_not_continue_on_another_number_of_ranks(
    comm, steps, delay
):
    model = {"weight": np.zeros(SHAPES["weight"], np.float32)}
    outer = loop_of(comm, model, delay=delay)
    for _ in range(steps):
        outer.step()
    states = comm.allgather(outer.state_dict())
    fresh = loop_of(comm, model, delay=delay)
    before = fresh.state_dict()
    befores = comm.allgather(before)
    with pytest.raises(
        ValueError,
        match=f"the state is of step {steps}, within a round or with an exchange in flight",
    ):
        resume(fresh, 3, lambda rank: states[rank])
    np.testing.assert_equal(fresh.state_dict(), before)
    # a function raises where all ranks learn of it
    saved = 0 if comm.rank == 1 else 3
    with pytest.raises(
        ValueError if comm.rank == 1 else CollectiveError,
        match="saved is 0" if comm.rank == 1 else "rank",
    ):
        fresh.load_state_dict(
            lambda: redistribute_state(befores.__getitem__, saved, comm.rank, 3)
        )
    outer.step()  # ends what is in flight
