"""Orthonormal transforms of chunks of consecutive values, and signs: with the additions of the host."""

from collections.abc import Callable

import numpy as np

from mpicomp.kernels.device.compiling import THREADS, Array, in_tiles, launch
from mpicomp.kernels.device.merging import sparse_writer
from mpicomp.kernels.host.bits import FORMATS

_TILE = 4096  # values of the chunks that a block transforms; no chunk is longer


def hadamard(
    values: Array, out: Array, chunk: int, *, threads: int | None = None
) -> None:
    """Write the transform of each chunk to `out`, as `mpicomp.kernels.host.hadamard` does.

    chunk: up to 4096. threads: ignored.
    """
    keys, size = FORMATS[values.dtype].keys, values.size
    tiles = in_tiles(size // chunk * chunk, _TILE)
    if size:
        blocks = tiles + (size % chunk > 0)
        launch(
            "hadamard",
            [keys],
            blocks,
            values.view(keys),
            out.view(keys),
            size,
            chunk,
            tiles,
        )


def hadamard_writer(
    indices: Array,
    values: Array,
    out: Array,
    chunk: int,
    *,
    is_sign: bool = False,
    threads: int | None = None,
) -> Callable[[], None]:
    """Return a function that writes what `hadamard` makes of a sparse vector to `out`, as the host's does.

    chunk, threads: as for `hadamard`. is_sign: it writes the signs of that.
    """
    write = sparse_writer(indices, values, [out])

    def transform() -> None:
        write()
        hadamard(out, out, chunk)
        if is_sign:
            signs(out)

    return transform


def signs(values: Array, *, threads: int | None = None) -> None:
    """Replace each value by its sign, as `mpicomp.kernels.host.signs` does. threads: ignored."""
    form = FORMATS[values.dtype]
    one = int(np.ones(1, values.dtype).view(form.keys)[0])
    if values.size:
        args = values.view(form.keys), values.size, form.mask, one
        launch("signs", [form.keys], in_tiles(values.size, THREADS), *args)
