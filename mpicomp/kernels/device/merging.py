"""Sums of sparse vectors, and copies between sparse and dense ones; every sum in the order of the host's.

Source of the merge: O. Green, R. McColl and D. A. Bader, "GPU merge path", ICS 2012.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from mpicomp.kernels import NOTHING, Facts
from mpicomp.kernels.device.compiling import (
    MOST_BLOCKS,
    THREADS,
    Array,
    bits_of,
    in_tiles,
    launch,
    segments_of,
    table_on_device,
    zeros,
)
from mpicomp.kernels.host.bits import FORMATS

_MERGED = 4 * THREADS  # entries that a block merges
_PACKED = 4 * THREADS
_CLEARED = 4096  # values of a segment that a block clears, or adds to
_OPERATORS = "+-*/"
_SAID = 3  # words of `Said`


def merge(
    indices_a: Array, values_a: Array, indices_b: Array, values_b: Array
) -> tuple[Array, Array, Facts | None]:
    """Return the sum of two sparse vectors as `mpicomp.kernels.host.merge` does, and of numbers what `inspect` does.

    The place of a value that is not finite is any.
    """
    room = indices_a.size + indices_b.size
    if values_a.ndim > 1 or not room:
        return *accumulate([indices_a, indices_b], [values_a, values_b], 0), None
    indices, values = (
        cupy.empty(room, indices_a.dtype),
        cupy.empty(room, values_a.dtype),
    )
    tiles = in_tiles(room, _MERGED)
    report, work = zeros(_SAID, 1, 1, tiles)
    form = FORMATS[values_a.dtype]
    launch(
        "merge",
        [indices_a.dtype, values_a.dtype],
        tiles,
        indices_a,
        values_a,
        indices_a.size,
        indices_b,
        values_b,
        indices_b.size,
        form.mask,
        form.infinity,
        indices,
        values,
        *work,
        tiles,
    )
    bad, first, last, count = report[: _SAID + 1].get().tolist()
    return indices[:count], values[:count], (-1, 0 if bad else -1, first, last)


def accumulate(
    indices: Sequence[Array], values: Sequence[Array], length: int
) -> tuple[Array, Array]:
    """Return the sum of one or more sparse vectors, as `mpicomp.kernels.host.accumulate` does: in rank order."""
    if not sum(each.size for each in indices):
        return indices[0], values[0]
    together = cupy.concatenate(list(indices))
    if values[0].ndim > 1:
        union, _ = _added(indices, together, cupy.zeros(together.size, np.float32))
        return union, _added_rows(union, indices, values)
    return _added(indices, together, cupy.concatenate(list(values)))


def divide(
    indices: Array, values: Array, positions: Array
) -> tuple[Array, Array, Array, Array]:
    """Return (indices, values) of the entries at `positions` (int64, increasing), and of the other entries."""
    if values.ndim > 1:
        kept, _, rest, places = divide(indices, cupy.arange(indices.size), positions)
        return kept, values[positions], rest, values[places]
    keys = values.view(_key_dtype(values.dtype))
    sizes = positions.size, indices.size - positions.size
    one, other = (
        (cupy.empty(size, indices.dtype), cupy.empty(size, keys.dtype))
        for size in sizes
    )
    if indices.size:
        args = indices, keys, indices.size, positions, positions.size, *one, *other
        launch(
            "divide",
            [indices.dtype, keys.dtype],
            in_tiles(indices.size, THREADS),
            *args,
        )
    return one[0], one[1].view(values.dtype), other[0], other[1].view(values.dtype)


def gather(dense: Array, indices: Array) -> Array:
    """Return ``dense[indices]`` of a 1-d `dense`; the indices (int32 or int64) must be in range."""
    keys = dense.view(FORMATS[dense.dtype].keys)
    out = cupy.empty(indices.size, keys.dtype)
    if indices.size:
        blocks = in_tiles(indices.size, THREADS)
        launch(
            "gather",
            [indices.dtype, keys.dtype],
            blocks,
            keys,
            indices,
            indices.size,
            out,
        )
    return out.view(dense.dtype)


def gather_scores(
    dense: Array, indices: Array, bonus: Array, factor: Any
) -> tuple[Array, Array]:
    """Return ``dense[indices]`` and scores as `mpicomp.kernels.host.gather_scores` does, in one launch."""
    values = cupy.empty(indices.size, dense.dtype)
    scores = cupy.empty(indices.size, bonus.dtype)
    if indices.size:
        number = bits_of(factor, bonus.dtype)
        blocks = in_tiles(indices.size, THREADS)
        args = dense, indices, bonus, number, indices.size, values, scores
        launch("gather_scores", [indices.dtype, dense.dtype], blocks, *args)
    return values, scores


def consecutive(first: int, end: int, dtype: DTypeLike) -> Array:
    """Return the integers first, ..., end - 1."""
    return cupy.arange(first, end, dtype=dtype)


def sparse_writer(
    indices: Array, values: Array, parts: Sequence[Array], *, are_zero: bool = False
) -> Callable[[], None]:
    """Return a function that writes a sparse vector to parts, as `mpicomp.kernels.host.sparse_writer` does.

    It takes two launches, one if the parts are zeros, whatever their number.
    """
    keys = _key_dtype(values.dtype)
    segments, blocks = segments_of(parts, (), _CLEARED)
    entries = in_tiles(indices.size, THREADS)

    def write() -> None:
        if blocks and not are_zero:
            launch("clear_segments", [keys], blocks, *segments, blocks)
        if entries:
            dtypes = [indices.dtype, keys]
            args = *segments, indices, values, indices.size
            launch("scatter_to_segments", dtypes, entries, *args)

    return write


def add(a: Array, b: Array, out: Array) -> None:
    """Write ``a + b`` to `out`, 1-d, contiguous and of one dtype and length."""
    add_scaled(a, 1, b, out)


def add_parts(
    a: Array, scale: float, parts: Sequence[Array], out: Array, *, sign: int = 1
) -> None:
    """Write ``scale * a + sign * b`` to `out`, as `mpicomp.kernels.host.add_parts` does.

    One launch for parts of the dtype of `a` and `out`, else one for each.
    """
    if {part.dtype for part in parts} == {a.dtype} == {out.dtype}:
        segments, blocks = segments_of(parts, (), _CLEARED)
        if blocks:
            args = a, bits_of(scale, a.dtype), sign, *segments, blocks, out
            launch("add_segments", [a.dtype], blocks, *args)
        return
    end = 0
    for part in parts:
        place = slice(end, end := end + part.size)
        add_scaled(a[place], scale, part, out[place], sign=sign)


def add_scaled(a: Array, factor: float, b: Array, out: Array, *, sign: int = 1) -> None:
    """Write ``factor * a + sign * b`` to `out`, as `mpicomp.kernels.host.add_scaled` does."""
    _combine(a, factor, "+" if sign == 1 else "-", b, out)


def multiply(a: Array, by: float, out: Array) -> None:
    """Write ``a * by`` to `out`, as `mpicomp.kernels.host.multiply` does."""
    _combine(a, by, "*", None, out)


def quotient(a: Array, by: Array | float, out: Array) -> None:
    """Write ``a / by`` to `out`, as `mpicomp.kernels.host.quotient` does."""
    other = by if isinstance(by, cupy.ndarray) else None
    _combine(a, by if other is None else 1, "/", other, out)


def _combine(
    a: Array, factor: float, operator: str, b: Array | None, out: Array
) -> None:
    """Write ``factor * a operator b`` to `out`: CuPy's own operators flush subnormal numbers of float32 to zero."""
    if not out.size:
        return
    dtypes = [a.dtype, a.dtype if b is None else b.dtype, out.dtype]
    args = a, bits_of(factor, a.dtype), _OPERATORS.index(operator), b, out.size, out
    launch("combine", dtypes, in_tiles(out.size, THREADS), *args)


def clear(out: Array) -> None:
    """Make all values of `out` zero."""
    out[...] = 0


def scatter_add(dense: Array, indices: Array, values: Array, *, sign: int = 1) -> None:
    """Add `sign`, 1 or -1, times `values` to ``dense[indices]`` in place; the indices must be in range and unique.

    The sum is rounded once to the dtype of `dense`, whatever the dtype of the values.
    """
    if values.ndim > 1:
        rows = dense[indices]
        add_scaled(values, sign, rows, rows)
        dense[indices] = rows
    elif indices.size:
        dtypes = [dense.dtype, indices.dtype, values.dtype]
        args = dense, indices, values, indices.size, sign
        launch("scatter_add", dtypes, in_tiles(indices.size, THREADS), *args)


def first_disorder(indices: Array, length: int) -> int:
    """Return the first position where `indices` leaves ``[0, length)`` or does not increase; -1 if there is none."""
    return inspect(indices, cupy.empty(0, np.float32), length)[0]


def inspect(indices: Array, values: Array, length: int) -> Facts:
    """Return the result of `mpicomp.kernels.host.inspect`, with one copy to the host."""
    if not indices.size:
        return NOTHING
    found, form = cupy.full(4, -1, np.int64), FORMATS[values.dtype]
    keys, infinity = values.reshape(-1).view(form.keys), int(form.infinity)
    args = indices, indices.size, length, keys, keys.size, form.mask, infinity, found
    blocks = min(MOST_BLOCKS, in_tiles(max(indices.size, keys.size), THREADS))
    launch("inspect", [indices.dtype, keys.dtype], blocks, *args)
    return tuple(found.get().tolist())


def _key_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def _added(
    indices: Sequence[Array], together: Array, values: Array
) -> tuple[Array, Array]:
    """Return the sum of vectors whose entries are concatenated in `together` and `values`."""
    size, dtypes = together.size, [together.dtype, values.dtype]
    starts = table_on_device(np.cumsum([0, *(each.size for each in indices)]))
    order, sums = (
        cupy.full(size, -1, together.dtype),
        cupy.empty(size, np.promote_types(values.dtype, np.float32)),
    )
    blocks = in_tiles(size, THREADS)
    launch(
        "accumulate",
        dtypes,
        blocks,
        together,
        values,
        starts,
        len(indices),
        size,
        order,
        sums,
    )
    union, total, tiles = (
        cupy.empty(size, together.dtype),
        cupy.empty(size, values.dtype),
        in_tiles(size, _PACKED),
    )
    count, work = zeros(1, 1, tiles)
    launch(
        "pack",
        dtypes,
        tiles,
        order,
        sums,
        size,
        union,
        total,
        *work,
        tiles,
    )
    entries = int(count[:1].get()[0])
    return union[:entries], total[:entries]


def _added_rows(
    union: Array, indices: Sequence[Array], values: Sequence[Array]
) -> Array:
    """Return the sums of rows at the indices of a union, in rank order: the indices of one vector are unique."""
    shape = union.size, *values[0].shape[1:]
    # Sums begin at -0.0, as -0.0 + x is x also for x = -0.0.
    sums = cupy.full(shape, -0.0, np.promote_types(values[0].dtype, np.float32))
    for where, what in zip(indices, values, strict=True):
        if what.size:
            places = cupy.searchsorted(union, where)
            rows = sums[places]
            add_scaled(what, 1, rows, rows)
            sums[places] = rows
    total = cupy.empty(shape, values[0].dtype)
    multiply(sums, 1, total)
    return total
