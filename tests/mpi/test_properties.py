"""Property-based: whatever the ranks contribute. All ranks draw the same cases; a failure on one fails all."""

import os

import numpy as np
import pytest
from cases import bits, select
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from strategies import DTYPES

from collectives import (
    SupportPlan,
    allreduce,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_reduce,
    sparse_reduce_scatter,
)
from mpicomp import SparseVector
from mpicomp.codec import CODECS

# No shrinking and no clock: the ranks have to go through the same cases.
together = settings(
    max_examples=12 if os.environ.get("MPI_TEST_ALL") else 6,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@st.composite
def supports(draw, size, width):
    """Draw every rank's positions among `width`: of one kind for all ranks, or of a kind of its own for each."""
    everything, share = np.arange(width), max(1, width // size)
    kinds = {
        "any": lambda rank: np.flatnonzero(
            draw(st.lists(st.booleans(), min_size=width, max_size=width))
        ),
        "none": lambda rank: everything[:0],
        "all": lambda rank: everything,
        "one": lambda rank: everything[-1:],
        "disjoint": lambda rank: everything[rank::size],
        "one share": lambda rank: everything[share : 2 * share],
        "at the bounds": lambda rank: np.unique(
            [width * r // size for r in range(size)]
        )[: width and size],
        "on one rank": lambda rank: everything[: width * (rank == size - 1)],
    }
    kind = draw(st.sampled_from(["each its own", *kinds]))
    names = [
        draw(st.sampled_from(sorted(kinds))) if kind == "each its own" else kind
        for _ in range(size)
    ]
    return [kinds[name](rank) for rank, name in enumerate(names)]


@st.composite
def contributions(draw, size, rows=False):
    """Draw every rank's vector: of one dtype and length, int32 or int64 indices, small integers and zeros as values."""
    width, dtype = draw(st.integers(0, 40)), draw(st.sampled_from(DTYPES))
    offset = draw(st.sampled_from([0, 2**40]))
    row = draw(st.sampled_from([(), (1,), (3,)])) if rows else ()
    alphabet = draw(st.sampled_from([[0], [1], [-1, 1], range(-9, 10)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [
        SparseVector(
            positions + offset,
            rng.choice(alphabet, (positions.size, *row)).astype(dtype),
            width + offset,
        )
        for positions in draw(supports(size, width))
    ]


def dense(vector):
    """Return the positions that may be taken, in float64."""
    offset = 2**40 if vector.length >= 2**40 else 0
    whole = np.zeros((vector.length - offset, *vector.values.shape[1:]))
    whole[vector.indices - offset] = vector.values
    return whole


def agreed(comm, check):
    """Run a check, and fail on all ranks if it failed on one."""
    try:
        check()
        said = None
    except AssertionError as error:
        said = f"rank {comm.rank}: {error}"
    faults = [fault for fault in comm.allgather(said) if fault]
    assert not faults, faults[0]


def same_everywhere(comm, *vectors):
    mine = [bits(vector) for vector in vectors]
    assert comm.allgather(mine).count(mine) == comm.size, (
        "the ranks hold different bits"
    )


@pytest.mark.parametrize("algorithm", ["auto", *allreduce.ALGORITHMS])
def test_an_exact_sum(comm, algorithm):
    @together
    @given(contributions(comm.size, rows=True), st.sampled_from(["auto", *CODECS]))
    def holds(vectors, codec):
        if algorithm in ("auto", "dense_mpi") and vectors[0].length >= 2**40:
            vectors = [
                SparseVector(each.indices - 2**40, each.values, each.length - 2**40)
                for each in vectors
            ]
        call = {"algorithm": algorithm, "codec": codec}
        one, again = (
            sparse_allreduce(vectors[comm.rank], comm, **call) for _ in range(2)
        )
        same_everywhere(comm, one, again)

        def check():
            one.validate()
            assert bits(one) == bits(again)
            np.testing.assert_array_equal(dense(one), sum(map(dense, vectors)))

        agreed(comm, check)

    holds()


@pytest.mark.parametrize("algorithm", gtopk_allreduce.algorithms)
def test_gtopk(comm, algorithm):
    @together
    @given(
        contributions(comm.size),
        st.sampled_from([None, 1, 2, 5, 10**6]),
        st.sampled_from(["auto", *CODECS]),
    )
    def holds(vectors, k, codec):
        call = {"k": k, "algorithm": algorithm, "codec": codec}
        (one, kept), (again, _) = (
            gtopk_allreduce(vectors[comm.rank], comm, **call) for _ in range(2)
        )
        same_everywhere(comm, one, again)
        rejected = sum(comm.allgather(dense(kept)))

        def check():
            one.validate()
            kept.validate()
            limit = max(vector.nnz for vector in vectors) if k is None else k
            total = sum(map(dense, vectors))
            assert one.nnz <= limit
            np.testing.assert_array_equal(dense(one) + rejected, total)
            union = np.unique(np.concatenate([each.indices for each in vectors])).size
            if algorithm == "exact" or (k is not None and k >= union):
                np.testing.assert_array_equal(dense(one), select(total, limit))

        agreed(comm, check)

    holds()


@pytest.mark.every_size
def test_a_reduce_scatter_is_a_division_of_the_sum(comm):
    @together
    @given(contributions(comm.size, rows=True))
    def holds(vectors):
        share = sparse_reduce_scatter(vectors[comm.rank], comm)
        shares = comm.allgather(share)

        def check():
            share.validate()
            np.testing.assert_array_equal(
                sum(map(dense, shares)), sum(map(dense, vectors))
            )
            assert len({index for each in shares for index in each.indices}) == sum(
                each.nnz for each in shares
            )

        agreed(comm, check)

    holds()


@pytest.mark.every_size
def test_gathered_reduced_handed_out_and_planned(comm):
    @together
    @given(contributions(comm.size, rows=True), st.integers(0, comm.size - 1))
    def holds(vectors, root):
        mine = vectors[comm.rank]
        parts = sparse_allgather(mine, comm)
        total = sparse_reduce(mine, comm, root)
        handed = sparse_bcast(total, comm, root)
        plan = SupportPlan.union(mine, comm)
        values = np.zeros((plan.indices.size, *mine.values.shape[1:]), mine.dtype)
        values[np.searchsorted(plan.indices, mine.indices)] = mine.values
        planned = plan.vector(plan.allreduce(values))
        same_everywhere(comm, handed, planned)

        def check():
            assert [bits(part) for part in parts] == [
                bits(vector) for vector in vectors
            ]
            np.testing.assert_array_equal(dense(handed), sum(map(dense, vectors)))
            np.testing.assert_array_equal(dense(planned), dense(handed))
            assert planned.indices.tobytes() == handed.indices.tobytes()

        agreed(comm, check)

    holds()
