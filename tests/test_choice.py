"""The choice of algorithms: its formulas and its answers against bytes counted over the simulated network."""

import json
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from collectives import allreduce, gtopk_allreduce, reduce_scatter, sparse_allreduce
from collectives.choice import FORMULAS, INSIDE, ON_NODES, Case, Choice, seconds, split, winners
from collectives.choice.overlap import in_digest, level_of, overlap_of
from collectives.metadata import Metadata
from mpicomp import SparseVector
from mpicomp.codec import CODECS
from mpicomp.compressors.quantised import quantise
from mpicomp.errors import ProfileError
from mpicomp_bench.network import Network

ENTRIES = 5000
SUMS = FORMULAS["sparse_allreduce"]
AUTO = partial(sparse_allreduce.automatic, partition="auto")
PATTERNS = {"disjoint": -1, "independent": 0, "overlapping": 0.75, "equal": 1}


def support(pattern, rank, size, length, entries=ENTRIES):
    """Return the indices of a rank; where supports overlap three quarters are those of all ranks."""
    own = np.random.default_rng([1, rank])
    if pattern == "disjoint":
        return np.sort(rank + size * own.choice(length // size, entries, replace=False, shuffle=False))
    common = np.random.default_rng(0).choice(length, entries, replace=False)[: round(PATTERNS[pattern] * entries)]
    others = np.setdiff1d(own.choice(length, entries, replace=False, shuffle=False), common)
    return np.sort(np.concatenate([common, own.permutation(others)[: entries - common.size]]))


def values(kind, rank, entries=ENTRIES):
    """Return values of which each rank has magnitudes of its own."""
    rng = np.random.default_rng([2, rank])
    signs, scale = np.sign(rng.standard_normal(entries)), 1 + 0.07 * rng.random()
    magnitudes = {"signs": 1.0, "two_bit": rng.choice([1, 3], entries)}.get(kind, 2 + abs(rng.standard_normal(entries)))
    vector = SparseVector(np.arange(entries), (signs * scale * magnitudes).astype(np.float32), entries)
    return (quantise(vector, "bfloat16")[0] if kind == "bfloat16" else vector).values


def counted(vectors, steps_of, nodes=None):
    """Return the bytes of the busiest rank, and the rounds. nodes: each rank on one of its own, unless given."""
    network = Network(len(vectors), nodes or range(len(vectors)))
    signature = {"length": vectors[0].length, "dtype": "float32", "width": None}
    _, rounds = network.run(lambda rank, group: steps_of(vectors[rank], group), **signature)
    return max(link.traffic.nbytes for link in network.links), rounds


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 16])
def test_auto_sends_little_more_than_the_best_algorithm(size):
    """Supports and values in all combinations, densities in turn; what is far from the least is not counted."""
    for place, pattern in enumerate(("independent", "overlapping", "disjoint")):
        for turn, kind in enumerate(("signs", "two_bit", "bfloat16", "float32")):
            density = (0.001, 0.01, 0.05 if pattern == "disjoint" else 0.1)[(place + turn) % 3]
            length = round(ENTRIES / density)
            vectors = [SparseVector(support(pattern, r, size, length), values(kind, r), length) for r in range(size)]
            names = [name for name in SUMS if not name.startswith("dense")]
            named = {
                name: counted(vectors, partial(sparse_allreduce.algorithms[name], partition="auto"))[0]
                for name in names
            }
            best = min(named, key=named.get)
            auto, _ = counted(vectors, AUTO)
            assert auto <= 1.15 * named[best], (pattern, kind, density, best, named)


@pytest.mark.parametrize(
    ("size", "coded"), [*((size, True) for size in (1, 2, 3, 5, 8, 13, 64)), (4, False), (13, False)]
)
def test_formulas_against_counted_bytes_and_rounds(size, coded):
    for length, entries, pattern in (400_000, 3000, "equal"), (60_000, 4000, "independent"):
        vectors = [
            SparseVector(support(pattern, rank, size, length, entries), values("float32", rank, entries), length)
            for rank in range(size)
        ]
        metadata = Metadata([entries] * size, [], length, "equal")
        case = Case(size, length, entries, overlap=PATTERNS[pattern], coded=coded)
        nodes = None if coded else [0] * size
        for name in SUMS:
            steps = partial(allreduce.ALGORITHMS[name], metadata=metadata)
            nbytes, rounds = counted(vectors, steps, nodes)
            cost = SUMS[name](case)
            assert cost[2] == pytest.approx(nbytes, rel=0.12), name
            assert name == "dense_mpi" or cost[0] == rounds, name
        steps = partial(reduce_scatter.split, partition="equal")
        nbytes, rounds = counted(vectors, steps, nodes)
        assert (split(case)[0], split(case)[2]) == (rounds, pytest.approx(nbytes, rel=0.12))
        if pattern == "independent":
            for name, formula in FORMULAS["gtopk_allreduce"].items():
                nbytes, rounds = counted(vectors, partial(gtopk_allreduce.algorithms[name], k=entries), nodes)
                cost = formula(case)
                assert cost[2] == pytest.approx(nbytes, rel=0.15), name
                assert cost[0] == rounds, name


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("kind", ["signs", "float32"])
def test_votes_cost_few_bytes(kind, size):
    """Nothing where every rank can count; elsewhere the values keep their formats, and counts take a byte at most."""
    for pattern, density in ("independent", 0.01), ("overlapping", 0.001), ("disjoint", 0.05), ("equal", 0.1):
        length, most = round(ENTRIES / density), {"allgather": 1.0, "split_allgather": 1.1, "recursive_doubling": 1.2}
        vectors = [SparseVector(support(pattern, r, size, length), values(kind, r), length) for r in range(size)]
        for name, least in most.items():
            steps = partial(sparse_allreduce.algorithms[name], partition="auto")
            without, with_votes = (counted(vectors, partial(steps, votes=votes))[0] for votes in (False, True))
            assert with_votes <= least * without, (name, pattern)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", [2, 8])
def test_digests_tell_how_far_supports_overlap(pattern, size):
    length, entries = 100_000, 10_000
    supports = [support(pattern, rank, size, length, entries) for rank in range(size)]
    digests = [indices[in_digest(indices, level_of(entries))] for indices in supports]
    assert all(20 < digest.size < 130 for digest in digests)
    found = Case(size, length, entries, overlap_of(digests, [entries] * size, length)).union(size)
    assert found == pytest.approx(np.unique(np.concatenate(supports)).size, rel=0.1)


def test_an_index_is_in_the_digests_of_all_lower_levels():
    indices = np.arange(0, 10**7, 3)
    for level in range(6, 12):
        inner, outer = in_digest(indices, level + 1), in_digest(indices, level)
        assert not (inner & ~outer).any()
        assert outer.mean() == pytest.approx(2.0**-level, rel=0.1)
    assert in_digest(indices.astype(np.int64), 8).tolist() == in_digest(indices.astype(np.int32), 8).tolist()


def test_small_vectors_are_summed_in_the_metadata_exchange():
    for size in 3, 4, 8, 13:
        vectors = [SparseVector(np.arange(rank, 40 + rank), np.ones(40, np.float32), 1000) for rank in range(size)]
        assert counted(vectors, AUTO)[1] == (size - 1).bit_length()


@pytest.mark.parametrize("nodes", [[4, 4], [3, 1]])
def test_several_ranks_on_several_nodes_take_an_algorithm_for_nodes(nodes):
    for entries, name in (1, "node_leaders"), (10_000, "node_lanes"):
        assert Choice().algorithm("sparse_allreduce", Case(sum(nodes), 10**6, entries), nodes) == name
        assert (Choice().gtopk(10**6, entries, 4, nodes) == "node_leaders") == (entries == 10_000)


def test_the_extremes_have_an_answer():
    bare = Case(7, 100, 100, value_nbytes=0)
    for case in (Case(1, 0, 0), Case(8, 0, 0.0), Case(5, 1, 1), Case(3, 2**63 - 1, 1e6), bare):
        for collective, formulas in FORMULAS.items():
            assert Choice().algorithm(collective, case, [case.ranks]) in formulas
            assert all(seconds(formula(case), INSIDE) >= 0 for formula in formulas.values())
    assert not Choice().algorithm("sparse_allreduce", bare, [7]).startswith("dense")
    few = Choice().algorithm("sparse_allreduce", Case(2, 100, 100, coded=False), [2], whole=False)
    assert few != "dense_mpi"
    assert few not in ON_NODES


@pytest.mark.parametrize(("bits", "most"), [(1, 128), (2, 128), (None, 8)])
def test_values_of_few_bits_are_gathered_from_many_ranks(bits, most):
    """Sums need the bits of a float: up to some 190 ranks the vectors take fewer bytes than the shares of their sum."""
    for ranks in 4, 8, 16, 64, 128, 256:
        case = Case(ranks, 4096 * 256, 64 * 256, bits=bits)
        expected = "allgather" if ranks <= most else "split_allgather"
        assert Choice().algorithm("sparse_allreduce", case, [1] * ranks) == expected


def test_gtopk_takes_the_exact_one_where_bytes_count_and_fewer_rounds_for_few_entries():
    between = [1] * 8
    assert Choice().gtopk(25_000_000, 25_000, 4, between) == "exact"
    assert Choice().gtopk(25_000_000, None, 4, between) == "exact"
    assert Choice().gtopk(25_000_000, 100, 4, between) != "exact"
    assert Choice().gtopk(0, None, 4, between) in FORMULAS["gtopk_allreduce"]


def test_messages_are_coded_between_nodes_alone():
    vector = SparseVector.from_dense(np.array([0, 1.0, 2.0] * 100))
    assert Choice().coding(vector, apart=True).values.number == CODECS["smallest"](vector).values.number == 14
    assert Choice().coding(vector, apart=False) == CODECS["quick"](vector)


PLACES = [[1000, 0.1, 32, "allgather"], [10**6, 0.1, 32, "dense_mpi"], [10**6, 0.001, 1, "recursive_halving"]]
TABLE = {"host": "node", "mpi": "any", "ranks": 8, "nodes": 1, "winners": {"sparse_allreduce": PLACES}}


def text_with(places):
    return winners.text_of({**TABLE, "winners": places})


def test_the_nearest_place_of_the_table_wins():
    choice = Choice(TABLE)
    for length, density, bits, expected in (
        *PLACES,
        (2000, 0.2, 16, "allgather"),
        (10**9, 1e-4, 2, "recursive_halving"),
    ):
        case = Case(8, int(length), length * density, bits=bits)
        assert choice.algorithm("sparse_allreduce", case, [8]) == expected
    case = Case(8, 10**6, 10**5, coded=False)
    for nodes, whole in ([7], True), ([4, 4], True), ([8], False):  # of which the table says nothing
        assert choice.algorithm("sparse_allreduce", case, nodes, whole=whole) == Choice().algorithm(
            "sparse_allreduce", case, nodes, whole=whole
        )
    assert choice.gtopk(10**6, 1000, 4, [8]) == Choice().gtopk(10**6, 1000, 4, [8])


def test_a_table_comes_back_from_its_file(tmp_path):
    (tmp_path / "table.json").write_text(winners.text_of(TABLE))
    assert winners.load(tmp_path / "table.json") == TABLE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-30], "it is not a table of winners"),
        (lambda text: text.replace("allgather", "split_all"), "checksum mismatch"),
        (lambda text: text.replace('"mpicomp_profile": 2', '"mpicomp_profile": 1'), "it is of version 1, expected 2"),
        (lambda text: "[" * 100_000, "it is not a table of winners"),
        (lambda text: "[]", "it is not a table of winners"),
        (lambda text: " " * winners.LARGEST_FILE + text, "it has over"),
        (
            lambda text: winners.text_of({**TABLE, "winners": {"sparse_allreduce": [[0, 1, 1, "dense"]]}}),
            "it has a place",
        ),
        (lambda text: text_with(5), "it is not a table of winners"),
        (lambda text: winners.text_of({"winners": {}}), "it is not a table of winners"),
        (
            lambda text: text_with({"x": [["a", 1, 1, "dense"]]}),
            "it is not a table of winners",
        ),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, change, said):
    path = tmp_path / "table.json"
    path.write_text(change(winners.text_of(TABLE)))
    with pytest.raises(ProfileError, match=f"table.json' is refused: {said}"):
        winners.load(path)


def test_broken_files_raise_nothing_else(tmp_path):
    """Bytes changed, dropped or doubled at random places."""
    text, rng, path = winners.text_of(TABLE).encode(), np.random.default_rng(0), tmp_path / "table.json"
    for _ in range(300):
        at, kind = int(rng.integers(len(text))), rng.integers(3)
        path.write_bytes(text[:at] + (b"", bytes([rng.integers(256)]), text[at : at + 2])[kind] + text[at + 1 :])
        with suppress(ProfileError):
            assert winners.load(path) == json.loads(text)["table"]
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        winners.load(tmp_path / "missing")


@pytest.mark.parametrize("relative", [False, True])
def test_the_default_path(monkeypatch, tmp_path, relative):
    monkeypatch.setenv("XDG_CONFIG_HOME", "config" if relative else str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = winners.default_path(8, 2)
    assert path.parent == (tmp_path / "home" / ".config" if relative else tmp_path) / "mpicomp"
    assert path.name.endswith("-P8-N2.json")


def test_sums_in_few_bits_are_halved_among_many_ranks_and_in_lanes_on_several_nodes():
    by_rule = Choice().quantised
    for nodes in [[1], [4], [8], [1] * 8]:
        assert by_rule(25_000_000, 4, 4, nodes) == "direct"
    assert by_rule(1000, 8, 4, [1] * 128) == by_rule(1000, 1, 4, [16]) == "halving"
    assert by_rule(1000, 4, 4, [2, 2]) == by_rule(10**8, 4, 8, [8, 3, 1]) == "node_lanes"
