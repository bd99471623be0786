"""Every feedback method with every compressor over every collective: what is owed moves by what did not arrive.

The values are integers and the momentum is 1/2 over a few steps, so that sums are exact in float64; but for AdaComp,
whose magnitude is a mean, which is compared up to rounding.
"""

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from collectives import dense_allreduce, gtopk_allreduce, sparse_allgather, sparse_allreduce
from mpicomp import (
    EF21,
    AdaComp,
    Dense,
    ErrorFeedback,
    GradientExchange,
    MomentumCorrection,
    Quantised,
    RandomK,
    SIDCo,
    StepAhead,
    TopK,
    TwoWay,
)

LENGTH, STEPS = 97, 2
COLLECTIVES = {
    "allgather": sparse_allgather,
    "allreduce": sparse_allreduce,
    "gtopk": gtopk_allreduce,
    "gtopk tree": partial(gtopk_allreduce, algorithm="tree"),
    "gtopk exact": partial(gtopk_allreduce, algorithm="exact", k=9),
}
COMPRESSORS = {
    "top-k": partial(TopK, k=9),
    "SIDCo": partial(SIDCo, 0.1),
    "AdaComp": partial(AdaComp, 16),
    "quantised": lambda: Quantised(TopK(k=9), "bfloat16"),
    "random-k": partial(RandomK, k=9),
    "dense": Dense,
}
every_collective = pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


def gradient(rank, step):
    """Return integers that bfloat16 rounds; rank 1 brings nothing in step 1."""
    drawn = np.random.default_rng([step, rank]).integers(-9999, 10000, LENGTH)
    return drawn.astype(np.float64) * (not (step == 1 and rank == 1))


def over_ranks(arrays, comm):
    """Return the sum over the ranks of float64 arrays."""
    total = np.array(arrays)
    comm.Allreduce(MPI.IN_PLACE, total)
    return total


def velocity(feedback, g):
    """Return what a method adds to what it owes, from its state before the step."""
    before = feedback.state_dict().get("velocity", np.zeros(LENGTH))
    if isinstance(feedback, StepAhead):
        return feedback.rate * (feedback.momentum * before + g)
    if isinstance(feedback, MomentumCorrection):
        return 0.5 * (before + g) + g if feedback.nesterov else 0.5 * before + g
    return g


def take_step(exchange, g):
    """Return what the exchange gave, and what of it is from this rank: what it no longer owes, or EF21's h_i."""
    feedback = exchange.feedback
    if isinstance(feedback, EF21):
        return exchange(g), feedback.local.copy()
    came = velocity(feedback, g) + (0 if feedback.residual is None else feedback.residual)
    return exchange(g), came - feedback.residual


METHODS = [ErrorFeedback, partial(MomentumCorrection, 0.5), partial(StepAhead, 0.5, 0.5), partial(EF21, 0.5)]
VARIANTS = [partial(MomentumCorrection, 0.5, nesterov=True), partial(StepAhead, 0.5), EF21]


@every_collective
@every_compressor
def test_nothing_is_lost(comm, compressor, collective):
    """One sum over the ranks for all methods and steps: it takes longer than the exchanges."""
    methods = METHODS + (VARIANTS if compressor is COMPRESSORS["top-k"] else [])
    exchanges = [GradientExchange(comm, compressor(), method(), collective, average=False) for method in methods]
    steps = [take_step(exchange, gradient(comm.rank, step)) for exchange in exchanges for step in range(STEPS)]
    given, left = (np.array(each) for each in zip(*steps, strict=True))
    tolerance = 1e-9 if compressor is COMPRESSORS["AdaComp"] else 0
    np.testing.assert_allclose(given, over_ranks(left, comm), rtol=0, atol=tolerance)
    assert given.any(axis=1).all()


@every_collective
def test_the_velocity_is_cleared_where_an_entry_left_for_good(comm, collective):
    feedback, kept = MomentumCorrection(0.5), []

    def watched(vector, comm):
        outcome = collective(vector, comm)
        kept.append((vector, outcome[1] if isinstance(outcome, tuple) else None))
        return outcome

    exchange = GradientExchange(comm, TopK(k=9), feedback, watched, average=False)
    for step in range(3):
        g = gradient(comm.rank, step)
        before = 0.5 * feedback.state_dict().get("velocity", np.zeros(LENGTH)) + g
        exchange(g)
        sent, rejected = kept[-1]
        gone = np.setdiff1d(sent.indices, [] if rejected is None else rejected.indices)
        before[gone] = 0
        np.testing.assert_array_equal(feedback.velocity, before if feedback.residual.any() else 0.5 * before + g)


def test_the_ranks_servers_have_the_same_bits(comm):
    server, given, passed = TwoWay(TopK(k=5)), np.zeros(LENGTH), np.zeros(LENGTH)
    for step in range(4):
        total = sparse_allreduce(TopK(k=9).compress(gradient(comm.rank, step)), comm)
        result = server.compress(total)
        server.keep()
        assert len(set(comm.allgather(result.indices.tobytes() + result.values.tobytes()))) == 1
        given += total.to_dense()
        passed += result.to_dense()
        np.testing.assert_array_equal(passed + server.residual, given)


def test_averaging_the_residuals_leaves_their_sum(comm):
    """To the last bit where the number of ranks is a power of two."""
    averaging, plain = (
        GradientExchange(
            comm, TopK(k=9), StepAhead(0.5, 0.5, period), sparse_allreduce, average=False, dense=dense_allreduce
        )
        for period in (2, None)
    )
    for step in range(2):
        np.testing.assert_array_equal(averaging(gradient(comm.rank, step)), plain(gradient(comm.rank, step)))
        owed = over_ranks(plain.feedback.residual, comm)
        tolerance = 0 if comm.size & (comm.size - 1) == 0 else 1e-9
        np.testing.assert_allclose(over_ranks(averaging.feedback.residual, comm), owed, rtol=0, atol=tolerance)
        assert not averaging.feedback.averaging_due
    assert len(set(comm.allgather(averaging.feedback.residual.tobytes()))) == 1


def test_a_failed_exchange_leaves_every_method_as_it_was(comm):
    for method in METHODS + VARIANTS:
        feedback = method()
        exchange = GradientExchange(comm, TopK(k=9), feedback, gtopk_allreduce)
        exchange(gradient(comm.rank, 0))
        before = {name: array.tobytes() for name, array in feedback.state_dict().items()}
        bad = gradient(comm.rank, 1)
        bad[7] = np.nan if comm.rank == comm.size - 1 else bad[7]
        with pytest.raises((ValueError, RuntimeError), match="nan"):
            exchange(bad)
        assert {name: array.tobytes() for name, array in feedback.state_dict().items()} == before
        exchange(gradient(comm.rank, 1))
