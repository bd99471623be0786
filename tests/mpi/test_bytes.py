"""What the transport counts on every rank, against the formulas of the cost table: within 5 %."""

import math
from functools import partial

import numpy as np
import pytest

from collectives import (
    SupportPlan,
    allreduce,
    dense_allreduce,
    gtopk_allreduce,
    sparse_allgather,
    sparse_allreduce,
    sparse_bcast,
    sparse_reduce_scatter,
    traffic,
)
from collectives.planning.choice import Case
from collectives.planning.partition import likely
from mpicomp import SparseVector

LENGTH, K = 2_000_000, 4000  # thin enough for plain indices
ENTRY, VALUE = 8, 4  # bytes


def spread(rank, length=LENGTH, k=K):
    """Return k entries at independent random places, so that the shares of them are even."""
    chosen = np.sort(np.random.default_rng(rank).choice(length, k, replace=False))
    return SparseVector(chosen, np.ones(k, np.float32), length)


def varied(vector, rank):
    """Return the vector with values of different magnitudes."""
    return SparseVector(
        vector.indices,
        np.random.default_rng(rank).standard_normal(K).astype(np.float32),
        LENGTH,
    )


def sent_by_all(comm, call):
    """Return the bytes that every rank sends in a call, in rank order."""
    before = traffic(comm).nbytes
    call()
    return comm.allgather(traffic(comm).nbytes - before)


def union(size):
    return len({index for rank in range(size) for index in spread(rank).indices})


# Entries that all ranks together send; tests/collectives/test_choice.py counts those of
# butterflies.
EXACT_SUMS = {
    "allgather": lambda size: size * (size - 1) * K,
    "split_allgather": lambda size: (size - 1) * (K + union(size)),
    "dense_mpi": lambda size: 2 * (size - 1) * LENGTH * VALUE / ENTRY,
}


@pytest.mark.at_least(2)
@pytest.mark.parametrize("algorithm", EXACT_SUMS)
def test_exact_sums(comm, algorithm):
    vector = spread(comm.rank)
    sent = sent_by_all(
        comm, lambda: sparse_allreduce(vector, comm, algorithm=algorithm)
    )
    assert sum(sent) == pytest.approx(
        EXACT_SUMS[algorithm](comm.size) * ENTRY, rel=0.05
    )


OTHERS = {
    "sparse_allgather": (
        lambda v, comm: sparse_allgather(v, comm),
        lambda size: size * (size - 1) * K * ENTRY,
    ),
    "sparse_reduce_scatter": (
        lambda v, comm: sparse_reduce_scatter(v, comm),
        lambda size: (size - 1) * K * ENTRY,
    ),
    "sparse_bcast": (
        lambda v, comm: sparse_bcast(v, comm),
        lambda size: (size - 1) * K * ENTRY,
    ),
    "gtopk tree": (
        lambda v, c: gtopk_allreduce(v, c, K, algorithm="tree"),
        lambda size: 2 * (size - 1) * K * ENTRY,
    ),
    "gtopk exact": (
        lambda v, comm: gtopk_allreduce(
            varied(v, comm.rank), comm, K, algorithm="exact"
        ),
        lambda size: (size - 1) * (K + size * likely(K / size, size)) * ENTRY,
    ),
    "dense_allreduce": (
        lambda v, comm: dense_allreduce(np.ones(10_000, np.float32), comm),
        lambda size: 2 * (size - 1) * 10_000 * VALUE,
    ),
    "plan.allreduce": (
        lambda v, comm: SupportPlan(
            SparseVector(np.arange(10_000), np.empty((10_000, 0)), LENGTH), comm
        ).allreduce(np.ones(10_000, np.float32)),
        lambda size: 2 * (size - 1) * 10_000 * VALUE,
    ),
}


@pytest.mark.at_least(2)
@pytest.mark.parametrize("name", OTHERS)
def test_the_others(comm, name):
    call, expected = OTHERS[name]
    vector = spread(comm.rank)
    sent = sent_by_all(comm, lambda: call(vector, comm))
    assert sum(sent) == pytest.approx(expected(comm.size), rel=0.05)


@pytest.mark.at_least(8)
def test_split_allgather_is_near_the_lower_bound(comm):
    """At a density of 1 %: at least k + K (P-2)/P entries a rank have to travel."""
    length, k = 400_000, 4000
    vectors = [spread(rank, length, k) for rank in range(comm.size)]
    union = np.unique(np.concatenate([vector.indices for vector in vectors])).size
    sent = sent_by_all(
        comm,
        lambda: sparse_allreduce(vectors[comm.rank], comm, algorithm="split_allgather"),
    )
    assert np.mean(sent) <= 1.15 * 8 * (k + union * (comm.size - 2) / comm.size)
    assert union == pytest.approx(Case(comm.size, length, k).union(comm.size), rel=0.01)


@pytest.mark.at_least(2)
@pytest.mark.unchecked("sends more")
def test_a_dense_union_travels_as_a_bitmap_or_a_range(comm):
    """Every second position is taken: 4 bytes of value and 2 bits of map an entry, against 8 bytes in plain form."""
    vector = SparseVector(
        np.arange(0, 100_000, 2), np.ones(50_000, np.float32), 100_000
    )
    rounds = math.ceil(math.log2(comm.size))
    sent = max(
        sent_by_all(comm, lambda: sparse_allreduce(vector, comm, algorithm="allgather"))
    )
    assert sent <= (comm.size - 1) * (50_000 * 4 + 100_000 / 8 + 200) + 64 * (
        comm.size - 1 + rounds
    )


@pytest.mark.at_least(2)
@pytest.mark.parametrize(
    ("codec", "nbytes"), [("plain", 8), ("quick", 8), ("smallest", 3 + 11 / 8)]
)
@pytest.mark.unchecked("sends more")
def test_a_coded_entry_takes_eleven_bits_and_three_bytes_at_a_density_of_a_five_hundredth(
    comm, codec, nbytes
):
    """The entropy is log2(500) + 1.44 = 10.4 bits; values of one octave. Each rank may take another codec."""
    rng = np.random.default_rng(9)
    values = np.copysign(1 + rng.random(K), rng.standard_normal(K)).astype(np.float32)
    vector = SparseVector(spread(comm.rank).indices, values, LENGTH)
    parts = []
    sent = sent_by_all(
        comm, lambda: parts.extend(sparse_allgather(vector, comm, codec=codec))
    )
    assert np.mean(sent) == pytest.approx((comm.size - 1) * K * nbytes, rel=0.02)
    assert all(part.values.tobytes() == values.tobytes() for part in parts)
    mixed = sparse_allgather(vector, comm, codec="plain" if comm.rank else "smallest")
    assert [part.indices.tobytes() for part in mixed] == [
        part.indices.tobytes() for part in parts
    ]


@pytest.mark.at_least(2)
def test_the_survey_is_a_small_part_of_what_travels(comm, monkeypatch):
    """Samples of where the entries stand are at most one for 16 of them, and 16 P a rank."""
    vector = spread(comm.rank)
    call = partial(sparse_allreduce, vector, comm, algorithm="split_allgather")
    sampled = sum(sent_by_all(comm, call))
    monkeypatch.setattr(allreduce, "UNSAMPLED", allreduce.ALGORITHMS)
    equal = sum(sent_by_all(comm, call))
    assert (
        0 < sampled - equal <= comm.size * (comm.size - 1) * (16 * comm.size * 4 + 128)
    )
    assert sampled <= 1.05 * equal
