"""Modules of the CUDA source, each of a file and a format, compiled at the first use and cached by CuPy; launches."""

import re
from collections.abc import Callable, Sequence
from ctypes import addressof, c_uint64
from functools import cache, lru_cache
from importlib import resources
from itertools import accumulate, chain
from struct import Struct
from threading import get_ident, local
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime
from numpy.typing import DTypeLike

from mpicomp.arrays.memory import addresses, sizes_of
from mpicomp.few_bits import places

Array = Any  # CuPy's arrays, which are not typed

FILES = (
    "common.cuh",
    "selection.cu",
    "chunks.cu",
    "segments.cu",
    "statistics.cu",
    "bins.cu",
    "fitting.cu",
    "merging.cu",
    "coding.cu",
    "few_bits.cu",
    "transforms.cu",
)
# A product and a sum are rounded one after the other, as on the host.
OPTIONS = ("--std=c++17", "--fmad=false")
THREADS = 256
# A kernel whose blocks process several tiles each starts a few for each multiprocessor.
MOST_BLOCKS = 1024
_ALL_BITS = (1 << 64) - 1
# Below this line a file lists what its templates are compiled for.
_KERNELS = "// Kernels\n"
_MOST = 24  # arguments of a kernel


def source(kernels_of: str | None = None) -> str:
    """Return the text of CUDA files as one: CuPy's cache of compiled code ignores changes of included files.

    kernels_of: the file whose kernels are wanted, with what it needs of the others; by default all.
    """
    texts = []
    for name in FILES:
        text = _text(name)
        if kernels_of not in (None, name):
            text = text.partition(_KERNELS)[0]
        texts.append(f'#line 1 "{name}"\n{text}')
        if name == kernels_of:
            break
    return "".join(texts).replace('#include "common.cuh"\n', "\n")


def _text(file: str) -> str:
    """Return the text of a CUDA file, also from a zipped wheel."""
    return resources.files(__package__).joinpath(file).read_text()


def module_of(name: str) -> tuple[str, int, int]:
    """Return the file of a kernel, and the bytes of the numbers and of the indices that its module is compiled for."""
    stem = re.sub(r"(_\d)?(_[fiu]\d)+$", "", name)
    sizes = {"number": 4, "index": 4}
    for kind, size in re.findall(r"_([fiu])(\d)", name.removeprefix(stem)):
        sizes["index" if kind == "i" else "number"] = int(size)
    return _file_of(stem), sizes["number"], sizes["index"]


@cache
def _file_of(stem: str) -> str:
    """Return the file of the kernels whose names begin with `stem`."""
    kernels = re.compile(rf"\b{stem}_(##|[uf][248]\b)")
    for name in FILES:
        if kernels.search(_text(name).partition(_KERNELS)[2]):
            return name
    raise KeyError(stem)


@cache
def _module(device: int, file: str, itemsize: int, index_itemsize: int) -> Any:
    """Return the compiled code of one file and format: NVRTC takes half a minute for all of them."""
    sizes = f"-DITEMSIZE={itemsize}", f"-DINDEX_ITEMSIZE={index_itemsize}"
    return cupy.RawModule(code=source(kernels_of=file), options=(*OPTIONS, *sizes))


@cache
def _function(device: int, name: str) -> int:
    """Return the driver's handle of a kernel."""
    kernel: int = _module(device, *module_of(name)).get_function(name).kernel.ptr
    return kernel


def _plan(device: int, name: str, arguments: int) -> Callable[..., None]:
    """Return a function that starts a kernel: it writes the arguments to memory that the driver reads."""
    kernel = _function(device, name)
    words = (c_uint64 * _MOST)()
    first = addressof(words)
    ndarray = cupy.ndarray
    places = (c_uint64 * _MOST)(*range(first, first + 8 * _MOST, 8))
    params = addressof(places)
    pack = Struct(f"{arguments}Q").pack_into
    current_stream = cupy.cuda.get_current_stream

    def start(blocks: int, threads: int, args: Sequence[Any]) -> None:
        # Most arguments are integers and contiguous arrays, which need no call.
        numbers = [
            arg & _ALL_BITS
            if type(arg) is int
            else arg.data.ptr
            if type(arg) is ndarray and arg._c_contiguous
            else _word(arg)
            for arg in args
        ]
        pack(words, 0, *numbers)
        stream = current_stream().ptr
        driver.launchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, params, 0)

    vars(start)["keeping"] = places
    return start


def _word(arg: Array | int | None) -> int:
    if not isinstance(arg, cupy.ndarray):
        return 0 if arg is None else int(arg) & _ALL_BITS
    # The attribute `flags` would make an object, which takes 0.9 us.
    if arg._c_contiguous:
        address: int = arg.data.ptr
        return address
    raise ValueError(
        "got an array that is not contiguous: expected a contiguous one; see cupy.ascontiguousarray"
    )


# Plans are kept by device, name and dtypes; a thread has its own, as the driver reads
# arguments without Python's lock.
_plans = local()


def launch(
    name: str,
    dtypes: Sequence[DTypeLike],
    blocks: int,
    *args: Array | int | None,
    threads: int = THREADS,
) -> None:
    """Start a kernel on the current stream.

    name, dtypes: the kernel's name, and the dtypes at its end. args: arrays
    (contiguous, else ValueError), integers, and None for no array. The driver's call
    costs the host 0.2 us by CuPy, 2 by cuda.bindings, 10 with arguments that either
    packs; see docs/contributing/gpu.md.
    """
    key = runtime.getDevice(), name, *dtypes
    plans: dict[Any, Any] = vars(_plans)
    start = plans.get(key)
    if start is None:
        full = "_".join([name, *(np.dtype(dtype).str[1:] for dtype in dtypes)])
        start = plans[key] = _plan(key[0], full, len(args))
    start(blocks, threads, args)


def zeros(*sizes: int) -> tuple[Array, list[int]]:
    """Return uint64 zeros, which one operation clears, and the addresses of parts of them: a slice costs 6 us."""
    whole = cupy.zeros(sum(sizes), np.uint64)
    first = whole.data.ptr
    return whole, [first + 8 * before for before in accumulate(sizes[:-1], initial=0)]


def upload(array: np.ndarray[Any, Any]) -> Array:
    """Return a copy on the device, from memory that is not pinned: half the host's time of `cupy.asarray`."""
    copy = cupy.empty(array.shape, array.dtype)
    copy.set(array, cupy.cuda.get_current_stream())
    return copy


def table_on_device(rows: np.ndarray[Any, Any]) -> Array:
    """Return integers on the device, those of an earlier call if they were the same; it is not to be written to."""
    return _uploaded(stream_of_now(), rows.shape, rows.dtype, rows.tobytes())


@lru_cache(maxsize=64)
def _uploaded(stream: Any, shape: Any, dtype: Any, content: bytes) -> Array:
    """Return integers of the host, on the device: complete for what follows on `stream`."""
    return upload(np.frombuffer(content, dtype).reshape(shape))


def stream_of_now() -> tuple[int, int, int]:
    """Return what names the current stream: a device, a stream's address, and a thread, as each has a default one."""
    return runtime.getDevice(), cupy.cuda.get_current_stream().ptr, get_ident()


def bits_of(factor: float, dtype: np.dtype[Any]) -> int:
    """Return the bits of a factor as a float64, rounded to a dtype."""
    return int(np.float64(dtype.type(factor)).view(np.uint64))


def in_tiles(size: Any, tile: Any) -> Any:
    """Return how many tiles it takes to cover `size` items: an integer, or an array of them."""
    return -(-size // tile)


def segments_of(
    parts: Sequence[Array], others: Sequence[tuple[Array, Array]], block: int
) -> tuple[tuple[Array | None, int, Array | None, int], int]:
    """Return the segments as arguments of kernels, and the number of blocks: a table, or a part and its size.

    The table is that of `Segments` in common.cuh; others: pairs of arrays whose addresses
    follow in it.
    """
    if len(parts) == 1 and not others:
        return (None, 0, parts[0], parts[0].size), in_tiles(parts[0].size, block)
    sizes = sizes_of(parts)
    known = tuple(addresses([*chain(parts, *others)]))
    rows, blocks = _table(stream_of_now(), block, sizes, known)
    return (rows, len(parts), None, 0), blocks


# Most steps pass arrays at the same addresses as the step before.
@lru_cache(maxsize=64)
def _table(stream: Any, block: int, sizes: Any, known: Any) -> tuple[Array, int]:
    """Return the table of segments: first blocks, first values, and addresses; and the number of blocks.

    stream: on which it is complete for what follows.
    """
    firsts, edges = places(sizes, block)
    rows = np.concatenate([firsts, edges, np.array(known, np.int64)])
    return upload(rows), int(firsts[-1])
