"""ErrorFeedback(in_place=True): the gradient's own array holds the residual, with the bits of ErrorFeedback()."""

import sys
from functools import partial

import numpy as np
import pytest
from cases import RandomK, compressed_sum, normals

from collectives import (
    CollectiveError,
    GradientExchange,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
)
from mpicomp import AdaComp, ErrorFeedback, Quantised, SIDCo, TopK

pytestmark = pytest.mark.small_groups

SHAPES = {"w": (30, 40), "b": (7,), "v": (25, 8)}
COLLECTIVES = [gtopk_allreduce, sparse_allreduce, sparse_allgather]
gradients = partial(normals, SHAPES)


def formed(form, arrays):
    return {"array": arrays["w"], "list": list(arrays.values()), "dict": arrays}[form]


def arrays_of(form, mean):
    return {
        "array": lambda: [mean],
        "list": lambda: mean,
        "dict": lambda: [mean[name] for name in SHAPES],
    }[form]()


def residuals(exchange):
    return [bucket.feedback.residual.tobytes() for bucket in exchange.buckets]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_means_and_residuals_have_the_bits_of_error_feedback(comm, collective, dtype):
    for form, compressor in (
        ("array", lambda: TopK(0.05)),
        (
            "list",
            lambda: (
                Quantised(TopK(0.05), "bfloat16")
                if dtype == np.float32
                else RandomK(0.1)
            ),
        ),
        ("dict", lambda: SIDCo(0.1)),
    ):
        exchanges = [
            GradientExchange(
                comm, compressor(), ErrorFeedback(in_place=here), collective, small=10
            )
            for here in (False, True)
        ]
        homes = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
        for step in range(4):
            mine = gradients(comm.rank, step, dtype)
            for name, home in homes.items():
                home += mine[name]  # as a backward pass does
            expected = arrays_of(form, exchanges[0](formed(form, mine)))
            means = arrays_of(form, exchanges[1](formed(form, homes)))
            assert [mean.tobytes() for mean in means] == [
                mean.tobytes() for mean in expected
            ]
        vectors = {"array": [["w"]], "list": [[*SHAPES]], "dict": [["w", "v"], ["b"]]}[
            form
        ]
        kept = [
            b"".join(homes[name].tobytes() for name in vector) for vector in vectors
        ]
        assert kept == residuals(exchanges[0])


def test_nothing_is_kept_beside_the_gradient(comm):
    exchange, home = (
        GradientExchange(comm, TopK(0.1), ErrorFeedback(in_place=True)),
        gradients(comm.rank, 0)["w"],
    )
    exchange(home)
    assert home.any()
    assert exchange.feedback.residual is None
    assert exchange.residual_norm == 0
    assert [name for name in exchange.state_dict() if "feedback" in name] == []
    with pytest.raises(
        RuntimeError, match="the residual is in the gradient's own array"
    ):
        exchange.rescale(2.0)
    with pytest.raises(ValueError, match="AdaComp needs the new gradient too"):
        GradientExchange(comm, AdaComp(50), ErrorFeedback(in_place=True))(home)


def test_a_compressed_sum_and_a_dense_mean_leave_the_same_residual(comm):
    """Also where the output buffer is a part of the same memory that the gradient does not have."""
    both = np.zeros((2, 30, 40), np.float32)
    exchange = GradientExchange(
        comm,
        TopK(0.1),
        ErrorFeedback(in_place=True),
        collective=compressed_sum(TopK(0.05)),
    )
    usual = GradientExchange(comm, TopK(0.1), collective=compressed_sum(TopK(0.05)))
    for step in range(3):
        mine = gradients(comm.rank, step)["w"]
        both[0] += mine
        expected = usual(mine)
        assert exchange(both[0], out=both[1]).tobytes() == expected.tobytes()
        assert both[0].tobytes() == usual.feedback.residual.tobytes()


class Half:
    """An array of bfloat16, as a framework has it: to be converted."""

    dtype = "bfloat16"

    def __init__(self, array):
        self.array = array

    def float(self):
        return self.array.copy()


def read_only(array):
    array.flags.writeable = False
    return array


FAULTS = {
    "read-only": (lambda array: read_only(array.copy()), "is read-only for NumPy"),
    "bfloat16": (
        lambda array: Half(array.copy()),
        "bfloat16, which is exchanged as float32",
    ),
    "order": (lambda array: np.asfortranarray(array), "not C-contiguous"),
    "strides": (lambda array: np.repeat(array, 2, axis=1)[:, ::2], "not C-contiguous"),
    "missing": (
        lambda array: None,
        r"has no gradient, whose array holds the residual|got builtins\.NoneType",
    ),
    "shape": (lambda array: array.T.copy(), "of shape"),
    "dtype": (lambda array: array.astype(np.float64), "is float64 of shape"),
}


@pytest.mark.parametrize("form", ["array", "list", "dict"])
@pytest.mark.parametrize("fault", [*FAULTS, "out", "out over it"])
def test_an_array_that_cannot_hold_the_residual_raises_everywhere_and_nothing_changes(
    comm, form, fault
):
    """On the last rank only; of several arrays the first."""
    exchange = GradientExchange(
        comm, TopK(0.1), ErrorFeedback(in_place=True), small=10, bucket_nbytes=1
    )
    exchange(formed(form, gradients(comm.rank, 0)))
    homes, state = gradients(comm.rank, 1), exchange.state_dict()
    before, given, outs = (
        {name: home.tobytes() for name, home in homes.items()},
        dict(homes),
        None,
    )
    change, said = FAULTS.get(
        fault, (None, "two arrays share memory that is written to")
    )
    odd = comm.rank == comm.size - 1
    if fault.startswith("out"):
        outs = {name: np.zeros_like(home) for name, home in homes.items()}
        wider = np.zeros(1200 + 40, np.float32)
        wider[:1200] = homes["w"].reshape(-1)
        given["w"] = wider[:1200].reshape(30, 40)
        if odd:
            outs["w"] = given["w"] if fault == "out" else wider[40:].reshape(30, 40)
        homes["w"] = given["w"]
    elif odd:
        given["w"] = change(homes["w"])
    with pytest.raises((ValueError, TypeError) if odd else CollectiveError, match=said):
        exchange(formed(form, given), out=None if outs is None else formed(form, outs))
    assert {name: home.tobytes() for name, home in homes.items()} == before
    np.testing.assert_equal(exchange.state_dict(), state)
    assert outs is None or not any(
        out.any() for name, out in outs.items() if name != "w"
    )
    exchange(formed(form, homes))
    assert exchange.steps == 2


def test_a_tensor_that_is_not_started_has_no_array_for_its_residual(comm):
    exchange = GradientExchange(comm, TopK(0.1), ErrorFeedback(in_place=True), small=0)
    homes = gradients(comm.rank, 0)
    exchange.register(homes)
    before = {name: home.tobytes() for name, home in homes.items()}
    for name in ["w", "v"] if comm.rank == comm.size - 1 else SHAPES:
        exchange.start(name, homes[name])
    with pytest.raises(
        (ValueError, CollectiveError), match=r"b has no gradient, .*: pass zeros"
    ):
        exchange.finish()
    assert {name: home.tobytes() for name, home in homes.items()} == before
    exchange(homes)


def test_a_skipped_step_is_not_compared_with_the_arrays_of_the_last_one(comm):
    """Nor does the exchange hold these arrays."""
    exchange = GradientExchange(
        comm, TopK(k=2), ErrorFeedback(in_place=True), nonfinite="skip"
    )
    last = np.ones(50, np.float32)
    references = sys.getrefcount(last)
    exchange(last)
    assert sys.getrefcount(last) == references
    assert not exchange(np.full(50, np.nan, np.float32), out=last).any()
    assert (exchange.steps, exchange.skipped) == (1, 1)
