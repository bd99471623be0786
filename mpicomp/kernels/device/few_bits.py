"""Every value of a vector in few bits, with the rounding error: the bits of the host; all segments in one launch."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mpicomp.arrays.memory import sizes_of
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
# Values of a block above which a warp works on it.
_LONG = 256
# Divisors below this one need no division for a quotient; see few_bits.cu.
_MOST_DIVISOR = 1 << 20


def encoder(
    parts: Sequence[Array],
    residual: Array | None,
    bits: int,
    block: int,
    rejected: Array,
    *,
    decay: float = 1.0,
    short: bool = False,
    threads: int | None = None,
) -> Callable[..., None]:
    """Return a function that codes parts in one launch, as `mpicomp.kernels.host.encoder` does.

    threads: ignored.
    """
    dtype = rejected.dtype
    form = rounding(dtype, bits, short=short)
    decay_bits, *limits = _bits_of(dtype, decay, *form[1:], offset_of(dtype, bits))

    def encode(
        codes: Array,
        scales: Array,
        others: Sequence[tuple[Array, Array]] = (),
        blocks: tuple[int, int] | None = None,
    ) -> None:
        terms = [(_in_words(term), steps) for term, steps in others]
        room = _in_words(codes)
        segments, last = segments_of(parts, terms, block)
        first, last = blocks or (0, last)
        table, rows, *only = segments
        args = [table, rows, len(terms), *only, first, last, block]
        args += [residual, decay_bits, form.cut, *limits]
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

    return encode


def decoder(
    shares: Sequence[tuple[Array, Array]],
    bits: int,
    block: int,
    parts: Sequence[Array],
    *,
    divisor: float = 1.0,
    onto: tuple[Sequence[Array], float] | None = None,
    first: int = 0,
    threads: int | None = None,
) -> Callable[[], None]:
    """Return a function that writes the values over a divisor to the parts, and allocates no memory.

    As `mpicomp.kernels.host.decoder` does, in one launch a share; threads: ignored.
    onto: takes a launch and a copy more for each part.
    """
    dtype = np.dtype(np.float32 if shares[0][1].itemsize == 2 else np.float64)
    segments, _ = segments_of(parts, (), block)
    is_short = float(divisor).is_integer() and 1 <= divisor < _MOST_DIVISOR
    numbers = _bits_of(dtype, divisor, 1 / divisor if is_short else 0)
    launches = []
    last = first
    for codes, scales in shares:
        low, last = last, last + scales.size // (2 if bits == 2 else 1)
        tiles = in_tiles((last - low) * block, THREADS * 2 * _HELD)
        args = *segments, low, last, block, *numbers, _in_words(codes), scales
        if low < last:
            name = f"dequantise_{bits}"
            launches.append(partial(launch, name, [dtype], tiles, *args))
    spans = _spans(sizes_of(parts), block, first, last) if onto else []

    def decode() -> None:
        for run in launches:
            run()
        if onto is None:
            return
        for part, base, span in zip(parts, onto[0], spans, strict=True):
            add_scaled(part[span], onto[1], base[span], base[span])
            part[span] = base[span]

    return decode


def _spans(sizes: tuple[int, ...], block: int, first: int, last: int) -> list[slice]:
    """Return the slice of each part that lies in the blocks from `first` to `last` - 1."""
    firsts = first_blocks(sizes, block)
    spans = []
    for size, low in zip(sizes, firsts, strict=False):
        begin, end = ((number - low) * block for number in (first, last))
        spans.append(slice(min(max(begin, 0), size), min(max(end, 0), size)))
    return spans


def _in_words(codes: Array) -> Array:
    """Return codes at an address that is a multiple of 4, as kernels need; the codes of a message have one."""
    return codes.copy() if codes.data.ptr % 4 else codes


@lru_cache(maxsize=256)
def _bits_of(dtype: np.dtype[Any], *numbers: float) -> list[int]:
    keys: list[int] = np.array(numbers, dtype).view(FORMATS[dtype].keys).tolist()
    return keys
