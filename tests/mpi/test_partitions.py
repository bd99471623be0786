"""Shares that are not equal ranges, and sums with the nodes in mind."""

import numpy as np
import pytest
from cases import (
    LENGTH,
    PATTERNS,
    assert_equal,
    assert_same_bits,
    contribution,
    contributions,
    for_each,
    select,
    window,
)

from collectives import (
    CollectiveError,
    gtopk_allreduce,
    reduce_scatter,
    sparse_allgather,
    sparse_allreduce,
    sparse_reduce_scatter,
    traffic,
)
from collectives.calls.first_call import link_of
from collectives.planning.schedule import groups
from mpicomp import SparseVector
from mpicomp.vector import add_up


@pytest.mark.every_size
@for_each(pattern=PATTERNS)
def test_a_reduce_scatter_between_the_callers_bounds(comm, pattern):
    bounds = [
        0,
        *sorted(np.random.default_rng(comm.size).integers(0, LENGTH, comm.size - 1)),
        LENGTH,
    ]
    share = sparse_reduce_scatter(
        contribution(pattern, comm.rank, comm.size), comm, partition=bounds
    )
    whole = sum(window(each) for each in contributions(pattern, comm.size))
    whole[: bounds[comm.rank]] = whole[bounds[comm.rank + 1] :] = 0
    assert_equal(share, whole)


class Broken:
    def __getitem__(self, place):
        raise KeyError(place)


BAD_PARTITIONS = [
    ("sampled", ValueError, "partition is 'sampled': expected 'equal' or"),
    ([0, LENGTH - 1], ValueError, "partition has 2 bounds from 0 to 239: expected"),
    ([], ValueError, "partition has 0 bounds: expected"),
    (7, TypeError, "partition is 7: expected .* integers"),
    (None, TypeError, "partition is None: expected .* integers"),
    ([0.0, LENGTH], TypeError, "partition is .*: expected .* integers"),
    (np.array(5), TypeError, "partition is .*: expected .* integers"),
    (Broken(), KeyError, "0"),
]


@pytest.mark.parametrize(
    ("bad", "error", "message"), BAD_PARTITIONS, ids=range(len(BAD_PARTITIONS))
)
def test_bad_partitions_raise_everywhere(comm, bad, error, message):
    vector, culprit = contribution("random", comm.rank, comm.size), comm.size - 1
    with pytest.raises(
        error if comm.rank == culprit else CollectiveError, match=message
    ):
        sparse_reduce_scatter(
            vector, comm, partition=bad if comm.rank == culprit else "equal"
        )


def test_bounds_are_compared_as_numbers_whatever_holds_them(comm):
    bounds = [LENGTH * rank // comm.size for rank in range(comm.size + 1)]
    kinds = [
        list,
        tuple,
        np.array,
        lambda some: [np.int64(each) for each in some],
        iter,
    ]
    mine = kinds[comm.rank % len(kinds)](bounds)
    share = sparse_reduce_scatter(
        contribution("random", comm.rank, comm.size), comm, partition=mine
    )
    whole = sum(window(each) for each in contributions("random", comm.size))
    np.testing.assert_array_equal(sum(comm.allgather(window(share))), whole)


@pytest.mark.at_least(3)
def test_bounds_that_differ_raise_however_they_are_printed(comm):
    bounds = np.array([LENGTH * rank // comm.size for rank in range(comm.size + 1)])
    bounds[1] -= comm.rank == 1
    with (
        np.printoptions(threshold=2, edgeitems=1),
        pytest.raises(CollectiveError, match="partition must be the same"),
    ):
        sparse_reduce_scatter(
            contribution("random", comm.rank, comm.size), comm, partition=bounds
        )


def hot(rank, length, entries):
    """Return a vector with 9 of 10 entries in 5 % of its length."""
    rng = np.random.default_rng(rank)
    inside = rng.choice(length // 20, entries * 9 // 10, replace=False) + length // 3
    indices = np.union1d(inside, rng.choice(length, entries // 10, replace=False))
    return SparseVector(indices, np.ones(indices.size, np.float32), length)


@pytest.mark.at_least(3)
def test_a_hot_stretch_does_not_fall_to_one_rank(comm, monkeypatch):
    added = []

    def counting(vectors):
        added.append(sum(vector.nnz for vector in vectors))
        return add_up(vectors)

    monkeypatch.setattr(reduce_scatter, "add_up", counting)
    vector = hot(comm.rank, 1_000_000, 20_000)

    def busiest(call):
        call()
        entries = comm.allgather(added.pop())
        return max(entries) / np.mean(entries)

    assert busiest(lambda: sparse_reduce_scatter(vector, comm)) > 0.6 * comm.size
    assert (
        busiest(lambda: sparse_allreduce(vector, comm, algorithm="split_allgather"))
        <= 1.1
    )


def test_the_ranks_of_one_machine_share_a_node(comm):
    assert link_of(comm).nodes == (0,) * comm.size


@pytest.fixture
def places(comm):
    """Return a function that moves the ranks of `comm` to nodes: rank r to the r-th one named, and so on again."""
    link = None

    def move(names):
        nonlocal link
        link = link_of(comm)
        marks = (names * comm.size)[: comm.size]
        link.nodes = tuple(marks.index(mark) for mark in marks)
        link.by_node = groups(link.nodes)

    yield move
    if link is not None:
        link.nodes = (0,) * comm.size
        link.by_node = groups(link.nodes)


@pytest.mark.every_size
@pytest.mark.parametrize("algorithm", ["auto", "node_lanes"])
@for_each(
    names=["AB", "AABB", "ABBB", "AAB", "ABC", "AAAAAAAB"],
    pattern=["random", "unequal", "one_holds_all", "blocks"],
)
def test_the_sum_over_several_nodes(comm, places, pattern, algorithm, names):
    places(names)
    total = sparse_allreduce(
        contribution(pattern, comm.rank, comm.size), comm, algorithm=algorithm
    )
    assert_same_bits(comm, total)
    assert_equal(total, sum(window(each) for each in contributions(pattern, comm.size)))


@pytest.mark.every_size
@pytest.mark.parametrize("algorithm", ["auto", "node_leaders"])
@for_each(
    names=["AB", "AABB", "ABBB", "AAB"],
    pattern=["random", "unequal", "one_holds_all", "cancelling", "ties"],
    k=[None, 1, 30],
)
def test_gtopk_over_several_nodes(comm, places, pattern, k, algorithm, names):
    places(names)
    vectors = contributions(pattern, comm.size)
    total = sum(window(each) for each in vectors)
    result, rejected = gtopk_allreduce(vectors[comm.rank], comm, k, algorithm=algorithm)
    assert_same_bits(comm, result)
    if algorithm == "node_leaders":
        assert_equal(
            result, select(total, max(each.nnz for each in vectors) if k is None else k)
        )
    np.testing.assert_array_equal(
        window(result) + sum(comm.allgather(window(rejected))), total
    )


@pytest.mark.unchecked("sends more")
@pytest.mark.at_least(2)
def test_what_leaves_a_node_is_coded(comm, places):
    """A density of 1 %, values of one octave: 8.6 bits an index and 53 a value between nodes, 32 and 64 inside."""
    indices = np.flatnonzero(np.random.default_rng(comm.rank).random(100_000) < 0.01)
    vector = SparseVector(
        indices, 1 + np.random.default_rng(1).random(indices.size), 100_000
    )

    def sent():
        before = traffic(comm).nbytes
        sparse_allgather(vector, comm)
        return comm.allreduce(traffic(comm).nbytes - before)

    inside = sent()
    places("AB")
    assert sent() / inside == pytest.approx((53 + 8.6) / 96, rel=0.02)


@pytest.mark.exactly(8)
def test_between_nodes_a_sum_travels_once_a_node(comm, places, monkeypatch):
    """4 ranks on each of 2 nodes, one support: flat, each rank sends its sums to all; in lanes, once to its peer."""
    places("AAAABBBB")
    link = link_of(comm)
    abroad, send = [0], link.send

    def counting(buffer, dest, *more):
        abroad[0] += buffer.size * (link.nodes[dest] != link.nodes[comm.rank])
        return send(buffer, dest, *more)

    monkeypatch.setattr(link, "send", counting)
    vector = SparseVector(
        np.arange(0, 400_000, 4), np.ones(100_000, np.float32), 400_000
    )

    def crossing(algorithm):
        abroad[0] = 0
        sparse_allreduce(vector, comm, algorithm=algorithm, codec="quick")
        return comm.allreduce(abroad[0])

    flat, lanes = map(crossing, ("split_allgather", "node_lanes"))
    # the sum of a node, its indices as a bitmap, from each of the two
    once = 2 * (vector.nnz * 4 + vector.length / 8)
    assert lanes == pytest.approx(once, rel=0.05)
    assert flat > 3 * lanes
