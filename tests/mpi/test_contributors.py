"""The mean over contributors: each entry of the sum is divided by the number of ranks that sent it."""

from functools import partial

import numpy as np
import pytest
from cases import compressed_sum

from collectives import (
    GradientExchange,
    Sum,
    gtopk_allreduce,
    sparse_allreduce,
    sparse_iallreduce,
    sparse_reduce,
)
from mpicomp import (
    Compressor,
    Dense,
    ErrorFeedback,
    NoFeedback,
    Quantised,
    SparseVector,
    TopK,
)

LENGTH = 60
COLLECTIVES = {
    "allreduce": sparse_allreduce,
    "doubling": partial(sparse_allreduce, algorithm="recursive_doubling"),
    "split": partial(sparse_iallreduce, algorithm="split_allgather", votes=False),
    "allgather": partial(sparse_allreduce, algorithm="allgather"),
}
every_collective = pytest.mark.parametrize(
    "collective", COLLECTIVES.values(), ids=COLLECTIVES
)


class NonZero(Compressor):
    """Sends what is not zero."""

    def compress(self, corrected, *, gradient=None):
        return SparseVector.from_dense(corrected)


def disjoint(rank, size):
    return np.where(np.arange(LENGTH) % size == rank, 1.0 + np.arange(LENGTH), 0)


def equal(rank, size):
    return np.where(np.arange(LENGTH) % 3 == 0, rank + 1.0, 0)


def random(rank, size):
    rng = np.random.default_rng([rank, size])
    return rng.integers(1, 9, LENGTH) * (rng.random(LENGTH) < 0.3).astype(float)


def some_empty(rank, size):
    return random(rank, size) * (rank % 2)


PATTERNS = [disjoint, equal, random, some_empty]


def expected(vectors, dtype):
    """Return the mean over those that are not zero, rounded once."""
    votes = np.maximum(1, sum(vector != 0 for vector in vectors))
    return (sum(vectors) / votes).astype(dtype)


@every_collective
def test_each_entry_is_divided_by_the_ranks_that_sent_it(comm, collective):
    for dtype in (np.float16, np.float64):
        exchange = GradientExchange(
            comm, NonZero(), NoFeedback(), collective, average="contributors"
        )
        for pattern in PATTERNS:
            vectors = [pattern(rank, comm.size) for rank in range(comm.size)]
            mean = exchange(vectors[comm.rank].astype(dtype))
            np.testing.assert_array_equal(mean, expected(vectors, dtype), strict=True)


def test_every_form_of_the_mean_is_divided_alike(comm):
    """Sparse, in a given array, as a list, and by name: several tensors, and one that is sent dense."""
    settings = {
        "compressor": NonZero(),
        "feedback": NoFeedback(),
        "average": "contributors",
        "small": 8,
    }
    array, listed, named = (GradientExchange(comm, **settings) for _ in range(3))
    vectors = [random(rank, comm.size) for rank in range(comm.size)]
    mine, want, out = (
        vectors[comm.rank],
        expected(vectors, float),
        np.full(LENGTH, np.nan),
    )
    np.testing.assert_array_equal(array(mine, out=out), want)
    np.testing.assert_array_equal(array(mine, sparse=True).to_dense(), want)
    np.testing.assert_array_equal(np.concatenate(listed([mine[:7], mine[7:]])), want)
    means = named({"w": mine[:40], "b": mine[40:45], "v": mine[45:]})
    np.testing.assert_array_equal(means["w"], want[:40])
    np.testing.assert_array_equal(means["v"], want[45:])
    np.testing.assert_array_equal(means["b"], sum(vectors)[40:45] / comm.size)
    assert (
        len(
            set(
                comm.allgather(
                    out.tobytes() + b"".join(mean.tobytes() for mean in means.values())
                )
            )
        )
        == 1
    )


@every_collective
def test_all_ranks_count_for_what_is_sent_dense(comm, collective):
    """`Dense` beside TopK in one message, and `Dense` whose values are sent quantised; zeros count."""
    compressors = {"d": Dense(), "k": NonZero(), "q": Quantised(Dense(), "bfloat16")}
    exchange = GradientExchange(
        comm,
        lambda name, shape: compressors[name],
        NoFeedback(),
        collective,
        average="contributors",
        small=0,
    )
    vectors = [
        equal(rank, comm.size) * (rank > 0) + disjoint(rank, comm.size)
        for rank in range(comm.size)
    ]
    means = exchange(dict.fromkeys(compressors, vectors[comm.rank]))
    np.testing.assert_array_equal(means["d"], sum(vectors) / comm.size)
    np.testing.assert_array_equal(means["q"], sum(vectors) / comm.size)
    np.testing.assert_array_equal(means["k"], expected(vectors, float))


def test_what_is_sent_and_kept_is_what_arrives_before_the_division(comm):
    """Of integers with a decay of 1/2, by all collectives: the votes of a step are those of the entries sent."""
    for collective in COLLECTIVES.values():
        exchange = GradientExchange(
            comm,
            TopK(k=9),
            ErrorFeedback(decay=0.5),
            collective,
            average="contributors",
        )
        residuals = [np.zeros(LENGTH) for _ in range(comm.size)]
        for step in range(3):
            gradients = [
                np.random.default_rng([step, rank]).integers(-9, 9, LENGTH) * 4.0
                for rank in range(comm.size)
            ]
            mean = exchange(gradients[comm.rank])
            sent = []
            for rank, gradient in enumerate(gradients):
                corrected = 0.5 * residuals[rank] + gradient
                sent.append(TopK(k=9).compress(corrected).to_dense())
                residuals[rank] = corrected - sent[rank]
            np.testing.assert_array_equal(mean, expected(sent, float))
            np.testing.assert_array_equal(
                exchange.feedback.residual, residuals[comm.rank]
            )


def counted(vector, comm):
    total, votes = sparse_allreduce(vector, comm, votes=True)
    return Sum(total, votes=votes)


@pytest.mark.exactly(2)
def test_what_gives_no_votes_is_refused(comm):
    compressed = compressed_sum(TopK(k=3))
    for collective in (
        gtopk_allreduce,
        partial(gtopk_allreduce, k=3),
        compressed,
        sparse_reduce,
    ):
        with pytest.raises(
            ValueError,
            match=r"reduce does not count .*: expected sparse_allreduce$",
        ):
            GradientExchange(
                comm, TopK(k=1), collective=collective, average="contributors"
            )
    with pytest.raises(ValueError, match="average is 'contributor': expected one of"):
        GradientExchange(comm, TopK(k=1), average="contributor")
    exchange = GradientExchange(
        comm,
        TopK(k=1),
        collective=lambda vector, comm: sparse_allreduce(vector, comm),
        average="contributors",
    )
    with pytest.raises(
        TypeError,
        match=r"the collective returned no votes, .*: expected collectives.Sum\(value, vo",
    ):
        exchange(np.ones(3))
    exchange = GradientExchange(
        comm,
        TopK(k=1),
        collective=counted,
        average="contributors",
    )
    assert exchange(np.eye(2)[comm.rank]).tolist() == [1, 1]
