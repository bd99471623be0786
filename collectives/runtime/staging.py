"""Device buffers in MPI messages: staged through pinned memory, or passed to MPI directly (docs/devices.md).

MPI ignores streams and accesses memory at once. So this module, and no other one,
synchronises CuPy's current stream before it passes a buffer to MPI, and before a step
returns arrays that the caller uses on streams of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import Buffer
from mpicomp.arrays.device import on_device
from mpicomp.codec import HEADER_NBYTES


def copied_out(blocks: Iterable[Any]) -> Iterator[Buffer]:
    """Start to copy device buffers to pinned memory; yield each copy once it is complete."""
    started = []
    for block in blocks:
        copy = pinned_like(block)
        _copy_out(block, copy)
        started.append((copy, _stream().record()))
    for copy, event in started:
        event.synchronize()
        yield copy


def first_lines(blocks: Sequence[Any]) -> list[Buffer]:
    """Wait for what was queued on the current stream, once, and return the first line of each device buffer."""
    lines = [*pinned(HEADER_NBYTES * len(blocks)).reshape(-1, HEADER_NBYTES)]
    for block, line in zip(blocks, lines, strict=True):
        _copy_out(block, line)
    wait_for_stream()
    return lines


def allocate(nbytes: int, like: Any, *, direct: bool) -> tuple[Buffer, Any]:
    """Return a buffer for a message, and where `copy_in` copies it to on the device of `like`; see `Arrival`.

    direct: the buffer is on the device, and there is no copy. Else it is pinned memory:
    keep it until `copied`, or until an operation that reads the asynchronous copy has
    been synchronised, as `decode` does.
    """
    if not on_device(like):
        return np.empty(nbytes, np.uint8), None
    import cupy

    if direct:
        buffer = cupy.empty(nbytes, np.uint8)
        # Work on the stream may still use this memory, which another array had before.
        wait_for_stream()
        return buffer, None
    # A message that is only a header has no entries.
    copy = cupy.empty(nbytes, np.uint8) if nbytes > HEADER_NBYTES else None
    return pinned(nbytes), copy


def copied() -> Callable[[], None]:
    """Return a function that waits until what is queued on the current stream now is done."""
    event = _stream().record()
    return lambda: None if event.done else event.synchronize()


def copy_in(landing: NDArray[Any], block: Any) -> None:
    """Start to copy pinned memory to the device."""
    block.data.copy_from_host_async(landing.ctypes.data, block.nbytes, _stream())


def wait_for_stream() -> None:
    """Wait for what was queued on the current stream, if it is not done."""
    stream = _stream()
    if not stream.done:
        stream.synchronize()


def complete(namespaces: Iterable[Any]) -> None:
    """Wait for what was queued on the stream if one of the modules that made the arrays is CuPy."""
    if any([xp is not np for xp in namespaces]):
        wait_for_stream()


def to_pinned(array: Any) -> NDArray[Any]:
    """Return a contiguous array of the device as a copy in pinned memory."""
    copy = pinned_like(array)
    if array.size:
        _copy_out(array, copy)
        wait_for_stream()
    return copy


def to_device(array: NDArray[Any]) -> Any:
    """Return a contiguous array in pinned memory as a copy on the device."""
    import cupy

    copy = cupy.empty(array.shape, array.dtype)
    if array.size:
        copy_in(array, copy)
        wait_for_stream()
    return copy


def pinned(nbytes: int) -> Buffer:
    """Return pinned memory, which returns to CuPy's pool when it is released."""
    import cupy

    memory: Buffer = np.frombuffer(
        cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8
    )
    return memory[:nbytes]


def pinned_like(array: Any) -> NDArray[Any]:
    """Return an array of this shape and dtype in pinned memory, to fill."""
    filled: NDArray[Any] = pinned(array.nbytes).view(array.dtype).reshape(array.shape)
    return filled


def _copy_out(block: Any, landing: NDArray[Any]) -> None:
    block.data.copy_to_host_async(landing.ctypes.data, landing.nbytes, _stream())


def _stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()
