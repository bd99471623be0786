"""GradientExchange of named tensors: in buckets, in any order, started while others are in flight."""

import os
import warnings
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from cases import FEEDBACKS, RandomK, compressors, integers, state_of

from collectives import (
    CollectiveError,
    GradientExchange,
    Sum,
    gtopk_allreduce,
    gtopk_iallreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_iallgather,
    sparse_iallreduce,
    traffic,
)
from mpicomp import (
    AdaComp,
    ChunkedTopK,
    Compressor,
    ErrorFeedback,
    Feedback,
    Hadamard,
    NoFeedback,
    Quantised,
    SparseVector,
    TopK,
    WarmUp,
)

pytestmark = pytest.mark.small_groups

# blocking or not: the exchange runs the latter
COLLECTIVES = [gtopk_iallreduce, sparse_allgather, sparse_allreduce]
SHAPES = {
    "a.weight": (30, 40),
    "a.bias": (40,),
    "b.weight": (40, 25),
    "b.bias": (25,),
    "scale": (),
}
gradients = partial(integers, SHAPES)


def flat(tensors):
    return np.concatenate(
        [np.ravel(tensors[name]).astype(np.float64) for name in SHAPES]
    )


def residuals(exchange):
    return [bucket.feedback.residual.copy() for bucket in exchange.buckets]


EVERY_FEEDBACK = [make() for make in FEEDBACKS.values()]
# functions of the density
MAKERS = {
    **compressors(chunk=37),
    "AdaComp": lambda density: AdaComp(40),
    "Quantised-two_bit": lambda density: Quantised(ChunkedTopK(2, 64), "two_bit"),
    "WarmUp": lambda density: WarmUp(TopK(0.5), [0.5, 0.25]),
}
COMPRESSORS = [make(0.05) for make in MAKERS.values()]
ADACOMP_WORKS_WITH = [
    repr(each) for each in (ErrorFeedback(), ErrorFeedback(decay=0.5), NoFeedback())
]
# exact: 8 * 8
SETTINGS = [
    {},
    {"average": "contributors"},
    {"average": "sign"},
    {"basis": Hadamard(chunk=64)},
]


# in make test the second of two steps corrects by a residual; a warm-up has three stages
STEPS = 3 if os.environ.get("MPI_TEST_ALL") else 2


def compressors_with(feedback, turn, turns):
    """Yield those of a turn that work with a feedback; all of them in make test-all. Turns have all pairs."""
    for place, compressor in enumerate(
        COMPRESSORS, EVERY_FEEDBACK.index(feedback) + turn
    ):
        works = (
            not isinstance(compressor, AdaComp) or repr(feedback) in ADACOMP_WORKS_WITH
        )
        if works and (place % turns == 0 or os.environ.get("MPI_TEST_ALL")):
            yield compressor


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("feedback", EVERY_FEEDBACK, ids=repr)
def test_each_tensor_is_exchanged_as_if_it_were_alone(comm, feedback, settings):
    """Consecutive tensors with equal compressors share an object, and a vector; of sizes and scales that differ."""
    in_place, turn = getattr(feedback, "in_place", False), SETTINGS.index(settings)
    if not feedback.has_gradient_units:
        settings = {key: value for key, value in settings.items() if key != "basis"}
    for compressor in compressors_with(feedback, turn, len(SETTINGS)):
        alone = {
            name: GradientExchange(
                comm, deepcopy(compressor), deepcopy(feedback), **settings
            )
            for name in SHAPES
        }
        together = GradientExchange(comm, compressor, feedback, small=0, **settings)
        homes = [
            {name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2)
        ]
        for step in range(STEPS):
            for place, (name, array) in enumerate(
                gradients(comm.rank, step, np.float64).items()
            ):
                for home in homes:  # of a residual in place
                    home[name] = np.asarray(home[name] * in_place + array * 4.0**place)
            means = together(homes[0])
            for name, array in homes[1].items():
                message = f"{compressor!r}, {name}, step {step}"
                np.testing.assert_allclose(
                    means[name],
                    alone[name](array),
                    rtol=1e-12,
                    atol=1e-9,
                    err_msg=message,
                )


def test_small_tensors_are_sent_dense_behind_the_others(comm):
    exchange = GradientExchange(
        comm, TopK(k=1), NoFeedback(), sparse_allreduce, small=10
    )
    half = np.array([2.0, 4.0], np.float16)
    means = exchange(
        {
            "a": np.array([1.0, 5.0]),
            "large": np.arange(20.0),
            "half": half,
            "b": np.array([2.0, 3.0]),
        }
    )
    assert means["a"].tolist() == [1, 5]
    assert means["b"].tolist() == [2, 3]
    assert means["half"].tolist() == [2, 4]
    assert np.flatnonzero(means["large"]).tolist() == [19]
    assert [bucket.names for bucket in exchange._buckets] == [
        ["large"],
        ["half"],
        ["a", "b"],
    ], "one for each dtype"
    assert [bucket.dense for bucket in exchange._buckets] == [False, True, True]


def test_a_tensor_may_have_a_compressor_of_its_own(comm):
    def choose(name, shape):
        assert shape == np.shape(gradients(comm.rank, 0)[name])
        return TopK(1.0) if name == "b.weight" else TopK(k=1)

    exchange = GradientExchange(
        comm, choose, ErrorFeedback(), sparse_allreduce, small=0
    )
    means = exchange(gradients(comm.rank, 0))
    every = [gradients(rank, 0) for rank in range(comm.size)]
    np.testing.assert_array_equal(
        means["b.weight"],
        sum(each["b.weight"] for each in every) / np.float32(comm.size),
    )
    assert np.count_nonzero(means["a.weight"]) <= comm.size
    with pytest.raises(
        TypeError,
        match=r"got one array, and for compressor a function .*: expected a dict of arrays",
    ):
        GradientExchange(comm, choose)(np.ones(3))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_gradients_may_become_ready_in_any_order(comm, collective):
    """Each rank in its own order: the buckets leave in the order of rank 0 in the first step."""
    settings = {"small": 0, "bucket_nbytes": 2000, "average": False}
    exchange = GradientExchange(
        comm, TopK(density=0.1), ErrorFeedback(), collective, **settings
    )
    reference = GradientExchange(
        comm, TopK(density=0.1), ErrorFeedback(), collective, **settings
    )
    reference.register(
        {name: np.zeros(SHAPES[name], np.float32) for name in reversed(SHAPES)}
    )
    for step in range(4):
        mine = gradients(comm.rank, step)
        order = (
            list(reversed(SHAPES))
            if step == comm.rank == 0
            else np.random.default_rng([step, comm.rank]).permutation(list(SHAPES))
        )
        for name in order:
            exchange.start(str(name), mine[name])
        means, expected = exchange.finish(), reference(mine)
        for name in SHAPES:
            np.testing.assert_array_equal(means[name], expected[name])


def interleaved(comm, count=64):
    """Return float16 matrices, each followed by a float32 norm, as mixed precision has them."""
    rng = np.random.default_rng(comm.rank)
    return {
        f"{number}.{name}": rng.integers(-8, 9, shape).astype(dtype)
        for number in range(count)
        for name, shape, dtype in (("w", (64, 9), "f2"), ("norm", (9,), "f4"))
    }


@pytest.mark.parametrize("settings", [{"bits": 4}, {"compressor": TopK(0.1)}], ids=repr)
def test_interleaved_dtypes_are_a_bucket_each(comm, settings):
    mine = interleaved(comm)
    grouped = {name: mine[name] for name in sorted(mine, key=lambda n: n[-1])}
    sent, means = [], []
    for given in mine, grouped:
        exchange = GradientExchange(comm, small=0, **settings)
        exchange(given)
        assert len(exchange.buckets) == 2
        before = traffic(comm).messages
        means.append(exchange(given))
        sent.append(traffic(comm).messages - before)
    assert sent[0] == sent[1]
    for name, mean in means[0].items():
        assert mean.tobytes() == means[1][name].tobytes()


def test_buckets_start_in_the_order_in_which_they_become_complete(comm):
    exchange = GradientExchange(comm, TopK(0.1), small=0, bucket_nbytes=4 * 64 * 9 * 2)
    exchange.register(interleaved(comm, 8))
    assert [bucket.names[-1] for bucket in exchange.buckets] == ["3.w", "7.w", "7.norm"]
    assert exchange.buckets[-1].names == [f"{number}.norm" for number in range(8)]


@pytest.mark.at_least(2)
def test_buckets_leave_before_the_step_ends(comm):
    exchange = GradientExchange(
        comm,
        TopK(density=0.1),
        ErrorFeedback(),
        sparse_iallreduce,
        small=0,
        bucket_nbytes=1,
    )
    exchange(gradients(comm.rank, 0))
    before = traffic(comm).messages
    exchange.start("a.weight", gradients(comm.rank, 1)["a.weight"])
    assert traffic(comm).messages > before
    exchange.finish()


@pytest.mark.parametrize("collective", [sparse_allreduce, sparse_iallgather])
def test_a_tensor_that_is_not_started_counts_as_zero(comm, collective):
    """What a step does not use, and a rank that has no batch left."""
    exchange = GradientExchange(
        comm, TopK(density=1.0), ErrorFeedback(), collective, small=0, average=False
    )
    exchange.register(gradients(0, 0))
    steps = [["a.weight", "scale"], list(SHAPES), []]
    for step, names in enumerate(steps):
        used = names if comm.rank else []
        for name in used:
            exchange.start(name, gradients(comm.rank, step)[name])
        totals = exchange.finish()
        for name, shape in SHAPES.items():
            parts = [
                gradients(rank, step)[name]
                for rank in range(1, comm.size)
                if name in names
            ]
            np.testing.assert_array_equal(totals[name], sum(parts, np.zeros(shape)))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("fault", ["not finite", "shape", "dtype", "kind", "name"])
def test_a_bad_tensor_on_one_rank_raises_everywhere_and_no_residual_changes(
    comm, collective, fault
):
    settings = {"small": 30, "bucket_nbytes": 2000, "average": False}
    compressor = RandomK(density=0.1, seed=3)
    exchange = GradientExchange(
        comm, compressor, ErrorFeedback(), collective, **settings
    )
    exchange(gradients(comm.rank, 0))
    before, culprit = residuals(exchange), comm.size - 1
    mine = gradients(comm.rank, 1)
    if comm.rank == culprit:
        bad = mine["b.weight"]
        bad = {
            "not finite": bad * np.float32("nan"),
            "shape": bad.T,
            "dtype": bad.astype(np.float64),
        }.get(fault, "b")
        mine |= {"c" if fault == "name" else "b.weight": bad}
    with pytest.raises(
        (ValueError, TypeError, KeyError) if comm.rank == culprit else CollectiveError
    ):
        exchange(mine)
    np.testing.assert_equal(residuals(exchange), before)
    totals = exchange(gradients(comm.rank, 1))
    assert len(set(comm.allgather(flat(totals).tobytes()))) == 1
    steps = [
        each.step for each in exchange.compressors.values() if isinstance(each, RandomK)
    ]
    assert steps == [2, 2, 2], "a step that failed counts for no rank"


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("scale"),
            r"'scale' is float32 of shape \(\) on rank 0, and missing on rank",
        ),
        (
            lambda tensors: tensors.update(more=np.ones(2)),
            r"'more' is missing on rank 0, and float64 of shape \(2,\)",
        ),
        (
            lambda tensors: tensors.update(scale=np.ones(1)),
            r"'scale' is float32 of shape \(\) on rank 0, and float64",
        ),
        (
            lambda tensors: tensors.update(scale=np.ones(1, int)),
            "scale: values are int64: expected float16",
        ),
        (
            lambda tensors: tensors.clear(),
            "got arrays by name, and it is empty: expected at least one array",
        ),
    ],
)
def test_tensors_that_differ_raise_everywhere(comm, change, message):
    exchange = GradientExchange(comm, TopK(k=1), ErrorFeedback(), sparse_allreduce)
    tensors = gradients(comm.rank, 0)
    if comm.rank == comm.size - 1:
        change(tensors)
    own = comm.rank == comm.size - 1 and not message.startswith("'")
    with pytest.raises(
        (ValueError, TypeError) if own else CollectiveError, match=message
    ):
        exchange.register(tensors)
    exchange(gradients(comm.rank, 0))


def test_names_are_looked_at_at_once_and_the_step_goes_on(comm):
    exchange = GradientExchange(
        comm, TopK(k=1), ErrorFeedback(), sparse_iallreduce, small=0
    )
    mine = gradients(comm.rank, 0)
    exchange.register(mine)
    exchange.start("scale", mine["scale"])
    with pytest.raises(ValueError, match="'scale' was started before in this step"):
        exchange.start("scale", mine["scale"])
    with pytest.raises(
        KeyError, match="'sale' is none of the tensors of the first step"
    ):
        exchange.start("sale", mine["scale"])
    mean = exchange.finish()["scale"]
    assert mean == np.float32(
        sum(gradients(rank, 0)["scale"] for rank in range(comm.size)) / comm.size
    )


def test_none_counts_as_zero_and_all_means_come_back(comm):
    """A rank whose step did not use a tensor still gets what the others sent of it."""
    exchange = GradientExchange(
        comm,
        TopK(density=1.0),
        ErrorFeedback(),
        sparse_allreduce,
        small=0,
        average=False,
    )
    exchange.register(gradients(0, 0))
    mine = gradients(comm.rank, 0)
    if comm.rank == 0:
        mine = {"scale": None, "b.weight": mine["b.weight"]}
    totals = exchange(mine)
    assert list(totals)[: len(mine)] == list(mine)
    assert totals.keys() == SHAPES.keys()
    others = [gradients(rank, 0) for rank in range(1, comm.size)]
    np.testing.assert_array_equal(
        totals["a.weight"],
        sum((each["a.weight"] for each in others), np.zeros((30, 40))),
    )
    np.testing.assert_array_equal(
        totals["scale"], sum((each["scale"] for each in others), np.zeros(()))
    )


@pytest.mark.parametrize("collective", [gtopk_allreduce, sparse_iallreduce])
def test_the_log_gets_plain_numbers(comm, collective):
    heard = []
    exchange = GradientExchange(
        comm,
        TopK(density=0.1),
        ErrorFeedback(),
        collective,
        small=0,
        log=heard.append,
        bucket_nbytes=2000,
    )
    mine = gradients(comm.rank, 0)
    exchange(mine)
    (did,) = heard
    assert did.length == flat(mine).size
    assert did.sent == sum(max(1, round(0.1 * array.size)) for array in mine.values())
    assert did.density == did.sent / did.length
    assert did.nbytes == 8 * did.sent
    kept = np.concatenate(residuals(exchange))
    assert did.residual_norm == pytest.approx(np.linalg.norm(kept))
    assert exchange.residual_norm == did.residual_norm
    assert (did.wire_nbytes > 0) == (comm.size > 1)
    assert min(did.compress_seconds, did.communicate_seconds, did.restore_seconds) > 0


def test_what_the_log_raises_is_a_warning_as_all_ranks_have_kept_the_step(comm):
    def full(statistics):
        raise OSError("no space left")

    exchange = GradientExchange(
        comm, TopK(k=5), log=full if comm.rank == comm.size - 1 else None
    )
    plain = GradientExchange(comm, TopK(k=5))
    for step in range(2):
        mine, mean = (
            gradients(comm.rank, step)["a.weight"],
            np.empty((30, 40), np.float32),
        )
        if comm.rank == comm.size - 1:
            with pytest.warns(RuntimeWarning, match="no space left"):
                exchange(mine, out=mean)
        else:
            exchange(mine, out=mean)
        np.testing.assert_array_equal(mean, plain(mine))
        assert exchange.steps == step + 1
    np.testing.assert_array_equal(exchange.feedback.residual, plain.feedback.residual)


def test_where_warnings_are_errors_what_the_log_raises_is_printed(comm, capsys):
    """An error after the step was kept would be that of one rank alone."""
    exchange = GradientExchange(comm, TopK(k=5), log=lambda statistics: 1 / 0)
    mine = gradients(comm.rank, 0)["a.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if comm.rank == comm.size - 1 else "ignore")
        mean = exchange(mine)
    np.testing.assert_array_equal(mean, GradientExchange(comm, TopK(k=5))(mine))
    said = "RuntimeWarning: log raised ZeroDivisionError"
    assert (said in capsys.readouterr().err) == (comm.rank == comm.size - 1)


def test_memory_that_ends_in_the_norm_for_the_log_is_a_warning(comm, monkeypatch):
    """Halves are widened for their norm, after all ranks have kept the step."""
    norms = []
    exchange = GradientExchange(
        comm, TopK(k=5), log=lambda statistics: norms.append(statistics.residual_norm)
    )
    mine = gradients(comm.rank, 0)["a.weight"].astype(np.float16)

    def without_memory(feedback):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Feedback, "residual_norm", property(without_memory))
        with pytest.warns(RuntimeWarning, match="no room"):
            exchange(mine)
    assert exchange.steps == 1
    exchange(mine)
    assert norms == [exchange.residual_norm]


@pytest.mark.parametrize("part", [0, 1])
def test_indices_out_of_range_of_a_callers_collective_are_refused(comm, part):
    """In the sum and in what was rejected: the residual is not written to beyond its end."""
    bad = SparseVector(np.array([0, 9, 5], np.int32), np.ones(3, np.float32), 8)

    def own(vector, comm):
        result = [sparse_allreduce(vector, comm), SparseVector.empty(8)]
        if isinstance(vector, SparseVector):
            result[part] = bad
        return Sum(*result)

    exchange = GradientExchange(comm, TopK(k=3), ErrorFeedback(), own)
    with pytest.raises(ValueError, match=r"indices\[1\] is 9: expected 0 <="):
        exchange(np.ones(8, np.float32))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.unchecked("refuses a sum that loses mass")
def test_a_collective_is_any_function(comm, blocks):
    def of_two(given, comm):
        half = (
            given
            if isinstance(given, Exception)
            else SparseVector(given.indices, given.values / 2, given.length)
        )
        return (sparse_allreduce if blocks else sparse_iallreduce)(half, comm)

    mean = GradientExchange(comm, TopK(k=3), NoFeedback(), of_two)(
        np.array([2.0, 4.0, 6.0])
    )
    assert mean.tolist() == [1, 2, 3]
    names = GradientExchange(
        comm, TopK(k=3), NoFeedback(), partial(sparse_allreduce, algorithm="allgather")
    )
    assert names({"x": np.array([2.0, 4.0, 6.0])})["x"].tolist() == [2, 4, 6]


@pytest.mark.at_least(2)
def test_a_collective_of_the_callers_that_blocks_may_fail_in_any_bucket(comm):
    def blocking(vector, comm):
        return sparse_allreduce(vector, comm)

    odd = comm.rank == comm.size - 1
    exchange = GradientExchange(
        comm, TopK(k=1), ErrorFeedback(), blocking, small=0, bucket_nbytes=1
    )
    exchange(gradients(comm.rank, 0))
    for name in SHAPES:
        bad, before = gradients(comm.rank, 1), residuals(exchange)
        if odd:
            bad[name] = bad[name] * np.float32("nan")
        with pytest.raises(ValueError if odd else CollectiveError, match="nan"):
            exchange(bad)
        np.testing.assert_equal(residuals(exchange), before)
    means = exchange(gradients(comm.rank, 1))
    assert len(set(comm.allgather(flat(means).tobytes()))) == 1


class Odd(Compressor):
    """A compressor that returns its argument."""

    def __init__(self, returned):
        self.returned = returned

    def compress(self, corrected, *, gradient=None):
        return self.returned


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (lambda: 1 / 0, "division by zero"),
        (lambda: TopK, "compressor for '.*' is the class TopK: expected an object"),
        (
            lambda: (TopK(k=1), None),
            r"compressor for '.*' is \(TopK.*: expected an object such as TopK",
        ),
        (
            lambda: Odd(None),
            "returned NoneType: expected a SparseVector",
        ),
        (
            lambda: Odd(SparseVector.empty(3)),
            "expected float32 numbers of length",
        ),
        (
            lambda: Odd(SparseVector.empty(25, np.float64)),
            "expected float32 numbers of length",
        ),
    ],
)
def test_a_bad_choice_or_compressor_on_one_rank_raises_everywhere(
    comm, chosen, message
):
    odd = comm.rank == comm.size - 1

    exchange = GradientExchange(
        comm, lambda *_: chosen() if odd else TopK(k=2), small=0
    )
    with pytest.raises(
        (ArithmeticError, TypeError, ValueError) if odd else CollectiveError,
        match=message,
    ):
        exchange(gradients(comm.rank, 0))


@pytest.mark.at_least(2)
@pytest.mark.parametrize("form", ["one array", "a list of arrays"])
def test_one_vector_and_named_tensors_do_not_mix(comm, form):
    """Neither between the ranks nor, where the residual of one would be lost, in one exchange."""
    odd = comm.rank == comm.size - 1
    named, alone = gradients(comm.rank, 0), gradients(comm.rank, 0)["a.weight"]
    alone = alone if form == "one array" else [alone]
    exchange = GradientExchange(
        comm, TopK(k=1), ErrorFeedback(), sparse_allreduce, small=0, bucket_nbytes=1
    )
    with pytest.raises(
        CollectiveError,
        match=f"'gradients' is {form} on rank 0, and arrays by name on rank",
    ):
        exchange(named if odd else alone)
    exchange(named)
    before = residuals(exchange)
    with pytest.raises(
        TypeError if odd else CollectiveError,
        match=f"got {form}: expected arrays by name",
    ):
        exchange(alone if odd else named)
    np.testing.assert_equal(residuals(exchange), before)
    exchange(named)
    other = GradientExchange(comm, TopK(k=1), ErrorFeedback(), sparse_allreduce)
    other(alone)
    with pytest.raises(
        TypeError, match=f"got arrays by name: expected {form}, as in the first step"
    ):
        other(named)
    with pytest.raises(
        TypeError, match=f"got arrays by name: expected {form}, as in the first step"
    ):
        other.start("a.weight", named["a.weight"])
    other(alone)


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    "setting", [{"bucket_nbytes": 1}, {"small": 30}, {"average": False}]
)
def test_settings_that_differ_raise_everywhere(comm, setting):
    odd = comm.rank == comm.size - 1
    exchange = GradientExchange(
        comm, TopK(k=1), ErrorFeedback(), sparse_iallreduce, **(setting if odd else {})
    )
    with pytest.raises(
        CollectiveError,
        match=f"the same settings: '{next(iter(setting))}' is .* on rank 0, and",
    ):
        exchange(gradients(comm.rank, 0))


@pytest.mark.at_least(2)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fault", ["started", "items", "name"])
def test_a_bad_dict_on_one_rank_raises_everywhere(comm, known, fault):
    class Lazy(dict):
        def __iter__(self):
            raise LookupError("not there")

        keys = __iter__

    odd, mine = comm.rank == comm.size - 1, gradients(comm.rank, 0)
    exchange = GradientExchange(
        comm, TopK(k=1), ErrorFeedback(), sparse_iallreduce, small=0, bucket_nbytes=1
    )
    if known:
        exchange.register(mine)
    if odd and fault == "started":
        exchange.start("a.weight", mine["a.weight"])
    bad = {"started": mine, "items": Lazy(mine), "name": mine | {3: mine["scale"]}}[
        fault
    ]
    said = {
        "started": "a step is in progress",
        "items": "not there",
        "name": "3 is none of" if known else "the name 3",
    }
    with pytest.raises(
        (RuntimeError, LookupError, TypeError) if odd else CollectiveError,
        match=said[fault],
    ):
        exchange(bad if odd else mine)
    exchange(mine)


def test_a_name_that_archives_of_arrays_cut_off_is_refused(comm):
    """Of two tensors one residual would be saved."""
    mine = {"layer\0a": np.ones(5), "layer\0b": np.ones(5)}
    with pytest.raises(TypeError, match="expected a string without null characters"):
        GradientExchange(comm, TopK(k=1))(mine)


def test_tensors_are_registered_once(comm):
    exchange = GradientExchange(comm, TopK(k=1), ErrorFeedback(), sparse_allreduce)
    exchange.start("scale", np.ones(4))
    with pytest.raises(
        RuntimeError, match="a step is in progress: register the tensors before"
    ):
        exchange.register(gradients(comm.rank, 0))
    exchange = GradientExchange(comm, TopK(k=1), ErrorFeedback(), sparse_allreduce)
    exchange(gradients(comm.rank, 0))
    norm = exchange.residual_norm
    with pytest.raises(
        RuntimeError, match="are registered: expected an exchange for each model"
    ):
        exchange.register(gradients(comm.rank, 0))
    assert exchange.residual_norm == norm > 0


def test_what_is_kept_is_left_alone_within_a_step(comm):
    exchange = GradientExchange(
        comm, TopK(k=1), ErrorFeedback(), sparse_iallreduce, small=0, bucket_nbytes=1
    )
    mine = gradients(comm.rank, 0)
    exchange(mine)
    state = exchange.state_dict()
    exchange.start("a.weight", mine["a.weight"])
    calls = (
        exchange.reset,
        partial(exchange.rescale, 2.0),
        partial(exchange.load_state_dict, state),
    )
    for call in calls:
        with pytest.raises(
            RuntimeError, match="a step is in progress: call finish first"
        ):
            call()
    exchange.finish()
    exchange.rescale(2.0)


def test_one_compressor_for_two_tensors_is_copied_and_as_it_was_after_a_step_that_failed(
    comm,
):
    shared = RandomK(k=2)
    exchange = GradientExchange(
        comm, lambda *_: shared, ErrorFeedback(), sparse_allreduce, small=0
    )
    exchange(gradients(comm.rank, 0))
    bad = gradients(comm.rank, 1)
    if comm.rank == 0:
        bad["scale"] = bad["scale"] * np.float32("nan")
    with pytest.raises(ValueError if comm.rank == 0 else CollectiveError, match="nan"):
        exchange(bad)
    assert [each.step for each in exchange.compressors.values()] == [1] * len(SHAPES)
    assert shared.step == 0


@pytest.mark.exactly(1)
def test_an_interrupt_leaves_all_as_it_was(comm):
    class Interrupted(RandomK):
        def compress(self, corrected, *, gradient=None):
            vector = super().compress(corrected)
            if self.step == 2:
                raise KeyboardInterrupt
            return vector

    for mine in (gradients(0, 0), gradients(0, 0)["a.weight"]):
        exchange = GradientExchange(
            comm, Interrupted(k=2), ErrorFeedback(), sparse_iallreduce, small=0
        )
        exchange(mine)
        before = state_of(exchange)
        with pytest.raises(KeyboardInterrupt):
            exchange(mine)
        assert state_of(exchange) == before


@pytest.mark.parametrize(
    "feedback",
    [each for each in EVERY_FEEDBACK if not getattr(each, "in_place", False)],
    ids=repr,
)
@pytest.mark.parametrize(
    ("before", "after"), [(6000, 1), pytest.param(1, 2**25, marks=pytest.mark.slow)]
)
def test_a_state_fits_other_buckets(comm, feedback, before, after):
    for compressor in compressors_with(feedback, before == 1, 2):
        one, other = (
            GradientExchange(
                comm,
                deepcopy(compressor),
                deepcopy(feedback),
                small=0,
                bucket_nbytes=nbytes,
            )
            for nbytes in (before, after)
        )
        for step in range(2):
            one(gradients(comm.rank, step, np.float64))
        other.register(gradients(comm.rank, 0, np.float64))
        other.load_state_dict(one.state_dict())
        for step in range(2, 4):
            expected, means = (
                each(gradients(comm.rank, step, np.float64)) for each in (one, other)
            )
            for name, mean in means.items():
                message = f"{compressor!r}, {name}, step {step}"
                np.testing.assert_allclose(
                    mean, expected[name], rtol=1e-12, atol=1e-9, err_msg=message
                )
