"""GradientExchange on a device: the bits of the host, and the residual as it was where a step fails."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from cases import compressed_sum, state_of
from devices import assert_same, counted

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    average_residuals,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_iallreduce,
    traffic,
)
from mpicomp import (
    AdaComp,
    AggregationAware,
    ChunkedTopK,
    ErrorFeedback,
    MomentumCorrection,
    Quantised,
    SIDCo,
    StepAhead,
    TopK,
)
from mpicomp.arrays.device import to_numpy

pytestmark = pytest.mark.small_groups

WAYS = {
    "top-k, gTop-k": lambda comm: (TopK(k=40), ErrorFeedback(), gtopk_allreduce, {}),
    "top-k, exact gTop-k": lambda comm: (
        TopK(k=40),
        MomentumCorrection(0.9),
        partial(gtopk_allreduce, algorithm="exact"),
        {},
    ),
    "SIDCo, allreduce": lambda comm: (
        SIDCo(0.05),
        ErrorFeedback(),
        sparse_allreduce,
        {},
    ),
    "votes": lambda comm: (
        AggregationAware(k=40),
        ErrorFeedback(),
        partial(sparse_allreduce, votes=True),
        {},
    ),
    "allgather": lambda comm: (
        Quantised(TopK(k=40), "sign"),
        ErrorFeedback(),
        sparse_allgather,
        {},
    ),
    "two-way, step-ahead": lambda comm: (
        TopK(k=40),
        StepAhead(0.1, 0.9),
        compressed_sum(TopK(k=20)),
        {},
    ),
    "in place": lambda comm: (
        TopK(k=40),
        ErrorFeedback(in_place=True),
        gtopk_allreduce,
        {},
    ),
    "chunks, two bits, contributors": lambda comm: (
        Quantised(ChunkedTopK(k=8, chunk=128), "two_bit"),
        ErrorFeedback(decay=0.95),
        sparse_allreduce,
        {"average": "contributors"},
    ),
    "signs of the mean": lambda comm: (
        TopK(k=40),
        MomentumCorrection(0.9),
        sparse_allreduce,
        {"average": "sign"},
    ),
    "all values in few bits": lambda comm: (
        None,
        ErrorFeedback(decay=0.9),
        None,
        {"bits": 4},
    ),
    "chunks in place, smallest codec": lambda comm: (
        Quantised(ChunkedTopK(k=8, chunk=128), "two_bit"),
        ErrorFeedback(in_place=True),
        partial(sparse_allreduce, codec="smallest"),
        {},
    ),
}


def made(way, comm):
    compressor, feedback, collective, more = WAYS[way](comm)
    return GradientExchange(comm, compressor, feedback, collective, **more)


def gradient(comm, step, size=800, unit=1.0):
    drawn = np.random.default_rng([comm.rank, step]).laplace(size=size)
    return (unit * drawn).astype(np.float32)


SUBNORMAL = 2.0**-146  # a gradient of a few times the smallest numbers
UNITS = pytest.mark.parametrize("unit", [1.0, SUBNORMAL], ids=["ordinary", "subnormal"])


@UNITS
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_the_host(comm, cupy, way, unit):
    here, on_it = made(way, comm), made(way, comm)
    for step in range(4):
        mine = gradient(comm, step, unit=unit).reshape(20, 40)
        there = cupy.asarray(mine)
        over = step % 2 and "in place" not in way
        expected, mean = here(mine), on_it(there, out=there if over else None)
        assert (mean is there) == bool(over)
        assert over or there.get().tobytes() == mine.tobytes(), (
            "the gradient, or in place the residual"
        )
        assert (mean.shape, mean.dtype) == (mine.shape, mine.dtype)
        assert mean.get().tobytes() == expected.tobytes()
    assert state_of(on_it) == state_of(here)


def test_named_tensors(comm, cupy):
    sizes = {"w": 900, "v": 700, "b": 12, "c": 9}
    shapes = {"w": (30, 30), "v": (7, 10, 10), "b": (3, 4), "c": (9,)}
    exchanges = [
        GradientExchange(
            comm, TopK(0.05), collective=sparse_iallreduce, small=64, bucket_nbytes=3000
        )
        for _ in range(2)
    ]
    for step in range(3):
        mine = {
            name: gradient(comm, step, size).reshape(shapes[name])
            for name, size in sizes.items()
        }
        expected = exchanges[0](mine)
        given = {name: cupy.asarray(array) for name, array in mine.items()}
        means = exchanges[1](given, out=given if step else None)
        for name in sizes:
            assert means[name].get().tobytes() == expected[name].tobytes()


@UNITS
@pytest.mark.parametrize("step", [StepAhead(0.1, 0.9), StepAhead(0.1)], ids=repr)
def test_averaged_residuals_are_those_of_the_host(comm, cupy, step, unit):
    here, on_it = (
        GradientExchange(comm, TopK(k=40), StepAhead(step.rate, step.momentum))
        for _ in range(2)
    )
    mine = gradient(comm, 0, unit=unit)
    here(mine)
    on_it(cupy.asarray(mine))
    average_residuals(here)
    average_residuals(on_it)
    assert state_of(on_it) == state_of(here)


@UNITS
@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"delay": 1}],
)
@pytest.mark.parametrize("sent", [{"compressor": TopK(k=40)}, {"bits": 4}])
def test_local_steps_are_those_of_the_host(comm, cupy, settings, sent, unit):
    """The inner step is computed on the host, as CuPy's own operators flush subnormal numbers to zero."""
    here = np.zeros(800, np.float32)
    there = cupy.asarray(here)
    loops = [
        OuterLoop(
            GradientExchange(comm, **sent, feedback=ErrorFeedback(decay=0.9)),
            [parameters],
            every=2,
            rate=0.7,
            **settings,
        )
        for parameters in (here, there)
    ]
    for step in range(4):
        here -= gradient(comm, step, unit=unit)
        there.set(there.get() - gradient(comm, step, unit=unit))
        for loop in loops:
            loop.step()
        assert there.get().tobytes() == here.tobytes()


@pytest.mark.stand_in("knows whether work is under way")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_step_returns_is_complete_on_every_stream(comm, cupy, way):
    exchange = made(way, comm)
    for step in range(2):
        there = cupy.asarray(gradient(comm, step))
        exchange(there, out=None if "in place" in way else there)
        assert not cupy.cuda.get_current_stream().busy


@pytest.mark.stand_in("knows whether work is under way")
def test_parameters_are_complete_on_every_stream_after_a_round(comm, cupy):
    parameters = cupy.zeros(800, np.float32)
    outer = OuterLoop(
        GradientExchange(comm, TopK(k=40)), [parameters], every=1, momentum=0.5
    )
    for step in range(2):
        parameters += cupy.asarray(gradient(comm, step))
        outer.step()
        assert not cupy.cuda.get_current_stream().busy


@pytest.mark.at_least(2)
def test_a_step_that_fails_leaves_the_residual(comm, cupy):
    exchange = made("top-k, gTop-k", comm)
    exchange(cupy.asarray(gradient(comm, 0)))
    before, bad = state_of(exchange), gradient(comm, 1)
    bad[7] = np.nan if comm.rank == 1 else bad[7]
    with pytest.raises(
        ValueError if comm.rank == 1 else CollectiveError, match=r"\[7\] is nan"
    ):
        exchange(cupy.asarray(bad))
    assert state_of(exchange) == before


@pytest.mark.parametrize(
    "way", ["top-k, gTop-k", "in place", "chunks, two bits, contributors"]
)
def test_sparse_means_are_those_of_the_host(comm, cupy, way):
    here, on_it = made(way, comm), made(way, comm)
    for step in range(2):
        parts = np.split(gradient(comm, step), [300])
        means = on_it([cupy.asarray(part) for part in parts], sparse=True)
        for mean, expected in zip(means, here(parts, sparse=True), strict=True):
            assert_same(mean, expected)
            parameters = np.ones(mean.length, np.float32)
            there = cupy.asarray(parameters)
            mean.add_to(there, -0.5)
            expected.add_to(parameters, -0.5)
            assert there.get().tobytes() == parameters.tobytes()


# Launches, one of them to fill a message up to a line, and synchronisations of a step
# on 70,000 values, two ranks.
MOST = {
    "out of place": (TopK(0.01), sparse_allreduce, False, 23, 7),
    "in place": (TopK(0.01), sparse_allreduce, True, 24, 8),
    "gTop-k": (TopK(0.01), gtopk_allreduce, False, 35, 10),
    "chunks, two bits": (
        Quantised(ChunkedTopK(64, 4096), "two_bit"),
        sparse_allreduce,
        True,
        32,
        11,
    ),
}


@pytest.mark.stand_in("counts launches")
@pytest.mark.unchecked("launches and waits for its accounts too")
@pytest.mark.exactly(2)
@pytest.mark.parametrize("name", MOST)
def test_a_step_starts_and_waits_for_few_things(comm, cupy, name):
    compressor, collective, in_place, launches, synchronisations = MOST[name]
    exchange = GradientExchange(
        comm, compressor, ErrorFeedback(in_place=in_place), collective
    )
    for step in range(2):
        mine = cupy.asarray(gradient(comm, step, 70_000))
        with counted(cupy) as found:
            exchange(mine, sparse=in_place)
    assert found.launches <= launches, found
    assert found.synchronisations <= synchronisations, found


# Launches and synchronisations of a step of one rank, whatever the number of tensors.
# Two ranks may take 12 and 3 more, of aggregation-aware selection 4.
STEPS = {
    "top-k": ({"compressor": TopK(0.01)}, 10, 2),
    "bits=4": ({"bits": 4}, 8, 2),
    "chunks": ({"compressor": ChunkedTopK(4, 256)}, 7, 2),
    "chunks, two bits": (
        {"compressor": Quantised(ChunkedTopK(4, 256), "two_bit")},
        14,
        3,
    ),
    "AdaComp": ({"compressor": AdaComp(50)}, 12, 2),
    "aggregation-aware": ({"compressor": AggregationAware(0.01)}, 27, 7),
    "SIDCo": ({"compressor": SIDCo(0.01)}, 12, 2),
}


def assert_few(comm, cupy, name, tensors, *more):
    """Fail if a step takes more launches and synchronisations than one of one rank, and these."""
    how, launches, synchronisations = STEPS[name]
    exchange = GradientExchange(comm, small=0, **deepcopy(how))
    sizes = [70_000, *(200 + i % 7 for i in range(tensors - 1))]
    ends = np.cumsum(sizes).tolist()
    for step in range(2):
        whole = cupy.asarray(gradient(comm, step, sum(sizes)))
        parts = {
            str(i): whole[end - size : end].copy()
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        }
        with counted(cupy) as found:
            exchange(parts)
    assert found.launches <= launches + more[0], found
    assert found.synchronisations <= synchronisations + more[1], found


# a selection of 160 takes the emulator seconds
TENSORS = pytest.mark.parametrize(
    "tensors",
    [20, *(pytest.param(many, marks=pytest.mark.slow) for many in (1, 54, 160))],
)


@pytest.mark.stand_in("counts launches")
@pytest.mark.unchecked("launches and waits for its accounts too")
@pytest.mark.exactly(1)
@pytest.mark.parametrize("name", ["chunks", "aggregation-aware"])
@TENSORS
def test_a_step_starts_as_many_things_for_any_number_of_tensors(
    comm, cupy, name, tensors
):
    """The other steps on one rank are in tests/tools/test_gpu_costs.py."""
    assert_few(comm, cupy, name, tensors, 0, 0)


@pytest.mark.stand_in("counts launches")
@pytest.mark.unchecked("launches and waits for its accounts too")
@pytest.mark.exactly(2)
@pytest.mark.parametrize("name", STEPS)
@TENSORS
def test_two_ranks_start_a_few_things_more(comm, cupy, name, tensors):
    assert_few(comm, cupy, name, tensors, 12, 4 if name == "aggregation-aware" else 3)


@pytest.mark.stand_in("counts synchronisations")
@pytest.mark.unchecked("launches and waits for its accounts too")
@pytest.mark.exactly(2)
def test_a_message_is_waited_for_once_on_each_side(comm, cupy):
    vector = TopK(k=500).compress(cupy.asarray(gradient(comm, 0, 70_000)))
    sparse_allreduce(vector, comm, algorithm="recursive_doubling", codec="plain")
    before = traffic(comm).messages
    with counted(cupy) as found:
        sparse_allreduce(vector, comm, algorithm="recursive_doubling", codec="plain")
    waited = found.synchronisations - 1  # for the number of entries of the sum
    assert waited <= traffic(comm).messages - before + 1, found


@pytest.mark.stand_in("counts synchronisations")
@pytest.mark.unchecked("launches and waits for its accounts too")
@pytest.mark.exactly(2)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("how", "own"), [({"bits": 4}, 0), (STEPS["top-k"][0], 1)])
def test_gradients_that_are_started_wait_for_their_messages_alone(
    comm, cupy, how, own, first
):
    """As in the hook of DDP; a selection waits once more, for the number of its entries.

    The first rank is counted while the other has sent nothing: no message arrives that
    it could wait for.
    """
    exchange = GradientExchange(comm, small=0, **deepcopy(how))
    for step in range(2):
        parts = {str(i): cupy.asarray(gradient(comm, step, 4000 + i)) for i in range(3)}
        if step == 0:
            exchange.register(parts)
        before = traffic(comm).messages
        if comm.rank != first:
            comm.Barrier()
        with counted(cupy) as found:
            exchange.start_together(parts, parts)
        sent = traffic(comm).messages - before
        if comm.rank == first:
            comm.Barrier()
        exchange.finish()
    if comm.rank == first:
        assert sent > 0
        assert found.synchronisations <= sent + own, found


@pytest.mark.parametrize(
    ("nbytes", "on_device", "buckets"),
    [
        (None, "none", 3),
        (None, "all", 1),
        (None, "of rank 0", 3),
        (2**25, "all", 3),
        (2**26, "none", 2),
    ],
)
def test_a_bucket_is_longer_on_the_device_of_all_ranks(
    comm, cupy, nbytes, on_device, buckets
):
    places = {"none": [], "of rank 0": [0], "all": range(comm.size)}
    xp = cupy if comm.rank in places[on_device] else np
    exchange = GradientExchange(comm, TopK(0.01), bucket_nbytes=nbytes)
    exchange.register({str(i): xp.empty(2**22, np.float32) for i in range(5)})
    if on_device == "of rank 0" and comm.size == 1:
        buckets = 1
    assert len(exchange.buckets) == buckets


@pytest.mark.at_least(2)
def test_ranks_have_the_same_buckets_wherever_their_tensors_are(comm, cupy):
    """A tensor that one rank has on the device, and others have not, is in another bucket on all."""
    mine = {name: gradient(comm, i, 50) for i, name in enumerate("abc")}
    here, on_it = (GradientExchange(comm, TopK(0.1), small=0) for _ in range(2))
    given = dict(mine)
    if comm.rank == 0:
        given["b"] = cupy.asarray(mine["b"])
    means = on_it(given)
    assert [bucket.names for bucket in on_it.buckets] == [["b"], ["a", "c"]]
    for name, expected in here(mine).items():
        assert to_numpy(means[name]).tobytes() == expected.tobytes()


def test_output_buffers_in_place_share_no_memory_with_the_gradient(comm, cupy):
    exchange, there = made("in place", comm), cupy.asarray(gradient(comm, 0))
    with pytest.raises(
        (ValueError, CollectiveError),
        match="two arrays share memory that is written to",
    ):
        exchange(there, out=there if comm.rank == 0 else cupy.empty_like(there))
    assert there.get().tobytes() == gradient(comm, 0).tobytes()


def test_tensors_in_host_memory_and_on_the_device_are_exchanged_together(comm, cupy):
    """As an embedding that stays on the host."""
    exchange = GradientExchange(comm, TopK(0.5), small=0)
    here = np.arange(8, dtype=np.float32) + comm.rank
    there = cupy.arange(8, dtype=np.float32) * (1 + comm.rank)
    means = exchange({"embedding": here, "layer": there})
    assert type(means["embedding"]) is np.ndarray
    assert type(means["layer"]) is type(there)
    alone = GradientExchange(comm, TopK(0.5), small=0)({"embedding": here})
    assert means["embedding"].tobytes() == alone["embedding"].tobytes()
    alone = GradientExchange(comm, TopK(0.5), small=0)({"layer": there})
    assert means["layer"].get().tobytes() == alone["layer"].get().tobytes()
