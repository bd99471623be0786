"""What reaches a threshold, in one read of the data."""

import cupy
import numpy as np

from mpicomp.kernels.device.compiling import MOST_BLOCKS, Array, in_tiles, launch
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.selection import not_finite_error

# Values that a block reads at a time, by their size in bytes.
TILES = {2: 4096, 4: 4096, 8: 2048}


def raise_not_finite(values: Array) -> None:
    """Raise ValueError naming the first value of `values`, of any shape, that is NaN or infinite."""
    flat = values.reshape(-1)
    position = first_not_finite(flat)
    if position >= 0:
        raise not_finite_error(
            position, values.shape, flat[position : position + 1].get()[0]
        )


def first_not_finite(values: Array) -> int:
    """Return the first position of `values` that holds NaN or an infinity; -1 if there is none."""
    form = FORMATS[values.dtype]
    return _first_reaching(values.view(form.keys), form.mask, form.infinity)


def all_below(numbers: Array, limit: int, mask: int | None = None) -> bool:
    """Return whether all of a vector's unsigned integers are below a limit, as the host's does, by one launch."""
    return _first_reaching(numbers, -1 if mask is None else mask, limit) < 0


def _first_reaching(bits: Array, mask: int, floor: int) -> int:
    # The kernel finds the largest complement of a position, from zeros, which are
    # cleared without a launch.
    found = cupy.zeros(1, np.int64)
    blocks = min(MOST_BLOCKS, in_tiles(bits.size, TILES[bits.itemsize]))
    if blocks:
        args = bits, bits.size, mask, floor, found
        launch("first_reaching", [bits.dtype], blocks, *args)
    return ~int(found.get()[0])
