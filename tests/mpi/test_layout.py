"""The buckets of an exchange between nodes: their bytes follow from the links, on all ranks alike."""

from functools import partial

import numpy as np
import pytest

from collectives import GradientExchange, sparse_allreduce, traffic
from collectives.calls.first_call import link_of
from collectives.planning.links import NETWORKS, SHORTEST_MESSAGE, Links
from collectives.runtime.link import groups
from mpicomp import AdaComp, ChunkedTopK, Compressor, Dense, ErrorFeedback, TopK

pytestmark = pytest.mark.small_groups

LENGTH = 2**15  # of a tensor of 128 KiB
COUNT = 40
SLOWEST = Links(1e-5, 1e5)
# so that the number of messages does not depend on the length
BY_DOUBLING = {
    "compressor": TopK(0.1),
    "collective": partial(sparse_allreduce, algorithm="recursive_doubling"),
}


def gradients(comm):
    rng = np.random.default_rng(comm.rank)
    return {str(i): rng.standard_normal(LENGTH, np.float32) for i in range(COUNT)}


@pytest.fixture
def on_links(comm):
    """Return a function that puts each rank on a node of its own, between which there are such links."""
    link = before = None

    def move(links):
        nonlocal link, before
        link = link_of(comm)
        before = before or (link.nodes, link.choice)
        link.nodes = tuple(range(comm.size))
        link.by_node = groups(link.nodes)
        link.choice = links

    yield move
    if link is not None:
        link.nodes, link.choice = before
        link.by_node = groups(link.nodes)


def test_a_slower_link_has_shorter_buckets():
    for sent in 0.01, 1 / 8:
        sizes = [NETWORKS[name].bucket_nbytes(sent, 2) for name in ("100mbit", "1gbit")]
        assert sizes[0] < sizes[1]
    slow = NETWORKS["100mbit"]
    assert slow.bucket_nbytes(1 / 8, 2) < slow.bucket_nbytes(0.01, 2)
    assert slow.bucket_nbytes(0, 2) == np.inf
    assert SLOWEST.bucket_nbytes(0.5, 4) == 8 * SHORTEST_MESSAGE


@pytest.mark.at_least(2)
@pytest.mark.parametrize("settings", [{"bits": 4}, {"compressor": TopK(0.3)}], ids=repr)
def test_buckets_between_nodes_are_short_on_a_slow_link(comm, on_links, settings):
    def buckets(**more):
        exchange = GradientExchange(comm, **settings, **more)
        exchange.register(gradients(comm))
        return [bucket.length for bucket in exchange.buckets]

    assert len(buckets()) == 1, "of 2^25 bytes inside a node"
    on_links(NETWORKS["100mbit"])
    sizes = buckets()
    assert len(sizes) > 2
    assert len({*comm.allgather(str(sizes))}) == 1
    assert len(buckets(bucket_nbytes=2**25)) == 1
    on_links(NETWORKS["ndr"])
    assert len(buckets()) == 1


@pytest.mark.at_least(2)
def test_ranks_with_other_densities_have_the_same_buckets(comm, on_links):
    on_links(NETWORKS["100mbit"])
    exchange = GradientExchange(comm, TopK(0.5 / (1 + 9 * comm.rank)))
    exchange(gradients(comm))
    assert len(exchange.buckets) > 2


@pytest.mark.at_least(2)
@pytest.mark.parametrize("compressor", [AdaComp(50), TopK(k=9)], ids=repr)
def test_buckets_of_what_is_not_known_before_are_those_inside_a_node(
    comm, on_links, compressor
):
    on_links(NETWORKS["100mbit"])
    exchange = GradientExchange(comm, compressor)
    exchange.register(gradients(comm))
    assert len(exchange.buckets) == 1


@pytest.mark.at_least(2)
@pytest.mark.unchecked("sends more")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"bits": 8}, marks=pytest.mark.slow),
        {"bits": 4},
        pytest.param({"bits": 2}, marks=pytest.mark.slow),
        {"bits": 1},
        {"compressor": TopK(0.1)},
        {"compressor": TopK(0.3), "average": "contributors"},
        {"compressor": ChunkedTopK(k=8, chunk=64)},
    ],
    ids=repr,
)
def test_bytes_grow_by_2_percent_at_most(comm, on_links, settings):
    on_links(SLOWEST)
    mine = gradients(comm)
    sent = []
    for more in {}, {"bucket_nbytes": 2**25}:
        exchange = GradientExchange(comm, **settings, **more)
        exchange(mine)
        before = traffic(comm).nbytes
        exchange(mine)
        sent.append(traffic(comm).nbytes - before)
        sent.append(len(exchange.buckets))
    assert sent[1] > 3
    assert sent[3] == 1
    assert sent[0] <= 1.02 * sent[2]


def test_the_fraction_that_a_compressor_selects_is_expected():
    class Own(Compressor):
        def compress(self, corrected, *, gradient=None):
            return Dense().compress(corrected)

    assert Own().fraction is None
    assert TopK(k=3).fraction is None
    assert TopK(0.25).fraction == 0.25
    assert ChunkedTopK(k=8, chunk=64).fraction == 0.125
    assert Dense().fraction == 1


@pytest.mark.at_least(2)
def test_a_sum_of_the_users_own_has_the_buckets_inside_a_node(comm, on_links):
    """It blocks, so nothing is hidden behind it."""

    def own(vector, comm):
        return sparse_allreduce(vector, comm)

    on_links(NETWORKS["100mbit"])
    exchange = GradientExchange(comm, TopK(0.5), ErrorFeedback(), own)
    exchange.register(gradients(comm))
    assert len(exchange.buckets) == 1


@pytest.mark.at_least(2)
@pytest.mark.parametrize("settings", [{"bits": 4}, BY_DOUBLING], ids=repr)
def test_a_step_has_one_agreement_for_any_number_of_buckets(comm, settings):
    mine = gradients(comm)
    sent = []
    for buckets in 1, 2, 4:
        nbytes = 4 * LENGTH * COUNT // buckets
        exchange = GradientExchange(comm, **settings, bucket_nbytes=nbytes)
        exchange(mine)
        assert len(exchange.buckets) == buckets
        before = traffic(comm).messages
        exchange(mine)
        sent.append(traffic(comm).messages - before)
    one, two, four = sent
    of_a_bucket = two - one
    assert four == two + 2 * of_a_bucket
    assert one > of_a_bucket, "the agreement"
