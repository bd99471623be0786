"""Every value of a vector in few bits, with the rounding error: the bits of the host; all segments in one launch."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mpicomp.few_bits import first_blocks
from mpicomp.kernels.device.compiling import (
    THREADS,
    Array,
    in_tiles,
    launch,
    segments_of,
)
from mpicomp.kernels.device.merging import add_scaled
from mpicomp.kernels.host.bits import FORMATS
from mpicomp.kernels.host.few_bits import offset_of, rounding

_HELD = 16  # values that a thread holds in registers
_LONG = 256  # values: a warp works on each longer block
# divisors below it have a quotient that needs no division: see few_bits.cu
_MOST_DIVISOR = 1 << 20


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
    quantise_parts(
        [values], None, others, bits, block, codes, scales, rejected, short=short
    )


def quantise_parts(
    parts: Sequence[Array],
    residual: Array | None,
    others: Sequence[tuple[Array, Array]],
    bits: int,
    block: int,
    codes: Array,
    scales: Array,
    rejected: Array,
    *,
    decay: float = 1.0,
    scale: float = 1.0,
    blocks: tuple[int, int] | None = None,
    short: bool = False,
    threads: int | None = None,
) -> None:
    """Quantise parts in one launch, as `mpicomp.kernels.host.quantise_parts` does.

    threads: ignored.
    """
    dtype = rejected.dtype
    form = rounding(dtype, bits, short=short)
    terms = [(_in_words(term), steps) for term, steps in others]
    room = _in_words(codes)
    segments, last = segments_of(parts, terms, block)
    first, last = blocks or (0, last)
    numbers = decay, scale, *form[1:], offset_of(dtype, bits)
    decay_bits, scale_bits, *limits = _bits_of(dtype, *numbers)
    table, rows, *only = segments
    args = [table, rows, len(terms), *only, first, last, block]
    args += [residual, decay_bits, scale_bits, form.cut, *limits]
    args += [room, scales, rejected]
    if first == last:
        return
    if block > _LONG:
        warps = in_tiles(last - first, THREADS // 32)
        launch("quantise_long", [dtype], warps, *args, bits)
    else:
        tiles = in_tiles((last - first) * block, THREADS * _HELD)
        launch(f"quantise_{bits}", [dtype], tiles, *args)
    if room is not codes:
        codes[...] = room


def decoder(
    codes: Array,
    scales: Array,
    bits: int,
    block: int,
    parts: Sequence[Array],
    *,
    divisor: float = 1.0,
    onto: tuple[Sequence[Array], float] | None = None,
    blocks: tuple[int, int] | None = None,
    threads: int | None = None,
) -> Callable[[], None]:
    """Return a function that writes the values over a divisor to the parts in one launch, and allocates no memory.

    As `mpicomp.kernels.host.decoder` does; threads: ignored. onto: takes a launch and a
    copy more for each part.
    """
    dtype = np.dtype(np.float32 if scales.itemsize == 2 else np.float64)
    segments, last = segments_of(parts, (), block)
    first, last = blocks or (0, last)
    if first == last:
        return lambda: None
    is_short = float(divisor).is_integer() and 1 <= divisor < _MOST_DIVISOR
    numbers = _bits_of(dtype, divisor, 1 / divisor if is_short else 0)
    tiles = in_tiles((last - first) * block, THREADS * 2 * _HELD)
    args = *segments, first, last, block, *numbers, _in_words(codes), scales
    decode = partial(launch, f"dequantise_{bits}", [dtype], tiles, *args)
    if onto is None:
        return decode
    spans = _spans([part.size for part in parts], block, first, last)

    def move() -> None:
        decode()
        for part, base, span in zip(parts, onto[0], spans, strict=True):
            add_scaled(part[span], onto[1], base[span], base[span])
            part[span] = base[span]

    return move


def _spans(sizes: Sequence[int], block: int, first: int, last: int) -> list[slice]:
    """Return which values of each part are in the blocks from `first` to before `last`."""
    firsts = first_blocks(sizes, block)
    spans = []
    for size, low in zip(sizes, firsts, strict=False):
        begin, end = ((number - low) * block for number in (first, last))
        spans.append(slice(min(max(begin, 0), size), min(max(end, 0), size)))
    return spans


def _in_words(codes: Array) -> Array:
    """Return codes at an address that is a multiple of 4, as kernels take them; those of a message are."""
    return codes.copy() if codes.data.ptr % 4 else codes


@lru_cache(maxsize=256)
def _bits_of(dtype: np.dtype[Any], *numbers: float) -> list[int]:
    keys: list[int] = np.array(numbers, dtype).view(FORMATS[dtype].keys).tolist()
    return keys
