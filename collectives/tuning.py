"""Choose an algorithm from what every rank knows: pure functions, so that all ranks choose alike."""

from collections.abc import Sequence

from mpicomp.vector import index_dtype

SMALL_PIECE = 64  # entries: below, a message costs its latency, and fewer of them are better
DIRECT_RANKS = 64  # up to here P - 1 messages of a split cost less than lg P rounds of larger ones


def expected_union(length: int, counts: Sequence[int]) -> float:
    """Return how many positions `counts` entries a rank take up together if the supports are independent."""
    missing = 1.0
    for count in counts:
        missing *= 1 - count / length if length else 1.0
    return length * (1 - missing)


def choose_allreduce(length: int, counts: Sequence[int], value_nbytes: int = 4) -> str:
    """Return the algorithm of `sparse_allreduce` for the ranks' numbers of entries, each with values of so many bytes.

    `recursive_doubling` for 2 ranks: one exchange, and no fewer bytes exist. `dense` when the expected union of
    independent supports is no smaller in plain form than the dense vector: half of the length for float32. `allgather` when the P^2 pieces of a split would have fewer than 64
    entries on average. Else `split_allgather` up to 64 ranks, which sends (P+1)/P of the bytes of an allgather when the
    supports are disjoint and far fewer when they overlap, and spreads the additions; `recursive_halving` above.
    """
    if len(counts) <= 2:
        return "recursive_doubling"
    if sum(counts) < SMALL_PIECE * len(counts) ** 2:
        return "allgather"
    if expected_union(length, counts) * (value_nbytes + index_dtype(length).itemsize) >= length * value_nbytes:
        return "dense"
    return "split_allgather" if len(counts) <= DIRECT_RANKS else "recursive_halving"
