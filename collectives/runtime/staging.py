"""Device buffers in MPI messages: staged through pinned memory, or passed to MPI directly (docs/devices.md).

MPI ignores streams and accesses memory at once. So this module, and no other one,
synchronises CuPy's current stream before it passes a buffer to MPI, and before a step
returns arrays that the caller uses on streams of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.runtime import messages
from collectives.runtime.messages import LINE, in_bytes, pieces
from mpicomp.arrays import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI


def send_pieces(
    comm: "MPI.Comm", block: Any, dest: int, tag: int, *, direct: bool
) -> "list[MPI.Request]":
    """Start to send a device buffer in pieces; each request keeps its memory alive. direct: after `first_lines`."""
    if direct:
        return messages.send_pieces(comm, block, dest, tag)
    landing = pinned(block.size)
    parts = pieces(block.size)
    copied = []
    for part in parts:
        _copy_out(block[part], landing[part])
        copied.append(_stream().record())
    requests = []
    for part, event in zip(parts, copied, strict=True):
        event.synchronize()
        requests.append(comm.Isend(in_bytes(landing[part]), dest, tag))
    return requests


def first_lines(blocks: Sequence[Any]) -> list[Buffer]:
    """Wait for what was queued on the current stream, once, and return the first line of each device buffer."""
    if not blocks:
        return []
    lines = [*pinned(LINE * len(blocks)).reshape(-1, LINE)]
    for block, line in zip(blocks, lines, strict=True):
        block.data.copy_to_host_async(line.ctypes.data, LINE, _stream())
    wait_for_stream()
    return lines


def allocate(nbytes: int, *, direct: bool) -> tuple[Buffer, Any]:
    """Return a buffer for a message for the device, and where `copy_in` copies it; see `Arrival`.

    direct: the buffer is on the device, and there is no copy. Else it is pinned memory:
    keep it until `copied`, or until an operation that reads the asynchronous copy has
    been synchronised, as `decode` does.
    """
    if direct:
        buffer = _on_device(nbytes)
        wait_for_stream()  # what had this memory before may still be at work on it
        return buffer, None
    # a line has no entries
    return pinned(nbytes), _on_device(nbytes) if nbytes > LINE else None


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
    block.data.copy_to_host_async(landing.ctypes.data, block.nbytes, _stream())


def _on_device(nbytes: int) -> Any:
    import cupy

    return cupy.empty(nbytes, np.uint8)


def _stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()
