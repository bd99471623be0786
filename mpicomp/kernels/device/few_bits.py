"""Every value of a vector in few bits, with the rounding error: the bits of the host; a warp for each block."""

from collections.abc import Sequence

import numpy as np

from mpicomp.kernels.device.compiling import THREADS, Array, in_tiles, launch
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.few_bits import offset_of, rounding

_WARPS = THREADS // 32


def quantise(
    values: Array,
    others: Sequence[tuple[Array, Array]],
    bits: int,
    block: int,
    codes: Array,
    scales: Array,
    rejected: Array,
    *,
    short: bool = False,
    threads: int | None = None,
) -> None:
    """Write codes, scales and errors of the sum of others and values, as `mpicomp.kernels.host.quantise` does.

    threads: ignored.
    """
    if values.size:
        total = values.copy() if others else values
        for term in others:
            _decode("add_quantised", *term, bits, block, total)
        how = rounding(values.dtype, bits, short=short)
        numbers = np.array(
            [*how[1:], offset_of(values.dtype, bits)], values.dtype
        ).view(FORMATS[values.dtype].keys)
        rejected[...] = values  # what stays where a block is not finite
        given = total, values.size, bits, block, how.cut, *numbers.tolist()
        warps = in_tiles(in_tiles(values.size, block), _WARPS)
        launch("quantise", [values.dtype], warps, *given, codes, scales, rejected)


def dequantise(
    codes: Array,
    scales: Array,
    bits: int,
    block: int,
    out: Array,
    *,
    threads: int | None = None,
) -> None:
    """Write the values that `quantise` encoded to `out`; threads: ignored."""
    _decode("dequantise", codes, scales, bits, block, out)


def _decode(
    name: str, codes: Array, scales: Array, bits: int, block: int, out: Array
) -> None:
    if out.size:
        args = codes, scales, out.size, bits, block, codes.size, out
        launch(name, [out.dtype], in_tiles(codes.size, THREADS), *args)
