"""Compressed allreduce: the sum of sparse vectors, of which every owner compresses its share before it is gathered.

Sources: H. Tang, C. Yu, X. Lian, T. Zhang, J. Liu, "DoubleSqueeze: parallel stochastic
gradient descent with double-pass error-compensated compression", ICML 2019 (arXiv
1905.05957), with a server; H. Tang et al., "1-bit Adam", ICML 2021 (arXiv 2102.02888),
with shares in place of the server. Costs: docs/contributing/costs.md.

Invariant: result and rejected entries of all ranks are the sum of the vectors: an owner
adds the parts of its share in rank order, and keeps as `rejected` what it does not send
of their sum.

Differences from the papers: the error of a share is not kept apart, but returned to its
owner. A rank may contribute all entries of its own share, which it does not send:
`GradientExchange` does, and then the residual in this share is the server's.
"""

from collections.abc import Mapping
from typing import Any, Literal

from collectives.calls.call import Call, Codec, Comm, Prepared, with_rejected
from collectives.calls.collective import collective
from collectives.gtopk import Result, numbers
from collectives.planning.partition import equal_bounds
from collectives.reduce_scatter import sum_of_share
from collectives.runtime.group import Group, vectors_of
from collectives.runtime.link import Link
from collectives.runtime.messages import Steps
from collectives.runtime.progress import continue_on_callers_thread
from mpicomp.arrays.memory import read_only
from mpicomp.arrays.values import negated
from mpicomp.compressors import Compressor
from mpicomp.compressors.base import check_compressor, check_selected
from mpicomp.vector import SparseVector, check_range, join, merge, without_zeros


def own_share(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first index of a rank's share, and the first one after it."""
    bounds = equal_bounds(length, size)
    return bounds[rank], bounds[rank + 1]


@collective(with_rejected, own_share=own_share)
def compressed_allreduce(
    vector: SparseVector,
    comm: "Comm",
    compressor: Compressor,
    *,
    algorithm: Literal["auto", "split_allgather"] = "auto",
    codec: Codec = "auto",
) -> Call[Result]:
    """Sum the vectors of all ranks and compress the sum, so that both directions are compressed.

    Rank r of P sums the indices n r // P <= index < n (r + 1) // P, its share, and compresses
    that. result + the sum of all ranks' rejected is the sum of all vectors, bitwise where the
    additions are exact, as on integer-valued floats.

    Args:
        vector: this rank's summand, of numbers, with any number of entries; one length and
            dtype on all ranks.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        compressor: selects from each share, such as `TopK(density=0.01)`; a `k` is that of a
            share. Without a state between calls, with the same settings on all ranks.
        algorithm: "auto" or "split_allgather".
        codec: format of the messages, as in `sparse_allreduce`.

    Returns:
        A pair (result, rejected). `result` is the compressed sum, the same bits on every
        rank; `rejected` is what the compressor left of this rank's share, which this rank
        must keep, for example in its residual.

    Raises:
        TypeError: `compressor` has a state, or an argument of this rank is of a wrong type;
            other ranks raise CollectiveError.
        ValueError: `vector` has rows, or an argument of this rank has a wrong value; likewise.
        OverflowError: a sum of this rank's share leaves the range of its dtype; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    Source: H. Tang et al., DoubleSqueeze, ICML 2019 (arXiv 1905.05957).

    >>> vector = TopK(k=2).compress(gradient)
    >>> result, rejected = compressed_allreduce(vector, comm, TopK(k=1))
    >>> result.values.tolist(), rejected.values.tolist()
    ([-3.0], [2.0])
    """
    return Call(
        vector, comm, algorithm, codec, {"compressor": compressor}, prepare=prepared
    )


compressed_iallreduce = compressed_allreduce.nonblocking


def prepared(vector: Any, compared: Mapping[str, Any], link: Link) -> Prepared:
    """Return the vector if it and the compressor are valid; compare the compressor's settings as text."""
    compressor = compared["compressor"]
    check_compressor(compressor)
    if any(part.state for part in compressor.chain()):
        raise TypeError(
            f"compressor is {compressor!r}, which keeps a state between calls: expected a compressor of a sum without "
            "one, such as TopK(density=0.01)"
        )
    text = {"compressor": repr(compressor)}
    return numbers(vector, text, link)._replace(own={"second": compressor})


@compressed_allreduce.algorithm(compares_calls=True)
def split_allgather(
    vector: SparseVector, group: Group, compressor: str, second: Compressor
) -> Steps[Result]:
    """Sum every share on its owner, compress it there, and gather the results; see the module.

    The call signatures take no extra rounds: in the first step every rank sends to
    every other one.
    """
    share = yield from sum_of_share(
        vector, group, equal_bounds(vector.length, group.size)
    )
    yield from continue_on_callers_thread()  # the compressor may be the user's
    with group.raise_on_all():
        kept = compressed(
            share, *own_share(vector.length, group.rank, group.size), second
        )
        rejected = without_zeros(merge(share, kept.with_values(negated(kept.values))))
    return join(vectors_of((yield from group.gather(kept)))), rejected


def compressed(
    share: SparseVector, first: int, end: int, compressor: Compressor
) -> SparseVector:
    """Return the entries that a compressor selects of a sum in a range, which has all of its entries."""
    check_range(share.values, "sum over the ranks")
    own = SparseVector.trusted(share.indices - first, share.values, end - first)
    dense = own.to_dense()
    selected = compressor.compress(read_only(dense), gradient=dense)
    check_selected(selected, dense, compressor)
    indices = selected.indices.astype(share.indices.dtype, copy=False) + first
    return SparseVector.trusted(indices, selected.values, share.length)
