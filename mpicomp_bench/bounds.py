"""Lower bounds of the bytes that a rank sends, on average over the ranks.

Entries: an exact sum on all ranks takes at least k + K (P-2)/P (SparCML, arXiv
1802.08021), k entries of the sum 2 f k, with k entries of a rank, K of the union, f =
(P-1)/P; an allgather takes (P-1) k, a reduce-scatter to equal shares f k. Bytes: the
sign and the fraction of a value, as all may share one exponent, and the entropy of the
indices of k of n independent positions. Supports with a pattern, and fractions with
trailing zeros, could take fewer.
"""

import math

# Bits of the fraction of a value, by the bytes of the value.
FRACTION_BITS = {2: 10, 4: 23, 8: 52}


def least_nbytes(
    collective: str, ranks: int, length: int, k: float, union: float, value_nbytes: int
) -> float:
    """Return the lower bound of a collective, by its name; 0 if none is known here."""
    own, summed = (
        (1 + FRACTION_BITS[value_nbytes] + index_bits(each / length)) / 8
        for each in (k, union)
    )
    others = (ranks - 1) / ranks
    return {
        "sparse_allreduce": max(0.0, k * own + union * (ranks - 2) / ranks * summed),
        "gtopk_allreduce": 2 * others * k * own,
        "compressed_allreduce": 2 * others * k * own,
        "sparse_reduce_scatter": others * k * own,
        "sparse_allgather": (ranks - 1) * k * own,
        "dense_allreduce": dense_nbytes(ranks, length, value_nbytes),
    }.get(collective, 0.0)


def dense_nbytes(
    ranks: int, length: int, value_nbytes: int, *, scattered: bool = False
) -> float:
    """Return the lower bound of a dense allreduce, or of a dense reduce-scatter."""
    return (1 if scattered else 2) * (ranks - 1) / ranks * length * value_nbytes


def index_bits(density: float) -> float:
    """Return the entropy of an index of a random support, in bits: about log2(1 / density) + 1.44 at low density."""
    if not 0 < density < 1:
        return 0.0
    return -math.log2(density) - (1 - density) * math.log1p(
        -density
    ) / density / math.log(2)
