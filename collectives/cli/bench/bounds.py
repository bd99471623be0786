"""The least bytes that a rank has to send, on average over the ranks: what is left to gain over it.

Entries: an exact sum on all ranks takes at least k + K (P-2)/P (SparCML, arXiv 1802.08021), a global top-k 2 f k, with
k entries of a rank, K of the union, f = (P-1)/P; to hand every rank's vector to all takes (P-1) k, to hand every owner
its equal share f k. Bytes: the sign and the fraction of a value, as the exponent may be that of all of them, and the
entropy of the place of k of n independent positions. Supports that have a pattern, and fractions that end early, could
be told in fewer.
"""

from collectives.cost import index_bits, least_value_nbytes


def least_nbytes(subject: str, ranks: int, length: int, k: int, union: int, value_nbytes: int) -> float:
    """Return the least bytes of a collective: "allreduce", "reduce_scatter", "allgather" or "gtopk"."""
    own, summed = (least_value_nbytes(value_nbytes) + index_bits(entries / length) / 8 for entries in (k, union))
    others = (ranks - 1) / ranks
    if subject == "allreduce":
        return max(0.0, k * own + union * (ranks - 2) / ranks * summed)
    return {"reduce_scatter": others, "allgather": ranks - 1, "gtopk": 2 * others}[subject] * k * own


def dense_nbytes(subject: str, ranks: int, length: int, value_nbytes: int) -> float:
    """Return the least bytes of MPI's own sum of dense vectors, scattered or on all ranks."""
    return (1 if subject == "reduce_scatter" else 2) * (ranks - 1) / ranks * length * value_nbytes
