"""The cost model against the algorithms themselves, run over a simulated network that counts what they send."""

import math

import numpy as np
import pytest
from simulated import Network

from collectives import allgather, allreduce, cost, gtopk, reduce_scatter
from collectives.channel import Offer
from collectives.partition import equal_ranges
from collectives.profiles import NETWORKS
from collectives.survey import look_around
from mpicomp import SparseVector

PROFILE = NETWORKS["1gbit"]
SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 33, 64]


def brings(rank, length, entries, overlap=0.0):
    """Return entries at random places, a share of them at places that all ranks have."""
    together = round(overlap * entries)
    places = np.random.default_rng(0).permutation(length)
    own = np.random.default_rng([1, rank]).choice(places[together:], entries - together, replace=False)
    indices = np.sort(np.concatenate([places[:together], own]))
    rng = np.random.default_rng([2, rank])
    values = np.copysign(np.exp2(rng.uniform(0, 12, entries)), rng.standard_normal(entries)).astype(np.float32)
    return SparseVector(indices, values, length)


def simulate(steps, size, length, entries, codec, overlap=0.0, nodes=None):
    """Return the bytes of the busiest rank and the rounds of steps(offer, channel), which begins after the survey."""
    network = Network(size, nodes)

    def run(rank, channel):
        channel.codec = codec
        channel._seat(range(size), channel.endpoint.nodes)
        return steps(Offer(brings(rank, length, entries, overlap), entries), channel)

    _, rounds = network.run(run, length=length, dtype="float32", k=entries)
    return max(endpoint.traffic.nbytes for endpoint in network.endpoints), rounds


def check(steps, operation, algorithm, size, length, entries, codec, **more):
    """Check a prediction: within a tenth in bytes, and not one round off."""
    nbytes, rounds = simulate(steps, size, length, entries, codec, **more)
    nodes = len(set(more.pop("nodes", [0])))
    case = cost.Case(size, length, entries, codec=codec, nodes=nodes, **more)
    predicted = cost.predict(operation, algorithm, case, PROFILE)
    assert predicted.nbytes == pytest.approx(nbytes, rel=0.1), (algorithm, size, entries, codec)
    assert predicted.rounds == rounds, (algorithm, size)


def exact_sum(name):
    def steps(offer, channel):
        survey = yield from look_around(offer, channel, sampling=name in cost.SAMPLED)
        return (yield from allreduce.ALGORITHMS[name](offer, channel, survey))

    return steps


@pytest.mark.parametrize(
    ("size", "codec"), [*((size, "smallest") for size in SIZES), *((size, "plain") for size in SIZES[:9]), (8, "quick")]
)
def test_bytes_and_rounds_of_exact_sums(size, codec):
    for length, entries in (400_000, 400), (20_000, 5000), (3000, 2900):
        for name in cost.FLAT:
            check(exact_sum(name), "sparse_allreduce", name, size, length, entries, codec)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_a_sum_by_mpi(size):
    """The simulated network does not count what MPI's own allreduce sends: the survey is left."""
    nbytes, _ = simulate(exact_sum("dense_mpi"), size, 20_000, 500, "plain")
    predicted = cost.predict("sparse_allreduce", "dense_mpi", cost.Case(size, 20_000, 500, codec="plain"), PROFILE)
    assert predicted.nbytes == pytest.approx(nbytes + 2 * (size - 1) / size * 80_000)


@pytest.mark.parametrize("overlap", [0.5, 1.0])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_bytes_where_supports_overlap(size, overlap):
    for name in cost.FLAT:
        check(exact_sum(name), "sparse_allreduce", name, size, 20_000, 2000, "plain", overlap=overlap)


@pytest.mark.parametrize("size", [128, 257])
def test_bytes_and_rounds_at_many_ranks(size):
    for name in "recursive_doubling", "recursive_halving":
        check(exact_sum(name), "sparse_allreduce", name, size, 20_000, 100, "plain")


@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_rounds_of_the_others(size):
    length, entries = 200_000, 4000

    def gather(offer, channel):
        return allgather.dissemination(offer, channel)

    def split(offer, channel):
        return reduce_scatter.split(offer, channel, equal_ranges(length, channel.size))

    check(gather, "sparse_allgather", "dissemination", size, length, entries, "plain")
    check(split, "sparse_reduce_scatter", "split", size, length, entries, "smallest")
    for name in "recursive_doubling", "tree":
        nbytes, rounds = simulate(gtopk.ALGORITHMS[name], size, length, entries, "plain")
        predicted = cost.predict("gtopk_allreduce", name, cost.Case(size, length, entries, codec="plain"), PROFILE)
        assert predicted.nbytes == pytest.approx(nbytes, rel=0.1), name
        assert rounds <= predicted.rounds <= rounds + (name == "tree") * math.ceil(math.log2(size))


@pytest.mark.parametrize("size", [2, 3, 8, 16, 64, 257])
def test_bytes_of_the_exact_gtopk(size):
    nbytes, rounds = simulate(gtopk.ALGORITHMS["exact"], size, 20_000, 1000, "plain")
    predicted = cost.predict("gtopk_allreduce", "exact", cost.Case(size, 20_000, 1000, codec="plain"), PROFILE)
    assert predicted.nbytes == pytest.approx(nbytes, rel=0.1)
    assert predicted.rounds == rounds


@pytest.mark.parametrize(
    ("nodes", "distance", "crossing"),
    [
        (1, 4, (False, 1)),
        (2, 2, (False, 1)),
        (2, 4, (True, 4)),
        (4, 1, (False, 1)),
        (4, 2, (True, 2)),
        (8, 1, (True, 1)),
    ],
)
def test_ranks_are_on_different_nodes_from_the_distance_of_a_node_on(nodes, distance, crossing):
    case = cost.Case(8, 1000, 10, nodes=nodes)
    assert cost.Model(case, PROFILE).crossing(distance) == crossing
