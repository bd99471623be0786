import math

from hypothesis import given
from hypothesis import strategies as st

from collectives.schedule import (
    butterfly,
    core_size,
    dissemination,
    fold_partner,
    halving,
    rotation,
    tree_children,
    tree_parent,
)

SIZES = st.integers(1, 300)


@given(SIZES)
def test_the_core_is_the_largest_power_of_two(size):
    core = core_size(size)
    assert core <= size < 2 * core
    assert core & (core - 1) == 0


@given(SIZES)
def test_butterfly_partners_agree_and_all_hear_of_all(size):
    core = core_size(size)
    rounds = [list(butterfly(rank, core)) for rank in range(core)]
    heard = [{rank} for rank in range(core)]
    for step in range(int(math.log2(core))):
        partners = [mine[step] for mine in rounds]
        assert all(partners[partner] == rank for rank, partner in enumerate(partners))
        heard = [heard[rank] | heard[partners[rank]] for rank in range(core)]
        block = 2 ** (step + 1)
        assert heard == [set(range(rank // block * block, rank // block * block + block)) for rank in range(core)]
    assert all(len(known) == core for known in heard)


@given(SIZES)
def test_fold_partners_are_pairs_and_no_rank_beyond_the_core_is_left_out(size):
    core = core_size(size)
    partners = [fold_partner(rank, size) for rank in range(size)]
    assert all(partners[rank] is not None for rank in range(core, size))
    assert all(partner is None or partners[partner] == rank for rank, partner in enumerate(partners))
    assert sum(partner is not None for partner in partners) == 2 * (size - core)


@given(SIZES)
def test_dissemination_brings_every_block_to_every_rank_once_and_in_order(size):
    rounds = [list(dissemination(rank, size)) for rank in range(size)]
    held = [[rank] for rank in range(size)]
    assert {len(hops) for hops in rounds} == {math.ceil(math.log2(size))}
    for step in range(len(rounds[0])):
        hops = [mine[step] for mine in rounds]
        assert all(hops[hop.source].dest == rank for rank, hop in enumerate(hops))
        held = [held[rank] + held[hop.source][: hop.blocks] for rank, hop in enumerate(hops)]
    assert held == [[(rank + i) % size for i in range(size)] for rank in range(size)]


@given(SIZES)
def test_halving_leaves_every_core_rank_its_own_share(size):
    core = core_size(size)
    for rank in range(core):
        low, high = 0, core
        for partner in halving(rank, core):
            middle = (low + high) // 2
            low, high = (low, middle) if rank < partner else (middle, high)
        assert (low, high) == (rank, rank + 1)
        assert list(halving(rank, core)) == list(butterfly(rank, core))[::-1]


@given(SIZES, st.data())
def test_the_tree_reaches_every_rank_once_from_any_root(size, data):
    root = data.draw(st.integers(0, size - 1))
    parents = [tree_parent(rank, size, root) for rank in range(size)]
    children = [list(tree_children(rank, size, root)) for rank in range(size)]
    assert parents[root] is None
    assert sorted(child for mine in children for child in mine) == [rank for rank in range(size) if rank != root]
    assert all(parents[child] == rank for rank, mine in enumerate(children) for child in mine)
    depth = {root: 0}
    for _ in range(size):
        depth |= {child: depth[rank] + 1 for rank in list(depth) for child in children[rank]}
    assert len(depth) == size
    assert max(depth.values()) <= math.ceil(math.log2(size))


@given(SIZES)
def test_in_a_rotation_every_rank_meets_every_other_one_and_every_message_has_a_receiver(size):
    steps = [list(rotation(rank, size)) for rank in range(size)]
    for rank, mine in enumerate(steps):
        assert sorted(dest for dest, _ in mine) == [other for other in range(size) if other != rank]
        assert all(steps[source][step][0] == rank for step, (_, source) in enumerate(mine))
