"""float16 gradients whose mean is in range while their sum is not: sums are in float32, and rounded once."""

from functools import partial

import numpy as np
import pytest

from collectives import (
    CollectiveError,
    GradientExchange,
    dense_allreduce,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
)
from mpicomp import (
    AdaComp,
    ChunkedTopK,
    Dense,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    Quantised,
    SIDCo,
    TopK,
)

pytestmark = pytest.mark.small_groups

LARGE = 40000.0
LENGTH = 64
ALL = TopK(k=LENGTH)
EXACT = {
    "topk": {"compressor": ALL},
    "chunked": {"compressor": ChunkedTopK(8, 8)},
    "sidco": {"compressor": SIDCo(0.5)},
    "adacomp": {"compressor": AdaComp(8)},
    "float16": {"compressor": Quantised(ALL, "float16")},
    "two_bit": {"compressor": Quantised(ChunkedTopK(8, 8), "two_bit")},
    "sign": {"compressor": Quantised(ALL, "sign")},
    "dense": {"compressor": Dense()},
    "small": {"compressor": ALL, "small": LENGTH + 1},
    "gtopk": {"compressor": ALL, "collective": partial(gtopk_allreduce, k=LENGTH)},
    "exact gtopk": {
        "compressor": ALL,
        "collective": partial(gtopk_allreduce, k=LENGTH, algorithm="exact"),
    },
    "allgather": {"compressor": ALL, "collective": sparse_allgather},
    "dense_allreduce": {"collective": dense_allreduce},
    "contributors": {"compressor": ALL, "average": "contributors"},
    "in place": {"compressor": ALL, "feedback": ErrorFeedback(in_place=True)},
    "momentum": {"compressor": ALL, "feedback": MomentumCorrection(0.9)},
    "basis": {"compressor": ChunkedTopK(8, 8), "basis": Hadamard(chunk=8)},
} | {
    name: {
        "compressor": ALL,
        "collective": partial(sparse_allreduce, algorithm=name),
    }
    for name in sparse_allreduce.algorithms
}


def gradient(form, value=LARGE):
    values = np.full(LENGTH, value, np.float16)
    values[::2] *= -1
    return {"w": values} if form is dict else values


def values_of(mean):
    return np.asarray(mean["w"] if isinstance(mean, dict) else mean)


@pytest.mark.parametrize("form", [dict, np.ndarray])
@pytest.mark.parametrize("name", EXACT)
def test_a_mean_in_range_is_returned_whatever_the_sum(comm, name, form):
    exchange = GradientExchange(comm, nonfinite="skip", **EXACT[name])
    mean = values_of(exchange(gradient(form)))
    assert exchange.finite
    assert mean.dtype == np.float16
    sent = mean != 0
    assert sent.any()
    np.testing.assert_array_equal(mean[sent], gradient(np.ndarray)[sent])


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_a_mean_of_few_bits_is_in_range(comm, bits):
    exchange = GradientExchange(comm, bits=bits, nonfinite="skip")
    mine = gradient(dict)
    out = exchange(mine, out=mine)["w"]
    assert exchange.finite
    np.testing.assert_allclose(np.abs(out), LARGE, rtol=0.03)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_signs_of_a_sum_out_of_range_are_right(comm, in_place):
    exchange = GradientExchange(
        comm, ALL, ErrorFeedback(in_place=in_place), average="sign"
    )
    np.testing.assert_array_equal(
        exchange(gradient(np.ndarray)), np.sign(gradient(np.ndarray))
    )


@pytest.mark.at_least(2)
@pytest.mark.parametrize("settings", [{"compressor": ALL}, {"bits": 4}])
def test_a_sum_out_of_range_that_is_asked_for_is_skipped_or_raises(comm, settings):
    """average=False: with dynamic loss scaling the step is skipped, and the scale becomes smaller."""
    exchange = GradientExchange(comm, average=False, nonfinite="skip", **settings)
    for step in range(2):
        mine = gradient(np.ndarray)
        assert not exchange(mine, out=mine).any()
        assert not exchange.finite
        assert exchange.skipped == step + 1
        assert exchange.residual_norm == 0
    total = exchange(gradient(np.ndarray, 8.0))
    assert exchange.finite
    np.testing.assert_allclose(total, comm.size * gradient(np.ndarray, 8.0), rtol=0.02)
    raising = GradientExchange(comm, average=False, **settings)
    with pytest.raises(
        (OverflowError, CollectiveError), match=r"leaves the range of float16.*float32"
    ):
        raising(gradient(np.ndarray))
