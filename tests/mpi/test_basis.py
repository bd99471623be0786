"""GradientExchange in a basis, with the sign of the mean, and by sums of dense arrays: conservation, states, errors."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from cases import compressed_sum, integers, state_of

from collectives import (
    CollectiveError,
    GradientExchange,
    OuterLoop,
    dense_allreduce,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
)
from mpicomp import (
    ChunkedTopK,
    Dense,
    ErrorFeedback,
    Hadamard,
    MomentumCorrection,
    NoFeedback,
    Quantised,
    StepAhead,
    TopK,
)
from mpicomp.means import DenseMean

pytestmark = pytest.mark.small_groups

# in chunks of 16: whole, but for none
SHAPES = {"w": (20, 16), "b": (48,), "v": (4, 4, 5), "s": (16,)}
COLLECTIVES = [sparse_allreduce, sparse_allgather, gtopk_allreduce]
gradients = partial(integers, SHAPES)


def summed(comm, step):
    every = [gradients(rank, step) for rank in range(comm.size)]
    return {
        name: sum(each[name].astype(np.float64) for each in every) for name in SHAPES
    }


def out_of_basis(bucket):
    """Return the residual of a bucket as values."""
    kept = DenseMean(bucket.feedback.residual.copy())
    return kept.out_of(bucket.basis, bucket.edges, kept.array.dtype).values()


def residual_in_values(exchange):
    """Return the residual of this rank, out of the basis, by name."""
    found = {}
    for bucket in exchange.buckets:
        values = out_of_basis(bucket)
        for tensor, (first, end) in zip(
            bucket.tensors, pairwise(bucket.bounds), strict=True
        ):
            found[tensor.name] = (
                values[first:end].reshape(tensor.shape).astype(np.float64)
            )
    return found


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("bucket_nbytes", [1, 2**25])
def test_mass_is_conserved_in_the_basis_bitwise_on_integers(
    comm, collective, bucket_nbytes
):
    """Chunks of a power of four are exact on integers: applied + residuals = given, in values."""
    compressor = ChunkedTopK(k=2, chunk=16)
    settings = {
        "average": False,
        "basis": Hadamard(chunk=16),
        "bucket_nbytes": bucket_nbytes,
    }
    exchange = GradientExchange(
        comm, compressor, ErrorFeedback(), collective, **settings
    )
    applied = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    given = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(3):
        totals = exchange(gradients(comm.rank, step))
        assert (
            len(
                set(
                    comm.allgather(
                        b"".join(total.tobytes() for total in totals.values())
                    )
                )
            )
            == 1
        )
        expected, kept = summed(comm, step), residual_in_values(exchange)
        for name in SHAPES:
            applied[name] += totals[name]
            given[name] += expected[name]
            np.testing.assert_array_equal(
                applied[name] + comm.allreduce(kept[name]), given[name]
            )


@pytest.mark.parametrize("basis", [Hadamard(chunk=64), Hadamard(chunk=16)])
@pytest.mark.parametrize("form", ["two_bit", "sign", "float16"])
def test_mass_is_conserved_within_rounding_in_any_basis_with_quantised_coefficients(
    comm, basis, form
):
    """Also contributors' means of nothing but one rank are its own coefficients; lengths that no chunk divides."""
    rng = np.random.default_rng(comm.rank)
    exchange = GradientExchange(
        comm, Quantised(ChunkedTopK(k=3, chunk=24), form), average=False, basis=basis
    )
    applied, given = np.zeros(1001), np.zeros(1001)
    for _ in range(3):
        gradient = rng.standard_normal(1001)
        applied += exchange(gradient)
        given += comm.allreduce(gradient)
    kept = residual_of(exchange)
    np.testing.assert_allclose(
        applied + comm.allreduce(kept), given, atol=1e-12 * comm.size
    )


def residual_of(exchange):
    (bucket,) = exchange.buckets
    return out_of_basis(bucket)


@pytest.mark.parametrize("average", [True, "contributors", "sign"])
def test_everything_sent_is_the_dense_mean_or_its_sign(comm, average):
    exchange = GradientExchange(
        comm, TopK(1.0), ErrorFeedback(), average=average, basis=Hadamard(chunk=16)
    )
    means, expected = exchange(gradients(comm.rank, 0)), summed(comm, 0)
    for name in SHAPES:
        if average == "sign":
            np.testing.assert_array_equal(means[name], np.sign(expected[name]))
        elif average is True:
            np.testing.assert_allclose(
                means[name], expected[name] / comm.size, rtol=1e-6, atol=1e-5
            )
        assert means[name].dtype == np.float32


@pytest.mark.parametrize("small", [None, 100])
def test_the_sign_of_a_mean_of_values(comm, small):
    """Sparse and dense, of small tensors as well; zeros have none, and the residual, rescaled, is that of the mean."""
    signed = GradientExchange(comm, TopK(0.1), average="sign", small=small)
    usual = GradientExchange(comm, TopK(0.1), small=small)
    for step in range(2):
        mine, out = (
            gradients(comm.rank, step),
            {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()},
        )
        means = usual(mine)
        for name, sign in signed(mine, out=out).items():
            assert sign is out[name]
            np.testing.assert_array_equal(sign, np.sign(means[name]))
        for exchange in signed, usual:
            exchange.rescale(0.5)
    means = usual(gradients(comm.rank, 2))
    for name, vector in signed(gradients(comm.rank, 2), sparse=True).items():
        np.testing.assert_array_equal(
            vector.to_dense(), np.sign(means[name]).reshape(-1)
        )


@pytest.mark.parametrize(
    "feedback", [NoFeedback, MomentumCorrection, lambda: ErrorFeedback(decay=0.5)]
)
@pytest.mark.parametrize("average", [True, "sign"])
def test_feedback_methods_work_on_coefficients(comm, feedback, average):
    """A dense simulation in the basis: the same method on transformed gradients, its result transformed back."""
    basis, compressor = Hadamard(chunk=16), TopK(0.2)
    within = GradientExchange(
        comm, compressor, feedback(), average=average, basis=basis
    )
    outside = GradientExchange(comm, compressor, feedback(), average=average is True)
    for step in range(3):
        mine = gradients(comm.rank, step)["w"].reshape(-1)
        coefficients, expected = np.empty_like(mine), np.empty_like(mine)
        basis.forward(mine, coefficients)
        basis.inverse(outside(coefficients), expected)
        np.testing.assert_array_equal(
            within(mine), np.sign(expected) if average == "sign" else expected
        )


def test_the_sum_is_compressed_in_the_basis(comm):
    """Each rank a share of the coefficients, of which the first alone is not zero."""
    exchange = GradientExchange(
        comm,
        TopK(1.0),
        average=False,
        collective=compressed_sum(TopK(k=1)),
        basis=Hadamard(chunk=16),
    )
    gradient = np.ones(16, np.float32)
    np.testing.assert_array_equal(exchange(gradient), np.full(16, comm.size))


def test_states_fit_other_buckets_and_no_other_basis(comm):
    def made(nbytes, basis):
        exchange = GradientExchange(
            comm,
            ChunkedTopK(k=2, chunk=16),
            ErrorFeedback(decay=0.9),
            bucket_nbytes=nbytes,
            basis=basis,
            small=0,
        )
        exchange.register(gradients(0, 0))
        return exchange

    first, second = (made(nbytes, Hadamard(chunk=16)) for nbytes in (1, 2**25))
    first(gradients(comm.rank, 0))
    second.load_state_dict(first.state_dict())
    one, other = first(gradients(comm.rank, 1)), second(gradients(comm.rank, 1))
    assert all(one[name].tobytes() == other[name].tobytes() for name in SHAPES)
    with pytest.raises(
        ValueError, match=r"basis Hadamard\(chunk=16\): expected Hadamard\(chunk=64\)"
    ):
        made(1, Hadamard(chunk=64)).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"basis Hadamard\(chunk=16\): expected None"):
        made(1, None).load_state_dict(first.state_dict())


def test_what_cannot_be_in_a_basis_is_refused_where_the_exchange_is_made(comm):
    for feedback in ErrorFeedback(in_place=True), StepAhead(0.1):
        with pytest.raises(
            ValueError,
            match=r"got basis=Hadamard\(chunk=256\) and .*: expected a feedback such as",
        ):
            GradientExchange(comm, TopK(0.1), feedback, basis=Hadamard())
    with pytest.raises(
        TypeError, match="basis is 'hadamard': expected an object such as Hadamard"
    ):
        GradientExchange(comm, TopK(0.1), basis="hadamard")
    with pytest.raises(ValueError, match="average is 'signs': expected one of"):
        GradientExchange(comm, TopK(0.1), average="signs")
    exchange = GradientExchange(comm, TopK(0.1), basis=Hadamard())
    with pytest.raises(
        ValueError,
        match=r"got out=|got sparse=True, and in the basis Hadamard\(chunk=256\)",
    ):
        exchange(np.ones(300, np.float32), sparse=True)
    for settings in ({"basis": Hadamard()}, {"average": "sign"}):
        with pytest.raises(ValueError, match="expected no basis, and a mean") as caught:
            OuterLoop(GradientExchange(comm, TopK(0.1), **settings), np.zeros(9))
        assert "has been measured" in str(caught.value)


@pytest.mark.at_least(2)
def test_bases_that_differ_raise_everywhere(comm):
    basis = Hadamard(chunk=16) if comm.rank else Hadamard(chunk=64)
    with pytest.raises(
        CollectiveError,
        match=r"'basis' is Hadamard\(chunk=64\) on rank 0, and Hadamard\(chunk=16\)",
    ):
        GradientExchange(comm, TopK(0.1), basis=basis)(np.ones(300, np.float32))


def test_a_value_that_is_not_finite_is_named_by_tensor_and_index_and_nothing_changes(
    comm,
):
    """Not the coefficient that it spoils."""
    exchange = GradientExchange(
        comm, ChunkedTopK(k=2, chunk=16), basis=Hadamard(chunk=16)
    )
    exchange(gradients(comm.rank, 0))
    before, bad = state_of(exchange), gradients(comm.rank, 1)
    if comm.rank == comm.size - 1:
        bad["v"].reshape(-1)[7] = np.nan
    error = ValueError if comm.rank == comm.size - 1 else CollectiveError
    with pytest.raises(error, match=r"in v: values\[7\] is nan"):
        exchange(bad)
    assert state_of(exchange) == before


@pytest.mark.parametrize("feedback", [ErrorFeedback, NoFeedback, MomentumCorrection])
def test_dense_arrays_are_exchanged_as_all_values_of_vectors_are(comm, feedback):
    """With the feedback's memory of them; also written over the gradients, and in the gradients' own arrays."""
    dense, sparse = (
        GradientExchange(comm, Dense(), feedback(), collective)
        for collective in (dense_allreduce, sparse_allreduce)
    )
    home = GradientExchange(comm, None, ErrorFeedback(in_place=True), dense_allreduce)
    for step in range(3):
        mine = gradients(comm.rank, step)
        expected = sparse(mine)
        for name, mean in dense(mine).items():
            np.testing.assert_allclose(mean, expected[name], rtol=1e-6)
        if feedback is ErrorFeedback:
            own = {name: array.copy() for name, array in mine.items()}
            for name, mean in home(own).items():
                np.testing.assert_allclose(mean, expected[name], rtol=1e-6)
                assert not own[name].any()
    with pytest.raises(
        ValueError,
        match=r"compressor is TopK\(density=0.1\), and bits=, or the collective, sends every value",
    ):
        GradientExchange(comm, TopK(0.1), collective=dense_allreduce)
    with pytest.raises(
        TypeError, match="compressor is None: expected a compressor such as"
    ):
        GradientExchange(comm)
