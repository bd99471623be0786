import sys
import types

import numpy as np
import pytest
from cases import take_step
from mpi4py import MPI

from collectives import GradientExchange, Sum, dense_allreduce, sparse_allgather
from mpicomp import (
    AdaComp,
    Dense,
    ErrorFeedback,
    Feedback,
    Hadamard,
    NoFeedback,
    SparseVector,
    TopK,
)
from mpicomp.feedback.base import check_range

World = MPI.COMM_SELF


def alone(vector, comm):
    """A collective of one rank that rejects every second entry."""
    if isinstance(vector, Exception):
        raise vector
    return Sum(vector.every(2), vector.every(2, 1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "compressor", [lambda: TopK(k=6), lambda: AdaComp(8)], ids=["TopK", "AdaComp"]
)
def test_a_decay_is_that_of_numpy_in_the_dtype_of_the_gradient(dtype, compressor):
    feedback, residual, twin = (
        ErrorFeedback(decay=0.95),
        np.zeros(40, dtype),
        compressor(),
    )
    exchange = GradientExchange(World, compressor(), feedback, alone)
    feedback = exchange.feedback  # a copy
    rng = np.random.default_rng(1)
    for _ in range(6):
        gradient = rng.standard_normal(40).astype(dtype)
        residual = residual * dtype(0.95) + gradient
        sent = twin.compress(residual.copy(), gradient=gradient)
        exchange(gradient)
        residual[sent.indices] -= sent.values
        back = sent.every(2, 1)
        residual[back.indices] += back.values
        np.testing.assert_array_equal(feedback.residual, residual)
        assert feedback.residual.dtype == dtype


def test_a_decay_out_of_range_or_in_place_is_refused():
    for decay in (0, -0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match=r"decay is .*: expected 0 < decay <= 1"):
            ErrorFeedback(decay=decay)
    with pytest.raises(
        ValueError, match="the gradient's array holds the sum of residual and gradient"
    ):
        ErrorFeedback(in_place=True, decay=0.5)
    assert ErrorFeedback(in_place=True, decay=1).in_place


def test_a_failed_call_leaves_the_residual_and_reports_the_error_to_the_collective():
    reported = []

    def collective(vector, comm):
        reported.append(vector)
        return alone(vector, comm)

    exchange = GradientExchange(World, TopK(k=1), ErrorFeedback(), collective)
    exchange(np.array([4.0, 1.0]))
    with pytest.raises(ValueError, match=r"values\[1\] is nan"):
        exchange(np.array([4.0, np.nan]))
    assert isinstance(reported[1], ValueError)
    assert exchange.feedback.residual.tolist() == [0, 1]


def test_a_list_that_is_none_is_named():
    exchange = GradientExchange(World, TopK(k=1), ErrorFeedback(), alone)
    with pytest.raises(
        ValueError,
        match="got a list of arrays, and it is empty: expected at least one array",
    ):
        exchange([])
    with pytest.raises(
        TypeError,
        match="got float32 in numpy's memory and float64 in numpy's memory in one list",
    ):
        exchange([np.ones(1), np.ones(1, np.float32)])
    with pytest.raises(
        TypeError, match="item 1 of the list is None in the first step: pass zeros"
    ):
        exchange([np.ones(1), None])


def test_the_residual_is_a_read_only_view():
    feedback = ErrorFeedback()
    take_step(feedback, TopK(k=1), np.ones(3))
    with pytest.raises(ValueError, match="read-only"):
        feedback.residual[0] = 5


def test_float16_parts_are_added_up_in_float32():
    parts = [
        SparseVector([0], np.array([value], np.float16), 2)
        for value in (6e4, 6e4, -6e4)
    ]
    total = sparse_allgather.declaration.to_sum(parts)
    assert total.value.values.tolist() == [np.float16(6e4)]


@pytest.mark.parametrize(
    "returned",
    [
        np.array([0, 6e4], np.float16),
        SparseVector([1], np.array([6e4], np.float16), 2),
        Sum(SparseVector([1], np.array([6e4], np.float16), 2)),
    ],
)
def test_what_a_function_of_the_users_own_may_return(returned):
    exchange = GradientExchange(
        World, TopK(k=1), NoFeedback(), lambda vector, comm: returned
    )
    mean = exchange(np.array([0, 6e4], np.float16))
    assert mean.dtype == np.float16
    assert mean.tolist() == [0, np.float16(6e4)]
    assert exchange.statistics.received == (
        2 if isinstance(returned, np.ndarray) else 1
    )


class Alike:
    """A compressor in all but its base class."""

    def compress(self, corrected, *, gradient=None):
        return TopK(k=1).compress(corrected)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        (
            "comm",
            None,
            "comm is NoneType: expected an mpi4py intracommunicator such as MPI.COMM_WORLD",
        ),
        (
            "comm",
            types.SimpleNamespace(size=1),
            "comm is SimpleNamespace: expected an mpi4py intracommunicator",
        ),
        (
            "compressor",
            TopK,
            r"compressor is the class TopK: expected an object such as TopK\(",
        ),
        ("compressor", 0.01, "compressor is 0.01: expected an object such as TopK"),
        ("compressor", ErrorFeedback(), "expected an object such as TopK"),
        (
            "compressor",
            Alike(),
            "Alike object at .*: expected an object such as TopK",
        ),
        (
            "feedback",
            ErrorFeedback,
            "feedback is the class ErrorFeedback: expected an object such as ErrorFeedback",
        ),
        (
            "feedback",
            TopK(k=1),
            r"feedback is TopK\(k=1\): expected an .*derives from mpicomp\.Feedback",
        ),
        (
            "collective",
            "gtopk",
            "collective is 'gtopk': expected a collective such as sparse_allreduce",
        ),
    ],
)
def test_a_wrong_part_is_named_at_once(name, part, message):
    parts = {
        "comm": World,
        "compressor": TopK(k=1),
        "feedback": ErrorFeedback(),
        "collective": alone,
    } | {name: part}
    with pytest.raises(TypeError, match=message):
        GradientExchange(**parts)


VECTOR = SparseVector([0], [1.0], 2)


@pytest.mark.parametrize(
    "returned",
    [object(), [VECTOR], (VECTOR, VECTOR), Sum([VECTOR]), Sum(VECTOR, (VECTOR,))],
)
def test_a_collective_that_returns_no_sum_is_named(returned):
    exchange = GradientExchange(
        World, TopK(k=1), ErrorFeedback(), lambda vector, comm: returned
    )
    with pytest.raises(
        TypeError,
        match=r"the collective returned (object|list|tuple): expected a SparseVector or an array",
    ):
        exchange(np.ones(2))


def test_a_collective_that_returns_integers_is_told_what_to_convert_them_to():
    exchange = GradientExchange(
        World, TopK(k=1), collective=lambda vector, comm: np.ones(2, np.int64)
    )
    with pytest.raises(TypeError, match=r"values are int64: expected .* astype"):
        exchange(np.ones(2))


def test_the_gradient_that_a_feedback_of_ones_own_returns_is_not_written_to():
    class Plain(NoFeedback):
        prepare_rejected = Feedback.prepare_rejected

    gradient = np.ones(3)
    assert GradientExchange(World, Dense(), Plain(), dense_allreduce)(
        gradient
    ).tolist() == [1, 1, 1]
    assert gradient.tolist() == [1, 1, 1]


LONGER = SparseVector([0], [1.0], 3)


@pytest.mark.parametrize("returned", [LONGER, Sum(LONGER), Sum(VECTOR, LONGER)])
def test_a_collective_that_returns_another_length_is_named(returned):
    exchange = GradientExchange(
        World, TopK(k=1), collective=lambda vector, comm: returned
    )
    with pytest.raises(ValueError, match="expected a sum of length 2"):
        exchange(np.ones(2))
    assert exchange.feedback.residual is None


class Parameter:
    """Stands for a parameter of PyTorch: a leaf of the graph that requires grad."""

    requires_grad, is_leaf, shape = True, True, (2,)

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self._array = array

    def detach(self):
        return self._array


def test_a_parameter_in_place_of_its_gradient_is_told():
    exchange = GradientExchange(World, TopK(k=1))
    parameter = Parameter(np.ones(2))
    with pytest.raises(
        TypeError, match=r"gradient is a parameter, not a gradient: pass its \.grad"
    ):
        exchange(parameter)
    exchange = GradientExchange(World, TopK(k=1))
    exchange.register({"w": parameter})
    with pytest.raises(
        TypeError, match=r"w is a parameter, not a gradient: pass its \.grad"
    ):
        exchange({"w": parameter})
    parameter.requires_grad = False
    assert exchange({"w": parameter})["w"].tolist() == [1, 1]


@pytest.mark.parametrize("tensors", [[np.ones(2)], iter([np.ones(2)]), object()])
def test_tensors_without_names_are_told(tensors):
    with pytest.raises(
        TypeError, match=r"expected a dict of arrays, such as dict\(model.named"
    ):
        GradientExchange(World, TopK(k=1)).register(tensors)


def test_names_of_a_model_that_is_wrapped_on_one_side_are_told():
    for known, other in (
        ("e.weight", "module.e.weight"),
        ("module.e.weight", "e.weight"),
    ):
        exchange = GradientExchange(World, TopK(k=1))
        exchange.register({known: np.ones(2)})
        with pytest.raises(
            KeyError, match=f"'{other}' is none .* it was registered as '{known}'"
        ):
            exchange.start(other, np.ones(2))
        with pytest.raises(
            KeyError, match=r"'bias' is none of .*: use another exchange"
        ):
            exchange({"bias": np.ones(2)})


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (np.float16, "down, or use float32"),
        (np.float32, "down, or use float64"),
        (np.float64, "down"),
    ],
)
def test_values_out_of_range_name_a_wider_dtype(dtype, remedy):
    with pytest.raises(
        OverflowError,
        match=f"the sum leaves the range of float.*: scale the gradients {remedy}$",
    ):
        check_range(np.array([1, np.inf], dtype), "sum")


class Rounded:
    """An array of bfloat16, as a framework has it: `from_dlpack` and `astype` make one of a result, which is a copy."""

    dtype = "bfloat16"

    def __init__(self, array):
        self.array = array

    def float(self):
        return self.array

    def astype(self, dtype):
        return Rounded(self.array.copy())


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": TopK(0.1)},
        {"compressor": TopK(0.1), "basis": Hadamard(256)},
        {"compressor": TopK(0.1), "average": "sign"},
        {"bits": 4},
    ],
)
def test_results_in_bfloat16_are_rounded_once_they_have_their_values(
    settings, monkeypatch
):
    library = sys.modules[__name__]
    monkeypatch.setattr(library, "from_dlpack", Rounded, raising=False)
    exchange = GradientExchange(MPI.COMM_SELF, small=0, **settings)
    plain = GradientExchange(MPI.COMM_SELF, small=0, **settings)
    for step in range(3):
        given = {"w": np.arange(3000.0, dtype=np.float32) % (7 + step)}
        given["b"] = np.zeros(2000, np.float32)
        expected = plain(given)
        means = exchange({name: Rounded(array) for name, array in given.items()})
        for name, mean in means.items():
            np.testing.assert_array_equal(mean.array, expected[name])
