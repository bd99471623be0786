"""The CUDA source as one module, compiled at its first use on a device and cached on disk by CuPy, and its launches."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

Array = Any  # CuPy's arrays, which are not typed

FILES = (
    "common.cuh",
    "selection.cu",
    "chunks.cu",
    "segments.cu",
    "bins.cu",
    "statistics.cu",
    "fitting.cu",
    "merging.cu",
    "coding.cu",
    "few_bits.cu",
    "transforms.cu",
)
# a product and a sum are rounded one after the other, as on the host
OPTIONS = ("--std=c++17", "--fmad=false")
THREADS = 256
# of a kernel whose blocks process several tiles each: a few for each multiprocessor
MOST_BLOCKS = 1024


def source(files: Sequence[str] = FILES) -> str:
    """Return the text of CUDA files as one: CuPy's cache of compiled code ignores changes of included files."""
    folder = Path(__file__).parent
    texts = ((name, (folder / name).read_text()) for name in files)
    return "".join(f'#line 1 "{name}"\n{text}' for name, text in texts).replace(
        '#include "common.cuh"\n', "\n"
    )


@cache
def _module(device: int) -> Any:
    return cupy.RawModule(code=source(), options=OPTIONS)


@cache
def _function(device: int, name: str) -> Any:
    return _module(device).get_function(name)


def launch(
    name: str,
    dtypes: Sequence[DTypeLike],
    blocks: int,
    *args: Array | int | None,
    threads: int = THREADS,
) -> None:
    """Start a kernel on the current stream.

    name, dtypes: the kernel's name, and the dtypes at its end. args: arrays
    (contiguous, else ValueError), integers, and None for no array.
    """
    full = "_".join([name, *(np.dtype(dtype).str[1:] for dtype in dtypes)])
    _function(cupy.cuda.Device().id, full)(
        (blocks,), (threads,), tuple(_argument(arg) for arg in args)
    )


def _argument(arg: Array | int | None) -> Any:
    if isinstance(arg, cupy.ndarray):
        if not arg.flags.c_contiguous:
            raise ValueError(
                "got an array that is not contiguous: expected a contiguous one; see cupy.ascontiguousarray"
            )
        return arg
    number = 0 if arg is None else int(arg)
    return np.uint64(number) if number > 0 else np.int64(number)


def zeros(*sizes: int) -> list[Array]:
    """Return arrays of uint64 zeros: parts of one allocation, which one operation clears."""
    whole, ends = cupy.zeros(sum(sizes), np.uint64), np.cumsum(sizes).tolist()
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def in_tiles(size: Any, tile: Any) -> Any:
    """Return how many tiles it takes to cover `size` items: an integer, or an array of them."""
    return -(-size // tile)
