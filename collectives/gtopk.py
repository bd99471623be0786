"""gTop-k: the k largest entries of a sum, without computing the whole sum. Costs: docs/contributing/costs.md.

Source: S. Shi et al., "A distributed synchronous SGD algorithm with global Top-k
sparsification for low bandwidth networks", ICDCS 2019 (arXiv 1901.04359). `tree` is the
published algorithm, the baseline.

`exact` and `node_leaders` have no search for a threshold, whose rounds would carry only
counts (as in P. Cao and Z. Wang, "Efficient top-k query calculation in distributed
networks", PODC 2004): see `largest_of_all`.

Invariant: after round j the 2^(j+1) ranks of a block hold the same vector, bitwise,
because merge() is commutative and top_k() breaks ties by index; so they drop the same
entries, and each keeps its share of these as `rejected`.

Differences from the paper: any P; unequal k; nothing is lost. Except for the exact
algorithms the result approximates the k largest, as in the paper: an entry that is
small in every block is dropped although its sum may be large.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from collectives.calls.call import Call, Codec, Comm, Prepared, sound, with_rejected
from collectives.calls.collective import collective
from collectives.planning.choice import choose
from collectives.planning.partition import cut, equal_bounds, likely
from collectives.reduce_scatter import scatter
from collectives.runtime.group import Group, Part, vectors_of
from collectives.runtime.link import Link
from collectives.runtime.messages import Steps
from collectives.runtime.patterns import (
    Combine,
    add,
    compare_by_doubling,
    doubling,
    hand_down,
    reduce_up,
)
from mpicomp.settings import LARGEST, to_integer
from mpicomp.vector import (
    SparseVector,
    add_up,
    count_up,
    intersection,
    join,
    merge,
    partition,
    top_k,
    without_zeros,
)

TYPICAL_DENSITY = 0.001  # where the call has no k

Result = tuple[SparseVector, SparseVector]


def to_count(k: Any, size: int) -> int | None:
    """Return k as an integer of Python's, at least 1, or None."""
    remedy = "; from a density take max(1, round(density * length))"
    return None if k is None else to_integer("k", k, 1, LARGEST, remedy=remedy)


@collective(with_rejected, compare=compare_by_doubling, checks={"k": to_count})
def gtopk_allreduce(
    vector: SparseVector,
    comm: "Comm",
    k: int | None = None,
    *,
    algorithm: Literal[
        "auto", "recursive_doubling", "tree", "exact", "node_leaders"
    ] = "auto",
    codec: Codec = "auto",
) -> Call[Result]:
    """Sum the vectors of all ranks and select k entries of large magnitude, the same on every rank.

    result + the sum of all ranks' rejected is the sum of all vectors, bitwise where the
    additions are exact, as on integer-valued floats.

    Args:
        vector: this rank's summand, of numbers, with any number of entries; one length and
            dtype on all ranks.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        k: entries to select, at least 1, the same on all ranks. None: in each round the
            largest number of entries of a rank merged so far.
        algorithm: "auto", the fastest, exact or not, by the estimates of `mpicomp explain`
            (without `k` for a thousandth of the length); "recursive_doubling"; "tree", as
            published, which "auto" never takes; "exact", the k largest of the sum with the
            fewest bytes; or "node_leaders", also exact, for several ranks on each of several
            nodes. The same on all ranks.
        codec: format of the messages, as in `sparse_allreduce`.

    Returns:
        A pair (result, rejected). `result` has at most k entries in the order of their
        indices, the same bits on every rank; of equal magnitudes an exact algorithm takes
        the lowest indices. `rejected` has the entries that this rank must keep, for example
        in its residual.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: `vector` has rows, or an argument of this rank has a wrong value; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    Source: S. Shi et al., ICDCS 2019 (arXiv 1901.04359).

    >>> result, rejected = gtopk_allreduce(TopK(k=2).compress(gradient), comm, k=1)
    >>> result.values.tolist(), rejected.values.tolist()
    ([-3.0], [2.0])
    """
    return Call(vector, comm, algorithm, codec, {"k": k}, prepare=numbers)


gtopk_iallreduce = gtopk_allreduce.nonblocking


def numbers(vector: Any, compared: Mapping[str, Any], link: Link) -> Prepared:
    """Return the vector if it is valid; raise ValueError for rows, which have no magnitude to select by."""
    prepared = sound(vector, compared, link)
    if prepared.width is not None:
        raise ValueError(
            f"vector has rows of {prepared.width} values: gTop-k selects numbers; take sparse_allreduce"
        )
    return prepared


def selecting(
    vector: SparseVector, group: Group, k: int | None
) -> tuple[Part, list[SparseVector], Combine]:
    """Return the k largest of a vector, a list for this rank's rejected entries, and a function that combines parts.

    That keeps the k largest of the sum; of what a block rejects each of its ranks keeps
    its share.
    """
    count = vector.nnz if k is None else k
    kept = vector
    collected = [SparseVector.empty(vector.length, vector.dtype, like=vector.values)]
    if vector.nnz > count:
        kept, *collected = top_k(vector, count)

    def combine(ours: Part, theirs: Part, block: int) -> Part:
        count = max(ours[1], theirs[1])
        kept, dropped = top_k(merge(ours[0], theirs[0]), count)
        collected.append(dropped.every(block, group.rank % block))
        return kept, count

    return (kept, count), collected, combine


@gtopk_allreduce.auto
def auto(vector: SparseVector, group: Group, k: int | None = None) -> Steps[Result]:
    """Run the fastest algorithm by what all ranks know: the supports count as independent, as asking takes a round."""
    entries = max(1, round(TYPICAL_DENSITY * vector.length)) if k is None else k
    entries = min(vector.length, entries)
    case = group.case(vector.length, entries, value_nbytes=vector.value_nbytes)
    name = choose("gtopk_allreduce", case, group.link.choice)
    group.algorithm = name
    return gtopk_allreduce.algorithms[name](vector, group, k=k)


@gtopk_allreduce.algorithm(compares_calls=True)
def recursive_doubling(
    vector: SparseVector, group: Group, k: int | None = None
) -> Steps[Result]:
    """Merge with a partner at doubling distance and keep the k largest; see the module."""
    part, rejected, combine = selecting(vector, group, k)
    result, _ = yield from doubling(part, group, combine)
    return result, add_up(rejected)


@gtopk_allreduce.algorithm()
def tree(vector: SparseVector, group: Group, k: int | None = None) -> Steps[Result]:
    """Select over a tree to rank 0, and broadcast: as published, but the rank that drops an entry keeps it."""
    part, rejected, combine = selecting(vector, group, k)
    total, _ = yield from reduce_up(part, group, combine)
    result = yield from hand_down(total, group)
    return result, add_up(rejected)


@gtopk_allreduce.algorithm(compares_calls=True)
def exact(vector: SparseVector, group: Group, k: int | None = None) -> Steps[Result]:
    """Sum every share on its owner, which keeps the rejected entries, and select from the owners' sums.

    In the first step every rank sends to every other one, which compares the call
    signatures.
    """
    parts = yield from scatter(vector, group, equal_bounds(vector.length, group.size))
    # Entries that cancelled out are dropped: no rank has to keep them.
    share = without_zeros(add_up(vectors_of(parts)))
    if k is None:
        k = max(count for _, count in parts)
    entries = sum(count for _, count in parts)
    here = sum(theirs.nnz for theirs, _ in parts)
    # The parts would keep the memory of nearly k entries until the end.
    del parts
    return (
        yield from largest_of_all(
            share, k, likely(k * here / max(entries, 1), group.size), join, group
        )
    )


@gtopk_allreduce.algorithm()
def node_leaders(
    vector: SparseVector, group: Group, k: int | None = None
) -> Steps[Result]:
    """Reduce inside each node to its first rank, select the k largest of their sum, and broadcast inside each node.

    Every rank keeps its own entries at all other indices, also those whose sum is zero.
    """
    node = group.node()
    count = vector.nnz if k is None else k
    result, count = yield from reduce_up((vector, count), node, add)
    if node.rank == 0:
        result = yield from largest_of_sum(result, count, group.lane(node))
    result = yield from hand_down(result, node)
    return result, partition(vector, result)[1]


def largest_of_sum(vector: SparseVector, k: int, group: Group) -> Steps[SparseVector]:
    """Return the k largest of the sum of vectors; values are sent only for indices that several ranks have.

    The owner of a share receives the indices in it, and requests the values of those
    that several ranks have: then every rank holds disjoint entries of the sum.
    """
    parts = cut(vector, equal_bounds(vector.length, group.size))
    supports = yield from group.all_to_all(
        [part.support() for part in parts], vector.nnz
    )
    counts = count_up(vectors_of(supports))
    several = counts.divide(np.flatnonzero(counts.values > 1))[0]
    asked = yield from group.all_to_all(
        [intersection(theirs, several) for theirs, _ in supports], k
    )
    sent, kept = zip(
        *[
            partition(part, wanted)
            for part, (wanted, _) in zip(parts, asked, strict=True)
        ],
        strict=True,
    )
    received = vectors_of((yield from group.all_to_all(sent)))
    here = sum(part.nnz for part in (*kept, *received))
    k = max(most for _, most in asked)
    entries = sum(count for _, count in supports)
    # Zeros are dropped, as `top_k` selects none.
    held = without_zeros(merge(join(kept), add_up(received)))
    quota = likely(k * here / max(entries, 1), group.size)
    return (yield from largest_of_all(held, k, quota, add_up, group))[0]


def largest_of_all(
    held: SparseVector,
    k: int,
    quota: int,
    unite: Callable[[Sequence[SparseVector]], SparseVector],
    group: Group,
) -> Steps[Result]:
    """Return the k largest of the disjoint entries of all ranks, and this rank's rejected entries.

    Each rank sends its largest entries first, `quota` at a time. Once one of a rank is
    rejected, its remaining entries cannot be selected; every other rank sends another
    batch: as many as it has sent so far, or k/P, whichever is larger. So the first
    allgather sends about k entries, any other one at most 2k + P, and there are at most
    ceil(lg P) + 2. unite: a function that adds up the entries of all ranks.
    """
    left = held
    chance = min(held.nnz, k)
    sent = 0
    result = rejected = group.nothing
    waited = set(range(group.size))  # the ranks that may have more
    while waited:
        some, left = top_k(left, min(quota, chance))
        gathered = yield from group.gather(some, chance - some.nnz)
        result, dropped = top_k(merge(result, unite(vectors_of(gathered))), k)
        rejected = merge(rejected, intersection(dropped, held))
        waited = {
            rank
            for rank in waited
            if gathered[rank][1] and not intersection(gathered[rank][0], dropped).nnz
        }
        chance = 0
        if group.rank in waited:
            chance = intersection(left, top_k(merge(result, left), k)[0]).nnz
        sent += some.nnz
        quota = max(sent, -(-k // group.size))
    return result, merge(rejected, left)
