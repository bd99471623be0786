"""Quantised allreduce: the sum of dense arrays with every value in few bits, on the way to the sum and back.

Sources: H. Tang et al., "1-bit Adam", ICML 2021 (arXiv 2102.02888), for the compressed
allreduce with an error on both sides; H. Tang et al., "DoubleSqueeze", ICML 2019 (arXiv
1905.05957); G. Wang et al., "ZeRO++" (arXiv 2306.10209), for blocks of 4 bits and sums
inside nodes. Costs and errors: docs/collectives.md.

Invariant: each rank rounds each index once, when it sends its values or as the owner of
the sum, and `rejected` has the error. So result and rejected entries of all ranks are
the sum of the arrays. All ranks decode the same codes.

Differences from the papers: any number of ranks; the owner of a share adds to its own
values as they are, and rounds only the sum; scales have 8 significant bits, so that
errors need no rounding; shares are whole blocks.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from collectives.planning.choice import algorithm_for
from collectives.runtime.collective import Call, collective, with_rejected
from collectives.runtime.group import Group
from collectives.runtime.messages import LINE, Steps
from collectives.runtime.patterns import compare_by_doubling
from mpicomp.arrays import (
    Array,
    check_apart,
    contiguous,
    kernels_for,
    like,
    on_device,
    rounded,
    to_values,
    writable_vector,
)
from mpicomp.codec import few_bits_message
from mpicomp.errors import DamagedMessageError
from mpicomp.few_bits import (
    BITS,
    BLOCKS,
    FewBits,
    as_they_are,
    block_bounds,
    join,
    quantise,
)
from mpicomp.settings import to_choice
from mpicomp.vector import SparseVector

Result = tuple[Array, Array]

BLOCK = 256  # values with one scale, by default


@collective(
    with_rejected,
    takes_arrays=True,
    takes_out=True,
    block=BLOCK,
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
    """Sum an array over all ranks, with every value in few bits, and return what was rounded away.

    array: any shape, float16, float32 or float64, of one size and dtype on all ranks;
    see `mpicomp.arrays` for the kinds. bits: of a value, 8, 4, 2 or 1; block:
    consecutive values with one scale, a power of two from 32 to 65536; both the same on
    all ranks (docs/collectives.md describes levels and scales). algorithm: "direct";
    "node_lanes", for several ranks on each of several nodes, which does not round
    inside a node; or "auto", which chooses by `collectives.planning.choice`.

    out: two C-contiguous arrays of the size and dtype of `array`, of which the second
    may be `array` itself: they are written to and returned, which saves the time to map
    new memory. Their contents are undefined if an error is raised.

    Returns (total, rejected), arrays of the same kind, shape and dtype. total: the same
    bits on every rank. rejected: what this rank must keep, for example in its residual.
    total + the sum of all ranks' rejected is the sum of the arrays: bitwise if all
    partial sums are exact, as on small integers, else within the rounding of one
    addition a rank. With 2 and 1 bits a zero becomes the smaller magnitude of its
    block, and `rejected` has its negative.

    >>> total, rejected = quantised_allreduce(gradient, comm, bits=8)
    >>> (total + rejected).tolist()  # of a single rank
    [0.5, -3.0, 0.25, 2.0]
    """
    return Call(
        array,
        comm,
        algorithm,
        arguments={"bits": bits, "block": block},
        own={"out": out},
        prepare=prepared,
    )


quantised_iallreduce = quantised_allreduce.nonblocking


def prepared(call: Call[Any], size: int) -> SparseVector:
    """Return an empty vector of length and dtype of the array, for the call signature; store the array in the call.

    Raises TypeError or ValueError for bad arguments; values that are not finite are
    found by the algorithms.
    """
    given = call.contribution
    out = call.own["out"]
    values = contiguous(to_values(given))
    flat = values.reshape(-1)
    dtype = values.dtype
    outputs = None if out is None else _outputs(out, flat)
    wide = flat.astype(np.promote_types(dtype, np.float32), copy=False)
    buffers = (
        outputs
        if outputs and wide.dtype == dtype
        else (np.empty_like(wide), np.empty_like(wide))
    )
    call.own = {"array": wide, "out": buffers}

    def finish(result: Result) -> tuple[Any, Any]:
        if outputs is None:
            total, rejected = (
                rounded(each, dtype).reshape(values.shape) for each in result
            )
            return like(total, original=given), like(rejected, original=given)
        if buffers is not outputs:  # float16
            outputs[0][...] = rounded(result[0], dtype)
            outputs[1][...] = rounded(result[1], dtype)
        return out  # type: ignore[no-any-return]

    call.finish = finish
    return SparseVector.empty(flat.size, dtype, like=flat)


def _outputs(out: Any, values: Array) -> Result:
    """Return the arrays of `out` as vectors; TypeError or ValueError unless the result for these values fits."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"out is {type(out).__name__}: expected a tuple of two arrays, for the total and for rejected"
        )
    total, rejected = (writable_vector(each) for each in out)
    for each in (total, rejected):
        if (each.size, each.dtype, on_device(each)) != (
            values.size,
            values.dtype,
            on_device(values),
        ):
            raise ValueError(
                f"out has {each.size} values of {each.dtype}: expected {values.size} of {values.dtype}, in the memory "
                "of the array"
            )
    check_apart([total, rejected])
    check_apart([total, values])
    return total, rejected


def decoded(parts: Sequence[FewBits], out: Result) -> Result:
    """Write the parts of the sum to the first array of `out`, and return both."""
    start = 0
    for part in parts:
        part.write(out[0][start : start + part.size])
        start += part.size
    return out


@quantised_allreduce.auto
def auto(
    vector: SparseVector, group: Group, bits: int, block: int, array: Array, out: Result
) -> Steps[Result]:
    """Run the algorithm that `collectives.planning.choice` takes for length and bits."""
    name = algorithm_for("quantised_allreduce", vector, group, vector.length, bits=bits)
    run = quantised_allreduce.algorithms[name]
    return run(vector, group, bits=bits, block=block, array=array, out=out)


@quantised_allreduce.algorithm(compares_calls=True)
def direct(
    vector: SparseVector, group: Group, bits: int, block: int, array: Array, out: Result
) -> Steps[Result]:
    """Send every owner its share, sum it there, and send the sum to all ranks; see the module."""
    short = vector.dtype == np.float16
    return decoded(
        (
            yield from shares_of_sum(
                array, out[1], bits, block, group, short=short, checked=True
            )
        ),
        out,
    )


def shares_of_sum(
    values: Array,
    rejected: Array,
    bits: int,
    block: int,
    group: Group,
    *,
    short: bool,
    checked: bool = False,
) -> Steps[list[FewBits]]:
    """Return the shares of the sum over a group, one of each rank, and write this rank's errors to `rejected`.

    short: decoded values are exact in float16. checked: refuse values that are not
    finite, as the scales tell: their errors are the values, which `rejected` may
    replace.
    """

    def code(start: int, end: int, others: Sequence[FewBits] = ()) -> FewBits:
        room = few_bits_message(end - start, bits, block, values, line=LINE)
        return quantise(
            values[start:end], rejected[start:end], room, others, short=short
        )

    bounds = block_bounds(values.size, block, group.size)
    parts = [
        code(*pair) for rank, pair in enumerate(pairwise(bounds)) if rank != group.rank
    ]
    if checked and not all([part.is_finite() for part in parts]):
        refuse_not_finite(values, group)
    parts.insert(group.rank, as_they_are(values[:0], block))
    received = yield from group.all_to_all(parts)
    others = [theirs for rank, (theirs, _) in enumerate(received) if rank != group.rank]
    start, end = bounds[group.rank : group.rank + 2]
    if any(
        (each.size, each.bits, each.block) != (end - start, bits, block)
        for each in others
    ):
        raise DamagedMessageError(
            f"received a damaged message: not {end - start} values in {bits} bits"
        )
    share = code(start, end, others)
    # if this rank's values are finite, the sum is out of range on all ranks
    if checked and not share.is_finite():
        refuse_not_finite(values, group)
    del parts, received, others
    return [theirs for theirs, _ in (yield from group.all_to_all([share] * group.size))]


def refuse_not_finite(values: Array, group: Group) -> None:
    """Raise ValueError on this rank, and CollectiveError on the others, if a value is not finite."""
    with group.raise_on_all():
        kernels_for(values).raise_not_finite(values)


@quantised_allreduce.algorithm()
def node_lanes(
    vector: SparseVector, group: Group, bits: int, block: int, array: Array, out: Result
) -> Steps[Result]:
    """Reduce-scatter values inside each node, sum every share over the nodes in few bits, gather it inside each node.

    There are as many lanes as ranks in the smallest node; further ranks of larger nodes
    own no share.
    """
    refuse_not_finite(array, group)
    nodes = group.nodes()
    short = vector.dtype == np.float16
    node = group.subgroup(next(ranks for ranks in nodes if group.rank in ranks))
    bounds = block_bounds(array.size, block, min(len(ranks) for ranks in nodes))
    parts = [as_they_are(array[start:end], block) for start, end in pairwise(bounds)]
    lanes = len(parts)
    nothing = as_they_are(array[:0], block)
    received = yield from node.all_to_all(parts + [nothing] * (node.size - lanes))
    own = (
        slice(*bounds[node.rank : node.rank + 2]) if node.rank < lanes else slice(0, 0)
    )
    values = np.zeros_like(array[own])
    share = nothing
    for part, _ in received:
        kernels_for(values).add(values, part.codes.view(values.dtype), values)
    out[1][...] = 0
    if node.rank < lanes:
        lane = group.subgroup([ranks[node.rank] for ranks in nodes])
        share = join(
            (
                yield from shares_of_sum(
                    values, out[1][own], bits, block, lane, short=short
                )
            )
        )
    everywhere = yield from node.all_to_all([share] * node.size)
    return decoded([theirs for theirs, _ in everywhere[:lanes]], out)
