"""Quantised allreduce: the sum of dense arrays with every value in few bits, on the way to the sum and back.

Sources: H. Tang et al., "1-bit Adam", ICML 2021 (arXiv 2102.02888), for the compressed
allreduce with an error on both sides; H. Tang et al., "DoubleSqueeze", ICML 2019 (arXiv
1905.05957); G. Wang et al., "ZeRO++" (arXiv 2306.10209), for blocks of 4 bits and sums
inside nodes. Costs: docs/contributing/costs.md.

Invariant: each rank rounds each index once, when it sends its values or as the owner of
the sum, and `rejected` has the error. So result and rejected entries of all ranks are
the sum of the arrays. All ranks decode the same codes.

Differences from the papers: any number of ranks; the owner of a share adds to its own
values as they are, and rounds only the sum; scales have 8 significant bits, so that
errors need no rounding; shares are whole blocks.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from collectives.calls.call import Call, Prepared, Sum, with_rejected
from collectives.calls.collective import collective
from collectives.faults.errors import DamagedMessageError
from collectives.planning.choice import choose
from collectives.runtime.group import Group, vectors_of
from collectives.runtime.link import Link
from collectives.runtime.messages import LINE, Steps
from collectives.runtime.patterns import compare_by_doubling
from mpicomp.arrays import Array, Dtype
from mpicomp.arrays.device import kernels_for, on_device
from mpicomp.arrays.frameworks import like, to_values, writable_vector
from mpicomp.arrays.memory import address, check_apart, contiguous
from mpicomp.arrays.values import converted
from mpicomp.codec import few_bits_message, join_few_bits
from mpicomp.correction import Correction, in_parts
from mpicomp.few_bits import (
    BITS,
    BLOCKS,
    FewBits,
    coder,
    first_blocks,
    position,
    shares,
)
from mpicomp.means import CodedMean
from mpicomp.settings import to_choice
from mpicomp.vector import SparseVector

Result = tuple[CodedMean, Array]  # and this rank's errors

BLOCK = 256  # values with one scale, by default


def decoded_sum(result: Result) -> Sum:
    """Return the result of an algorithm as the `Sum` that the debug mode checks."""
    total, errors = result
    return Sum(total.values(), errors)


@collective(
    with_rejected,
    takes=Correction,
    promise=decoded_sum,
    compare=compare_by_doubling,
    checks={
        "bits": lambda bits, size: to_choice("bits", bits, BITS),
        "block": lambda block, size: to_choice("block", block, BLOCKS),
    },
)
def quantised_allreduce(
    array: Any,
    comm: Any,
    bits: int = 4,
    block: int = BLOCK,
    *,
    algorithm: Literal["auto", "direct", "node_lanes"] = "auto",
    out: tuple[Any, Any] | None = None,
) -> Call[tuple[Any, Any]]:
    """Sum an array over all ranks with every value in few bits, and return what was rounded away.

    total + the sum of all ranks' rejected is the sum of the arrays: bitwise if all partial
    sums are exact, as on small integers, else within the rounding of one addition a rank.
    With 2 and 1 bits a zero becomes the smaller magnitude of its block, and `rejected` has
    its negative. The page on collectives describes levels and scales.

    Args:
        array: this rank's summand, of any shape; float16, float32 or float64, of one size and
            dtype on all ranks; of NumPy, CuPy or a kind that supports DLPack.
        comm: an mpi4py intracommunicator; all its ranks call, in the same order.
        bits: of a value in a message, 8, 4, 2 or 1; the same on all ranks.
        block: consecutive values with one scale, a power of two from 32 to 65536; the same on
            all ranks.
        algorithm: "auto", the faster by the estimates of `mpicomp explain`; "direct"; or
            "node_lanes", for several ranks on each of several nodes, which does not round
            inside a node. The same on all ranks.
        out: a pair of output buffers for total and rejected, C-contiguous, of the size and
            dtype of `array`; new arrays by default. The second may be `array` itself, and no
            other part of its memory. Their contents are undefined after an error.

    Returns:
        A pair (total, rejected) of arrays of the kind, shape and dtype of `array`. `total` has
        the same bits on every rank; `rejected` is what this rank must keep, for example in
        its residual.

    Raises:
        TypeError: an argument of this rank is of a wrong type; other ranks raise
            CollectiveError.
        ValueError: an argument of this rank has a wrong value; likewise.
        CollectiveError: another rank's arguments are bad, or those that must agree differ.

    Source: H. Tang et al., 1-bit Adam, ICML 2021 (arXiv 2102.02888).

    >>> total, rejected = quantised_allreduce(gradient, comm, bits=8)
    >>> (total + rejected).tolist()  # of a single rank
    [0.5, -3.0, 0.25, 2.0]
    """
    return Call(
        array,
        comm,
        algorithm,
        arguments={"bits": bits, "block": block},
        prepare=partial(prepared, out=out),
    )


quantised_iallreduce = quantised_allreduce.nonblocking


def prepared(
    contribution: Any, compared: Mapping[str, Any], link: Link, *, out: Any
) -> Prepared:
    """Return the correction whose values the algorithms send, with float32 for float16.

    Raises TypeError or ValueError for bad arguments; values that are not finite are
    found by the algorithms.
    """
    if isinstance(contribution, Correction):
        correction = contribution
    else:
        values = contiguous(to_values(contribution))
        flat = values.reshape(-1)
        room, rejected = _outputs(out, flat)
        correction = Correction([flat], rejected)
    widened = correction.widened()

    def finish(result: Result) -> Any:
        total, errors = result
        if widened is not correction:
            correction.out[...] = converted(errors, correction.out.dtype)
        if correction is contribution:
            return total, correction.out
        total.write(room)
        if out is not None:
            return out
        return (
            like(room.reshape(values.shape), original=contribution),
            like(rejected.reshape(values.shape), original=contribution),
        )

    errors = correction.out
    return Prepared(
        widened,
        errors,
        errors.size,
        compared=compared,
        own={"dtype": errors.dtype},
        finish=finish,
        contributed=widened.values,
    )


def _outputs(out: Any, values: Array) -> tuple[Array, Array]:
    """Return the arrays of `out`, or new ones, as vectors; TypeError or ValueError unless the result fits."""
    if out is None:
        return np.empty_like(values), np.empty_like(values)
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"out is {type(out).__name__}: expected a tuple of two arrays, for the total and for rejected"
        )
    total, rejected = (writable_vector(array) for array in out)
    for array in (total, rejected):
        if (array.size, array.dtype, on_device(array)) != (
            values.size,
            values.dtype,
            on_device(values),
        ):
            raise ValueError(
                f"out has {array.size} values of {array.dtype}: expected {values.size} of {values.dtype}, in the "
                "memory of the array"
            )
    written = [total, rejected]
    # The output `rejected` may be the array itself, as each value is read before it is
    # written.
    if address(rejected) != address(values):
        written.append(values)
    check_apart(written)
    return total, rejected


@quantised_allreduce.auto
def auto(
    correction: Correction, group: Group, bits: int, block: int, dtype: Dtype
) -> Steps[Result]:
    """Run the algorithm that `collectives.planning.choice` takes for length and bits."""
    size = correction.out.size
    case = group.case(size, size, bits=bits)
    name = choose("quantised_allreduce", case, group.link.choice)
    group.algorithm = name
    run = quantised_allreduce.algorithms[name]
    return run(correction, group, bits=bits, block=block, dtype=dtype)


@quantised_allreduce.algorithm(compares_calls=True)
def direct(
    correction: Correction, group: Group, bits: int, block: int, dtype: Dtype
) -> Steps[Result]:
    """Send every owner its share, sum it there, and send the sum to all ranks; see the module."""
    parts = yield from shares_of_sum(
        correction,
        (0, first_blocks(correction.sizes, block)[-1]),
        bits,
        block,
        group,
        short=dtype == np.float16,
    )
    total = CodedMean(parts, correction.sizes)
    if not total.is_finite:
        # All ranks have the same codes, so all of them raise.
        yield from raise_not_finite(correction, group)
    return total, correction.out


def shares_of_sum(
    correction: Correction,
    blocks: tuple[int, int],
    bits: int,
    block: int,
    group: Group,
    *,
    short: bool,
) -> Steps[list[FewBits]]:
    """Return the shares of the sum over a group, one of each rank, and write this rank's errors.

    blocks: the first, and the one after the last, of those to sum. short: decoded
    values are exact in float16. A block of the sum is not finite if one of any rank is.
    """
    write = coder(correction, bits, block, short=short)

    def code(share: tuple[int, int], others: Sequence[FewBits] = ()) -> FewBits:
        size = (share[1] - share[0]) * block
        room = few_bits_message(size, bits, block, correction.out, line=LINE)
        return write(room, others, share)

    ranges = shares(*blocks, group.size)
    parts = [code(share) for rank, share in enumerate(ranges) if rank != group.rank]
    parts.insert(group.rank, few_bits_message(0, bits, block, correction.out))
    received = yield from group.all_to_all(parts)
    others = [theirs for rank, (theirs, _) in enumerate(received) if rank != group.rank]
    first, end = ranges[group.rank]
    size = (end - first) * block
    if any(
        (other.size, other.bits, other.block) != (size, bits, block) for other in others
    ):
        raise DamagedMessageError(
            f"received a damaged message: not {size} values in {bits} bits"
        )
    share = code((first, end), others)
    del parts, received, others
    return vectors_of((yield from group.all_to_all([share] * group.size)))


def raise_not_finite(correction: Correction, group: Group) -> Steps[None]:
    """Raise ValueError on a rank with a value that is not finite, and CollectiveError on the others.

    Without one the sum is out of range, and nothing is raised. In a block that is not
    finite the errors, which may have replaced the values, are the values.
    """
    with group.raise_on_all():
        correction.check(correction.values())
    yield from group.compare_calls()


@quantised_allreduce.algorithm()
def node_lanes(
    correction: Correction, group: Group, bits: int, block: int, dtype: Dtype
) -> Steps[Result]:
    """Reduce-scatter values inside each node, sum every share over the nodes in few bits, gather it inside each node.

    There are as many lanes as ranks in the smallest node; further ranks of larger nodes
    own no share.
    """
    sizes = correction.sizes
    errors = correction.out
    values = correction.values()
    with group.raise_on_all():
        correction.check(values)
    node = group.node()
    lanes = shares(0, first_blocks(sizes, block)[-1], min(map(len, group.by_node)))
    spans = [slice(*[position(end, sizes, block) for end in lane]) for lane in lanes]
    # Each part is a vector of one row, which is sent as it is.
    index = np.zeros_like(values, np.int32, shape=1)
    parts = [SparseVector.trusted(index, values[None, span], 1) for span in spans]
    absent = [group.nothing] * (node.size - len(lanes))
    received = yield from node.all_to_all(parts + absent)
    errors[...] = 0
    share = few_bits_message(0, bits, block, values, line=LINE)
    if node.rank < len(lanes):
        total = np.empty_like(values)
        own = total[spans[node.rank]]
        own[...] = 0
        for part, _ in received:
            kernels_for(own).add(own, part.values[0], own)
        shared = yield from shares_of_sum(
            Correction(in_parts(total, sizes), errors),
            lanes[node.rank],
            bits,
            block,
            group.lane(node),
            short=dtype == np.float16,
        )
        share = join_few_bits(shared, line=LINE)
    everywhere = yield from node.all_to_all([share] * node.size)
    coded = vectors_of(everywhere[: len(lanes)])
    return CodedMean(coded, sizes), errors
