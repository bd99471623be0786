"""The algorithms themselves over a simulated network: results, and the rounds and messages of the cost table."""

import math
from functools import partial

import numpy as np
import pytest
from cases import select

from collectives import (
    CollectiveError,
    allgather,
    allreduce,
    compressed_allreduce,
    gtopk,
    gtopk_allreduce,
    quantised_allreduce,
    reduce_scatter,
    rooted,
    sparse_allreduce,
)
from collectives.calls.notification import run_or_notify
from collectives.planning.partition import likely
from collectives.runtime.group import PIECE_OVERHEAD, Group
from collectives.runtime.metadata import ENTRIES_AT, entries_of
from mpicomp import SparseVector, TopK, quantise
from mpicomp.correction import Correction
from mpicomp_bench.network import Network

SIZES = [*range(1, 18), 32, 65]
FEW = [*range(1, 10), 12, 13, 16, 17]


def contribution(rank, size):
    """Return a vector with rank + 1 at the rank's own index, 1 at an index that all share, 2 where neighbours meet."""
    indices = np.unique([rank, size, size + 1 + rank, size + 1 + (rank + 1) % size])
    values = np.where(indices < size, rank + 1, np.where(indices == size, 1, 2))
    return SparseVector(indices, values.astype(np.float64), 2 * size + 1)


def dense_sum(size):
    return sum(contribution(rank, size).to_dense() for rank in range(size))


def check_sum(results, size, expected=None):
    """Check that all ranks have the sum, or what is expected, and the same bits of it."""
    np.testing.assert_array_equal(
        results[0].to_dense(), dense_sum(size) if expected is None else expected
    )
    assert all(
        result.indices.tobytes() == results[0].indices.tobytes() for result in results
    )
    assert all(
        result.values.tobytes() == results[0].values.tobytes() for result in results
    )


def lower(size):
    return int(math.log2(size))


def upper(size):
    return math.ceil(math.log2(size))


def fold(size):
    """Rounds more where P is no power of two."""
    return 0 if size & (size - 1) == 0 else 2


def metadata_of(size):
    return [(SparseVector.empty(2 * size + 1), 4 << ENTRIES_AT)] * size


def over(network, steps, **signature):
    """Run an algorithm of `contribution` on the ranks of a network; return the results and the rounds."""
    size = len(network.links)
    signature = {"length": 2 * size + 1, "dtype": "float64"} | signature
    return network.run(
        lambda rank, group: steps(contribution(rank, size), group), **signature
    )


def summed(network, name):
    """Run an exact sum, check it, and return the rounds."""
    size = len(network.links)
    results, rounds = over(
        network, partial(allreduce.ALGORITHMS[name], metadata=metadata_of(size))
    )
    check_sum(results, size)
    return rounds


def selected(network, name, k):
    """Run a gTop-k, check that all ranks have the same and nothing is lost; return the result and the rounds."""
    results, rounds = over(network, partial(gtopk_allreduce.algorithms[name], k=k), k=k)
    kept, size = results[0][0], len(results)
    check_sum([result for result, _ in results], size, kept.to_dense())
    total = kept.to_dense() + sum(rejected.to_dense() for _, rejected in results)
    np.testing.assert_array_equal(total, dense_sum(size))
    return kept, rounds


ROUNDS = {
    "allgather": upper,
    "recursive_doubling": lambda size: lower(size) + fold(size),
    "split_allgather": lambda size: (size > 1) + upper(size),
}
MESSAGES = {
    "allgather": upper,
    "recursive_doubling": lambda size: lower(size) + fold(size) / 2,
    "split_allgather": lambda size: size - 1 + upper(size),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_an_exact_sum_has_every_contribution_once_and_the_rounds_of_the_table(name):
    for size in SIZES + [256, 257] * name.startswith("recursive"):
        network = Network(size)
        assert summed(network, name) == ROUNDS[name](size), size
        assert max(link.traffic.messages for link in network.links) <= math.ceil(
            MESSAGES[name](size)
        )


NODES = {  # the first rank of the node of each rank
    **{
        f"of {each}": lambda size, each=each: [
            rank // each * each for rank in range(size)
        ]
        for each in (1, 2, 3, 8)
    },
    "one alone": lambda size: [min(rank, 1) for rank in range(size)],
    "in turns": lambda size: [rank % 3 for rank in range(size)],
}


@pytest.mark.parametrize("nodes", NODES)
def test_sums_over_nodes(nodes):
    for size in FEW:
        summed(Network(size, NODES[nodes](size)), "node_lanes")


GTOPK_ROUNDS = {
    "recursive_doubling": lambda size: lower(size) + fold(size),
    "tree": lambda size: lower(size) + fold(size) + 2 * upper(size),
    "exact": lambda size: (size > 1) + upper(size) * (upper(size) + 2),
    "node_leaders": lambda size: lower(size) + fold(size) + 2 * upper(size),
}


@pytest.mark.parametrize("large", [257, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GTOPK_ROUNDS)
def test_gtopk_loses_nothing_and_has_the_rounds_of_the_table(name, large):
    """`tree` and, here on one node, `node_leaders` compare the call signatures first; `exact` gathers once at least.

    large: for algorithms with few and small messages.
    """
    fewer = {
        "tree": upper,
        "node_leaders": upper,
        "exact": lambda size: upper(size) * (upper(size) + 1),
    }
    fewer = fewer.get(name, lambda size: 0)
    for size in SIZES + [large] * (name != "exact"):
        for rendezvous in (False, True)[: 1 + (size in FEW)]:
            kept, rounds = selected(Network(size, rendezvous=rendezvous), name, 5)
            assert (
                GTOPK_ROUNDS[name](size) - fewer(size)
                <= rounds
                <= GTOPK_ROUNDS[name](size)
            ), size
            assert kept.nnz <= 5


@pytest.mark.parametrize("nodes", NODES)
def test_gtopk_over_nodes_is_exact(nodes):
    for size in FEW:
        k = (5, size, None)[size % 3]
        kept, _ = selected(
            Network(size, NODES[nodes](size), seed=size), "node_leaders", k
        )
        expected = select(dense_sum(size), k or contribution(0, size).nnz)
        np.testing.assert_array_equal(kept.to_dense(), expected)


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_gtopk_sends_few_bytes_between_nodes(density):
    """Against the flat algorithms that "auto" knows; the tree sends as few where neighbours share a node."""
    k, nodes, sent = 3000, [0, 0, 0, 0, 4, 4, 4, 4], {}
    rng = np.random.default_rng(8)
    held = [
        TopK(k=k).compress(rng.standard_normal(round(k / density), np.float32))
        for _ in nodes
    ]
    for name in ("recursive_doubling", "exact", "node_leaders"):
        network = Network(len(nodes), nodes)
        sending = []
        for link in network.links:
            link.send = partial(send_counted, link, link.send, sending)

        def run(rank, group, name=name):
            return gtopk_allreduce.algorithms[name](held[rank], group, k=k)

        network.run(run, length=held[0].length, dtype="float32", k=k)
        sent[name] = sum(sending)
    assert sent.pop("node_leaders") <= 0.3 * min(sent.values())


def send_counted(link, send, between, buffer, dest, *more):
    if link.nodes[dest] != link.nodes[link.rank]:
        between.append(buffer.size)
    return send(buffer, dest, *more)


def drawn(rank, length):
    return (
        np.random.default_rng([rank, length])
        .integers(-9, 10, length)
        .astype(np.float32)
    )


def in_few_bits(network, name, length, bits, block=32):
    """Return results and rounds of a sum in few bits, whose conservation and bits on all ranks are checked."""

    def run(rank, group):
        values = drawn(rank, length)
        total, errors = yield from quantised_allreduce.algorithms[name](
            Correction([values], np.empty_like(values)),
            group,
            bits=bits,
            block=block,
            dtype=values.dtype,
        )
        return total.values(), errors

    results, rounds = network.run(run, length=length, dtype="float32")
    assert len({total.tobytes() for total, _ in results}) == 1
    conserved = results[0][0].astype(np.float64) + sum(
        rejected.astype(np.float64) for _, rejected in results
    )
    np.testing.assert_array_equal(
        conserved, sum(drawn(rank, length) for rank in range(len(results)))
    )
    return results, rounds


FEW_BITS_ROUNDS = {
    "direct": lambda size: 2 * (size > 1),
    "node_lanes": lambda size: 2 * (size > 1) + lower(size) + fold(size),
}


@pytest.mark.parametrize("name", FEW_BITS_ROUNDS)
@pytest.mark.parametrize("length", [0, 33, 700])
def test_sums_in_few_bits_lose_nothing_and_have_the_rounds_of_the_table(name, length):
    for size in FEW:
        for rendezvous in (False, True):
            _, rounds = in_few_bits(
                Network(size, rendezvous=rendezvous), name, length, 4
            )
            assert rounds == FEW_BITS_ROUNDS[name](size), size


@pytest.mark.parametrize("bits", [8, 4])
def test_sums_in_few_bits_have_the_bytes_of_the_bits(bits):
    for size in (2, 3, 4, 7, 8):
        length, exact = 20_000 * size, 2 * (size - 1) * 20_000 * bits / 8
        network = Network(size)
        in_few_bits(network, "direct", length, bits, 256)
        assert (
            exact <= max(link.traffic.nbytes for link in network.links) <= 1.04 * exact
        )


@pytest.mark.parametrize("nodes", NODES)
def test_sums_in_few_bits_over_nodes(nodes):
    """Between nodes a rank sends the codes of its lane, not of all values."""
    for size in FEW:
        network, sending = Network(size, NODES[nodes](size)), []
        for link in network.links:
            link.send = partial(send_counted, link, link.send, sending)
        in_few_bits(network, "node_lanes", 3000, 4)
        among = network.links[0].nodes
        count = len(set(among))
        lanes = min(among.count(first) for first in set(among))
        codes = 2 * (count - 1) * (3000 / 2 + 3000 / 32 * 2)  # of all lanes
        most = (
            codes
            + 2 * count * (count - 1) * lanes * (64 + 64 + 32)
            + 64 * size * 2 * size
        )
        assert sum(sending) <= most


@pytest.mark.parametrize("nbytes", [1, 300_001])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_bytes_in_pieces_along_a_chain(nbytes, rendezvous):
    sent = np.random.default_rng(nbytes).integers(256, size=nbytes, dtype=np.uint8)
    for size in FEW:
        root = size // 3
        buffers = [np.zeros_like(sent) for _ in range(size)]
        buffers[root] = sent.copy()
        network = Network(size, seed=size, rendezvous=rendezvous)

        def run(rank, group, held=buffers, root=root):
            return group.relay(held[rank], root)

        _, rounds = network.run(run)
        assert all((buffer == sent).all() for buffer in buffers)
        piece = 1 + math.isqrt(nbytes * PIECE_OVERHEAD // size)
        assert rounds == (-(-nbytes // piece) + size - 2 if size > 1 else 0)


@pytest.mark.parametrize("size", SIZES)
def test_the_others(size):
    vectors, root = [contribution(rank, size) for rank in range(size)], size // 2
    parts, rounds = over(Network(size), allgather.dissemination)
    assert rounds == upper(size)
    assert [part.indices.tolist() for part in parts[-1]] == [
        vector.indices.tolist() for vector in vectors
    ]
    shares, rounds = over(
        Network(size), partial(reduce_scatter.split, partition="equal")
    )
    assert rounds == (size > 1)
    np.testing.assert_array_equal(
        sum(share.to_dense() for share in shares), dense_sum(size)
    )
    totals, rounds = over(Network(size), partial(rooted.tree, root=root), root=root)
    assert rounds <= 2 * upper(size)  # the terms, and the tree
    np.testing.assert_array_equal(totals[root].to_dense(), dense_sum(size))
    steps = partial(rooted.hand_down, root=root)
    handed, rounds = over(
        Network(size),
        lambda vector, group: steps(
            vector if group.rank == root else group.nothing, group
        ),
        root=root,
    )
    assert rounds <= 2 * upper(size)
    assert all(
        vector.values.tobytes() == vectors[root].values.tobytes() for vector in handed
    )
    exchanged, rounds = over(Network(size), allreduce.exchange_metadata)
    assert rounds == upper(size)
    assert all(
        entries_of(each) == [vector.nnz for vector in vectors] for each in exchanged
    )


@pytest.mark.parametrize("size", [5, 7, 13])
def test_a_call_like_one_that_gathered_the_vectors_needs_no_metadata(size):
    """Whatever the ranks remember of the last calls, the choice and the bits are those of ranks that remember none."""
    # entries, just too many to be sent in place of metadata
    length, few = 100_000, 9000 // (size - 1)
    network = Network(size, nodes=range(size))

    def summed(entries, network, form=None):
        rng = np.random.default_rng(entries)
        drawn = [
            np.sort(rng.choice(length, entries, replace=False)) for _ in range(size)
        ]
        vectors = [
            SparseVector(each, rng.standard_normal(entries).astype(np.float32), length)
            for each in drawn
        ]
        vectors = [quantise(each, form) if form else each for each in vectors]
        for link in network.links:
            link.clock = link.sent = link.traffic.nbytes = 0
        results, rounds = network.run(
            lambda rank, group: sparse_allreduce.automatic(vectors[rank], group),
            length=length,
        )
        (gathered,) = {
            any(
                kind[4] == entries.bit_length() and last == "allgather"
                for kind, last in link.taken.items()
            )
            for link in network.links
        }
        assert len({total.values.tobytes() for total in results}) == 1
        return (
            gathered,
            results[0].values.tobytes(),
            rounds,
            sum(link.traffic.nbytes for link in network.links),
        )

    def fresh(entries, form=None):
        return summed(entries, Network(size, nodes=range(size)), form)

    first, again = summed(few, network), summed(few, network)
    assert first == fresh(few)
    assert again[:3] == (True, first[1], first[2] // 2)
    assert again[3] < first[3]
    # another number of entries is no call like it
    assert summed(40_000, network) == fresh(40_000)
    assert not fresh(40_000)[0]
    network.links[size - 1].taken.clear()  # as after an error on this rank alone
    assert summed(few, network)[:3] == first[:3]
    assert summed(few, network) == again


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_ranks_advance_changes_no_bit(seed):
    """Sums in the order of arrival give another result in every run."""
    size = 13
    values = np.random.default_rng(7).standard_normal((size, 50)).astype(np.float32)

    def run(steps):
        def start(rank, group):
            return steps(SparseVector(np.arange(50), values[rank], 50), group)

        return start

    def exact(name):
        metadata = [(SparseVector.empty(50), 50 << ENTRIES_AT)] * size
        return lambda vector, group: allreduce.ALGORITHMS[name](vector, group, metadata)

    for steps in [
        *map(exact, ROUNDS),
        *(partial(steps, k=20) for steps in gtopk_allreduce.algorithms.values()),
    ]:
        outcomes = [
            Network(size, seed=order).run(run(steps), length=50, dtype="float32", k=20)[
                0
            ][0]
            for order in (0, 1 + seed)
        ]
        vectors = [
            outcome[0] if isinstance(outcome, tuple) else outcome
            for outcome in outcomes
        ]
        assert vectors[0].values.tobytes() == vectors[1].values.tobytes()
        assert vectors[0].indices.tobytes() == vectors[1].indices.tobytes()


def of_ones(steps, vector, group):
    """Run an algorithm of sums in few bits, in the place of one of sparse vectors."""
    ones = Correction([np.ones(100)], np.empty(100))
    return steps(ones, group, bits=4, block=32, dtype=ones.out.dtype)


NAMED = {
    "sparse_allreduce": {
        name: steps
        for name, steps in [
            ("auto", sparse_allreduce.automatic),
            *sparse_allreduce.algorithms.items(),
        ]
        if name in ("auto", *ROUNDS)
    },
    "gtopk_allreduce": {
        "auto": gtopk_allreduce.automatic,
        **gtopk_allreduce.algorithms,
    },
    "compressed_allreduce": {
        name: partial(steps, compressor="", second=TopK(k=2))
        for name, steps in compressed_allreduce.algorithms.items()
    },
    "quantised_allreduce": {
        name: partial(of_ones, steps)
        for name, steps in [
            ("auto", quantised_allreduce.automatic),
            *quantised_allreduce.algorithms.items(),
        ]
    },
}


@pytest.mark.parametrize("operation", NAMED)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_ranks_in_different_algorithms_end_together_and_leave_no_message(
    operation, rendezvous
):
    """Also where one has an error of its own. `run` finds ranks that wait for ever, and messages that are left."""
    algorithms = NAMED[operation]
    for size in range(2, 20):
        for seed in range(5):
            rng = np.random.default_rng([size, seed])
            few = rng.choice([*algorithms], rng.integers(2, 5))
            names = [str(name) for name in [*few, *rng.choice(few, size)][:size]]
            alone = (
                ValueError("alone")
                if rng.random() < 0.2 or len(set(names)) == 1
                else None
            )

            def run(rank, group, names=names, alone=alone):
                error = alone if rank == 1 else None
                # as a collective does
                name = next(iter(algorithms)) if error else names[rank]
                signature = {
                    "operation": operation,
                    "algorithm": name,
                    "length": 100,
                    "dtype": "float64",
                }
                own = Group(group.link, signature, error)
                try:
                    yield from run_or_notify(
                        own, algorithms[name](brought_to(rank, error), own)
                    )
                except (CollectiveError, ValueError) as error:
                    return type(error)

            nodes = rng.choice([None, *range(2, size + 1)])
            nodes = nodes and [rank // nodes * nodes for rank in range(size)]
            results, _ = Network(size, nodes, seed, rendezvous=rendezvous).run(run)
            expected = [CollectiveError] * size
            if alone:
                expected[1] = ValueError
            assert results == expected, (names, alone)


def brought_to(rank, error):
    return (
        SparseVector.empty(0)
        if error
        else SparseVector(np.arange(100), np.arange(1.0, 101) + rank, 100)
    )


@pytest.mark.parametrize(("counts", "sampling"), [
    ([40] * 8, 0),  # an allgather, which cuts nothing
    ([40_000] * 8, 8),
    # together they are cut, and only the first one thought so before
    ([40_000] + [40] * 7, 1),
    ([40_000, 0, 0, 0, 0, 0, 0, 9], 1),
])  # fmt: skip
def test_a_rank_brings_samples_where_what_it_brings_itself_would_be_cut(
    monkeypatch, counts, sampling
):
    length, looked = 10**6, []
    rng = np.random.default_rng(1)
    # in a twentieth of the length
    hot = [np.sort(rng.choice(length // 20, count, replace=False)) for count in counts]
    vectors = [
        SparseVector(indices, rng.integers(1, 2**20, indices.size) / 8, length)
        for indices in hot
    ]

    exchange = allreduce.exchange_metadata

    def seen(vector, group, *, sampling, **more):
        looked.append(sampling)
        return exchange(vector, group, sampling=sampling, **more)

    monkeypatch.setattr(allreduce, "exchange_metadata", seen)
    network = Network(8, nodes=range(8))
    results, _ = network.run(
        lambda rank, group: sparse_allreduce.automatic(vectors[rank], group),
        length=length,
    )
    assert sum(looked) == sampling
    expected = sum(vector.to_dense() for vector in vectors)
    assert all(np.array_equal(result.to_dense(), expected) for result in results)


PLACES = {  # of the entries of a rank, and the factor of its values there
    "even": lambda rng, places, rank, size: (rng.choice(places, 60, replace=False), 1),
    "in one share": lambda rng, places, rank, size: (
        places[places * size // places.size == size // 2],
        1,
    ),
    "equal": lambda rng, places, rank, size: (places[rank :: 2 * size], 0),
    "larger in later shares": lambda rng, places, rank, size: (
        places[rank::size],
        1 + places[rank::size] ** 2,
    ),
    "larger on later ranks": lambda rng, places, rank, size: (
        rng.choice(places, 60, replace=False),
        4**rank,
    ),
    "on one rank": lambda rng, places, rank, size: (
        places[: places.size * (rank == size - 1)],
        1,
    ),
    "cancelling": lambda rng, places, rank, size: (
        places[: 80 - rank // 2],
        (-1) ** rank * (1 + places[: 80 - rank // 2]),
    ),
}


@pytest.mark.parametrize("family", PLACES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 32])
def test_the_exact_gtopk_wherever_the_largest_are(family, size):
    """The k largest, nothing lost, and as few gatherings as it says: one for what is spread evenly."""
    length = 60 * size
    for k in 0, 1, 9, 40, 100, length:
        held = []
        for rank in range(size):
            rng = np.random.default_rng([rank, size])
            places, factor = PLACES[family](rng, np.arange(length), rank, size)
            drawn = (
                factor * rng.integers(-9, 10, places.size)
                if np.any(factor)
                else rng.choice([-1, 1], places.size)
            )
            order = np.argsort(places)
            held.append(SparseVector(places[order], np.float64(drawn)[order], length))

        def steps(rank, group, held=held, k=k):
            return gtopk.exact(held[rank], group, k=k)

        results, rounds = Network(size, seed=k).run(
            steps, length=length, dtype="float64", k=k
        )
        total = sum(vector.to_dense() for vector in held)
        for result, _ in results:
            np.testing.assert_array_equal(result.to_dense(), select(total, k))
        np.testing.assert_array_equal(
            select(total, k) + sum(rejected.to_dense() for _, rejected in results),
            total,
        )
        gatherings = (rounds - (size > 1)) / max(1, upper(size))
        assert gatherings <= (
            1 if not k or (family == "even" and k >= 40) else upper(size) + 2
        ), k


# the part of a gradient that all ranks share
@pytest.mark.parametrize("common", [0, 0.5])
# of the scales of the layers: deviations of their logarithms
@pytest.mark.parametrize("spread", [0, 0.3, 1])
@pytest.mark.parametrize(
    ("size", "length", "k"), [(8, 100_000, 1000), (64, 50_000, 200)]
)
def test_of_gradients_in_layers_exact_gtopk_gathers_little_more_than_k(
    monkeypatch, size, length, k, spread, common
):
    rng = np.random.default_rng([size, round(10 * spread), round(10 * common)])
    scales = np.repeat(rng.lognormal(0, spread, 40), length // 40)
    base = common * rng.standard_normal(length)
    held = [
        TopK(k=k).compress(((1 - common) * rng.standard_normal(length) + base) * scales)
        for _ in range(size)
    ]
    gathered = entries_gathered(monkeypatch, held, k)
    assert len(gathered) <= (2 if spread else 1)
    assert k <= sum(gathered) <= {8: 1.6, 64: 5}[size] * k


def entries_gathered(monkeypatch, held, k):
    """Return how many entries all ranks together send in each gathering of an exact gTop-k of these vectors."""
    gathered, gather = [[] for _ in held], Group.gather

    def counted(group, vector, count=0):
        gathered[group.rank].append(vector.nnz)
        return gather(group, vector, count)

    monkeypatch.setattr(Group, "gather", counted)
    network, length = Network(len(held)), held[0].length
    results, _ = network.run(
        lambda rank, group: gtopk.exact(held[rank], group, k),
        length=length,
        dtype="float64",
        k=k,
    )
    np.testing.assert_array_equal(
        results[0][0].to_dense(), select(sum(vector.to_dense() for vector in held), k)
    )
    return np.sum(gathered, axis=0).tolist()


@pytest.mark.parametrize(
    "family",
    ["all in a share that has few entries", "all but in a share that has most entries"],
)
@pytest.mark.parametrize(
    "size", [2, 3, 4, 8, 13, 16, pytest.param(32, marks=pytest.mark.slow)]
)
def test_the_exact_gtopk_stays_within_its_bounds(monkeypatch, family, size):
    """The k largest are where the owners expect few of them, so that they send too few at first."""
    k, width = 50 * size, 4000 * size
    few = family.startswith("all in")
    held = []
    for rank in range(size):
        dense = np.zeros((size, width))
        rng = np.random.default_rng([size, rank])
        for share in range(size):
            if (share == size // 2) if few else (share < size - 1):
                dense[share, rank:k:size] = 100 + rng.random(
                    dense[share, rank:k:size].size
                )
            elif few:
                dense[share, rng.choice(width, 1000, replace=False)] = rng.random(1000)
            else:
                dense[share, : width - 1] = 1e-3
        held.append(SparseVector.from_dense(dense.ravel()))
    gathered = entries_gathered(monkeypatch, held, k)
    assert 1 < len(gathered) <= upper(size) + 2
    assert gathered[0] <= size * likely(k / size, size)
    assert max(gathered[1:]) <= 2 * k + size
    if few:
        assert len(gathered) == upper(size) + 2  # as many as there can be
