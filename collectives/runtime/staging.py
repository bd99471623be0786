"""Device buffers in MPI messages: staged through pinned memory, or passed to MPI directly.

A CUDA-aware MPI accepts device pointers; any other one crashes. There a message is copied to pinned memory
(page-locked, so that the device copies at the full rate of the bus) and sent from it, and received into pinned memory.
Messages above 8 MiB are sent in pieces: one is on the network while the next one is copied. Pinned memory is from
CuPy's pool, which keeps it for the next message.

MPI ignores streams and accesses memory at once. So this module, and no other one, synchronises CuPy's current stream
before it passes a buffer to MPI, and before a step returns arrays that the caller uses on streams of its own.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.runtime import messages
from collectives.runtime.messages import LINE, Arrival, in_bytes, pieces
from mpicomp.arrays import Buffer

if TYPE_CHECKING:
    from mpi4py import MPI


def send_pieces(comm: "MPI.Comm", block: Any, dest: int, tag: int, *, direct: bool) -> "list[MPI.Request]":
    """Start to send a device buffer in pieces; each request keeps its memory alive."""
    if direct:
        _stream().synchronize()
        return messages.send_pieces(comm, block, dest, tag)
    landing, parts = pinned(block.size), pieces(block.size)
    copied = []
    for part in parts:
        _copy_out(block[part], landing[part])
        copied.append(_stream().record())
    requests = []
    for part, event in zip(parts, copied, strict=True):
        event.synchronize()
        requests.append(comm.Isend(in_bytes(landing[part]), dest, tag))
    return requests


class DeviceArrival(Arrival):
    """A message for the device. direct: MPI writes to the device; else it is copied there from pinned memory.

    In the latter case `buffer` is the pinned memory, from which the host reads the header and other fields, and `copy`
    is on the device. The copy is asynchronous: keep the arrival until `wait_for_copy` has returned, or until an
    operation that reads the copy has been synchronised, as `decode` does.
    """

    def __init__(self, comm: "MPI.Comm", source: int, tag: int, *, direct: bool) -> None:
        super().__init__(comm, source, tag)
        self._direct = direct

    def _room(self, nbytes: int) -> Buffer:
        if self._direct:
            self.buffer = _on_device(nbytes)
            _stream().synchronize()  # what had this memory before may still be at work on it
        else:
            self.buffer = pinned(nbytes)
            self.copy = _on_device(nbytes) if nbytes > LINE else None  # a line has no entries
        return self.buffer

    def _landed(self, part: slice) -> None:
        if self.copy is not None:
            _copy_in(self.buffer[part], self.copy[part])

    def wait_for_copy(self) -> None:
        """Wait until the pinned memory may be used for another message."""
        _stream().synchronize()


def complete(namespaces: Iterable[Any]) -> None:
    """Wait for what was queued on the stream if one of the modules that made the arrays is CuPy."""
    if any(each is not np for each in namespaces):
        _stream().synchronize()


def to_pinned(array: Any) -> NDArray[Any]:
    """Return a contiguous array of the device as a copy in pinned memory."""
    copy = pinned_like(array)
    if array.size:
        _copy_out(array, copy)
        _stream().synchronize()
    return copy


def to_device(array: NDArray[Any]) -> Any:
    """Return a contiguous array in pinned memory as a copy on the device."""
    import cupy

    copy = cupy.empty(array.shape, array.dtype)
    if array.size:
        _copy_in(array, copy)
        _stream().synchronize()
    return copy


def pinned(nbytes: int) -> Buffer:
    """Return pinned memory, which returns to CuPy's pool when it is released."""
    import cupy

    memory: Buffer = np.frombuffer(cupy.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8)
    return memory[:nbytes]


def pinned_like(array: Any) -> NDArray[Any]:
    """Return an array of this shape and dtype in pinned memory, to fill."""
    filled: NDArray[Any] = pinned(array.nbytes).view(array.dtype).reshape(array.shape)
    return filled


def _copy_out(block: Any, landing: NDArray[Any]) -> None:
    block.data.copy_to_host_async(landing.ctypes.data, block.nbytes, _stream())


def _copy_in(landing: NDArray[Any], block: Any) -> None:
    block.data.copy_from_host_async(landing.ctypes.data, block.nbytes, _stream())


def _on_device(nbytes: int) -> Any:
    import cupy

    return cupy.empty(nbytes, np.uint8)


def _stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()
