"""Every schedule at every number of ranks from 1 to 1024: all ranks at once, as arrays, where the functions allow it.

That every contribution arrives exactly once is seen by random 64-bit weights: a sum of
the weights is the sum of all of them only when each went in once.
"""

import math

import numpy as np
import pytest

from collectives.planning.schedule import (
    butterfly,
    core_size,
    dissemination,
    fold_partner,
    groups,
    hearing,
    rotation,
    tree_children,
    tree_parent,
)

SIZES = range(1, 1025)


def weights(size):
    return np.random.default_rng(size).integers(0, 2**63, size, np.uint64)


def test_the_core_is_the_largest_power_of_two():
    for size in SIZES:
        core = core_size(size)
        assert core <= size < 2 * core
        assert core & (core - 1) == 0


def test_butterfly_partners_agree_and_every_contribution_arrives_once():
    for core in (2**power for power in range(11)):
        ranks, held = np.arange(core), weights(core)
        rounds = list(butterfly(ranks, core))
        assert len(rounds) == math.log2(core)
        for step, partners in enumerate(rounds):
            np.testing.assert_array_equal(partners[partners], ranks)
            held = held + held[partners]
            block = 2 ** (step + 1)
            # the ranks of a block hold the same
            assert (held == np.repeat(held[::block], block)).all()
        assert (held == weights(core).sum()).all()


def test_fold_partners_are_pairs_and_no_rank_beyond_the_core_is_left_out():
    for size in SIZES:
        core = core_size(size)
        partners = [fold_partner(rank, size) for rank in range(size)]
        assert all(partners[rank] is not None for rank in range(core, size))
        assert all(
            partner is None or partners[partner] == rank
            for rank, partner in enumerate(partners)
        )
        assert sum(partner is not None for partner in partners) == 2 * (size - core)


def test_dissemination_brings_every_block_to_every_rank_once_and_in_order():
    for size in SIZES:
        ranks, held = np.arange(size), 1  # the blocks from a rank's own on
        rounds = list(dissemination(ranks, size))
        assert len(rounds) == math.ceil(math.log2(size))
        for dest, source, blocks in rounds:
            # every message has a receiver
            np.testing.assert_array_equal(dest[source], ranks)
            # and begins where this rank's end
            np.testing.assert_array_equal(source, (ranks + held) % size)
            assert blocks <= held
            held += blocks
        assert held == size


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_tree_reaches_every_rank_once_from_any_root(place):
    for size in SIZES:
        root = {"first": 0, "middle": size // 2, "last": size - 1}[place]
        parents = [tree_parent(rank, size, root) for rank in range(size)]
        children = [list(tree_children(rank, size, root)) for rank in range(size)]
        assert parents[root] is None
        assert sorted(child for mine in children for child in mine) == [
            rank for rank in range(size) if rank != root
        ]
        assert all(
            parents[child] == rank
            for rank, mine in enumerate(children)
            for child in mine
        )
        assert rounds_to(root, children) <= math.ceil(math.log2(size))


def rounds_to(rank, children):
    """Return the rounds of a reduction to `rank`: its children deliver one after the other, the smallest first."""
    ready = 0
    for child in children[rank]:
        ready = 1 + max(ready, rounds_to(child, children))
    return ready


def test_in_a_rotation_every_rank_meets_every_other_one_and_every_message_has_a_receiver():
    for size in [*range(1, 257), 511, 512, 1000]:
        ranks, contributed = np.arange(size), weights(size)
        held = contributed.copy()
        for dest, source in rotation(ranks, size):
            assert (dest[source] == ranks).all()
            held += contributed[source]
        assert (held == contributed.sum()).all()


def test_every_rank_is_heard_once_and_those_of_recursive_doubling_first():
    for size in range(1, 66):
        for rank in range(size):
            order = hearing(rank, size)
            assert sorted(order) == [other for other in range(size) if other != rank]
            core = core_size(size)
            if rank < core:
                partners = list(butterfly(rank, core))
                folds = [rank + core] if rank + core < size else []
                assert list(order[: len(folds) + len(partners)]) == folds + partners


def test_groups_keep_the_order_of_the_ranks():
    marks = 0, 0, 2, 0, 2, 5
    assert groups(marks) == ((0, 1, 3), (2, 4), (5,))
    assert groups(()) == ()
