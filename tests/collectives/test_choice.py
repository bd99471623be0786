"""The choice of algorithms: its formulas and its answers against bytes counted over the simulated network."""

import pathlib
import runpy
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from collectives import allreduce, gtopk_allreduce, reduce_scatter, sparse_allreduce
from collectives.planning.choice import Case, choose
from collectives.planning.links import NETWORKS, Links, links_of, rounded, seconds
from collectives.runtime.group import Group
from collectives.runtime.metadata import ENTRIES_AT
from mpicomp import SparseVector
from mpicomp.codec import CODECS
from mpicomp.compressors.quantised import quantise
from mpicomp_bench import formulas
from mpicomp_bench.formulas import FORMULAS, predicted, split
from mpicomp_bench.network import Network

ROOT = pathlib.Path(__file__).parents[2]
ENTRIES = 5000
SUMS = FORMULAS["sparse_allreduce"]
AUTO = sparse_allreduce.automatic
PATTERNS = {"disjoint": -1, "independent": 0, "overlapping": 0.25, "equal": 1}


def support(pattern, rank, size, length, entries=ENTRIES):
    """Return the indices of a rank; where supports overlap a quarter are those of all ranks."""
    own = np.random.default_rng([1, rank])
    if pattern == "disjoint":
        return np.sort(
            rank
            + size * own.choice(length // size, entries, replace=False, shuffle=False)
        )
    common = np.random.default_rng(0).choice(length, entries, replace=False)[
        : round(PATTERNS[pattern] * entries)
    ]
    others = np.setdiff1d(
        own.choice(length, entries, replace=False, shuffle=False), common
    )
    return np.sort(
        np.concatenate([common, own.permutation(others)[: entries - common.size]])
    )


def values(kind, rank, entries=ENTRIES):
    """Return values of which each rank has magnitudes of its own."""
    rng = np.random.default_rng([2, rank])
    signs, scale = np.sign(rng.standard_normal(entries)), 1 + 0.07 * rng.random()
    magnitudes = {"signs": 1.0, "two_bit": rng.choice([1, 3], entries)}.get(
        kind, 2 + abs(rng.standard_normal(entries))
    )
    vector = SparseVector(
        np.arange(entries), (signs * scale * magnitudes).astype(np.float32), entries
    )
    return (quantise(vector, "bfloat16") if kind == "bfloat16" else vector).values


def counted(vectors, steps_of, nodes=None):
    """Return the bytes of the busiest rank, and the rounds. nodes: each rank on one of its own, unless given.

    "auto" takes the links for so slow that bytes are all that counts.
    """
    network = Network(
        len(vectors), nodes or range(len(vectors)), choice=Links(1e-6, 1e6)
    )
    signature = {"length": vectors[0].length, "dtype": "float32", "width": None}
    _, rounds = network.run(
        lambda rank, group: steps_of(vectors[rank], group), **signature
    )
    return max(link.traffic.nbytes for link in network.links), rounds


@pytest.mark.parametrize(
    "size", [2, 3, 4, 6, 8, pytest.param(16, marks=pytest.mark.slow)]
)
def test_auto_sends_little_more_than_the_best_algorithm(size):
    """Supports and values in all combinations, densities in turn; what is far from the least is not counted."""
    for place, pattern in enumerate(
        ("independent", "overlapping", "disjoint", "equal")
    ):
        for turn, kind in enumerate(("signs", "two_bit", "bfloat16", "float32")):
            density = (0.001, 0.01, 0.05 if pattern == "disjoint" else 0.1)[
                (place + turn) % 3
            ]
            length = round(ENTRIES / density)
            vectors = [
                SparseVector(support(pattern, r, size, length), values(kind, r), length)
                for r in range(size)
            ]
            names = [name for name in SUMS if name != "dense_mpi"]
            named = {
                name: counted(vectors, sparse_allreduce.algorithms[name])[0]
                for name in names
            }
            best = min(named, key=named.get)
            auto, _ = counted(vectors, AUTO)
            assert auto <= 1.25 * named[best], (pattern, kind, density, best, named)


@pytest.mark.parametrize(
    ("size", "coded"),
    [
        *product((1, 2, 3, 5, 8, 13), [True]),
        (4, False),
        (13, False),
        pytest.param(64, True, marks=pytest.mark.slow),
    ],
)
def test_formulas_against_counted_bytes_and_rounds(size, coded):
    for length, entries in (400_000, 3000), (60_000, 4000):
        vectors = [
            SparseVector(
                support("independent", rank, size, length, entries),
                values("float32", rank, entries),
                length,
            )
            for rank in range(size)
        ]
        metadata = [(SparseVector.empty(length), entries << ENTRIES_AT)] * size
        case = Case(size, length, entries, 1 if coded else size)
        nodes = None if coded else [0] * size
        for name in SUMS:
            steps = partial(allreduce.ALGORITHMS[name], metadata=metadata)
            nbytes, rounds = counted(vectors, steps, nodes)
            cost = SUMS[name](case)
            assert cost[2] == pytest.approx(nbytes, rel=0.12), name
            assert name == "dense_mpi" or cost[0] == rounds, name
        steps = partial(reduce_scatter.split, partition="equal")
        nbytes, rounds = counted(vectors, steps, nodes)
        assert (split(case)[0], split(case)[2]) == (
            rounds,
            pytest.approx(nbytes, rel=0.12),
        )
        for name, formula in FORMULAS["gtopk_allreduce"].items():
            nbytes, rounds = counted(
                vectors, partial(gtopk_allreduce.algorithms[name], k=entries), nodes
            )
            cost = formula(case)
            assert (cost[0], cost[2]) == (rounds, pytest.approx(nbytes, rel=0.15)), name


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("kind", ["signs", "float32"])
def test_votes_cost_few_bytes(kind, size):
    """Nothing where every rank can count; elsewhere the values keep their formats, and counts take a byte at most."""
    for pattern, density in (
        ("independent", 0.01),
        ("overlapping", 0.001),
        ("disjoint", 0.05),
        ("equal", 0.1),
    ):
        length, most = (
            round(ENTRIES / density),
            {"allgather": 1.0, "split_allgather": 1.1, "recursive_doubling": 1.2},
        )
        vectors = [
            SparseVector(support(pattern, r, size, length), values(kind, r), length)
            for r in range(size)
        ]
        for name, least in most.items():
            steps = sparse_allreduce.algorithms[name]
            without, with_votes = (
                counted(vectors, partial(steps, votes=votes))[0]
                for votes in (False, True)
            )
            assert with_votes <= least * without, (name, pattern)


def test_small_vectors_are_summed_in_the_metadata_exchange():
    for size in 3, 4, 8, 13:
        vectors = [
            SparseVector(np.arange(rank, 40 + rank), np.ones(40, np.float32), 1000)
            for rank in range(size)
        ]
        assert counted(vectors, AUTO)[1] == (size - 1).bit_length()


NEAR = NETWORKS["1gbit"]


def gtopk(length, k, links=NEAR, ranks=8, per_node=1):
    return choose("gtopk_allreduce", Case(ranks, length, k, per_node), links)


def test_several_ranks_on_several_nodes_take_an_algorithm_for_nodes():
    assert choose("sparse_allreduce", Case(16, 10**6, 10_000, 8), NEAR) == "node_lanes"
    assert gtopk(10**6, 10_000, NEAR, 16, 8) == "node_leaders"
    assert gtopk(10**6, 1, NEAR, 16, 8) == "recursive_doubling"


def test_over_fast_links_several_ranks_on_a_node_take_the_algorithms_that_ignore_nodes():
    assert (
        choose("sparse_allreduce", Case(64, 25_000_000, 25_000, 8), NETWORKS["hdr"])
        == "split_allgather"
    )
    assert gtopk(25_000_000, 25_000, NETWORKS["hdr"], 64, 8) != "node_leaders"


def test_auto_is_near_the_fastest_as_measured():
    fit = runpy.run_path(str(ROOT / "benchmarks" / "fit_choice.py"))
    found = np.concatenate([*fit["slowdowns"]().values()])
    assert found.size == 234
    assert np.mean(found <= 1.15) > 0.8
    assert found.max() < 2


@pytest.mark.parametrize("crowding", [1.0, 4.0])
@pytest.mark.parametrize("network", [*NETWORKS, "20mbit:20us", "1gbit:10ms"])
def test_auto_is_near_the_fastest_as_predicted(network, crowding):
    """By `mpicomp explain`, from 20 Mbit/s to 400 Gbit/s, and in one node."""
    links = replace(links_of(network), crowding=crowding)
    grid = product(
        ("sparse_allreduce", "gtopk_allreduce", "quantised_allreduce"),
        (3, 5, 8, 64),
        (1, 4, 64),
        (1000, 10**6, 25_000_000, 10**9),
        (1e-4, 1e-3, 0.01, 0.1, 0.5),
    )
    found = []
    for collective, ranks, per_node, length, density in grid:
        case = Case(ranks, length, max(1, density * length), min(ranks, per_node))
        taken = predicted(collective, case, links)
        chosen, _ = taken[choose(collective, case, links)]
        found.append(chosen / min(seconds for seconds, _ in taken.values()))
    near = np.mean(np.array(found) <= 1.15)
    assert near > 0.85, near
    assert max(found) < 3


def test_measured_links_are_rounded_so_that_two_runs_agree():
    near = NETWORKS["1gbit"]
    for latency, rate in (0.6, 1.6), (1.0, 1.0), (1.7, 0.6):
        assert rounded(latency * near.latency, rate * near.rate) == near
    assert rounded(NETWORKS["hdr"].latency, NETWORKS["hdr"].rate) == Links(
        near.latency / 10, 100 * near.rate
    )


def test_the_extremes_have_an_answer():
    bare = Case(7, 100, 100, 7, value_nbytes=0)
    for case in (
        Case(1, 0, 0),
        Case(8, 0, 0.0),
        Case(5, 1, 1),
        Case(3, 2**63 - 1, 1e6),
        bare,
    ):
        for collective, costs in FORMULAS.items():
            assert choose(collective, case, NEAR) in costs
            assert all(
                seconds(cost(case), Links(1e-6, 1e9, 2).inside()) >= 0
                for cost in costs.values()
            )
    assert choose("sparse_allreduce", bare, NEAR) != "dense_mpi"
    few = choose("sparse_allreduce", Case(2, 100, 100, 2), NEAR, of_all_ranks=False)
    assert few in FORMULAS["sparse_allreduce"].keys() - {"dense_mpi"}


@pytest.mark.parametrize(("bits", "most"), [(1, 64), (2, 64)])
def test_values_of_few_bits_are_gathered_from_many_ranks(bits, most):
    """Sums need the bits of a float: up to some 100 ranks the vectors take fewer bytes than the shares of their sum."""
    for ranks in 4, 8, 16, 64, 256:
        case = Case(ranks, 4096 * 256, 64 * 256, bits=bits)
        assert choose("sparse_allreduce", case, NEAR) == (
            "allgather" if ranks <= most else "split_allgather"
        )


def test_gtopk_takes_the_exact_one_where_bytes_count_and_fewer_rounds_for_few_entries():
    assert gtopk(25_000_000, 25_000) == "exact"
    assert gtopk(25_000_000, 100) != "exact"


@pytest.mark.parametrize(("nodes", "codec"), [([0, 1], "smallest"), ([0, 0], "quick")])
def test_messages_are_coded_between_nodes_alone(nodes, codec):
    vector = SparseVector.from_dense(np.array([0, 1.0, 2.0] * 100))
    group = Group(Network(2, nodes).links[0], {})
    found, expected = group.coding(vector), CODECS[codec](vector)
    assert [form.number for form in found] == [form.number for form in expected]


def quantised(length, bits, links=NEAR, ranks=8, per_node=1):
    return choose(
        "quantised_allreduce", Case(ranks, length, length, per_node, bits=bits), links
    )


def test_sums_in_few_bits_take_lanes_on_several_nodes_where_bytes_between_nodes_count():
    for bits, (ranks, per_node) in product(
        (8, 4, 2, 1), [(4, 2), (12, 4), (16, 8), (32, 4)]
    ):
        assert quantised(10**6, bits, NEAR, ranks, per_node) == quantised(
            10**7, bits, NEAR, ranks, per_node
        )
        assert quantised(10**6, bits, NEAR, ranks, per_node) == "node_lanes"
        assert quantised(10**7, bits, NETWORKS["hdr"], ranks, per_node) == "direct"
    assert quantised(100, 4, NEAR, 4, 2) == "direct"


def test_the_bits_of_values_are_those_that_the_codec_needs():
    fit = runpy.run_path(str(ROOT / "benchmarks" / "fit_choice.py"))
    for name, fraction in fit["fractions"]().items():
        assert getattr(formulas, name) == pytest.approx(fraction, abs=0.01), name


@pytest.mark.parametrize(
    ("ranks", "best"), [(8, "split_allgather"), (16, "recursive_doubling")]
)
def test_sums_of_half_precision_take_all_bits_from_so_many_ranks(ranks, best):
    """Counted by benchmarks/choice.py: the other one sends 1.07 and 1.46 times the bytes."""
    case = Case(ranks, 2_000_000, 20_000, bits=16, fresh=0.5)
    assert choose("sparse_allreduce", case, links_of("100mbit")) == best
