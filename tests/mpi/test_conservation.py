"""Every feedback method with every compressor over every collective: residuals change by what was not received.

The values are integers and the momentum is 1/2 over a few steps, so that sums are
exact; but for magnitudes that are means, of `INEXACT`, which are compared up to rounding.
"""

import itertools
from functools import partial

import numpy as np
import pytest
from cases import (
    LOSSY,
    RandomK,
    compressed_sum,
    compressors,
    feedbacks_but,
    through_a_file,
)
from mpi4py import MPI

from collectives import (
    CollectiveError,
    GradientExchange,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
)
from collectives.exchange.reduction import reduction
from mpicomp import (
    AdaComp,
    MomentumCorrection,
    Quantised,
    StepAhead,
    TopK,
    WarmUp,
)

LENGTH = 97
COLLECTIVES = {
    "allgather": sparse_allgather,
    "allreduce": sparse_allreduce,
    "compressed": compressed_sum(TopK(k=5)),
    "gtopk": gtopk_allreduce,
    "gtopk tree": partial(gtopk_allreduce, algorithm="tree"),
    "gtopk exact": partial(gtopk_allreduce, algorithm="exact", k=9),
}
# functions of the density
COMPRESSORS = {
    **compressors(chunk=20),
    "AdaComp": lambda density: AdaComp(16),
    "random-k": RandomK,
    "WarmUp": lambda density: WarmUp(TopK(density), [1.0, density]),
}
# send magnitudes that are no integers, whose sums are rounded
INEXACT = "AdaComp", "Quantised-two_bit"
LOSSLESS = {
    **feedbacks_but(*LOSSY),
    "step ahead without momentum": partial(StepAhead, 0.5),
}
FORMS = "array", "list", "dict"
# "b" is sent dense in a dict
BOUNDS = {"w": slice(0, 40), "b": slice(40, 47), "v": slice(47, LENGTH)}
SIZES = 1, 2, 3, 4, 5, 7, 8
STEPS, FAULTY = 3, 2  # the step that fails the first time
every_collective = pytest.mark.parametrize(
    "collective", COLLECTIVES.values(), ids=COLLECTIVES
)


def gradient(rank, step, dtype=np.float64):
    """Return integers that bfloat16 rounds; rank 1 contributes nothing in step 1."""
    drawn = np.random.default_rng([step, rank]).integers(-9999, 10000, LENGTH)
    return (drawn * (not (step == 1 and rank == 1))).astype(dtype)


def over_ranks(arrays, comm):
    """Return the sum over the ranks of float64 arrays."""
    total = np.array(arrays)
    comm.Allreduce(MPI.IN_PLACE, total)
    return total


class Case:
    """A combination, on this rank: an exchange, and what it has to conserve."""

    def __init__(self, comm, number, names):
        self.comm, self.names = comm, names
        self.feedback, self.compressor, self.collective = (
            table[name]
            for table, name in zip(
                (LOSSLESS, COMPRESSORS, COLLECTIVES), names, strict=True
            )
        )
        self.form, self.dtype = (
            FORMS[number % 3],
            (np.float64, np.float32)[number % 2 and names[1] not in INEXACT],
        )
        self.average = number % 5 == 0
        self.in_place, self.number = names[0] == "in place", number
        self.home = np.zeros(LENGTH, self.dtype)  # of the residual in place
        self.exchange = self.made()

    def __repr__(self):
        what = f"{self.form} of {self.dtype.__name__}, average={self.average}"
        return f"{', '.join(self.names)}: {what}"

    def made(self):
        exchange = GradientExchange(
            self.comm,
            self.compressor(0.1),
            self.feedback(),
            self.collective,
            average=self.average,
            small=10,
        )
        if self.form == "dict":
            exchange.register(self.formed(self.home))
        return exchange

    def restart(self):
        """Go on with another exchange from a file."""
        state = through_a_file(self.exchange.state_dict())
        self.exchange = self.made()
        self.exchange.load_state_dict(state)

    def formed(self, whole):
        """Return views of a whole gradient in the form of this case."""
        parts = {name: whole[part] for name, part in BOUNDS.items()}
        return {"array": whole, "list": list(parts.values()), "dict": parts}[self.form]

    def joined(self, means):
        """Return means in the form of this case as one array in float64."""
        if self.form != "array":
            means = np.concatenate(
                [
                    self.plain(mean)
                    for mean in (means.values() if self.form == "dict" else means)
                ]
            )
        return self.plain(means).astype(np.float64)

    @staticmethod
    def plain(mean):
        return mean if isinstance(mean, np.ndarray) else mean.to_dense()

    def kept(self, of):
        """Return of(feedback, positions) for each vector, put together in float64."""
        whole = np.zeros(LENGTH)
        for bucket in self.exchange.buckets:
            names = (
                [tensor.name for tensor in bucket.tensors]
                if self.form == "dict"
                else BOUNDS
            )
            places = np.concatenate([np.arange(LENGTH)[BOUNDS[name]] for name in names])
            whole[places] = of(bucket, places)
        return whole

    def residual(self):
        if self.in_place:
            return self.home.astype(np.float64)
        return self.kept(
            lambda bucket, places: 0 if (e := bucket.feedback.residual) is None else e
        )

    def added(self, g):
        """Return what the method adds to the residual, from its state before the step."""

        def of(bucket, places):
            feedback, mine = bucket.feedback, g[places].astype(np.float64)
            before = (
                feedback.state_dict()
                .get("velocity", np.zeros(places.size))
                .astype(np.float64)
            )
            if isinstance(feedback, StepAhead):
                return feedback.rate * (feedback.momentum * before + mine)
            if isinstance(feedback, MomentumCorrection):
                return 0.5 * before + mine
            return mine

        return self.kept(of)

    def step(self, step):
        """Return what came of a step, and what left this rank for it."""
        if step == FAULTY:
            self.fails(step)
            self.restart()
        g = gradient(self.comm.rank, step, self.dtype)
        before = self.residual() + self.added(g)
        if self.in_place:
            self.home += g
            g = self.home
        mode = (self.number + step) % 3
        if mode == 0:
            means = self.exchange(self.formed(g), sparse=True)
        elif mode == 1:
            out = np.full(LENGTH, np.nan, self.dtype)
            means = self.exchange(self.formed(g), out=self.formed(out))
            assert np.isfinite(out).all()
        else:
            means = self.exchange(self.formed(g))
        return self.joined(means), before - self.residual()

    def fails(self, step):
        """Take a step in which the last rank has no number."""
        g = gradient(self.comm.rank, step, self.dtype) + self.home
        if self.comm.rank == self.comm.size - 1:
            g[:] = np.nan
        given, out, state = (
            g.copy(),
            np.full(LENGTH, 7, self.dtype),
            self.exchange.state_dict(),
        )
        with pytest.raises((ValueError, CollectiveError), match="nan"):
            self.exchange(self.formed(g), out=self.formed(out))
        np.testing.assert_array_equal(g, given)
        np.testing.assert_array_equal(out, 7)
        np.testing.assert_equal(self.exchange.state_dict(), state)


def cases(comm):
    """Yield half of the combinations of a feedback, a compressor and a collective, and all pairs; each at one P."""
    here = 2 * SIZES.index(comm.size)
    three = itertools.product(
        enumerate(LOSSLESS), enumerate(COMPRESSORS), enumerate(COLLECTIVES)
    )
    for number, ((f, feedback), (k, compressor), (c, collective)) in enumerate(three):
        refused = feedback != "error feedback" and compressor == "AdaComp"
        if (f + k + c) % (2 * len(SIZES)) == here and not refused:
            yield Case(comm, number, (feedback, compressor, collective))


def test_nothing_is_lost(comm):
    """One sum over the ranks for all cases and steps: it takes longer than the exchanges."""
    rows = [
        (case, step, *case.step(step)) for case in cases(comm) for step in range(STEPS)
    ]
    total = over_ranks([row[-1] for row in rows], comm)
    for (case, step, came, _), left in zip(rows, total, strict=True):
        expected = left.astype(case.dtype) / case.dtype(
            comm.size if case.average else 1
        )
        tolerance = 1e-9 if case.names[1] in INEXACT else 0
        np.testing.assert_allclose(
            came, expected, rtol=0, atol=tolerance, err_msg=f"{case}, step {step}"
        )
        assert came.any() or not left.any(), case


@every_collective
def test_the_velocity_is_cleared_where_an_entry_left_for_good(comm, collective):
    feedback, kept = MomentumCorrection(0.5), []

    summed = reduction(collective, None, False)

    def watched(vector, comm):
        total = summed.declared.to_sum(summed.call(vector, comm).wait())
        kept.append((vector, total.rejected))
        return total

    exchange = GradientExchange(comm, TopK(k=9), feedback, watched, average=False)
    feedback = exchange.feedback  # a copy
    for step in range(3):
        g = gradient(comm.rank, step)
        before = 0.5 * feedback.state_dict().get("velocity", np.zeros(LENGTH)) + g
        exchange(g)
        sent, rejected = kept[-1]
        gone = np.setdiff1d(sent.indices, [] if rejected is None else rejected.indices)
        before[gone] = 0
        np.testing.assert_array_equal(
            feedback.velocity, before if feedback.residual.any() else 0.5 * before + g
        )


@pytest.mark.parametrize(
    "compressor", [lambda: TopK(k=4), lambda: Quantised(RandomK(k=6), "float16")]
)
def test_the_virtual_iterate_of_step_ahead_takes_the_steps_of_momentum_sgd(
    comm, compressor
):
    rate, momentum = 0.05, 0.9
    exchange = GradientExchange(
        comm, compressor(), StepAhead(rate, momentum), sparse_allreduce
    )

    def normal(*seed):
        return np.random.default_rng(seed).standard_normal(LENGTH)

    x, velocity = normal(5), np.zeros(LENGTH)
    virtual = x.copy()
    for step in range(20):
        gradient = 0.1 * (exchange.ahead(x) - normal(3, comm.rank)) + normal(
            step, comm.rank
        )
        x = x - exchange(gradient)
        velocity = momentum * velocity + over_ranks(gradient, comm) / comm.size
        virtual = virtual - rate * velocity
        kept = over_ranks(exchange.feedback.residual, comm) / comm.size
        np.testing.assert_allclose(x - kept, virtual, rtol=0, atol=1e-13)
