"""Buffers of a CUDA device on their way through MPI: staged through pinned memory, or as they are.

An MPI that is CUDA-aware takes a pointer of the device; any other one dies of it, so there a message is copied to
pinned memory first (page-locked: the device copies it by itself, at the full rate of the bus) and sent from there, and
comes back the same way. A message of more than 8 MiB goes in pieces: one is on the network while the next one is
copied. The pinned memory is CuPy's pool, which keeps it for the next message.

MPI knows nothing of streams: it reads and writes at once. So CuPy's current stream is synchronised here, before MPI
sees a buffer, and nowhere else in the library.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.runtime import messages
from collectives.runtime.messages import Arrival, Buffer, in_bytes, pieces

if TYPE_CHECKING:
    from mpi4py import MPI


def send_pieces(comm: "MPI.Comm", block: Any, dest: int, tag: int, *, direct: bool) -> "list[MPI.Request]":
    """Start to send a buffer of the device in its pieces; each request keeps what MPI reads alive."""
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
    """A message for the device: `direct`, MPI writes it there; else it is copied from pinned memory piece by piece."""

    def __init__(self, comm: "MPI.Comm", source: int, tag: int, *, direct: bool) -> None:
        super().__init__(comm, source, tag)
        self._direct, self._landing = direct, Arrival.buffer

    def _room(self, nbytes: int) -> Buffer:
        self.buffer = _on_device(nbytes)
        if self._direct:
            _stream().synchronize()  # what had this memory before may still be at work on it
            return self.buffer
        self._landing = pinned(nbytes)
        return self._landing

    def _landed(self, part: slice) -> None:
        if self._direct:
            return
        _copy_in(self._landing[part], self.buffer[part])
        if part.stop == self.buffer.size:
            _stream().synchronize()  # the pinned memory goes back to its pool
            self._landing = Arrival.buffer


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
    """Return memory that the device copies to and from by itself; it goes back to CuPy's pool when it is let go."""
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
